"""From factories to a dataset on the disk, in one call."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Unpack

import torch

from marl_collect.collectors import MultiSyncCollector
from marl_collect.collectors.options import CollectorKeywords
from marl_collect.factories import Factory
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.whole import EpisodeWriter
from marl_collect.storage.writer import Writer, check_target

_FRAMES = 2000  # Of a batch; see EpisodeWriter.

_OWN = {
    "total_frames",
    "replay_buffer",
    "extend_buffer",
    "split_trajs",
    "trajs_per_batch",
    "traj_format",
    "cat_results",
    "track_traj_ids",
    "set_truncated",
    "storing_device",
    "max_staleness",
    "worker_idx",
}
"""Options that would change what a batch is, or who takes it."""


def record(
    path: str | Path,
    create_env_fn: Factory | Sequence[Factory],
    policy: Any = None,
    *,
    episodes: int | None = None,
    frames: int | None = None,
    task: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    policy_description: Mapping[str, Any] | None = None,
    **options: Unpack[CollectorKeywords],
) -> Dataset:
    """Collect in worker processes and write to a dataset; append if there is one.

    Batches are on the disk as they are made: an error or Ctrl-C loses at most the
    batch in the making and episodes that have not ended.

    Args:
        path: a folder that is new, empty or holds a dataset of the same kind.
        create_env_fn: as for collectors.
        policy: as for collectors; None for random actions.
        episodes: write so many whole episodes and nothing else, the same number from
            every environment. Where they may never end, ``max_frames_per_traj`` cuts.
        frames: or write so many frames, rounded up to whole batches ``[B, T]``.
        task: name for the description; that of the environment if None.
        env_kwargs: what the factories build with, for the description.
        policy_description: what acts, for the description; if None its class, number
            of parameters and a digest of them.
        options: those of :class:`~marl_collect.CollectorOptions` that leave batches
            ``[B, T]``, such as ``num_workers``, ``max_frames_per_traj`` and ``seed``;
            ``frames_per_batch`` is at most 2000 if not given.

    Returns:
        The dataset, opened.

    Raises:
        TypeError: for options that have no place here.
        ValueError: unless one of ``episodes`` and ``frames`` is given; or if the
            folder holds a dataset of another kind.
        FileExistsError: if the folder holds something else.
    """
    path = Path(path)
    if (episodes is None) == (frames is None):
        raise ValueError("Give record() either episodes or frames, one of them.")
    amount = frames if episodes is None else episodes
    if amount is not None and amount < 1:
        raise ValueError(f"There must be something to record, but {amount} was given.")
    refused = sorted(_OWN & set(options))
    if refused:
        message = (
            f"record() writes the batches itself, so it takes no {', '.join(refused)}."
        )
        if "set_truncated" in refused:
            message += (
                " set_truncated would cut episodes at the ends of batches, and list "
                "the pieces as whole episodes: limit them with max_frames_per_traj."
            )
        raise TypeError(message)
    check_target(path)
    given: dict[str, Any] = {"frames_per_batch": min(frames or _FRAMES, _FRAMES)}
    given |= options
    if given.get("seed") is None:
        given["seed"] = int(torch.randint(2**31 - 1, ()))
    given["total_frames"] = frames
    with MultiSyncCollector(create_env_fn, policy, **given) as collector:
        environment = collector.description
        about = DatasetDescription(
            task or environment.name, environment, dict(env_kwargs or {})
        )
        if policy_description is None:
            policy_description = describe_policy(collector.policy)
            if "policy_factory" in given and collector.policy is None:
                policy_description = {"kind": "built in the workers"}
        settings = {"episodes": episodes, "frames": frames} | {
            name: value for name, value in given.items() if _is_plain(value)
        }
        run = RunDescription(given["seed"], policy_description, settings)
        _write(collector, Writer(path, about, run), episodes)
    return open_dataset(path)


def describe_policy(policy: Any) -> dict[str, Any]:
    """Return what a policy is, as plain data: class, parameters, digest of weights."""
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
    return about


def _write(collector: MultiSyncCollector, writer: Writer, episodes: int | None) -> None:
    if episodes is None:
        with writer:
            while (batch := collector.next()) is not None:
                writer.add(batch)
        return
    target: AbstractContextManager[EpisodeWriter] = EpisodeWriter(writer, episodes)
    with target as whole:
        while not whole.complete:
            whole.add(collector.next())


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
