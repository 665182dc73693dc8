"""The options of whatever has worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from marl_collect.options import Option, Options
from marl_collect.processes.launcher import StartMethod

MOST_THREADS = 4096
"""More threads than any machine runs; asking for more is a slip."""
_MOST_SECONDS = 10**8  # Three years; the system's calls take no more.

WITHOUT_WORKERS: Final = {
    "Collector": "it is about worker processes, and Collector has none: use "
    "MultiSyncCollector or MultiAsyncCollector"
}
"""Why a collector in this process refuses an option of worker processes."""


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
            not_in=WITHOUT_WORKERS,
        ),
    ] = 300.0
    start_timeout: Annotated[
        float,
        Option(
            "the same limit while the workers start",
            positive=True,
            at_most=_MOST_SECONDS,
            unit="seconds",
            not_in=WITHOUT_WORKERS,
        ),
    ] = 300.0
    start_method: Annotated[
        StartMethod | None,
        Option(
            '`"forkserver"` or `"spawn"`; None: `"forkserver"`. '
            '`"fork"` is not offered: it copies locks that no thread releases',
            hint="'fork' is not supported: a forked copy of a process that has threads "
            "(torch, CUDA, numpy) can deadlock; 'forkserver' is as fast.",
            not_in=WITHOUT_WORKERS,
        ),
    ] = None
    preload: Annotated[
        Sequence[str],
        Option(
            "modules that the fork server imports once, before it forks, such as the "
            "environment's. A module that starts threads is refused",
            hint="Give the names of modules in a list, such as ['pettingzoo'].",
            not_in=WITHOUT_WORKERS,
        ),
    ] = ()
    num_sub_threads: Annotated[
        int,
        Option(
            "threads of the numerical libraries in each worker",
            at_least=1,
            at_most=MOST_THREADS,
            not_in={
                "Collector": "it is about worker processes, and Collector has none: "
                "use num_threads"
            },
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

    def __post_init__(self) -> None:
        """Check every value, and that preloaded modules have a fork server.

        Raises:
            ValueError: if there is none.
        """
        super().__post_init__()
        if self.preload and self.start_method == "spawn":
            raise ValueError(
                f"preload is {list(self.preload)}, but with start_method='spawn' there "
                "is no fork server to import modules: omit one of the two."
            )

    def of_pool(self, *modules: str) -> dict[str, Any]:
        """Return arguments of a ``WorkerPool`` whose server imports modules first."""
        return {
            "start_method": self.start_method,
            "preload": (*modules, *self.preload),
            "timeout": self.timeout,
            "start_timeout": self.start_timeout,
            "num_threads": self.num_sub_threads,
        }
