"""Ray starts this file in place of each of its workers; see ``ray_cluster.py``.

It hands over what makes a process this worker (arguments, environment, working
directory, standard streams) to the warm process that forks programs of tests, and ends.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Final

ADDRESS: Final = "MARL_COLLECT_TEST_WARM_PROCESS"
"""Environment variable with the address of the warm process, in hexadecimal."""


def main() -> None:
    """Ask for a process that becomes this worker."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.warm import ask

    # As Ray's setup_worker.py does: the rest is for the worker.
    command = [arg for arg in sys.argv[1:] if not arg.startswith("--language=")]
    fds = {number: number for number in range(3)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(bytes.fromhex(os.environ[ADDRESS]))
        ask(connection, (command, os.getcwd(), dict(os.environ), fds))
        connection.recv(1)  # Until it has forked.


if __name__ == "__main__":
    main()
