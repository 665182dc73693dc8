"""Options shared by everything that starts worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from marl_collect.options import Option, Options
from marl_collect.processes.launcher import StartMethod

MOST_THREADS = 4096
"""No machine runs this many threads; a larger value is a mistake."""
_MOST_SECONDS = 10**8  # Three years; system calls accept no more.


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """How processes start, and how long to wait for them."""

    timeout: Annotated[
        float | None,
        Option(
            "seconds without progress after which a working worker counts as hung; "
            "None for never. Your own pauses do not count",
            positive=True,
            at_most=_MOST_SECONDS,
            unit="seconds",
            to_actors=True,
        ),
    ] = 300.0
    start_timeout: Annotated[
        float,
        Option(
            "the same until the workers are ready",
            positive=True,
            at_most=_MOST_SECONDS,
            unit="seconds",
            to_actors=True,
        ),
    ] = 300.0
    start_method: Annotated[
        StartMethod | None,
        Option(
            '`"forkserver"` or `"spawn"`; None for the first where the system has it. '
            'There is no `"fork"`: it copies locks and threads that nobody releases',
            hint="'fork' is not supported: a forked copy of a process that has threads "
            "(torch, CUDA, numpy) can deadlock; 'forkserver' is as fast.",
            to_actors=True,
        ),
    ] = None
    preload: Annotated[
        Sequence[str],
        Option(
            "modules that the fork server imports once, before it forks, such as the "
            "environment's; one that starts threads is refused",
            hint="Give the names of modules in a list, such as ['pettingzoo'].",
            to_actors=True,
        ),
    ] = ()
    num_sub_threads: Annotated[
        int,
        Option(
            "threads of numerical libraries in each worker",
            at_least=1,
            at_most=MOST_THREADS,
            to_actors=True,
        ),
    ] = 1
    num_threads: Annotated[
        int | None,
        Option(
            "torch threads of this process; None changes nothing",
            at_least=1,
            at_most=MOST_THREADS,
        ),
    ] = None
