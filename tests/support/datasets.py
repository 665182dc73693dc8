"""Datasets of whole episodes, recorded without starting a process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from marl_collect import Collector, open_dataset
from marl_collect.storage import Dataset, DatasetDescription, RunDescription, Writer
from marl_collect.storage.recording import EpisodeWriter, describe_policy


def record_here(
    path: Path,
    make_env: Callable[[], Any],
    policy: Any = None,
    *,
    episodes: int,
    seed: int = 0,
    task: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Record whole episodes as ``record`` does, but with a ``Collector``.

    Args:
        path: folder of the dataset.
        make_env: makes the only environment.
        policy: None for random actions.
        episodes: how many.
        seed: of the collector.
        task: name of the task; the environment's name if None.
        env_kwargs: for the description.
        options: of the collector.
    """
    collector = Collector(make_env, policy, frames_per_batch=100, seed=seed, **options)
    environment = collector.description
    about = DatasetDescription(
        task or environment.name, environment, dict(env_kwargs or {})
    )
    run = RunDescription(seed, describe_policy(policy), {"episodes": episodes})
    with EpisodeWriter(Writer(path, about, run), episodes) as writer:
        while not writer.complete:
            writer.add(collector.next())
    return open_dataset(path)
