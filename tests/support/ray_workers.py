"""Forks Ray's workers from a warm process; see ``ray_cluster.py``.

    raylet -- starts --> ray_workers.py -- arguments, streams --> ray_workers.py serve
                                                                        |
                                                 worker <-- fork -------+

The *server* is one process per cluster. It has imported what actors import, but not
Ray, which reads a worker's environment when it is imported. Ray starts this file again
in place of each of its workers. It hands over what makes a process this worker
(arguments, environment, working directory, standard streams), and ends.

The server is not a thread of the test process, because Ray holds the interpreter lock
while its driver waits for the first workers.
"""

import os
import pickle
import signal
import socket
import sys
from typing import Any, Final

SOCKET: Final = "MARL_COLLECT_TEST_RAY_WORKERS"
"""Environment variable with the path of the server's socket."""

PRELOAD: Final = (
    "marl_collect.collectors.worker",
    "marl_collect.distributed.worker",
    "workloads.counting",
    # What Ray imports.
    "google.protobuf.reflection",
    "jsonschema",
    "requests",
    "yaml",
)
_READY: Final = b"."


def main() -> None:
    """Ask the server for a process that becomes this worker."""
    # As Ray's setup_worker.py does: the rest is for the worker.
    command = [arg for arg in sys.argv[1:] if not arg.startswith("--language=")]
    request = {"command": command, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [_READY], [0, 1, 2])
        with server.makefile("wb") as file:
            pickle.dump(request, file)
        server.recv(1)  # Until it has forked.


def serve(path: str) -> None:
    """Fork workers; they and this process die with the test process."""
    import importlib
    from contextlib import suppress
    from gc import freeze

    sys.path[0] = os.path.dirname(sys.path[0])  # `zygote.become` removes it.
    from support import zygote

    zygote.prctl(zygote._PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(100)
        for name in PRELOAD:
            with suppress(ImportError):
                importlib.import_module(name)
        assert "ray" not in sys.modules
        freeze()
        signal.signal(signal.SIGCHLD, _reap)
        os.write(1, b".")
        while True:
            caller, _ = server.accept()
            with caller:
                _, streams, _, _ = socket.recv_fds(caller, 1, 3)
                with caller.makefile("rb") as file:
                    request = pickle.load(file)
                if not os.fork():
                    break
                for fd in streams:
                    os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    zygote.prctl(zygote._PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    zygote.become(request | {"interpreter": False})


def _reap(*_: Any) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        main()
