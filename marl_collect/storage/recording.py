"""``record``: collects into a dataset on disk, and writes beside the collection."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.buffers.trajectories import TrajectoryAssembler
from marl_collect.collectors import MultiSyncCollector
from marl_collect.collectors.options import MOST_FRAMES, BatchOptions
from marl_collect.core.closing import Closing
from marl_collect.core.factories import Factory
from marl_collect.core.first_ends import FirstEnds
from marl_collect.core.seeding import draw_seed
from marl_collect.errors import ClosedError
from marl_collect.files.urls import local_folder
from marl_collect.options import Option, changed, function, refuse
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.programs.interruption import Interruption
from marl_collect.storage.columns import expanded
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.files import check_target
from marl_collect.storage.writer import Writer

BATCH_FRAMES: Final = 2000
"""Default frames of a batch: large enough to write fast, small enough to lose."""


@dataclass(frozen=True)
class RecordArguments(BatchOptions):
    """The arguments of ``record``."""

    path: Annotated[
        str | Path,
        Option("a folder that is new, empty or holds a dataset of the same kind"),
    ]
    create_env_fn: Annotated[
        Factory | Sequence[Factory], Option("as for collectors", checked=False)
    ]
    policy: Annotated[Any, Option("as for collectors; None for random actions")] = None
    _: KW_ONLY
    frames_per_batch: Annotated[
        int | Sequence[int] | None,
        Option(
            f"as for collectors; None: at most {BATCH_FRAMES}",
            at_least=1,
            at_most=MOST_FRAMES,
        ),
    ] = None
    episodes: Annotated[
        int | None,
        Option(
            "write exactly this many complete episodes, the first ones of every "
            "environment, whose numbers differ by one at most. If episodes may never "
            "end, set `max_frames_per_traj`",
            at_least=1,
        ),
    ] = None
    frames: Annotated[
        int | None,
        Option("or this many frames, rounded up to whole batches", at_least=1),
    ] = None
    task: Annotated[
        str | None, Option("name of the task; the environment's name if None")
    ] = None
    env_kwargs: Annotated[
        Mapping[str, Any] | None,
        Option("the environment's keyword arguments, for the description"),
    ] = None
    policy_description: Annotated[
        Mapping[str, Any] | None,
        Option(
            "description of the policy; if None, its class, number of parameters and "
            "a digest of them"
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check every value, and those that go together."""
        super().__post_init__()
        if self.episodes is not None and self.reset_at_each_iter:
            raise ValueError(
                "reset_at_each_iter cuts episodes that are longer than the frames of a "
                "batch, so they would never be complete: omit it, or pass frames "
                "instead of episodes."
            )
        for name in ("env_kwargs", "policy_description"):
            try:
                json.dumps(dict(getattr(self, name) or {}))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{name} is stored as JSON, but has other values: {error}. Pass "
                    "numbers, strings, lists and dicts that describe them."
                ) from error


@function(RecordArguments)
def record(arguments: RecordArguments) -> Dataset:
    """Collect in worker processes and write to a new or existing dataset.

    Each batch is written as soon as it is complete. An error or Ctrl-C loses at most
    the current batch and episodes that have not ended.

    The arguments are the fields of ``RecordArguments``.

    Returns:
        The dataset, opened.

    Raises:
        TypeError: if an option of collectors is passed that does not apply here.
        ValueError: unless exactly one of ``episodes`` and ``frames`` is given, if
            ``reset_at_each_iter`` would cut episodes, or if the folder holds a dataset
            of another kind.
        FileExistsError: if the folder holds something else.
    """
    collect_into(arguments)
    return open_dataset(arguments.path)


