"""The shared memory that carries policy weights to the workers.

One byte vector holds all parameters and buffers. Each tensor is a view of it, at a
multiple of 64 bytes. The trainer's shared memory has places for two vectors, so one can
be written while workers still read the other:

    trainer                                        worker
    write(place, tensors)
    Collect(weights=place) ---------------------->  pull(place): copy what differs

The ``WeightBroadcaster`` alone decides which place holds which version and when a place
may be overwritten. The tensors of a worker's module are views of the worker's own
vector, so a pull copies bytes only.

A range of bytes has one version per place: the number of the write that changed it.
Equal versions mean equal bytes, at the places and in all workers, so only ranges with
other versions are copied. The frozen parameters of a policy, such as an encoder or a
member of a pool, are a range whose version changes only if its bytes have changed. All
other weights get a new version with every write: trained parameters change anyway, and
the module in a worker may have changed its own buffers.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter, is_
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.skeleton import weight_tensors

ALIGNMENT = 64
PLACES = 2
_VERSION = np.dtype(np.int64)
_NOTHING = -1
"""Version of a range that has never been written, or not completely."""
_LISTED = 3
"""Number of names that an error lists."""
_KIND = attrgetter("shape", "dtype")
_INNER = "module."  # The beginning of names of the module in a TensorDictModule.
_EXTRA_STATE = "_extra_state"  # The key of ``get_extra_state()`` in a state_dict.

# In bytes. A memoryview holds the interpreter lock while it copies; numpy releases it.
# This size takes about 0.1 ms, far less than Python's switch interval of 5 ms.
_SMALL = 1 << 20

# An array of bytes or a memoryview. `target[:] = source` works between equal types.
_Bytes = Any
_ADDRESS = torch.Tensor.data_ptr
_CONTIGUOUS = torch.Tensor.is_contiguous

# It stops at the first difference, unlike comparisons of arrays, and allocates nothing.
_differ = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcmp
_differ.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@final
@dataclass(frozen=True)
class WeightRange:
    """The weights in a vector that have one version.

    Attributes:
        tensors: the indices of the tensors.
        begin: where the range begins in the vector, in bytes.
        end: where it ends, in bytes.
        frozen: whether these are parameters of one policy that require no gradient.
    """

    tensors: slice
    begin: int
    end: int
    frozen: bool


@final
@dataclass(frozen=True)
class WeightLayout:
    """Names, shapes, dtypes and offsets of the tensors in a weight vector.

    Attributes:
        names: of the tensors; a tied tensor has its first name.
        shapes: of the tensors.
        dtypes: of the tensors.
        offsets: where the tensors begin, in bytes.
        nbytes: size of the vector.
        ranges: neighbouring frozen parameters of one policy, and what lies between.
        aliases: maps the other names of tied tensors to their first names.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int
    ranges: tuple[WeightRange, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, module: nn.Module, policy_of: Callable[[str], str] | None = None
    ) -> "WeightLayout":
        """Return the layout of a module's parameters and buffers.

        Args:
            module: a policy, or several policies.
            policy_of: maps the name of a parameter to its policy. None for one range,
                which always travels: torch must count what a module writes to frozen
                parameters in a worker.
        """
        tensors = weight_tensors(module)
        first = {id(tensor): name for name, tensor in tensors.items()}
        aliases = {
            name: first[id(tensor)]
            for name, tensor in _every_name(module).items()
            if name not in tensors and id(tensor) in first
        }
        return cls.plan(tensors, aliases, policy_of)

    @classmethod
    def plan(
        cls,
        tensors: Mapping[str, torch.Tensor],
        aliases: Mapping[str, str] | None = None,
        policy_of: Callable[[str], str] | None = None,
    ) -> "WeightLayout":
        """Return the layout that stores ``tensors`` back to back."""
        offsets: list[int] = []
        end = 0
        for tensor in tensors.values():
            offsets.append(end)
            size = tensor.numel() * tensor.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        nbytes = max(end, ALIGNMENT)

        def frozen_in(item: tuple[str, torch.Tensor]) -> str | None:
            name, tensor = item
            frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            return policy_of(name) if policy_of and frozen else None

        edges = (*offsets, nbytes)
        ranges: list[WeightRange] = []
        stop = 0
        for policy, group in groupby(tensors.items(), frozen_in):
            start, stop = stop, stop + len(list(group))
            frozen = policy is not None
            ranges.append(
                WeightRange(slice(start, stop), edges[start], edges[stop], frozen)
            )
        return cls(
            names=tuple(tensors),
            shapes=tuple(tuple(t.shape) for t in tensors.values()),
            dtypes=tuple(t.dtype for t in tensors.values()),
            offsets=tuple(offsets),
            nbytes=nbytes,
            ranges=tuple(ranges),
            aliases=dict(aliases or {}),
        )

    @cached_property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        return list(zip(self.shapes, self.dtypes, strict=True))

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of ``vector``, uint8 ``[nbytes]``."""
        out: list[torch.Tensor] = []
        for shape, dtype, offset in zip(
            self.shapes, self.dtypes, self.offsets, strict=True
        ):
            count = int(np.prod(shape, dtype=np.int64))
            size = count * torch.empty(0, dtype=dtype).element_size()
            out.append(vector[offset : offset + size].view(dtype).view(shape))
        return out

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have these shapes and dtypes, in this order."""
        return list(map(_KIND, tensors)) == self.kinds

    def check(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Check that ``tensors``, in the order of the names, fit this layout.

        Raises:
            ValueError: if shapes or dtypes differ, or if tensors have no values. The
                message names them.
        """
        if self.fits(tensors) and not any(t.is_meta for t in tensors):
            return
        wrong = [
            f"{name} is {_described(tensor)}, but must be {tuple(kind[0])} {kind[1]}"
            for name, tensor, kind in zip(self.names, tensors, self.kinds, strict=True)
            if _KIND(tensor) != kind or tensor.is_meta
        ]
        raise ValueError(
            f"{what} must hold tensors like those that the workers were started with, "
            f"but {'; '.join(wrong)}. Nothing was copied. Convert them, for example "
            "with tensor.to(dtype); for another network build a new collector."
        )

    def tensors_of(
        self, source: Any, what: str = "weights", module: nn.Module | None = None
    ) -> list[torch.Tensor]:
        """Return the tensors of this layout from weights that a user passed.

        Args:
            source: a module, a state_dict (numpy arrays are accepted), or a
                TensorDict of parameters such as ``TensorDict.from_module(policy)``.
                Names may be those of the module that a ``TensorDictModule`` wraps.
            what: name of the argument, for error messages.
            module: has the buffers with ``persistent=False``, which a state_dict lacks.

        Raises:
            KeyError: if names are missing or surplus.
            ValueError: if a tensor has another shape or dtype, or if tensors that are
                tied in the policy differ in ``source``.
            TypeError: if ``source`` is none of these types.
        """
        by_name = self._named(_by_name(source, what), module)
        missing = self._missing(by_name)
        known = {_memory_of(by_name[name]) for name in self.names if name in by_name}
        surplus = [
            name
            for name, tensor in by_name.items()
            if name not in self.names
            and name not in self.aliases
            and _memory_of(tensor) not in known
        ]
        if missing or surplus:
            message = _other_names(what, missing, surplus, by_name)
            if not surplus:
                message += (
                    " If they are buffers with persistent=False, which a state_dict "
                    "lacks, pass the module."
                )
            raise KeyError(message)
        for alias, name in self.aliases.items():
            tied, first = by_name.get(alias), by_name[name]
            if tied is not None and not _equal(tied, first):
                raise ValueError(
                    f"{what}: {alias!r} and {name!r} are one tied tensor in the policy "
                    "that the workers were started with, but have different values. "
                    "Nothing was copied. Build a new collector for the untied policy."
                )
        tensors = [by_name[name] for name in self.names]
        self.check(tensors, what)
        return tensors

    def _named(
        self, by_name: dict[str, torch.Tensor], module: nn.Module | None
    ) -> dict[str, torch.Tensor]:
        """Return tensors by the names of this layout, as far as they are known."""
        if not self._missing(by_name):
            return by_name
        unsaved: dict[str, torch.Tensor] = {}
        if module is not None:
            saved = module.state_dict()
            unsaved = {n: b for n, b in module.named_buffers() if n not in saved}
        inner = {f"{_INNER}{name}": tensor for name, tensor in by_name.items()}
        return min(
            unsaved | by_name, unsaved | inner, key=lambda t: len(self._missing(t))
        )

    def _missing(self, by_name: Mapping[str, torch.Tensor]) -> list[str]:
        return [name for name in self.names if name not in by_name]


class Reader(Protocol):
    """The worker's end of a weight transport."""

    def pull(self, place: int) -> Sequence[int]:
        """Copy the vector at ``place`` into the worker's own vector.

        Returns:
            The indices of the ranges that were copied, because they differed.
        """
        ...

    def publish_own(self) -> None:
        """Write the worker's own weights to place 0, for all workers to read."""
        ...


class Handle(Protocol):
    """Gives a worker access to the weights; can be pickled."""

    @property
    def layout(self) -> WeightLayout:
        """The layout of each vector."""
        ...

    def attach(self, vector: torch.Tensor) -> Reader:
        """Return the reader that fills the worker's vector, uint8 ``[nbytes]``."""
        ...


class Publisher(Protocol):
    """The trainer's end of a weight transport, with ``PLACES`` vectors."""

    @property
    def handle(self) -> Handle:
        """The handle that workers attach."""
        ...

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Write weights to a place that no worker is reading.

        Returns:
            The indices of the ranges that were copied, because they differed.
        """
        ...

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place; they are read-only."""
        ...

    def close(self) -> None:
        """Release all memory."""
        ...


class WeightScheme(Protocol):
    """Sends weights to the workers; the type of ``weight_sync_schemes``."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Return the trainer's end of a new transport for this layout."""
        ...


@final
class SharedMemoryWeights:
    """Sends weights through shared memory; the default."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Reserve memory."""
        return WeightPublisher(layout)


@final
@dataclass(frozen=True)
class WeightsHandle:
    """Gives a worker access to weights in shared memory."""

    memory: MemoryHandle
    layout: WeightLayout

    def attach(self, vector: torch.Tensor) -> Reader:
        """Attach the trainer's memory."""
        return WeightReader(self, vector)


@final
class WeightWriter:
    """Writes weights to vectors, repeatedly, as bytes.

    A torch call takes longer than the copy of a small tensor, and several times as long
    as a numpy call. A memoryview is the fastest. For a policy of six small tensors
    these calls are most of the time of an update.

    Attributes:
        places: the tensors of each vector.
    """

    def __init__(
        self,
        layout: WeightLayout,
        vectors: Sequence[torch.Tensor],
        versions: NDArray[np.int64],
    ) -> None:
        """Prepare the copies.

        Args:
            layout: of each vector.
            vectors: each uint8 ``[nbytes]``, on the CPU.
            versions: of the ranges in each vector, ``[vectors, ranges]``; updated.
        """
        self._layout = layout
        self.places = [layout.views(vector) for vector in vectors]
        self._targets = [[_as_bytes(t) for t in place] for place in self.places]
        self._versions = versions
        # The first vector begins with zeros, or with what a worker writes there.
        self._versions[1:] = _NOTHING
        self._newest = 0
        self._writes = 0
        # The tensors read last. None if a tensor cannot be read as bytes.
        self._seen: list[torch.Tensor | None] = [None] * len(layout.names)
        self._addresses = [0] * len(layout.names)
        self._sources: list[_Bytes] = [None] * len(layout.names)
        self._pairs: list[list[list[tuple[_Bytes, _Bytes]]]] = []
        self._memory: list[list[list[tuple[int, int, int]]]] = []
        self._all_plain = False

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Write weights to a vector, in the order of the layout, from any device.

        Other dtypes are converted.

        Returns:
            The indices of the ranges that were copied.

        Raises:
            ValueError: if a tensor has another shape than in the layout; it is named.
        """
        self._read(tensors)
        if len(self._layout.ranges) == 1:  # It always travels.
            for target, source in self._pairs[place][0]:
                target[:] = source
            return [0]
        self._writes += 1
        versions = self._versions[self._newest].tolist()
        for number, weights in enumerate(self._layout.ranges):
            known = weights.frozen and versions[number] != _NOTHING
            if not known or self._differs(number):
                versions[number] = self._writes
        changed = _differences(versions, self._versions[place].tolist())
        # If it is interrupted, the next one writes all ranges.
        self._versions[place] = _NOTHING
        pairs = self._pairs[place]
        for number in changed:
            for target, source in pairs[number]:
                target[:] = source
        self._versions[place] = versions
        self._newest = place
        return changed

    def _differs(self, number: int) -> bool:
        """Return whether a range has other bytes than those written last.

        Torch counts no writes through ``tensor.data`` or numpy, so nothing but the
        bytes tells.
        """
        return any(_differ(*memory) for memory in self._memory[self._newest][number])

    def _read(self, tensors: Sequence[torch.Tensor]) -> None:
        # Equal tensors have the same memory as in the last call, unless `tensor.data`
        # was replaced.
        if (
            self._all_plain
            and all(map(is_, tensors, self._seen))
            and list(map(_ADDRESS, tensors)) == self._addresses
            # `tensor.data` may be another view of the same memory.
            and all(map(_CONTIGUOUS, tensors))
        ):
            return
        self._all_plain = False  # It stays False if a check raises an error.
        for index, tensor in enumerate(tensors):
            self._find_source(index, tensor)
        sizes = [target.nbytes for target in self.places[0]]
        self._pairs, self._memory = [], []
        for views, targets in zip(self.places, self._targets, strict=True):
            pairs = list(zip(targets, self._sources, strict=True))
            memory = list(
                zip(self._addresses, map(_ADDRESS, views), sizes, strict=True)
            )
            slices = [weights.tensors for weights in self._layout.ranges]
            self._pairs.append([pairs[tensors] for tensors in slices])
            self._memory.append([memory[tensors] for tensors in slices])
        self._all_plain = None not in self._seen

    def _find_source(self, index: int, tensor: torch.Tensor) -> None:
        target = self.places[0][index]
        if tensor.shape != target.shape:
            raise ValueError(
                f"The weights of {self._layout.names[index]!r} must have shape "
                f"{tuple(target.shape)}, but have {tuple(tensor.shape)}."
            )
        plain = (
            tensor.device.type == "cpu"
            and tensor.dtype == target.dtype
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
        )
        # Other tensors are converted by torch at every call.
        source = tensor if plain else torch.empty_like(target).copy_(tensor.detach())
        self._seen[index] = tensor if plain else None
        self._sources[index] = _as_bytes(source)
        self._addresses[index] = _ADDRESS(source)


@final
class WeightPublisher:
    """The trainer's end, which owns the shared vectors."""

    def __init__(self, layout: WeightLayout) -> None:
        """Reserve memory.

        Raises:
            MemoryError: if there is too little shared memory. The message has the
                required and the free size.
        """
        size = PLACES * (layout.nbytes + _VERSION.itemsize * len(layout.ranges))
        self._segment = Segment.create(size, "The policy's weights")
        self._layout = layout
        self._writer = WeightWriter(layout, *_places(self._segment, layout))

    @property
    def handle(self) -> WeightsHandle:
        """The handle that workers attach."""
        return WeightsHandle(self._segment.handle, self._layout)

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Write weights to a place; see ``WeightWriter.write``."""
        return self._writer.write(place, tensors)

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place; they are read-only."""
        return self._writer.places[place]

    def close(self) -> None:
        """Release the shared memory."""
        self._writer = None  # type: ignore[assignment]
        self._segment.close()


@final
class WeightReader:
    """The worker's end, which fills the vector of the worker's module."""

    def __init__(self, handle: WeightsHandle, vector: torch.Tensor) -> None:
        """Attach the trainer's memory; nothing is read yet.

        Args:
            handle: of the trainer's memory.
            vector: the worker's, uint8 ``[nbytes]``; its module's tensors are
                views of it.
        """
        layout = handle.layout
        published, self._versions = _places(Segment.attach(handle.memory), layout)
        self._vector = vector
        self._published = published
        parts = [slice(weights.begin, weights.end) for weights in layout.ranges]
        self._pairs = [
            [(vector[part], place[part]) for part in parts] for place in published
        ]
        self._has = [_NOTHING] * len(layout.ranges)
        self._written = vector._version

    def pull(self, place: int) -> Sequence[int]:
        """Copy what differs at ``place``; the trainer does not change it meanwhile.

        Returns:
            The indices of the ranges that were copied.
        """
        # numpy's copy is faster, but in workers its large copies bypass the caches
        # (by glibc's memcpy), and the policy reads these weights next.
        if len(self._has) == 1:  # It always travels.
            self._vector.copy_(self._published[place])
            return [0]
        versions = self._versions[place].tolist()
        # torch counts the writes to the vector through any of its views. If a module
        # has written its own tensors, nothing is known about them.
        if self._vector._version != self._written:
            self._has = [_NOTHING] * len(versions)
        changed = _differences(versions, self._has)
        for number in changed:
            target, source = self._pairs[place][number]
            target.copy_(source)
        self._has, self._written = versions, self._vector._version
        return changed

    def publish_own(self) -> None:
        """Write the worker's own weights to place 0, for all workers to read."""
        self._published[0].copy_(self._vector)


def check_same_weights(
    expected: WeightLayout | None, built: WeightLayout | None, whose: str, why: str
) -> None:
    """Check that a policy that a factory built has the expected tensors.

    Args:
        expected: layout of the policy to compare with, None if it has no weights.
        built: layout of the policy that the factory built.
        whose: which policy is expected, for the message.
        why: the reason, the beginning of the message.

    Raises:
        ValueError: if names, shapes or dtypes differ; the first difference is named.
    """
    ours, theirs = (
        {}
        if layout is None
        else {
            name: f"{dtype} {list(shape)}"
            for name, dtype, shape in zip(
                layout.names, layout.dtypes, layout.shapes, strict=True
            )
        }
        for layout in (expected, built)
    )
    for name in sorted(ours | theirs):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{why}, so their tensors must be the same, but {name!r} is "
                f"{ours.get(name, 'missing')} in {whose} and "
                f"{theirs.get(name, 'missing')} in what policy_factory builds."
            )


