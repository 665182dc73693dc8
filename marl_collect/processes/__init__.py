"""Worker processes: starting them, talking to them, and never leaving any behind.

Knows nothing of environments, policies or torch: the standard library and
cloudpickle only. The rest of the package uses three names, `WorkerPool` and
`WorkerContext` (the two ends), and the cells of the status board.

    trainer                                   fork server (forkserver.py)
    +--------------------------+  control     +---------------------------+
    | WorkerPool               | -----------> | fresh interpreter, one    |
    |   WorkerProcess x n      |              | thread, modules preloaded |
    |     ForkedChild          | <----------- | forks, waits for children |
    |     Connection           |  status x n  +---------------------------+
    |   StatusBoard (shared memory)  |                     | fork       ^ control of
    +--------------------------+                     v            | its own, for
         |            ^  command x n          +---------------------------+ nested
         |            +---------------------> | worker: run_worker()      | pools
         +-- lines ---- shared memory ------> |   main(WorkerContext, arg)|
                                              +---------------------------+

With ``start_method="spawn"`` there is no server: the trainer starts a fresh
interpreter per worker, and everything else is the same.

Who ends whom: a trainer that closes its pool asks, then SIGTERM, then SIGKILL.
The server ends with the trainer (end of its control socket, or the trainer's
process descriptor), the kernel kills workers whose server is gone, and the
server kills workers that were asked for by a worker that is gone. It also ends
what a worker has started and left behind, such as a game's own process.

Files, in reading order:

    pool.py            WorkerPool: the trainer's end, and the one place that waits
    context.py         WorkerContext: the worker's end
    status_board.py           one line of shared memory per worker: phase, steps, ...
    peer.py            one worker as the pool sees it: its messages and its end
    hang.py            alive without progress: when is that a hang?
    starting.py        all processes first, then what they shall run
    closing.py         ask, SIGTERM, SIGKILL
    growth.py          how much memory a process has come to hold
    cleanup.py         pools that are still open when the interpreter exits
    worker_process.py  WorkerProcess: one process and its socket
    children.py        exit code and signals of a forked or a spawned process
    launcher.py        starts processes; owns the fork servers
    forkserver.py      the server itself
    strays.py          what workers have started and left behind
    standard_streams.py  for a trainer without stdin, stdout or stderr
    packets.py         what it and the launcher say to each other
    spawned.py         first lines of a spawned worker
    bootstrap.py       from a bare process to the user's main function
    survival.py        signals, and dying with the parent
    endless.py         workers must not start workers while they import
"""

from marl_collect.processes.context import WorkerContext
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.status_board import Line, Phase, StatusBoard, WorkerProgress

__all__ = [
    "Line",
    "Phase",
    "StatusBoard",
    "WorkerContext",
    "WorkerPool",
    "WorkerProgress",
]
