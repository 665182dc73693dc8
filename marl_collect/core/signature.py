"""What a policy reads and writes, beside reading observations and writing actions."""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from marl_collect.core.description import EnvDescription, Field, Fields, Key
from marl_collect.errors import PolicyError

IS_INIT = ("is_init",)
"""True in the first frame of an episode."""
_OWN = "_policy"


def is_private(key: Key) -> bool:
    """Whether ``key`` is the policy's own: it is kept, but not put into batches."""
    return any(name.startswith("_") for name in key)


@final
@dataclass(frozen=True)
class PolicySignature:
    """The keys of a policy; plain data that pickles.

    Attributes:
        outputs: what it writes, actions included. Keys of observations are among them
            if it overwrites these; keys under ``next`` if it writes a key both there
            and at the root, and does not read it.
        carried: what it writes under ``next``, which is at the root of the frame
            after it, and zero where an episode begins.
        kept: what it writes at the root and reads again in the frame after it.
        removed: observations that it takes out of its input.
        reads_is_init: whether it reads ``is_init``.
        apart: outputs at whose keys the memory already holds something else, the
            environment's own value for example.
    """

    outputs: Fields
    carried: Fields = field(default_factory=dict)
    kept: Fields = field(default_factory=dict)
    removed: frozenset[Key] = frozenset()
    reads_is_init: bool = False
    apart: frozenset[Key] = frozenset()

    def place(self, key: Key) -> Key:
        """Return where in the memory the output ``key`` is."""
        return (_OWN, *key) if key in self.apart else key

    def memory(self, description: EnvDescription) -> dict[Key, Field]:
        """Return what must be in the memory beside the environments' row."""
        fields = {self.place(key): leaf for key, leaf in self.outputs.items()}
        fields |= dict(self.kept) | dict(self.carried)
        if self.reads_is_init:
            fields[IS_INIT] = Field((1,), np.dtype(np.bool_))
        row = description.row()
        return {key: leaf for key, leaf in fields.items() if key not in row}

    @property
    def roots(self) -> dict[Key, Key]:
        """Keys of a batch that the policy writes, and where in the memory they are."""
        return {key: self.place(key) for key in self.outputs if not is_private(key)}

    @property
    def states(self) -> dict[Key, Field]:
        """The part of ``carried`` that is in batches."""
        return {key: leaf for key, leaf in self.carried.items() if not is_private(key)}


def check_same_signature(
    one: PolicySignature, other: PolicySignature, who: str
) -> None:
    """Check that a policy writes the same keys wherever it acts.

    Args:
        one: the first signature.
        other: another one, of ``who``.
        who: named in the error.

    Raises:
        PolicyError: naming a key that is not the same.
    """
    if one == other:
        return
    mine, theirs = (
        {**s.outputs, **{("next", *key): leaf for key, leaf in s.carried.items()}}
        for s in (one, other)
    )
    keys = mine.keys() | theirs.keys()
    found = [
        f"{'/'.join(key)} ({_text(mine.get(key))} and {_text(theirs.get(key))})"
        for key in sorted(keys)
        if mine.get(key) != theirs.get(key)
    ]
    raise PolicyError(
        "The policy must write the same keys, shapes and dtypes everywhere, but the "
        f"first one and that of {who} differ: "
        f"{', '.join(found) or 'in what they read'}."
    )


def _text(leaf: Field | None) -> str:
    return "nothing" if leaf is None else f"{list(leaf.shape)}, {leaf.dtype}"
