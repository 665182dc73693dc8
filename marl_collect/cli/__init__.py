"""The command ``marl-collect``.

========================  =====================================================
file                      its one job
========================  =====================================================
``main.py``               the command itself, its version and its subcommands
``collect.py``            ``marl-collect collect``: its options
``collecting.py``         what that command does
``compare.py``            ``marl-collect compare``: its options
``comparing.py``          what that command does
``training_progress.py``  its live display
``policies.py``           from ``--policy`` to a policy
``interruption.py``       Ctrl-C: at any moment, once, without losing a batch
``progress.py``           the live display
``summary.py``            tables about experience, groups and spaces
``render.py``             ``marl-collect render``
``inspect.py``            ``marl-collect inspect``
``histograms.py``         histograms of episodes, as text and as a picture
``export.py``             ``marl-collect export``
``tasks.py``              finding tasks by name, through entry points
``listing.py``            ``marl-collect envs`` and ``marl-collect info``
``bench.py``              ``marl-collect bench``: the checkout's benchmarks
``consoles.py``           where text goes, and how a command fails
========================  =====================================================

Modules that import torch are imported inside the commands, so that ``--help`` is quick.
"""
