"""How a policy acts on the memory of environments, in the step loop.

Read ``runner.py`` first: the interface that the step loop uses. ``choose.py`` selects
the runner of a policy; ``fused/`` repeats recorded operations instead of calling it.
"""
