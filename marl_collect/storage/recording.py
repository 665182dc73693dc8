"""``record``: collects into a dataset on disk in one call."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from marl_collect.collectors import MultiSyncCollector
from marl_collect.collectors.options import (
    MOST_FRAMES,
    BatchOptions,
)
from marl_collect.core.factories import Factory
from marl_collect.core.interruption import Interruption
from marl_collect.options import Option, changed, function, refuse
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.storage.appending import check_target
from marl_collect.storage.background import BackgroundWriter
from marl_collect.storage.compression import Compression
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.whole import BATCH_FRAMES, EpisodeWriter
from marl_collect.storage.writer import Writer


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
    compression: Annotated[
        Compression,
        Option("of images and other large frames, lossless; `none` stores raw numbers"),
    ] = "lz4"
    policy_description: Annotated[
        Mapping[str, Any] | None,
        Option(
            "description of the policy; if None, its class, number of parameters and "
            "a digest of them"
        ),
    ] = None


@function(RecordArguments)
def record(asked: RecordArguments) -> Dataset:
    """Collect in worker processes and write to a new or existing dataset.

    Each batch is written as soon as it is complete. An error or Ctrl-C loses at most
    the current batch and episodes that have not ended.

    The arguments are the fields of ``RecordArguments``.

    Returns:
        The dataset, opened.

    Raises:
        TypeError: if an option of collectors is passed that does not apply here.
        ValueError: unless exactly one of ``episodes`` and ``frames`` is given, or if
            the folder holds a dataset of another kind.
        FileExistsError: if the folder holds something else.
    """
    path, episodes, frames = Path(asked.path), asked.episodes, asked.frames
    if (episodes is None) == (frames is None):
        raise ValueError(
            "record() needs either episodes or frames: pass exactly one of them."
        )
    refuse(asked, "record")
    check_target(path)
    given = changed(BatchOptions, asked)
    given["frames_per_batch"] = asked.frames_per_batch
    if asked.frames_per_batch is None:
        given["frames_per_batch"] = min(frames or BATCH_FRAMES, BATCH_FRAMES)
    if asked.seed is None:
        given["seed"] = int(torch.randint(2**31 - 1, ()))
    given["total_frames"] = frames
    with MultiSyncCollector(asked.create_env_fn, asked.policy, **given) as collector:
        environment = collector.description
        about = DatasetDescription(
            asked.task or environment.name, environment, dict(asked.env_kwargs or {})
        )
        policy_description = asked.policy_description
        if policy_description is None:
            policy_description = describe_policy(collector.policy)
            if "policy_factory" in given and collector.policy is None:
                policy_description = {"kind": "built in the workers"}
        settings = {"episodes": episodes, "frames": frames} | {
            name: value for name, value in given.items() if _is_plain(value)
        }
        run = RunDescription(given["seed"], policy_description, settings)
        writer = Writer(path, about, run, compression=asked.compression)
        write_batches(collector, writer, episodes)
    return open_dataset(path)


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
            digest.update(name.encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy())
        about["parameters"] = sum(p.numel() for p in policy.parameters())
        about["sha256"] = digest.hexdigest()
    if isinstance(policy, AssignedPolicies):
        about["names"] = list(policy.names)
    return about


def write_batches(
    collector: MultiSyncCollector,
    writer: Writer,
    episodes: int | None = None,
    *,
    on_episodes: Callable[[Sequence[EndedEpisode]], None] | None = None,
    interruption: Interruption | None = None,
) -> None:
    """Write what a collector yields, while it collects the next batch.

    Args:
        collector: which has not begun.
        writer: closed at the end.
        episodes: number of complete episodes to write; None writes all batches.
        on_episodes: called with the episodes of each batch, in another thread.
        interruption: ends the collection after the batch that is being written.
    """
    whole = None if episodes is None else EpisodeWriter(writer, episodes)
    interruption = interruption or Interruption()
    with BackgroundWriter(whole or writer, on_episodes) as recorder:
        while not interruption.happened:
            if whole is not None and whole.complete:
                break
            batch = collector.next()
            if batch is None:
                break
            with interruption.deferred():
                recorder.add(batch)
            del batch  # Frees its slot.


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
