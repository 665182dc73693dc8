"""The memory of a rollout on a device: the current frame of K worlds, and slots.

The flags and masks of all agents are columns of one tensor, and so are their rewards.
So the rules of the engine, and the copies to a slot, take equally many operations for
any number of groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import warn_of_held
from marl_collect.core.description import ALIGNMENT, FLAGS, EnvDescription, Key, Row
from marl_collect.core.device_check import host_memory

Columns = tuple[int, int, bool]
"""First column, the one after the last, and whether the key has one more dimension."""
BOOLS: Key = ("_bools",)
REWARDS: Key = ("_rewards",)
FAULTS: Key = ("_faults",)
_USES = torch._C._storage_Use_Count  # noqa: SLF001
_SPARE = 2
"""Number of slots whose memory is kept while no batch uses it."""


def dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype of a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


@final
class Agents:
    """Where the flags, masks and rewards of all agents are.

    Attributes:
        number: N, of the agents of all groups.
        ranges: first agent of each group, and the one after its last.
        bools: the columns of each key in a tensor ``[..., 4 N + 3]``: three flags and
            the masks of all agents, then the flags of the root.
        rewards: the columns of each key in a tensor ``[..., N]``.
    """

    def __init__(self, description: EnvDescription) -> None:
        """Place the agents in the order of their groups."""
        self.ranges: dict[str, tuple[int, int]] = {}
        self.bools: dict[Key, Columns] = {}
        self.rewards: dict[Key, Columns] = {}
        end = 0
        for name, group in description.groups.items():
            self.ranges[name] = end, end + group.n_agents
            end += group.n_agents
        self.number = end
        for name, (first, last) in self.ranges.items():
            for k, flag in enumerate(FLAGS):
                self.bools[name, flag] = k * end + first, k * end + last, True
            if description.groups[name].mask:
                self.bools[name, "mask"] = 3 * end + first, 3 * end + last, False
            self.rewards[name, "reward"] = first, last, True
        for k, flag in enumerate(FLAGS):
            self.bools[flag,] = 4 * end + k, 4 * end + k + 1, False

    @property
    def width(self) -> int:
        """Number of columns of flags and masks."""
        return 4 * self.number + len(FLAGS)


def view(block: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Return some columns of the last dimension."""
    first, last, deeper = columns
    part = block[..., first:last]
    return part.unsqueeze(-1) if deeper else part


@final
class DeviceMemory:
    """The current frame of K worlds, as tensors of a device.

    Attributes:
        tensors: ``[K, ...]`` by key, as in the host's memory.
        blocks: the same memory without flags, masks and rewards, but with ``BOOLS`` and
            ``REWARDS``.
        agents: where those are.
    """

    def __init__(
        self, description: EnvDescription, host: Row, device: torch.device
    ) -> None:
        """Copy the memory of the host, ``[K, ...]`` by key."""
        self.agents = agents = Agents(description)
        size = len(host["done",])
        bools = torch.zeros(size, agents.width, dtype=torch.bool, device=device)
        rewards = torch.zeros(size, agents.number, dtype=torch.float32, device=device)
        self.blocks: dict[Key, torch.Tensor] = {BOOLS: bools, REWARDS: rewards}
        self.tensors: dict[Key, torch.Tensor] = {}
        for key, array in host.items():
            if key in agents.bools:
                self.tensors[key] = view(bools, agents.bools[key])
            elif key in agents.rewards:
                self.tensors[key] = view(rewards, agents.rewards[key])
            else:
                new = torch.empty(
                    array.shape, dtype=dtype_of(array.dtype), device=device
                )
                self.tensors[key] = self.blocks[key] = new
        self.load(host)

    def load(self, host: Row) -> None:
        """Copy the memory of the host."""
        for key, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(host[key]))

    def store(self, host: Row) -> None:
        """Copy to the memory of the host."""
        for key, tensor in self.tensors.items():
            host[key][...] = tensor.cpu().numpy()

    def block_of(self, key: Key) -> Key:
        """Return the key of the block that has ``key``."""
        if key in self.agents.bools:
            return BOOLS
        return REWARDS if key in self.agents.rewards else key


