"""From a run's JSON to what people read.

===============  ==============================================================
file             its one job
===============  ==============================================================
``reading.py``   figures of a run: estimates and paired ratios, by experiment
``targets.py``   what was aimed at, and whether it was reached
``limits.py``    ratios to limits, which stand beside the targets
``readme.py``    the README's table
``chart.py``     the README's chart
===============  ==============================================================
"""