def collect_into(
    arguments: RecordArguments,
    *,
    on_start: Callable[[MultiSyncCollector, Writer], None] | None = None,
    on_episodes: Callable[[Sequence[EndedEpisode]], None] | None = None,
    on_end: Callable[[], None] | None = None,
    interruption: Interruption | None = None,
) -> None:
    """Collect and write as ``record`` does, and tell the caller about the progress.

    Args:
        arguments: the arguments of ``record``.
        on_start: called with the collector and the writer before the first batch.
        on_episodes: called with the episodes of each batch, in another thread.
        on_end: called when everything is written, before the workers are closed.
        interruption: ends the collection after the batch that is being written.
    """
    path, episodes, frames = Path(arguments.path), arguments.episodes, arguments.frames
    if (episodes is None) == (frames is None):
        raise ValueError(
            "record() needs either episodes or frames: pass exactly one of them."
        )
    refuse(arguments, "record")
    check_target(local_folder(path))
    options = changed(BatchOptions, arguments) | asdict(arguments.ranks)
    options |= {"seed": draw_seed(arguments.seed), "total_frames": frames}
    most = min(frames or BATCH_FRAMES, BATCH_FRAMES)
    options["frames_per_batch"] = arguments.frames_per_batch or most
    with MultiSyncCollector(
        arguments.create_env_fn, arguments.policy, **options
    ) as collector:
        environment = collector.description
        task = arguments.task or environment.name
        about = DatasetDescription(task, environment, dict(arguments.env_kwargs or {}))
        policy = arguments.policy_description
        if policy is None:
            built = "policy_factory" in options and collector.policy is None
            kind = {"kind": "built in the workers"}
            policy = kind if built else describe_policy(collector.policy)
        settings = {"episodes": episodes, "frames": frames} | options
        plain = bool | int | float | str | None
        settings = {k: v for k, v in settings.items() if isinstance(v, plain)}
        run = RunDescription(options["seed"], policy, settings)
        interruption, ends = interruption or Interruption(), FirstEnds(environment)
        writer = Writer(path, about, run)
        whole = None if episodes is None else EpisodeWriter(writer, episodes)
        with BackgroundWriter(whole or writer, on_episodes) as recorder:
            if on_start is not None:
                on_start(collector, writer)
            while not (interruption.happened or (whole and whole.complete)):
                batch = collector.next()
                if batch is None:
                    break
                ends.look(batch["next"].get)
                with interruption.deferred():
                    recorder.add(batch)
                del batch  # Frees its slot.
        if on_end is not None:
            on_end()


def describe_policy(policy: Any) -> dict[str, Any]:
    """Describe a policy as JSON values: class, parameters, digest of its weights.

    Of several policies there are the names too, in the order of ``policy_id``.
    """
    if policy is None:
        return {"kind": "random"}
    about: dict[str, Any] = {"kind": type(policy).__name__}
    if isinstance(policy, torch.nn.Module):
        digest = hashlib.sha256()
        for name, tensor in policy.state_dict().items():
            if not isinstance(tensor, torch.Tensor):  # Of `get_extra_state`.
                continue
            digest.update(name.encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().data)
        about["parameters"] = sum(p.numel() for p in policy.parameters())
        about["sha256"] = digest.hexdigest()
    if isinstance(policy, AssignedPolicies):
        about["names"] = list(policy.names)
    return about