@final
class DeviceSlot:
    """The memory of one batch.

    Attributes:
        memory: all of it, uint8.
        blocks: ``[T, K, ...]`` by key, and ``BOOLS`` at the root and under ``next``,
            ``("next", *REWARDS)`` and ``FAULTS``.
    """

    def __init__(self, slots: "DeviceSlots", memory: torch.Tensor) -> None:
        """Use ``memory``, of ``slots``."""
        self._slots = slots
        self.memory = memory
        self.blocks = {
            key: _at(memory, offset, shape, dtype)
            for key, (offset, shape, dtype) in slots.blocks.items()
        }

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return a view ``[K, T, ...]`` of each key of the batch."""
        return self._views(self._slots.layout.fields, self.blocks)

    def host(self) -> dict[Key, NDArray[Any]]:
        """Return what the host needs, ``[K, T, ...]``, and ``FAULTS``, in one copy."""
        slots = self._slots
        memory = self.memory[: slots.host_end]
        if memory.device.type != "cpu":
            memory = slots.on_host.copy_(memory)
        blocks = {
            key: _at(memory, *block)
            for key, block in slots.blocks.items()
            if block[0] < slots.host_end
        }
        keys = [key for key in slots.layout.fields if slots.block_of(key) in blocks]
        tensors = self._views(keys, blocks) | {FAULTS: blocks[FAULTS]}
        return {key: tensor.numpy() for key, tensor in tensors.items()}

    def _views(
        self, keys: Any, blocks: Mapping[Key, torch.Tensor]
    ) -> dict[Key, torch.Tensor]:
        out = {}
        for key in keys:
            block = blocks[self._slots.block_of(key)].transpose(0, 1)
            columns = self._slots.columns_of(key)
            out[key] = block if columns is None else view(block, columns)
        return out


@final
class DeviceSlots:
    """Owns the slots of one collector. A slot is free when no batch uses its memory.

    Attributes:
        layout: keys, shapes and dtypes of a batch.
        blocks: offset, shape and dtype of each block of a slot.
        host_end: end of the part that the host needs.
    """

    def __init__(
        self,
        layout: Layout,
        memory: DeviceMemory,
        *,
        outputs: Sequence[Key],
        host: Sequence[Key],
        faults: int,
    ) -> None:
        """Plan the memory of a slot.

        Args:
            layout: keys, shapes and dtypes of a batch.
            memory: of the current frame.
            outputs: keys that the policy writes, so their values are not those of the
                environment.
            host: keys that the host needs, in addition to flags, masks and rewards.
            faults: number of checks, whose results the host needs.
        """
        self.layout = layout
        self._agents = memory.agents
        self._device = memory.blocks[BOOLS].device
        self._outputs = set(outputs)
        size, frames = layout.batch
        agents = memory.agents
        shapes: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {
            FAULTS: ((faults,), torch.bool),
            ("next", *BOOLS): ((frames, size, agents.width), torch.bool),
            ("next", *REWARDS): ((frames, size, agents.number), torch.float32),
        }
        for key in [*host, *(k for k in layout.fields if k not in host)]:
            if self.columns_of(key) is None:
                leaf = layout.fields[key]
                shape = frames, size, *leaf.shape
                shapes[key] = shape, dtype_of(leaf.dtype)
        shapes[BOOLS] = (frames, size, agents.width), torch.bool
        self.blocks: dict[Key, tuple[int, tuple[int, ...], torch.dtype]] = {}
        end = self.host_end = 0
        for number, (key, (shape, dtype)) in enumerate(shapes.items()):
            self.blocks[key] = end, shape, dtype
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
            if number < 3 + len(host):
                self.host_end = end
        self._nbytes = end
        self._memory: list[torch.Tensor] = []
        self._alone = 0
        self._warned = False
        is_host = self._device.type == "cpu"
        self.on_host = host_memory(0 if is_host else self.host_end, self._device)

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._memory)

    def acquire(self) -> DeviceSlot:
        """Return a slot to fill; a new one if batches use all of them."""
        free = [m for m in self._memory if _uses(m) == self._alone]
        dropped = set(map(id, free[_SPARE:]))
        self._memory = [m for m in self._memory if id(m) not in dropped]
        if free:
            memory = free[0]
        else:
            if len(self._memory) == _SPARE and not self._warned:
                self._warned = True
                warn_of_held(_SPARE, self._nbytes)
            memory = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
            self._alone = _uses(memory)
            self._memory.append(memory)
        return DeviceSlot(self, memory)

    def arrays(self, slot: DeviceSlot) -> DeviceSlot:
        """Return what ``DeviceRollout.collect`` fills: the slot itself."""
        return slot

    def hand_out(self, slot: DeviceSlot) -> dict[Key, torch.Tensor]:
        """Return a tensor ``[K, T, ...]`` per key on the slot's memory."""
        return slot.tensors()

    def close(self) -> None:
        """Release all memory that no batch uses."""
        self._memory.clear()

    def columns_of(self, key: Key) -> Columns | None:
        """Return the columns of a batch's key in its block; None for all of it."""
        ahead = key[0] == "next"
        name = key[1:] if ahead else key
        if ahead and name in self._agents.rewards:
            return self._agents.rewards[name]
        if name in self._agents.bools and (ahead or key not in self._outputs):
            return self._agents.bools[name]
        return None

    def block_of(self, key: Key) -> Key:
        """Return the key of the block that has a batch's key."""
        if self.columns_of(key) is None:
            return key
        ahead = key[0] == "next"
        block = REWARDS if ahead and key[1:] in self._agents.rewards else BOOLS
        return ("next", *block) if ahead else block


def _at(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


def _uses(memory: torch.Tensor) -> int:
    count: int = _USES(memory.untyped_storage()._cdata)  # noqa: SLF001
    return count
