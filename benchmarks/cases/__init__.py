"""Micro-benchmarks: alternatives within one process, as ``micro.py`` measures them.

A module has ``cases()``, which yields the rows of its table. It is imported when it is
measured, so its libraries are optional.

=================  ============================================================
module             its question
=================  ============================================================
``policy_step``    what a policy costs per frame, called and fused
``models``         networks: ours, TorchRL's, and a loop of torch modules
``learners``       what a gradient step costs
``assignment``     what several policies cost, compared with one
``envs``           steps and resets of environments, and of their library's loop
``worlds``         what a frame costs if a simulator steps many worlds
``imports``        what importing MeltingPot costs
``datasets``       forms of datasets of images: sizes, writing, sampling
``formats``        size and time of an export of short episodes
=================  ============================================================
"""
