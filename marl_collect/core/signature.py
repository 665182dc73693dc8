"""``PolicySignature``: the keys that a policy reads and writes."""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from marl_collect.core.description import EnvDescription, Field, Fields, Key
from marl_collect.errors import PolicyError

IS_INIT = ("is_init",)
"""Key of the flag that is True in the first frame of an episode."""
POLICY_ID = "policy_id"
"""Name in a group of the index of each agent's policy."""
NOBODY = -1
"""The ``policy_id`` in frames with random actions (``init_random_frames``)."""
MEMBER = "member"
"""Name in a group of the agents of one policy, also those that do not act."""
ACTS = "acts"
"""Name in a group of the environment's mask, where ``batch_of`` has restricted it."""
_OWN = "_policy"


def is_private(key: Key, description: EnvDescription) -> bool:
    """Whether ``key`` is private to the policy: kept, but not in batches.

    A name that begins with ``_`` makes it private, unless the environment gave it.
    """
    if key in description.row():
        return False
    names = key[1:] if key[0] in description.groups else key
    return any(name.startswith("_") for name in names)


@final
@dataclass(frozen=True)
class PolicySignature:
    """The keys of a policy; plain data that can be pickled.

    Attributes:
        outputs: keys that the policy writes, including actions. Observations that it
            overwrites are among them, and keys under ``next`` that it writes there and
            at the root without reading them.
        carried: keys that it writes under ``next``. They are at the root of the
            following frame, and zero when an episode begins.
        kept: keys that it writes at the root and reads in the following frame.
        removed: observations that it deletes from its input.
        reads_is_init: whether it reads ``is_init``.
        apart: outputs whose keys are already used in the memory, for example by the
            environment's own value.
        private: outputs and states that are not in batches.
    """

    outputs: Fields
    carried: Fields = field(default_factory=dict)
    kept: Fields = field(default_factory=dict)
    removed: frozenset[Key] = frozenset()
    reads_is_init: bool = False
    apart: frozenset[Key] = frozenset()
    private: frozenset[Key] = frozenset()

    def place(self, key: Key) -> Key:
        """Return the key in the memory at which the output ``key`` is stored."""
        return (_OWN, *key) if key in self.apart else key

    def memory(self, description: EnvDescription) -> dict[Key, Field]:
        """Return the fields that the memory needs in addition to the row."""
        fields = {self.place(key): leaf for key, leaf in self.outputs.items()}
        fields |= dict(self.kept) | dict(self.carried)
        if self.reads_is_init:
            fields[IS_INIT] = Field((1,), np.dtype(np.bool_))
        row = description.row()
        return {key: leaf for key, leaf in fields.items() if key not in row}

    @property
    def roots(self) -> dict[Key, Key]:
        """Keys of a batch that the policy writes, with their keys in the memory."""
        return {k: self.place(k) for k in self.outputs if k not in self.private}

    @property
    def states(self) -> dict[Key, Field]:
        """The part of ``carried`` that is in batches."""
        return {k: leaf for k, leaf in self.carried.items() if k not in self.private}


def check_same_signature(
    one: PolicySignature, other: PolicySignature, who: str
) -> None:
    """Check that a policy has the same signature everywhere.

    Args:
        one: the first signature.
        other: the signature of ``who``.
        who: name used in the error.

    Raises:
        PolicyError: if they differ. The message lists the keys.
    """
    if one == other:
        return
    mine, theirs = (
        {**s.outputs, **{("next", *key): leaf for key, leaf in s.carried.items()}}
        for s in (one, other)
    )
    keys = mine.keys() | theirs.keys()
    differing = [
        f"{'/'.join(key)} ({_text(mine.get(key))} and {_text(theirs.get(key))})"
        for key in sorted(keys)
        if mine.get(key) != theirs.get(key)
    ]
    raise PolicyError(
        "The policy must write the same keys, shapes and dtypes everywhere, but the "
        f"first one and that of {who} differ: "
        f"{', '.join(differing) or 'in the keys that they read'}."
    )


def _text(leaf: Field | None) -> str:
    return "nothing" if leaf is None else f"{list(leaf.shape)}, {leaf.dtype}"
