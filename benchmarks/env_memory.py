"""Prints the private memory of one environment including its imports, in MB.

It is measured in a fork of a process that has imported only the modules that workers
share. The rest of a worker's private memory is the collector's.

    python benchmarks/env_memory.py WORKLOAD [PRELOADED_MODULE ...]
"""

import gc
import importlib
import os
import sys

from harness import processes
from workloads.adapters import our_factory

from marl_collect.core.description import allocate
from marl_collect.processes.launcher import COLLECTOR_MODULES

_PRIVATE = ("Private_Clean", "Private_Dirty")


def main() -> None:
    """Measure one workload and print the result."""
    workload, *preload = sys.argv[1:]
    for name in (*COLLECTOR_MODULES, *preload):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    make = our_factory(workload)
    child = os.fork()
    if child == 0:
        before = processes.memory_mb([os.getpid()], *_PRIVATE)
        env = make()
        row = allocate(env.description.row())
        env.bind(row)
        env.reset_row(0)
        for _ in range(20):
            if row["done",][0]:
                env.reset_row(1)
            env.step_row()
        after = processes.memory_mb([os.getpid()], *_PRIVATE)
        os.write(1, f"{after - before}\n".encode())
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
