"""The options of whatever has worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from marl_collect.options import Option, Options
from marl_collect.processes.launcher import StartMethod

MOST_THREADS = 4096
"""More threads than any machine runs; asking for more is a slip."""
_MOST_SECONDS = 10**8  # Three years; the system's calls take no more.


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """How processes start, and how long the trainer waits for them."""

    timeout: Annotated[
        float | None,
        Option(
            "seconds without progress after which a busy worker counts as hung; None: "
            "never. Pauses of your own code do not count",
            positive=True,
            at_most=_MOST_SECONDS,
            unit="seconds",
        ),
    ] = 300.0
    start_timeout: Annotated[
        float,
        Option(
            "the same limit while the workers start",
            positive=True,
            at_most=_MOST_SECONDS,
            unit="seconds",
        ),
    ] = 300.0
    start_method: Annotated[
        StartMethod | None,
        Option(
            '`"forkserver"` or `"spawn"`; None: `"forkserver"` where available. '
            '`"fork"` is not offered: it copies locks that no thread releases',
            hint="'fork' is not supported: a forked copy of a process that has threads "
            "(torch, CUDA, numpy) can deadlock; 'forkserver' is as fast.",
        ),
    ] = None
    preload: Annotated[
        Sequence[str],
        Option(
            "modules that the fork server imports once, before it forks, such as the "
            "environment's. A module that starts threads is refused",
            hint="Give the names of modules in a list, such as ['pettingzoo'].",
        ),
    ] = ()
    num_sub_threads: Annotated[
        int,
        Option(
            "threads of the numerical libraries in each worker",
            at_least=1,
            at_most=MOST_THREADS,
        ),
    ] = 1
    num_threads: Annotated[
        int | None,
        Option(
            "torch threads of this process; None: unchanged",
            at_least=1,
            at_most=MOST_THREADS,
        ),
    ] = None