def _other_names(
    what: str,
    missing: Sequence[str],
    surplus: Sequence[str],
    names: Iterable[str],
) -> str:
    differs = [
        f"{kind} {_listed(which)}"
        for kind, which in (("missing", missing), ("surplus", surplus))
        if which
    ]
    shown = "" if surplus else f"; found {_listed(sorted(names))}"
    return (
        f"{what} must hold the tensors that the workers' policy was started with, but "
        f"{' and '.join(differs)}{shown}. Nothing was copied."
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many others there are."""
    others = len(names) - _LISTED
    more = f" and {others} others" if others > 0 else ""
    return f"{list(names[:_LISTED])}{more}"


def _every_name(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )


def _by_name(source: Any, what: str) -> dict[str, torch.Tensor]:
    from tensordict import TensorDictBase

    if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
        return _every_name(source)
    if isinstance(source, TensorDictBase):
        items = source.items(include_nested=True, leaves_only=True)
        return {
            name: _tensor(tensor, name, what)
            for name, tensor in (
                (k if isinstance(k, str) else ".".join(k), v) for k, v in items
            )
        }
    if isinstance(source, Mapping):
        return {
            str(name): _tensor(tensor, str(name), what)
            for name, tensor in source.items()
            if not str(name).endswith(_EXTRA_STATE)
        }
    raise TypeError(
        f"{what} must be a module, a state_dict or a TensorDict, but is a "
        f"{type(source).__name__}."
    )


def _tensor(value: Any, name: str, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(np.array(value))
    raise TypeError(
        f"{what} must hold tensors or numpy arrays, but {name!r} is a "
        f"{type(value).__name__}."
    )


def _described(tensor: torch.Tensor) -> str:
    where = " on the meta device, without values" if tensor.is_meta else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{where}"


def _memory_of(tensor: torch.Tensor) -> object:
    """Return an identity that all names of a tied tensor share."""
    if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _memory_of(one) == _memory_of(other):
        return True
    if _KIND(one) != _KIND(other) or one.is_meta or other.is_meta:
        return False
    return bool(torch.equal(one.detach().cpu(), other.detach().cpu()))


def _differences(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _places(
    segment: Segment, layout: WeightLayout
) -> tuple[list[torch.Tensor], NDArray[np.int64]]:
    """Return the vector of each place, and the versions of its ranges."""
    count, size = len(layout.ranges), layout.nbytes
    vectors = np.frombuffer(segment.buffer, np.uint8, PLACES * size)
    versions = np.frombuffer(segment.buffer, _VERSION, PLACES * count, PLACES * size)
    return (
        [torch.from_numpy(vector) for vector in vectors.reshape(PLACES, size)],
        versions.reshape(PLACES, count),
    )


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    # As uint8, because numpy does not have all dtypes of torch.
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if array.nbytes <= _SMALL else array
