"""Stores and restores the next observations that ``compact_obs=True`` omits.

Within an episode, the next observation of a frame is the root observation of the
following frame. At the end of an episode or of the batch no frame follows, and the next
observation is stored under ``("collector", "last_observations")``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from marl_collect.buffers.frame_writer import LastObservation
from marl_collect.core.description import Key

KEY = ("collector", "last_observations")


@dataclass(frozen=True)
class LastObservations:
    """The m last observations of one batch ``[B, T]``.

    Attributes:
        rows: environment of each one, int64 ``[m]``.
        frames: frame of each one, int64 ``[m]``.
        observations: observations by key, ``[m, n_agents, ...]``.
    """

    rows: torch.Tensor
    frames: torch.Tensor
    observations: Mapping[Key, torch.Tensor]


def gather(
    last: Sequence[LastObservation], firsts: Sequence[int]
) -> LastObservations | None:
    """Join the last observations of the workers.

    Args:
        last: in any order; rows are relative to the worker.
        firsts: for each entry, the first row of its worker in the batch.
    """
    if not last:
        return None
    return LastObservations(
        rows=torch.from_numpy(
            np.concatenate([o.rows + f for o, f in zip(last, firsts, strict=True)])
        ),
        frames=torch.from_numpy(
            np.repeat([o.frame for o in last], [len(o.rows) for o in last])
        ),
        observations={
            key: torch.from_numpy(np.concatenate([o.observations[key] for o in last]))
            for key in last[0].observations
        },
    )


def attach(batch: TensorDict, last: LastObservations | None) -> TensorDict:
    """Store ``last`` in its batch."""
    if last is not None:
        if "collector" not in batch.keys():
            batch.set("collector", TensorDict({}, batch.batch_size))
        batch.get("collector").set_non_tensor(KEY[1], last)
    return batch


def restore_next(batch: TensorDictBase) -> TensorDictBase:
    """Write ``("next", g, "observation")`` into a batch ``[B, T]``, and return it.

    Raises:
        KeyError: if the batch was not collected with ``compact_obs=True``.
    """
    collector: Any = batch.get("collector", None)
    last: LastObservations | None = None
    if collector is not None and KEY[1] in collector.keys():
        last = collector.get_non_tensor(KEY[1])
    if last is None:
        following = batch.get("next").keys(include_nested=True)
        if any("observation" in key for key in following if isinstance(key, tuple)):
            return batch  # Nothing is omitted if the policy changes all observations.
        raise KeyError(
            f"The batch has neither next observations nor {'/'.join(KEY)}: it was not "
            "collected with compact_obs=True."
        )
    for key, values in last.observations.items():
        root = batch.get(key)
        following = torch.empty_like(root)
        following[:, :-1] = root[:, 1:]
        following[last.rows, last.frames] = values
        batch.set(("next", *key), following)
    return batch
