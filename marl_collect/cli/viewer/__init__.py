"""The page of ``marl-collect view``: what it shows, and how it gets it.

========================  =====================================================
file                      contents
========================  =====================================================
``episodes.py``           a dataset as JSON values and pictures
``server.py``             sends the page and its data to a browser, or to a file
``page.html``             the page, with its style and its script
========================  =====================================================

A dataset may come from anybody. The page writes all text as text, and loads
nothing from other servers. The server answers only requests that have its token.
"""
