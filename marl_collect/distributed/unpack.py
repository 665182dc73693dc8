"""Copies an actor's bytes into rows of the trainer's slot: a batch's only copy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.compact_observations import LastObservations
from marl_collect.buffers.layout import TRAJ_IDS, VALID, VERSION, Layout
from marl_collect.core.description import Field, Key
from marl_collect.distributed.messages import Gathered, Last

_INT = np.dtype(np.int64)


def slot_layout(
    sent: Layout, batch: tuple[int, int], *, ragged: bool, versions: bool
) -> Layout:
    """Plan the trainer's slot for actors that send batches of the layout ``sent``.

    Args:
        sent: of an actor's bytes.
        batch: ``(B, T)`` of the slot.
        ragged: whether frames may be invalid.
        versions: whether the version of the weights is recorded.
    """
    fields = dict(sent.fields)
    if ragged:
        fields[VALID] = Field((), np.dtype(np.bool_))
    if versions:
        fields[VERSION] = fields["next", *VERSION] = Field((), _INT)
    return Layout.plan(fields, batch)


def unpack_batch(
    rows: Mapping[Key, NDArray[Any]],
    gathered: Gathered,
    sent: Layout,
    versions: Sequence[int],
) -> None:
    """Copy what an actor sent, and fill the keys that only the trainer knows.

    Args:
        rows: the actor's rows of the slot, ``[B, T, ...]`` per key.
        gathered: what it sent: as many rows, and at most as many frames.
        sent: layout of the actor's bytes.
        versions: of the weights that acted in each row.
    """
    frames = sent.batch[1]
    for key, source in sent.arrays(gathered.content.data).items():
        target = rows[key]
        target[:, :frames] = source
        if frames < target.shape[1]:
            target[:, frames:] = -1 if key == TRAJ_IDS else 0
    valid = [True] * len(versions)
    for key, values in (
        (VALID, valid),
        (VERSION, versions),
        (("next", *VERSION), versions),
    ):
        if key in rows:
            rows[key].fill(0)
            for row, end in enumerate(gathered.ends):
                rows[key][row, :end] = values[row]


def unpack_last(last: Last | None) -> LastObservations | None:
    """Return an actor's last observations in the trainer's own memory."""
    if last is None:
        return None
    return LastObservations(
        rows=torch.from_numpy(last.rows.copy()),
        frames=torch.from_numpy(last.frames.copy()),
        observations={
            key: torch.from_numpy(kept.copy())
            for key, kept in last.observations.items()
        },
    )
