"""Several environments as one, stepped in this process or in others.

``SerialEnv`` steps its environments in this process. ``ParallelEnv`` steps them in
other processes and gives the same data. In both, the policy acts in this process, for
all environments at once. Nothing here imports torch, because the processes of
ParallelEnv do not need it.

    trainer                                      process p
    ParallelEnv (parallel.py)                    main (worker.py)
      ParallelBatch (batch.py)                     its own rows
        EnvProcesses --------- WorkerPool ------>
          memory [N, ...] per key <============>   envs read and write it
          Signals (signals.py)    <============>   commands, finished

``joint.py`` has what SerialEnv and ParallelEnv share. ``worker.py`` lists the messages
on sockets.
"""

from marl_collect.parallel_env.parallel import ParallelEnv
from marl_collect.parallel_env.serial import SerialEnv

__all__ = ["ParallelEnv", "SerialEnv"]
