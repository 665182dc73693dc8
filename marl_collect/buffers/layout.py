"""The data layout of a slot: keys, shapes, dtypes and offsets.

A slot holds one batch ``[B, T]`` as one dense array per key. The rows of one worker are
contiguous. With many environments, the memory of keys with small rows is ``[T, B]``,
and their arrays are views of it. The trainer reads the memory that the workers wrote,
without a copy. Offsets are multiples of 64 bytes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import (
    ALIGNMENT,
    SMALL,
    EnvDescription,
    Field,
    Fields,
    Key,
    places,
)
from marl_collect.core.signature import IS_INIT, PolicySignature

TRAJ_IDS = ("collector", "traj_ids")
VALID = ("collector", "mask")
FRAME_IDS = ("collector", "frame_ids")
LEVEL = ("collector", "level")
STEP_COUNT = ("step_count",)
VERSION = ("policy_version",)
MANY = 128
"""Number of environments from which on small rows of a frame are adjacent."""
_INT, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)
_OPTIONAL = {
    TRAJ_IDS: Field((), _INT),
    FRAME_IDS: Field((), _INT),
    VALID: Field((), _BOOL),
    LEVEL: Field((), _INT),
    STEP_COUNT: Field((1,), _INT),
    IS_INIT: Field((1,), _BOOL),
    VERSION: Field((), _INT),
}
"""Keys that a batch may have in addition to the environment's and policy's."""
_FOLLOWED = (STEP_COUNT, IS_INIT, VERSION)
"""Those that are also under ``next``."""


@final
@dataclass(frozen=True)
class Layout:
    """Keys, shapes, dtypes and offsets of one slot.

    Attributes:
        fields: fields of one frame, by key of the batch, including ``next``.
        batch: ``(B, T)``.
        offsets: offset in bytes of each field's array ``[B, T, *shape]``.
        nbytes: size of the slot in bytes.
    """

    fields: Fields
    batch: tuple[int, int]
    offsets: Mapping[Key, int]
    nbytes: int

    @classmethod
    def plan(cls, fields: Fields, batch: tuple[int, int]) -> "Layout":
        """Place ``fields`` one after another."""
        sizes = [leaf.nbytes * batch[0] * batch[1] for leaf in fields.values()]
        *offsets, end = places(sizes)
        by_key = dict(zip(fields, offsets, strict=True))
        return cls(dict(fields), batch, by_key, max(end, ALIGNMENT))

    def arrays(self, buffer: Any, rows: slice = slice(None)) -> dict[Key, NDArray[Any]]:
        """Return the array ``[B, T, *shape]`` of each key, or some of its rows."""
        out: dict[Key, NDArray[Any]] = {}
        n_envs, frames = self.batch
        for key, leaf in self.fields.items():
            if self.is_time_major(leaf):
                shape = (frames, n_envs, *leaf.shape)
                memory = np.ndarray(shape, leaf.dtype, buffer, self.offsets[key])
                whole = memory.swapaxes(0, 1)
            else:
                shape = (n_envs, frames, *leaf.shape)
                whole = np.ndarray(shape, leaf.dtype, buffer, self.offsets[key])
            out[key] = whole[rows]
        return out

    def is_time_major(self, leaf: Field) -> bool:
        """Whether the memory of a field is ``[T, B, *shape]``.

        Many environments write small rows faster if those of a frame are adjacent.
        """
        return self.batch[0] >= MANY and leaf.nbytes <= SMALL


def batch_fields(
    description: EnvDescription,
    signature: PolicySignature,
    wanted: Collection[Key],
) -> dict[Key, Field]:
    """Return the fields of a batch, in the order of their memory.

    Args:
        description: description of the environments.
        signature: signature of the policy.
        wanted: optional keys of a batch, except ``is_init``, which the policy decides.
            With ``FRAME_IDS``, next observations that follow are omitted.
    """
    observed = description.observed() | signature.states
    following = observed | description.outcome()
    outputs = {key: signature.outputs[key] for key in signature.roots}
    changed = outputs.keys() | signature.removed
    omitted: set[Key] = set()
    if FRAME_IDS in wanted:
        # If the policy changes the root, only `next` has the environment's value.
        omitted = {
            key
            for key in following
            if key[1:2] == ("observation",) and key not in changed
        }
    fields = {k: f for k, f in observed.items() if k not in signature.removed} | outputs
    fields |= {("next", *k): f for k, f in following.items() if k not in omitted}
    chosen = {*wanted, IS_INIT} if signature.reads_is_init else {*wanted}
    for key, leaf in _OPTIONAL.items():
        if key in chosen and (omitted or key != FRAME_IDS):
            fields[key] = leaf
            if key in _FOLLOWED:
                fields["next", *key] = leaf
    return fields
