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

Frozen parameters, such as those of a pool's versions, are copied only if their bytes
have changed. Each place has a number per tensor: that of the write that changed it.
Equal numbers mean equal bytes, at the places and in all workers, so only tensors with
other numbers are copied. A new worker has no numbers and copies everything. Tensors
that are not frozen get a new number in every write: trained parameters change anyway,
and the module in a worker may have changed its own buffers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.copies import WeightCopies
from marl_collect.weights.skeleton import weight_tensors

ALIGNMENT = 64
PLACES = 2
_NUMBER = np.dtype(np.int64)
_NOTHING = -1
"""Stamp of a tensor never written here."""
_LISTED = 3
"""Number of names that an error lists."""
_KIND = attrgetter("shape", "dtype")
_INNER = "module."  # The beginning of names of the module in a TensorDictModule.
_EXTRA_STATE = "_extra_state"  # The key of ``get_extra_state()`` in a state_dict.


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
        frozen: indices of the parameters that require no gradient.
        aliases: maps the other names of tied tensors to their first names.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int
    frozen: tuple[int, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> "WeightLayout":
        """Return the layout of a module's parameters and buffers."""
        tensors = weight_tensors(module)
        first = {id(tensor): name for name, tensor in tensors.items()}
        aliases = {
            name: first[id(tensor)]
            for name, tensor in _every_name(module).items()
            if name not in tensors and id(tensor) in first
        }
        return cls.plan(tensors, aliases)

    @classmethod
    def plan(
        cls,
        tensors: Mapping[str, torch.Tensor],
        aliases: Mapping[str, str] | None = None,
    ) -> "WeightLayout":
        """Return the layout that stores ``tensors`` back to back."""
        offsets: list[int] = []
        end = 0
        for tensor in tensors.values():
            offsets.append(end)
            size = tensor.numel() * tensor.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(
            names=tuple(tensors),
            shapes=tuple(tuple(t.shape) for t in tensors.values()),
            dtypes=tuple(t.dtype for t in tensors.values()),
            offsets=tuple(offsets),
            nbytes=max(end, ALIGNMENT),
            frozen=tuple(
                index
                for index, tensor in enumerate(tensors.values())
                if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            ),
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

    def part(self, indices: range) -> "WeightLayout":
        """Return the layout of consecutive tensors, without aliases."""
        begin, end = self.ends(indices)
        own = slice(indices.start, indices.stop)
        return WeightLayout(
            names=self.names[own],
            shapes=self.shapes[own],
            dtypes=self.dtypes[own],
            offsets=tuple(offset - begin for offset in self.offsets[own]),
            nbytes=end - begin,
        )

    def ends(self, indices: range) -> tuple[int, int]:
        """Return where consecutive tensors begin and end, in bytes."""
        edges = (*self.offsets, self.nbytes)
        return edges[indices.start], edges[indices.stop]

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
        found = self._named(_by_name(source, what), module)
        missing = self._missing(found)
        own = {_memory_of(found[name]) for name in self.names if name in found}
        surplus = [
            name
            for name, tensor in found.items()
            if name not in self.names
            and name not in self.aliases
            and _memory_of(tensor) not in own
        ]
        if missing or surplus:
            message = _other_names(what, missing, surplus, found)
            if not surplus:
                message += (
                    " If they are buffers with persistent=False, which a state_dict "
                    "lacks, pass the module."
                )
            raise KeyError(message)
        for alias, name in self.aliases.items():
            tied, first = found.get(alias), found[name]
            if tied is not None and not _equal(tied, first):
                raise ValueError(
                    f"{what}: {alias!r} and {name!r} are one tied tensor in the policy "
                    "that the workers were started with, but have different values. "
                    "Nothing was copied. Build a new collector for the untied policy."
                )
        tensors = [found[name] for name in self.names]
        self.check(tensors, what)
        return tensors

    def _named(
        self, given: dict[str, torch.Tensor], module: nn.Module | None
    ) -> dict[str, torch.Tensor]:
        """Return tensors by the names of this layout, as far as they are known."""
        if not self._missing(given):
            return given
        unsaved: dict[str, torch.Tensor] = {}
        if module is not None:
            saved = module.state_dict()
            unsaved = {n: b for n, b in module.named_buffers() if n not in saved}
        inner = {f"{_INNER}{name}": tensor for name, tensor in given.items()}
        return min(
            unsaved | given, unsaved | inner, key=lambda t: len(self._missing(t))
        )

    def _missing(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        return [name for name in self.names if name not in found]


class Reader(Protocol):
    """The worker's end of a weight transport."""

    def pull(self, place: int) -> Sequence[int]:
        """Copy the vector at ``place`` into the worker's own vector.

        Returns:
            The indices of the tensors that were copied, because they differed.
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

    def attach(self, own: torch.Tensor) -> Reader:
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
            The indices of the tensors that were copied, because they differed.
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

    def attach(self, own: torch.Tensor) -> Reader:
        """Attach the trainer's memory."""
        return WeightReader(self, own)


@final
class WeightPublisher:
    """The trainer's end, which owns the shared vectors."""

    def __init__(self, layout: WeightLayout) -> None:
        """Reserve memory.

        Raises:
            MemoryError: if there is too little shared memory. The message has the
                required and the free size.
        """
        self.layout = layout
        size = PLACES * (layout.nbytes + _NUMBER.itemsize * len(layout.names))
        self._segment = Segment.create(size, "The policy's weights")
        vectors, self._numbers = _places(self._segment, layout)
        self._places = [layout.views(vector) for vector in vectors]
        self._copies = WeightCopies(layout.names, *self._places)
        self._newest = 0
        self._writes = 0
        # The first place begins with zeros, or with what a worker writes there.
        count = len(layout.names)
        self._at = [[0] * count, *([_NOTHING] * count for _ in range(PLACES - 1))]

    @property
    def handle(self) -> WeightsHandle:
        """The handle that workers attach."""
        return WeightsHandle(self._segment.handle, self.layout)

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Write weights, in the order of the layout, from any device.

        Returns:
            The indices of the tensors that were copied.

        Raises:
            ValueError: if a tensor has another shape than in the layout; it is named.
        """
        self._copies.read(tensors)
        if self.layout.frozen:
            return self._write_changed(place)
        self._copies.write(place)
        return range(len(tensors))

    def _write_changed(self, place: int) -> list[int]:
        self._writes += 1
        numbers = [self._writes] * len(self.layout.names)
        for index in self.layout.frozen:
            if not self._copies.differ(self._newest, index):
                numbers[index] = self._at[self._newest][index]
        copied = _differences(numbers, self._at[place])
        # If it is interrupted, the next one writes all tensors.
        self._at[place] = [_NOTHING] * len(numbers)
        self._copies.write(place, copied)
        self._at[place] = numbers
        self._numbers[place][...] = numbers
        self._newest = place
        return copied

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place; they are read-only."""
        return self._places[place]

    def close(self) -> None:
        """Release the shared memory."""
        self._places.clear()
        self._numbers.clear()
        self._copies = None  # type: ignore[assignment]
        self._segment.close()


@final
class WeightReader:
    """The worker's end, which fills the vector of the worker's module."""

    def __init__(self, handle: WeightsHandle, own: torch.Tensor) -> None:
        """Attach the trainer's memory; nothing is read yet.

        Args:
            handle: of the trainer's memory.
            own: the worker's vector, uint8 ``[nbytes]``; its module's tensors are
                views of it.
        """
        layout = handle.layout
        self._segment = Segment.attach(handle.memory)
        self._published, self._numbers = _places(self._segment, layout)
        self._own = own
        self._has = [_NOTHING] * len(layout.names)
        self._version = own._version
        self._edges = (*layout.offsets, layout.nbytes)
        self._layout = layout

    def pull(self, place: int) -> Sequence[int]:
        """Copy what differs at ``place``; the trainer does not change it meanwhile.

        Returns:
            The indices of the tensors that were copied.
        """
        # numpy's copy is faster, but in workers its large copies bypass the caches
        # (by glibc's memcpy), and the policy reads these weights next.
        own, published = self._own, self._published[place]
        if not self._layout.frozen:
            own.copy_(published)
            return range(len(self._has))
        # torch counts the writes to the vector through any of its views. If the module
        # has written its own tensors, nothing is known about them.
        written = own._version != self._version
        old = [_NOTHING] * len(self._has) if written else self._has
        self._has = self._numbers[place].tolist()
        copied = _differences(self._has, old)
        for first, last in _runs(copied):
            run = slice(self._edges[first], self._edges[last + 1])
            own[run].copy_(published[run])
        self._version = own._version
        return copied

    def publish_own(self) -> None:
        """Write the worker's own weights to place 0, for all workers to read."""
        self._published[0].copy_(self._own)

    def close(self) -> None:
        """Detach from the trainer's memory."""
        self._published.clear()
        self._numbers.clear()
        self._segment.close()


def check_factory_weights(given: WeightLayout, built: WeightLayout | None) -> None:
    """Check that the weights of ``policy`` fit the policy of ``policy_factory``.

    Args:
        given: layout of ``policy``.
        built: layout of the policy that the factory built, None if it has no weights.

    Raises:
        ValueError: if they differ; the first difference is named.
    """
    ours, theirs = (
        {}
        if each is None
        else {
            name: f"{dtype} {list(shape)}"
            for name, dtype, shape in zip(
                each.names, each.dtypes, each.shapes, strict=True
            )
        }
        for each in (given, built)
    )
    different = sorted(
        name for name in ours | theirs if ours.get(name) != theirs.get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            "policy supplies the weights of the policies that policy_factory builds, "
            f"so their tensors must be the same, but {name!r} is "
            f"{ours.get(name, 'missing')} in policy and "
            f"{theirs.get(name, 'missing')} in what policy_factory builds."
        )


def check_names(
    found: Iterable[str], expected: WeightLayout, what: str, hint: str
) -> None:
    """Check that a policy has the tensors of a layout, by name.

    Args:
        found: the names in the policy.
        expected: the layout.
        what: the policy's description, the beginning of the message.
        hint: what to do, the end of the message.

    Raises:
        ValueError: if tensors are missing or surplus; they are named.
    """
    names = list(found)
    missing = [name for name in expected.names if name not in names]
    surplus = [name for name in names if name not in expected.names]
    if missing or surplus:
        message = _other_names(what, missing, surplus, names)
        raise ValueError(f"{message} {hint}")


def check_same_weights(
    first: WeightLayout | None, other: WeightLayout | None, whose: str, firsts: str
) -> None:
    """Check that policies built by a factory have the same tensors.

    Args:
        first: layout of the policy to compare with, None if it has no weights.
        other: layout of the other policy.
        whose: which process has the other policy, for the message.
        firsts: which process has the first one.

    Raises:
        ValueError: if tensors differ; they are named.
    """
    if first == other:
        return
    what = f"The policy that policy_factory built for {whose}"
    same = "All workers need the same network."
    if first is None or other is None:
        has = "has no weights" if other is None else "has weights"
        raise ValueError(f"{what} {has}, unlike that of {firsts}. {same}")
    check_names(other.names, first, what, same)
    theirs = dict(
        zip(other.names, zip(other.shapes, other.dtypes, strict=True), strict=True)
    )
    differ = [
        f"{name} is {theirs[name][0]} {theirs[name][1]}, but {shape} {dtype} there"
        for name, shape, dtype in zip(
            first.names, first.shapes, first.dtypes, strict=True
        )
        if theirs[name] != (shape, dtype)
    ]
    raise ValueError(
        f"{what} differs from that of {firsts}: "
        f"{'; '.join(differ) or 'its tensors have another order or ties'}. {same}"
    )


def _other_names(
    what: str,
    missing: Sequence[str],
    surplus: Sequence[str],
    found: Iterable[str],
) -> str:
    differs = [
        f"{kind} {_listed(which)}"
        for kind, which in (("missing", missing), ("surplus", surplus))
        if which
    ]
    shown = "" if surplus else f"; found {_listed(sorted(found))}"
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


def _runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of consecutive indices."""
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        found = [index for _, index in run]
        yield found[0], found[-1]


def _places(
    segment: Segment, layout: WeightLayout
) -> tuple[list[torch.Tensor], list[NDArray[np.int64]]]:
    """Return the vector of each place, and the numbers of its tensors."""
    count, size = len(layout.names), layout.nbytes
    vectors = np.frombuffer(segment.buffer, np.uint8, PLACES * size)
    numbers = np.frombuffer(segment.buffer, _NUMBER, PLACES * count, PLACES * size)
    return (
        [torch.from_numpy(vector) for vector in vectors.reshape(PLACES, size)],
        list(numbers.reshape(PLACES, count)),
    )
