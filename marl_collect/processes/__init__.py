"""Worker processes: starting them, exchanging messages, and ending them.

This package knows nothing of environments, policies or torch. It needs only the
standard library and cloudpickle. The rest of ``marl_collect`` uses ``WorkerPool`` (the
trainer's end), ``WorkerContext`` (the worker's end) and the cells of the status board.

    trainer                                   fork server (forkserver.py)
    +--------------------------+  control     +---------------------------+
    | WorkerPool               | -----------> | fresh interpreter, one    |
    |   WorkerHandle x n       |              | thread, modules preloaded |
    |     ForkedChild          |              | forks, waits for children |
    |     Connection           | <----------- +---------------------------+
    |                          |  status x n         | fork       ^ control socket
    |   StatusBoard            |                     v            | of its own, for
    +--------------------------+  command x n +---------------------------+ nested
         |            ^---------------------> | worker: run_worker()      | pools
         +-- lines ---- shared memory ------> |   main(WorkerContext, arg)|
                                              +---------------------------+

With ``start_method="spawn"`` there is no server: the trainer starts a fresh
interpreter per worker, and everything else is the same.

How processes end:

- A trainer that closes its pool asks its workers to end, then sends SIGTERM, then
  SIGKILL.
- The fork server ends with the trainer. It notices through its control socket and
  through a process descriptor of the trainer.
- The kernel kills the workers of a server that has ended.
- The server kills the workers of a worker that has ended, and its orphans, such as a
  game's own process.

To read the code, start with ``pool.py`` and ``context.py`` (the two ends of a socket),
then ``worker_handle.py`` and ``launcher.py``.
"""

from marl_collect.processes.context import WorkerContext
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.status_board import Line, Phase, StatusBoard

__all__ = [
    "Line",
    "Phase",
    "StatusBoard",
    "WorkerContext",
    "WorkerPool",
]
