"""The next observations that ``compact_obs=True`` leaves out, and how to restore them.

Inside an episode, the next observation of a frame is the root of the following one.
Where none follows, at an episode's end and at the end of the batch, it is kept in the
batch under ``("collector", "last_observations")``.
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
    """All of one batch ``[B, T]``.

    Attributes:
        rows: environment of each, int64 ``[m]``.
        frames: frame of each, int64 ``[m]``.
        observations: by key, ``[m, n_agents, ...]``.
    """

    rows: torch.Tensor
    frames: torch.Tensor
    observations: Mapping[Key, torch.Tensor]


def gather(
    last: Sequence[LastObservation], firsts: Sequence[int]
) -> LastObservations | None:
    """Join what the workers kept.

    Args:
        last: in any order; rows are the worker's own.
        firsts: row of the batch that each one's worker begins with.
    """
    if not last:
        return None
    return LastObservations(
        rows=torch.tensor([o.row + f for o, f in zip(last, firsts, strict=True)]),
        frames=torch.tensor([o.frame for o in last]),
        observations={
            key: torch.from_numpy(np.stack([o.observations[key] for o in last]))
            for key in last[0].observations
        },
    )


def join(
    parts: Sequence[LastObservations | None], firsts: Sequence[int]
) -> LastObservations | None:
    """Join those of several batches that become one.

    Args:
        parts: of each batch.
        firsts: row of the joined batch that each one begins with.
    """
    found = [
        (part, first)
        for part, first in zip(parts, firsts, strict=True)
        if part is not None
    ]
    if not found:
        return None
    return LastObservations(
        rows=torch.cat([part.rows + first for part, first in found]),
        frames=torch.cat([part.frames for part, _ in found]),
        observations={
            key: torch.cat([part.observations[key] for part, _ in found])
            for key in found[0][0].observations
        },
    )


def attach(batch: TensorDict, last: LastObservations | None) -> TensorDict:
    """Put ``last`` into the batch that it belongs to."""
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
            return batch  # A policy that changes all observations has none left out.
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
