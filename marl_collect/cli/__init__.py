"""The command ``marl-collect``.

========================  =====================================================
file                      contents
========================  =====================================================
``main.py``               the command, its version and its subcommands
``arguments.py``          options that several commands share
``collect.py``            options of ``marl-collect collect``
``collecting.py``         its implementation
``progress.py``           its live display
``compare.py``            options of ``marl-collect compare``
``comparing.py``          its implementation
``training_progress.py``  its live display
``runs.py``               task and policy of a run of ``compare``
``file_tasks.py``         checks the tasks that run folders and datasets name
``policies.py``           builds the policy that ``--policy`` names
``summary.py``            tables of data, groups and spaces
``render.py``             ``marl-collect render``
``play.py``               ``marl-collect play``: returns of episodes
``view.py``               ``marl-collect view``
``viewer/``               its page, and what the page shows
``datasets.py``           ``inspect``, ``copy``, ``export`` and ``import``
``uploading.py``          ``collect --out URL``: copies finished files
``histograms.py``         histograms of episodes, as text and as a picture
``tasks.py``              finds tasks by name, through entry points
``listing.py``            ``marl-collect envs`` and ``marl-collect info``
``consoles.py``           the consoles, and how commands report errors
``environment_errors.py`` reports environments that cannot be built
========================  =====================================================

Modules that import torch are imported inside the commands, so ``--help`` is fast.
"""
