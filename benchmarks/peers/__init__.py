"""Others' collectors and vectorisers, each at its best.

=========================  ====================================================
file                       its one job
=========================  ====================================================
``torchrl_collectors.py``  TorchRL: MultiSync, MultiAsync, Collector over ParallelEnv
``pufferlib_vector.py``    PufferLib's Multiprocessing
``storing.py``             what vectorisers hand out, stored and read as a batch
``install.py``             command: makes their environments
``installed.py``           which environments there are
=========================  ====================================================
"""
