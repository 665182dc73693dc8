"""Jobs of several ranks that gloo connects, with and without torchrun."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.processes import SOON
from support.scripts import Program, run_python, start_python

_TESTS = str(Path(__file__).parents[1])


def _variables() -> dict[str, str]:
    """Return variables with which programs find ``support`` too."""
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), _TESTS]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


_CONNECT = """
import os
import sys
import torch.distributed as dist

folder, arguments = sys.argv[1], sys.argv[2:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
)
"""


@contextmanager
def job(
    folder: Path, code: str, ranks: int, *arguments: str, **variables: str
) -> Iterator[list[Program]]:
    """Start all ranks of a job; outputs and errors are in one pipe.

    Args:
        folder: where they meet, and their working directory.
        code: of each rank, which has ``folder``, ``arguments``, ``rank``,
            ``world_size`` and ``dist``.
        ranks: their number.
        arguments: of the program.
        variables: of the environment.
    """
    (folder / "job.py").write_text(_CONNECT + code)
    (folder / "meet").unlink(missing_ok=True)
    with ExitStack() as stack:
        programs = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} | variables
            program = start_python(
                *["job.py", str(folder), *arguments],
                cwd=folder,
                stderr=-2,
                env=_variables() | own,
            )
            programs.append(stack.enter_context(program))
        yield programs


def outputs(programs: list[Program]) -> list[str]:
    """Wait until all ranks have ended; return what they have printed.

    Torch 2.15 then lists objects that a forked program has from before the fork.
    """
    texts = [program.communicate(timeout=3 * SOON)[0] for program in programs]
    return [text.partition("nanobind: leaked")[0] for text in texts]


def run_ranks(
    folder: Path, code: str, ranks: int, *arguments: str, **variables: str
) -> list[str]:
    """Run a job to its end; return what its ranks have printed."""
    with job(folder, code, ranks, *arguments, **variables) as programs:
        return outputs(programs)


def torchrun(
    folder: Path, script: Path, ranks: int, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script with torchrun to its end.

    Args:
        folder: the working directory of the ranks.
        script: of each rank.
        ranks: their number.
        arguments: of the script.
    """
    return run_python(
        *["-m", "torch.distributed.run", "--standalone"],
        *["--nproc-per-node", str(ranks)],
        *["--local-addr", "127.0.0.1"],  # The host's name may not be resolved.
        script,
        *arguments,
        cwd=folder,
        env=_variables(),
    )
