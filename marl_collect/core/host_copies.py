"""Copies between the host and a device, and steps a simulator there with arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, final

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.core.device_check import host_memory


@final
class PackedCopies:
    """Copies any number of tensors to a device, and others from it, in one copy each.

    On the host they are packed in memory that later copies use again, and that is
    pinned for a GPU. Nothing is copied if the device is the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Copy to and from ``device``."""
        self._device = device
        self._to = self._from = host_memory(0, device)

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the host on the device, in new memory.

        The copy is not waited for. Call ``to_host`` before the next ``to_device``: it
        waits until the packed memory is free.
        """
        if self._device.type == "cpu":
            return list(tensors)
        memory = self._to = self._large_enough(self._to, tensors)
        for part, tensor in zip(_parts(memory, tensors), tensors, strict=True):
            part.copy_(tensor)
        return _parts(memory.to(self._device, non_blocking=True), tensors)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the device on the host, valid until the next call."""
        if self._device.type == "cpu":
            return [tensor.detach() for tensor in tensors]
        memory = self._from = self._large_enough(self._from, tensors)
        flat = [
            tensors[k].detach().contiguous().reshape(-1).view(torch.uint8)
            for k in _order(tensors)
        ]
        if flat:
            memory.copy_(torch.cat(flat))
        return _parts(memory, tensors)

    def _large_enough(
        self, memory: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return memory if len(memory) == nbytes else host_memory(nbytes, self._device)


@final
class OnHost:
    """``begin`` and ``advance`` of a simulator with a device, for arrays.

    What a call gets is one copy to the device, and what it returns is one copy back.
    """

    def __init__(self, env: Any) -> None:
        """Copy to and from the ``simulator_device`` of a ``BatchedEnv``."""
        self._env = env
        self._device: torch.device = env.simulator_device
        # A step's `first` is read when worlds begin, so steps have memory of their own.
        self._begins = PackedCopies(self._device)
        self._steps = PackedCopies(self._device)

    def begin(
        self, which: NDArray[Any] | None, seeds: NDArray[Any]
    ) -> Mapping[Any, Any]:
        """Begin episodes; see ``BatchedEnv``.

        Raises:
            TypeError: if the simulator returns something other than observations.
        """
        arrays = [seeds] if which is None else [seeds, which]
        there, *mask = self._begins.to_device(list(map(torch.from_numpy, arrays)))
        first = self._env.begin(mask[0] if mask else None, there)
        if not isinstance(first, Mapping):
            raise TypeError(
                f"begin() of {self._env.description.name} must return observations if "
                f"worlds begin, but returned {first!r:.200}."
            )
        observations: Mapping[Any, Any] = self._here(first, self._begins)
        return observations

    def advance(self, actions: Mapping[str, Any]) -> Any:
        """Step all worlds; see ``BatchedEnv``."""
        tensors = list(map(torch.from_numpy, _leaves(actions)))
        there = iter(self._steps.to_device(tensors))
        step = self._env.advance(_with_leaves(actions, there))
        if not is_dataclass(step) or isinstance(step, type):
            return step  # The engine raises the error.
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        values = {name: value for name, value in values.items() if value is not None}
        return replace(step, **self._here(values, self._steps))

    def _here(self, tree: Any, copies: PackedCopies) -> Any:
        """Return the same mappings and sequences, with arrays instead of tensors."""
        tensors = list(_leaves(tree))
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{self._env.description.name} has device={self._device}, so it "
                    "must return tensors of this device, but returned "
                    f"{tensor!r:.100} of type {type(tensor).__name__}."
                )
        return _with_leaves(tree, (t.numpy() for t in copies.to_host(tensors)))


def moved(batch: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return ``batch`` on another device; its old memory may change afterwards.

    A batch on a slot's memory is moved in one copy. A copy to a GPU goes through pinned
    memory and is not waited for. Other batches, and those of a GPU, are copied key by
    key.

    Args:
        batch: on the CPU, or on the device of a simulator.
        device: the target.
    """
    values = batch.values(include_nested=True, leaves_only=True)
    # The observations that compact_obs stores separately are not tensors.
    leaves = [value for value in values if isinstance(value, torch.Tensor)]
    addresses = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    on_gpu = device.type == "cuda"
    if any(leaf.device.type != "cpu" for leaf in leaves):
        return batch.to(device)
    if len(addresses) != 1:
        return batch.to(device, non_blocking=on_gpu)
    memory = leaves[0].untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        memory, 0, (memory.nbytes(),), (1,)
    )
    if on_gpu:
        # Pinned at once, so workers may fill the slot again.
        flat = flat.pin_memory()
    copied = flat.to(device, non_blocking=on_gpu, copy=True)
    there = copied.untyped_storage()
    # Its device has the number of the GPU, which "cuda" leaves out.
    device = copied.device

    def again(leaf: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=leaf.dtype, device=device)
        return empty.set_(there, leaf.storage_offset(), leaf.shape, leaf.stride())

    out = batch.apply(again, device=device)
    assert out is not None
    return out


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the order of packed tensors: wide dtypes first, so all are aligned."""
    return sorted(range(len(tensors)), key=lambda k: -tensors[k].itemsize)


def _parts(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of packed memory that have the values of ``tensors``."""
    parts: dict[int, torch.Tensor] = {}
    start = 0
    for k in _order(tensors):
        end = start + tensors[k].nbytes
        part = memory[start:end].view(tensors[k].dtype)
        parts[k] = part.view(tensors[k].shape)
        start = end
    return [parts[k] for k in range(len(tensors))]


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
