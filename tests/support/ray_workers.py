"""Ray starts this file in place of each of its workers; see ``ray_cluster.py``.

It hands over what makes a process this worker (arguments, environment, working
directory, standard streams) to the warm process that forks programs of tests, and ends.
"""

import os
import sys
from pathlib import Path
from typing import Final

SOCKET: Final = "MARL_COLLECT_TEST_WARM_PROCESS"
"""Environment variable with the path of the warm process's socket."""


def main() -> None:
    """Ask for a process that becomes this worker."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.scripts import ask

    request = {
        # As Ray's setup_worker.py does: the rest is for the worker.
        "command": [arg for arg in sys.argv[1:] if not arg.startswith("--language=")],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "interpreter": False,
    }
    with ask(os.environ[SOCKET], request, [0, 1, 2]) as status:
        status.recv(1)  # Until it has forked.


if __name__ == "__main__":
    main()
