"""The data layout of a slot: keys, shapes, dtypes and offsets.

A slot holds one batch ``[B, T]`` as one dense array per key. The rows of one worker are
contiguous. With many environments, the memory of keys with small rows is ``[T, B]``,
and their arrays are views of it. The trainer reads the memory that the workers wrote,
without a copy. Offsets are multiples of 64 bytes.
"""

from collections.abc import Mapping
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
_INT = np.dtype(np.int64)


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
        offsets: dict[Key, int] = {}
        end = 0
        for key, leaf in fields.items():
            offsets[key] = end
            size = leaf.nbytes * batch[0] * batch[1]
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(dict(fields), batch, offsets, max(end, ALIGNMENT))

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


@dataclass(frozen=True)
class BatchContents:
    """The optional keys of a batch, in addition to the environment's and policy's."""

    traj_ids: bool = True
    step_count: bool = False
    policy_version: bool = False
    compact_obs: bool = False
    ragged: bool = False
    level: bool = False


def batch_fields(
    description: EnvDescription,
    signature: PolicySignature,
    contents: BatchContents,
) -> dict[Key, Field]:
    """Return the fields of a batch, in the order of their memory.

    Args:
        description: description of the environments.
        signature: signature of the policy.
        contents: optional keys.
    """
    observed = description.observed() | signature.states
    following = observed | description.outcome()
    outputs = {key: signature.outputs[key] for key in signature.roots}
    changed = outputs.keys() | signature.removed
    omitted: set[Key] = set()
    if contents.compact_obs:
        # If the policy changes the root, only `next` has the environment's value.
        omitted = {
            key
            for key in following
            if key[1:2] == ("observation",) and key not in changed
        }
    fields = {k: f for k, f in observed.items() if k not in signature.removed} | outputs
    fields |= {("next", *k): f for k, f in following.items() if k not in omitted}
    if contents.traj_ids:
        fields[TRAJ_IDS] = Field((), _INT)
    if omitted:
        fields[FRAME_IDS] = Field((), _INT)
    if contents.ragged:
        fields[VALID] = Field((), np.dtype(np.bool_))
    if contents.level:
        fields[LEVEL] = Field((), _INT)
    if contents.step_count:
        fields[STEP_COUNT] = fields["next", *STEP_COUNT] = Field((1,), _INT)
    if signature.reads_is_init:
        fields[IS_INIT] = fields["next", *IS_INIT] = Field((1,), np.dtype(np.bool_))
    if contents.policy_version:
        fields[VERSION] = fields["next", *VERSION] = Field((), _INT)
    return fields