@final
class BackgroundWriter(Closing):
    """Writes batches in a thread of its own, one at a time.

    It holds at most one batch, so a collector needs no memory beyond its two slots. An
    error in the thread is raised by the next call. Nothing is written after an error,
    because the dataset would lack a batch.
    """

    def __init__(
        self,
        writer: "Writer | EpisodeWriter",
        on_episodes: Callable[[Sequence[EndedEpisode]], None] | None = None,
    ) -> None:
        """Start the thread, which owns ``writer`` and closes it.

        ``on_episodes`` is called in it with the episodes of each batch on disk.
        """
        self._writer, self._on_episodes = writer, on_episodes
        self._thread = ThreadPoolExecutor(1, "writer")
        self._owner = os.getpid()
        self._batch: Any = None
        self._last: Future[None] | None = None
        self._closed = self._raised = False

    def __repr__(self) -> str:
        return f"BackgroundWriter({self._writer!r})"

    def add(self, batch: TensorDictBase) -> None:
        """Write ``batch``, after waiting for the one before it.

        Raises:
            Exception: the error of an earlier batch, at every call.
            ClosedError: after ``close``, and in a fork of the process.
        """
        if self._closed or os.getpid() != self._owner:
            raise ClosedError(
                "This background writer is closed, or belongs to the process that this "
                "one was forked from: create a new one."
            )
        self._wait()
        # As an argument, its slot would still be taken when the result is known.
        self._batch = batch
        self._last = self._thread.submit(self._write)

    def close(self) -> None:
        """Wait for the last batch, and close the writer; may be called twice.

        Raises:
            Exception: the error of a batch, unless ``add`` has raised it.
        """
        self._closed = True
        if os.getpid() == self._owner:  # A fork has no such thread.
            self._thread.shutdown()
        self._writer.close()
        if not self._raised:
            self._wait()

    def _wait(self) -> None:
        if self._last is not None and os.getpid() == self._owner:
            error = self._last.exception()
            if error is not None:
                self._raised = True
                raise error

    def _write(self) -> None:
        batch, self._batch = self._batch, None
        episodes = self._writer.add(batch)
        if self._on_episodes is not None:
            self._on_episodes(episodes)


@final
class EpisodeWriter(Closing):
    """Writes the first complete episodes of every environment of a new collector.

    Every environment contributes as many as the others, or one more if the number is
    not a multiple of the number of environments. Writing the episodes that end first
    overall would prefer short ones. Episodes that have not ended when the writer is
    closed are not written.
    """

    def __init__(self, writer: Writer, episodes: int) -> None:
        """Prepare to write ``episodes`` with ``writer``, which ``close`` closes."""
        self._writer, self._episodes = writer, episodes
        self._assembler = TrajectoryAssembler(self._wants)
        self._waiting: list[TensorDictBase] = []
        self._missing: dict[int, int] = {}
        """How many more episodes each environment contributes."""

    def __repr__(self) -> str:
        return f"EpisodeWriter({self._writer!r}, episodes={self._episodes})"

    @property
    def complete(self) -> bool:
        """Whether every environment has contributed its episodes."""
        return bool(self._missing) and not any(self._missing.values())

    def add(self, batch: TensorDictBase) -> Sequence[EndedEpisode]:
        """Take the next batch ``[B, T]``, of all environments.

        Returns:
            The episodes written by this call: those that wait are written together when
            they have ``BATCH_FRAMES`` frames.
        """
        if not self._missing:
            ids = batch[TRAJ_IDS]
            environments = (ids[ids != -1] >> 32).unique().tolist()
            share, rest = divmod(self._episodes, len(environments))
            self._missing = {e: share + (k < rest) for k, e in enumerate(environments)}
        self._assembler.add(expanded(batch))
        frames = self._assembler.take("cat")
        ids = frames[TRAJ_IDS].numpy()
        (first,) = (np.diff(ids, prepend=-1) != 0).nonzero()
        chosen = []
        for environment in (ids[first] >> 32).tolist():
            chosen.append(self._missing[environment] > 0)
            self._missing[environment] -= chosen[-1]
        is_chosen = np.repeat(chosen, np.diff(first, append=len(ids))).astype(np.bool_)
        if is_chosen.any():
            self._waiting.append(frames[torch.from_numpy(is_chosen)])
        enough = sum(map(len, self._waiting)) >= BATCH_FRAMES
        return self._flush() if enough or self.complete else []

    def close(self) -> None:
        """Write the buffered complete episodes, and close the writer."""
        try:
            self._flush()
        finally:
            self._writer.close()

    def _wants(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(ids >> 32, [k for k, n in self._missing.items() if n > 0])

    def _flush(self) -> Sequence[EndedEpisode]:
        if not self._waiting:
            return []
        batch = torch.cat(self._waiting, 0).unsqueeze(0)
        self._waiting = []
        return self._writer.add(batch, whole=True)
