"""Several environments as one, in this process or in others.

``SerialEnv`` steps its environments here; ``ParallelEnv`` has other processes step
them and gives the same data. In both the policy acts in this process, for all
environments at once. Imports no torch: the processes of ParallelEnv need none.

    trainer                                      process p
    ParallelEnv (parallel.py)                    main (worker.py)
      ParallelBatch (batch.py)                     its own rows
        GroupBatch x groups (part.py)
        Crew (crew.py) ------- WorkerPool ------>
          memory [N, ...] per key <============>   envs read and write it
          Signals (signals.py)    <============>   commands, finished

Also here: ``together.py`` (what SerialEnv and ParallelEnv share), ``options.py`` and
``arguments.py`` (what users pass), ``cpus.py`` (how many processes), ``spread.py``
(who steps what), ``attributes.py`` (``env.attr``, ``env[i].attr``), ``messages.py``
(what crosses sockets, rarely), ``semaphore.py`` (sleeping and waking).
"""

from marl_collect.parallel_env.parallel import ParallelEnv
from marl_collect.parallel_env.serial import SerialEnv

__all__ = ["ParallelEnv", "SerialEnv"]
