"""What is measured: lists of experiments, most important first.

==================  ===========================================================
file                its one job
==================  ===========================================================
``experiment.py``   one experiment: systems that are measured together
``settings.py``     what a run was asked for
``headline.py``     the rows that targets are about: ours, TorchRL, the limits
``puffer.py``       PufferLib on workloads with identical code
``plan.py``         all of them, in order
==================  ===========================================================
"""
