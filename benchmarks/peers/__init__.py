"""Others' collectors and vectorisers, each at its best.

=========================  ====================================================
file                       its one job
=========================  ====================================================
``torchrl_collectors.py``  TorchRL: MultiSync, MultiAsync, Collector over ParallelEnv
``gymnasium_async.py``     Gymnasium's AsyncVectorEnv, through ``joint.py``
``supersuit_concat.py``    SuperSuit's concatenated vector environments
``pufferlib_vector.py``    PufferLib's Multiprocessing
``agilerl_async.py``       AgileRL's AsyncPettingZooVecEnv
``rllib_runner.py``        RLlib's MultiAgentEnvRunner
``joint.py``               a multi-agent environment as one with a flat observation
``storing.py``             what all of these store, and how it is read
``install.py``             command: makes their environments
``installed.py``           which environments there are
=========================  ====================================================
"""
