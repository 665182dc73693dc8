"""From a run's JSON to what people read.

===============  ==============================================================
file             its one job
===============  ==============================================================
``reading.py``   figures of a run: estimates and paired ratios, by experiment
``targets.py``   what was aimed at, and whether it was reached
``storing.py``   ours against loops that store, beside the targets
``readme.py``    the README's table
``tables.py``    the report's tables
``plots.py``     the report's plots
``page.py``      the report: a Markdown file, and its pictures beside it
===============  ==============================================================
"""
