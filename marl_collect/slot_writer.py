"""How the running memory gets into a slot, at the right frame."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from numpy.typing import NDArray

from marl_collect.description import EnvDescription, Key
from marl_collect.layout import IS_INIT, TRAJ_IDS, VALID
from marl_collect.policies.runner import PolicyRunner

Arrays = Mapping[Key, NDArray[Any]]


@final
class SlotWriter:
    """Writes frames of K environments into the arrays ``[K, T, ...]`` of one slot."""

    def __init__(
        self,
        slot: Arrays,
        memory: Arrays,
        observed: Sequence[Key],
        policy: PolicyRunner,
        description: EnvDescription,
    ) -> None:
        """Pair each array of the slot with its source in ``memory``, ``[K, ...]``."""
        size = memory["done",].shape[0]
        # One environment: drop its dimension, so that plain rows are assigned.
        pick: Any = 0 if size == 1 else slice(None)

        def pair(target: Key, source: Key) -> tuple[NDArray[Any], NDArray[Any]]:
            rows = slot[target][0] if size == 1 else slot[target].swapaxes(0, 1)
            return rows, memory[source][pick]

        following = [*observed, *description.outcome()]
        kept = [key for key in following if ("next", *key) in slot]
        self._slot = slot
        self.frames = slot["done",].shape[1]
        self._acted = [pair(key, key) for key in policy.outputs]
        self._stepped = [pair(("next", *key), key) for key in kept]
        self._init = pair(IS_INIT, IS_INIT)[0] if IS_INIT in slot else None
        self._roots = [(slot[key], memory[key]) for key in observed]
        self._shift = [
            (slot[key], slot["next", *key]) for key in observed if key in kept
        ]

    def first(self) -> None:
        """Write the root of the first frame."""
        for root, source in self._roots:
            root[:, 0] = source

    def acted(self, frame: int) -> None:
        """Write what the policy computed."""
        for rows, source in self._acted:
            rows[frame] = source

    def init(self, frame: int, source: NDArray[Any]) -> None:
        """Write whether an episode begins at this frame."""
        if self._init is not None:
            self._init[frame] = source[0] if self._init.ndim == 2 else source

    def stepped(self, frame: int) -> None:
        """Write the outcome of the step."""
        for rows, source in self._stepped:
            rows[frame] = source

    def began(self, k: int, frame: int) -> None:
        """Write the root of environment k, whose episode begins at ``frame``."""
        if frame < self.frames:
            for root, source in self._roots:
                root[k, frame] = source[k]

    def finish(self, k: int, begins: Sequence[int], end: int) -> None:
        """Write the roots inside each episode, which begin at ``begins``.

        Args:
            k: the environment.
            begins: first frame of each episode.
            end: first frame that was not stepped.
        """
        for begin, stop in zip(begins, [*begins[1:], end], strict=True):
            if stop - begin > 1:
                for root, following in self._shift:
                    root[k, begin + 1 : stop] = following[k, begin : stop - 1]

    def close(self, end: int) -> None:
        """Mark which frames are valid, and clear the others."""
        if VALID in self._slot:
            self._slot[VALID][:, :end] = True
        if end < self.frames:
            for array in self._slot.values():
                array[:, end:] = 0
            if TRAJ_IDS in self._slot:
                self._slot[TRAJ_IDS][:, end:] = -1
