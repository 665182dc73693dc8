"""Steps a simulator whose data are tensors of a device, with arrays of the host."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray


@final
class OnHost:
    """``begin`` and ``advance`` of a simulator with a device, for arrays.

    From a GPU, everything that a call returns is one copy to pinned memory, which later
    calls use again.
    """

    def __init__(self, env: Any) -> None:
        """Copy to and from the ``simulator_device`` of a ``BatchedEnv``."""
        self._env = env
        self._device: torch.device = env.simulator_device
        self._pinned: dict[int, torch.Tensor] = {}

    def begin(
        self, which: NDArray[np.bool_] | None, seeds: NDArray[np.int64]
    ) -> Mapping[Any, Any]:
        """Begin episodes; see ``BatchedEnv``.

        Raises:
            TypeError: if the simulator returns something other than observations.
        """
        begins = None if which is None else self._there(which)
        first = self._env.begin(begins, self._there(seeds))
        if not isinstance(first, Mapping):
            raise TypeError(
                f"begin() of {self._env.description.name} must return observations if "
                f"worlds begin, but returned {first!r:.200}."
            )
        arrays: Mapping[Any, Any] = self._here(first)
        return arrays

    def advance(self, actions: Mapping[str, Any]) -> Any:
        """Step all worlds; see ``BatchedEnv``."""
        step = self._env.advance(self._there(actions))
        if not is_dataclass(step) or isinstance(step, type):
            return step  # The engine raises the error.
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        values = {name: value for name, value in values.items() if value is not None}
        return replace(step, **self._here(values))

    def _there(self, tree: Any) -> Any:
        if isinstance(tree, Mapping):
            return {key: self._there(value) for key, value in tree.items()}
        return torch.from_numpy(tree).to(self._device, non_blocking=True)

    def _here(self, tree: Any) -> Any:
        """Return the same mappings and sequences, with arrays instead of tensors."""
        tensors = list(_leaves(tree))
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{self._env.description.name} has device={self._device}, so it "
                    "must return tensors of this device, but returned "
                    f"{tensor!r:.100} of type {type(tensor).__name__}."
                )
        if self._device.type == "cpu":
            return _with_leaves(tree, (tensor.detach().numpy() for tensor in tensors))
        # Those of wide dtypes first, so that all of them are aligned.
        order = sorted(range(len(tensors)), key=lambda k: -tensors[k].itemsize)
        packed = torch.cat(
            [tensors[k].contiguous().reshape(-1).view(torch.uint8) for k in order]
        )
        if len(packed) not in self._pinned:
            self._pinned[len(packed)] = torch.empty(
                len(packed), dtype=torch.uint8, device="cpu", pin_memory=True
            )
        memory = self._pinned[len(packed)].copy_(packed)
        arrays: dict[int, Any] = {}
        start = 0
        for k in order:
            tensor, end = tensors[k], start + tensors[k].nbytes
            part = memory[start:end].view(tensor.dtype)
            arrays[k] = part.reshape(tensor.shape).numpy()
            start = end
        return _with_leaves(tree, (arrays[k] for k in range(len(tensors))))


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield what nested mappings and sequences have."""
    if isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(value)
    else:
        yield tree


def _with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return the same nested mappings and sequences with other leaves, in order."""
    if isinstance(tree, Mapping):
        return {key: _with_leaves(value, leaves) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not hasattr(tree, "shape"):
        return [_with_leaves(value, leaves) for value in tree]
    return next(leaves)
