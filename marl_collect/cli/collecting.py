"""Implementation of ``marl-collect collect``: collects batches and writes them.

It always ends in the same way: the workers are closed, the batch that is being written
is finished, and the folder is printed.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marl_collect.cli.consoles import USER_ERROR, err, fail, out, user_errors
from marl_collect.cli.environment_errors import explain
from marl_collect.cli.runs import Play
from marl_collect.cli.tasks import find_factory
from marl_collect.cli.uploading import Upload
from marl_collect.files.urls import url_of
from marl_collect.processes.launcher import COLLECTOR_MODULES, start_server
from marl_collect.programs.interruption import Interruption

if TYPE_CHECKING:
    from marl_collect.collectors import MultiSyncCollector
    from marl_collect.storage import EndedEpisode, Writer


def batch_frames(
    frames: int | None, environments: int, frames_per_batch: int | None
) -> int:
    """Return the frames per batch, a multiple of the number of environments.

    Args:
        frames: to collect; None if episodes are collected.
        environments: of all workers.
        frames_per_batch: that the user wants; None chooses equal batches whose total
            exceeds ``frames`` as little as possible.
    """
    from marl_collect.storage.recording import BATCH_FRAMES

    if frames is None:
        size = frames_per_batch or BATCH_FRAMES
    elif frames_per_batch is not None:
        size = min(frames_per_batch, frames)
    else:
        size = math.ceil(frames / math.ceil(frames / BATCH_FRAMES))
    return math.ceil(size / environments) * environments


def run(
    what: Play, target: str | None, settings: Mapping[str, Any], *, quiet: bool
) -> int:
    """Run the collection and return the exit code.

    Args:
        what: task, policy and settings of the environment.
        target: folder of the dataset; None for a new one in ``runs``. For a URL, such
            a folder is copied there.
        settings: further arguments of ``record``, with ``seed``.
        quiet: whether to print the folder only.

    Raises:
        typer.Exit: after an error that was shown.
    """
    with user_errors(ValueError, ImportError):
        factory = find_factory(what.task, what.env_kwargs)
    start_server(COLLECTOR_MODULES)  # It imports torch while this process does.
    with Interruption() as interruption:
        job = _Job(what, target, settings)
        try:
            job.run(factory, interruption, quiet=quiet)
        except BaseException as error:
            if not interruption.happened:
                job.report_failure(error)
                raise
        if interruption.happened:
            job.report_interruption()
            return interruption.exit_code
        job.report(quiet=quiet)
    return 0


class _Job:
    """One run of the command."""

    def __init__(
        self, what: Play, target: str | None, settings: Mapping[str, Any]
    ) -> None:
        url = None if target is None else url_of(target)
        is_local = target is not None and url is None
        new = free_folder(Path("runs"), what.task)
        self._path = Path(str(target)) if is_local else new
        self._upload = None if url is None else Upload(self._path, url)
        self._what = what
        self._settings = settings
        self._writer: Writer | None = None
        self._started = self._seconds = 0.0
        self._episodes = self._episode_frames = 0
        self._returns: dict[str, list[float]] = {}
        """Sum over all episodes of each agent's return, by group."""

    def run(
        self, factory: Callable[[], Any], interruption: Interruption, *, quiet: bool
    ) -> None:
        """Collect until all frames are collected or a signal arrives."""
        # These imports load torch, which takes seconds. Ctrl-C works during them too.
        from marl_collect.cli.progress import ProgressDisplay, live
        from marl_collect.parallel_env.describe import describe
        from marl_collect.storage import DatasetDescription
        from marl_collect.storage.copying import check_url
        from marl_collect.storage.files import check_target
        from marl_collect.storage.recording import RecordArguments, collect_into

        what, settings = self._what, self._settings
        check_target(self._path.absolute())
        unit: Literal["frames", "episodes"] = (
            "episodes" if settings["frames"] is None else "frames"
        )
        display = ProgressDisplay(what.task, settings[unit], unit)

        def started(collector: "MultiSyncCollector", writer: "Writer") -> None:
            self._writer, self._started = writer, time.perf_counter()
            display.count(collector.steps_so_far)

        def add(episodes: "Sequence[EndedEpisode]") -> None:
            display.add(episodes)
            self._add(episodes)
            if self._upload is not None:
                self._upload.more()

        def ended() -> None:
            self._seconds = time.perf_counter() - self._started

        with nullcontext() if quiet else live(display, err):
            display.say("building one environment to get its spaces")
            environment = describe(factory)
            if self._upload is not None:
                display.say(f"looking at {self._upload.url}")
                about = DatasetDescription(what.task, environment, what.env_kwargs)
                check_url(self._upload.url, about)
            policy = what.policy.build(environment)
            display.say(f"starting {settings['num_workers']} workers")
            arguments = RecordArguments(
                self._path,
                factory,
                policy,
                max_frames_per_traj=what.max_frames_per_traj,
                task=what.task,
                env_kwargs=what.env_kwargs,
                policy_description=what.policy.describe(),
                **settings,
            )
            collect_into(
                arguments,
                on_start=started,
                on_episodes=add,
                on_end=ended,
                interruption=interruption,
            )
        if self._upload is not None and not interruption.happened:
            if not quiet:
                err.print(f"Copying the last files to {self._upload.url}.")
            self._upload.finish()

    def report(self, *, quiet: bool) -> None:
        """Print what was collected and where it is; if ``quiet``, only where.

        Raises:
            typer.Exit: if not everything was copied.
        """
        from rich.filesize import decimal

        from marl_collect.cli.summary import facts, returns_table
        from marl_collect.storage.files import list_files

        assert self._writer is not None
        if self._upload is not None and self._upload.error is not None:
            raise fail(
                f"{self._upload.error}\nNot everything could be copied. "
                f"{self._complete_frames()}"
            )
        frames, episodes = self._writer.frames, self._episodes
        if quiet:
            out.print(str(self._path), soft_wrap=True)
            return
        rows = [
            ("frames", f"{frames:,}"),
            ("frames/s", f"{frames / self._seconds:,.0f}, writing included"),
            ("episodes", f"{episodes:,}"),
            (
                "mean length",
                f"{self._episode_frames / episodes:,.1f} frames" if episodes else "-",
            ),
            ("seed", str(self._settings["seed"])),
            ("written to", str(self._path)),
            *([] if self._upload is None else [("copied to", self._upload.url)]),
            (
                "folder",
                decimal(sum(f.path.stat().st_size for f in list_files(self._path))),
            ),
        ]
        if episodes:
            environment = self._writer.description.environment
            out.print(returns_table(environment, episodes, self._returns))
        out.print(facts(rows))

    def _add(self, episodes: "Sequence[EndedEpisode]") -> None:
        for episode in episodes:
            self._episodes += 1
            self._episode_frames += episode.length
            for name, returns in episode.returns.items():
                sums = self._returns.setdefault(name, [0.0] * len(returns))
                for agent, value in enumerate(returns):
                    sums[agent] += value

    def report_interruption(self) -> None:
        """Print what was kept after a signal."""
        err.print(f"Interrupted: {self._complete_frames()}", soft_wrap=True)

    def report_failure(self, error: BaseException) -> None:
        """Print what went wrong and what was kept.

        Raises:
            typer.Exit: instead of an error whose message is enough.
        """
        from marl_collect.errors import worker_error_of

        expected = isinstance(
            error, (ValueError, OSError, TypeError, KeyError, ImportError)
        )
        if not isinstance(error, Exception) or not (expected or worker_error_of(error)):
            return
        message = explain(error, self._what.task, self._what.env_kwargs)
        if self._writer is None:
            raise fail(message, USER_ERROR) from error
        raise fail(f"{message}\n{self._complete_frames()}") from error

    def _complete_frames(self) -> str:
        frames = 0 if self._writer is None else self._writer.frames
        if not frames:
            return "no batch was complete, so nothing was written."
        if not self._path.exists():
            return f"{self._path} is gone, to which {frames:,} frames were written."
        text = f"{frames:,} frames in complete batches are in {self._path}."
        if self._upload is not None:
            text += f" `{self._upload.command}` copies what {self._upload.url} lacks."
        return text


def free_folder(parent: Path, task: str) -> Path:
    """Return ``parent/TASK-N`` with the lowest N that does not exist."""
    name = re.sub(r"[^\w.-]+", "-", task.rpartition("/")[2])
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
