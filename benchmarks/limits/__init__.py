"""What no framework can pass: loops without one, in as many processes at once.

==================  ===========================================================
file                its one job
==================  ===========================================================
``loops.py``        an environment stepped by its library, and by our adapter
``minimal.py``      the least that a policy's forward pass can cost
``stock.py``        runner: a loop over the library's own environment
``direct.py``       runner: a loop over our adapter
``stored.py``       runner: the same, which stores every frame and reads it
``posting.py``      processes that only wake each other, as those of ParallelEnv do
==================  ===========================================================
"""
