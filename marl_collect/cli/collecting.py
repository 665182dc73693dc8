"""Implementation of ``marl-collect collect``: collects batches and writes them.

It always ends in the same way: the workers are closed, the batch that is being written
is finished, and the folder is printed.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marl_collect.cli.consoles import USER_ERROR, err, fail, out, user_errors
from marl_collect.cli.environment_errors import explain
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.tasks import find_factory
from marl_collect.core.interruption import Interruption
from marl_collect.processes.launcher import COLLECTOR_MODULES, start_server

if TYPE_CHECKING:
    from marl_collect.collectors import MultiSyncCollector
    from marl_collect.storage import EndedEpisode, Writer


@dataclass(frozen=True)
class CollectRequest:
    """The command's arguments, parsed; see ``marl-collect collect --help``."""

    task: str
    env_kwargs: dict[str, Any]
    frames: int
    workers: int
    envs_per_worker: int
    frames_per_batch: int | None
    max_frames_per_traj: int | None
    policy: PolicyRequest
    seed: int
    out: Path | None
    compression: str
    quiet: bool
    episodes: int | None = None

    @property
    def batch_frames(self) -> int:
        """Frames per batch, a multiple of the number of environments."""
        from marl_collect.storage.episode_writer import BATCH_FRAMES

        size = self.workers * self.envs_per_worker
        if self.episodes is not None:
            frames = self.frames_per_batch or BATCH_FRAMES
        elif self.frames_per_batch is not None:
            frames = min(self.frames_per_batch, self.frames)
        else:  # Equal batches whose total exceeds `frames` as little as possible.
            frames = math.ceil(self.frames / math.ceil(self.frames / BATCH_FRAMES))
        return math.ceil(frames / size) * size


def run(request: CollectRequest) -> int:
    """Run the collection and return the exit code.

    Raises:
        typer.Exit: after an error that was shown.
    """
    with user_errors(ValueError, ImportError):
        factory = find_factory(request.task, request.env_kwargs)
    start_server(COLLECTOR_MODULES)  # It imports torch while this process does.
    with Interruption() as interruption:
        job = _Job(request, factory, interruption)
        try:
            job.run()
        except BaseException as error:
            if not interruption.happened:
                job.report_failure(error)
                raise
        if interruption.happened:
            job.report_interruption()
            return interruption.exit_code
        job.report()
    return 0


class _Job:
    """One run of the command."""

    def __init__(
        self,
        request: CollectRequest,
        factory: Callable[[], Any],
        interruption: Interruption,
    ) -> None:
        self._request = request
        self._factory = factory
        self._interruption = interruption
        self._path = request.out or free_folder(Path("runs"), request.task)
        self._writer: Writer | None = None
        self._started = self._seconds = 0.0

    def run(self) -> None:
        """Collect until all frames are collected or a signal arrives."""
        # These imports load torch, which takes seconds. Ctrl-C works during them too.
        from marl_collect.cli.progress import ProgressDisplay
        from marl_collect.parallel_env.describe import describe
        from marl_collect.storage.appending import check_target
        from marl_collect.storage.recording import RecordArguments, collect_into

        request = self._request
        check_target(self._path)
        compression: Any = request.compression
        whole = request.episodes is not None
        total = request.episodes or request.frames
        unit: Literal["frames", "episodes"] = "episodes" if whole else "frames"
        display = ProgressDisplay(
            err, request.task, total, unit, enabled=not request.quiet
        )

        def started(collector: "MultiSyncCollector", writer: "Writer") -> None:
            self._writer, self._started = writer, time.perf_counter()
            display.count(collector.steps_so_far)

        def wrote(episodes: "Sequence[EndedEpisode]") -> None:
            self._seconds = time.perf_counter() - self._started
            display.add(episodes)

        with display:
            display.say("building one environment to get its spaces")
            policy = request.policy.build(describe(self._factory))
            display.say(f"starting {request.workers} workers")
            arguments = RecordArguments(
                self._path,
                self._factory,
                policy,
                frames_per_batch=request.batch_frames,
                episodes=request.episodes,
                frames=None if whole else request.frames,
                num_workers=request.workers,
                envs_per_worker=request.envs_per_worker,
                max_frames_per_traj=request.max_frames_per_traj,
                seed=request.seed,
                task=request.task,
                env_kwargs=request.env_kwargs,
                compression=compression,
                policy_description=request.policy.describe(),
            )
            collect_into(
                arguments,
                on_start=started,
                on_episodes=wrote,
                interruption=self._interruption,
            )

    def report(self) -> None:
        """Print what was collected and where it is."""
        from rich.filesize import decimal

        from marl_collect.cli.summary import facts, returns_table
        from marl_collect.storage.files import size_of

        assert self._writer is not None
        added = self._writer.added
        if self._request.quiet:
            out.print(str(self._path), soft_wrap=True, highlight=False)
            return
        length = added.mean_length
        rows = [
            ("frames", f"{added.frames:,}"),
            ("frames/s", f"{added.frames / self._seconds:,.0f}, writing included"),
            ("episodes", f"{added.episodes:,}"),
            ("mean length", "-" if length is None else f"{length:,.1f} frames"),
            ("seed", str(self._request.seed)),
            ("written to", str(self._path)),
            ("size in memory", decimal(added.nbytes)),
            ("folder", decimal(size_of(self._path))),
        ]
        if added.episodes:
            environment = self._writer.contents.description.environment
            out.print(returns_table(environment, added))
        out.print(facts(rows))

    def report_interruption(self) -> None:
        """Print what was kept after a signal."""
        err.print(f"Interrupted: {self._kept()}", soft_wrap=True, highlight=False)

    def report_failure(self, error: BaseException) -> None:
        """Print what went wrong and what was kept.

        Raises:
            typer.Exit: instead of an error whose message is enough.
        """
        from marl_collect.errors import worker_error_of

        expected = isinstance(error, (ValueError, OSError, TypeError, KeyError))
        if not isinstance(error, Exception) or not (expected or worker_error_of(error)):
            return
        message = explain(error, self._request.task, self._request.env_kwargs)
        if self._writer is None:
            raise fail(message, USER_ERROR) from error
        raise fail(f"{message}\n{self._kept()}") from error

    def _kept(self) -> str:
        frames = 0 if self._writer is None else self._writer.added.frames
        if not frames:
            return "no batch was complete, so nothing was written."
        return f"{frames:,} frames in complete batches are in {self._path}."


def free_folder(parent: Path, task: str) -> Path:
    """Return ``parent/TASK-N`` with the lowest N that does not exist."""
    name = re.sub(r"[^\w.-]+", "-", task.rpartition("/")[2])
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
