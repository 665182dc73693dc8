"""The memory through which policy weights reach the workers.

All parameters and buffers are in one byte vector, a view per tensor and dtype, at
multiples of 64 bytes. The trainer's shared memory has places for two such vectors, so
that one can be written while workers still read the other:

    trainer                                        worker
    write(place, tensors)
    Collect(weights=place) ---------------------->  pull(place): copy the vector

Which place holds which version, and when a place may be overwritten, is decided by the
``WeightBroadcaster`` alone. A worker's module
lives in views of the worker's own vector: a pull is one copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import nn

from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.copies import WeightCopies
from marl_collect.weights.skeleton import weight_tensors

ALIGNMENT = 64
PLACES = 2
_KIND = attrgetter("shape", "dtype")
_EXTRA_STATE = "_extra_state"  # What ``get_extra_state`` returns, in a state_dict.


@final
@dataclass(frozen=True)
class WeightLayout:
    """Names, shapes, dtypes and offsets of the tensors in a weight vector.

    Attributes:
        names: of the tensors; a tied one has the first of its names.
        shapes: of the tensors.
        dtypes: of the tensors.
        offsets: bytes at which they begin.
        nbytes: size of the vector.
        aliases: first name of a tied tensor by each of its other names.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> "WeightLayout":
        """Plan the vector of a module's parameters and buffers."""
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
        """Place ``tensors`` one after the other."""
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
            aliases=dict(aliases or {}),
        )

    @cached_property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        return list(zip(self.shapes, self.dtypes, strict=True))

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that stand in ``vector``, uint8 ``[nbytes]``."""
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
        """Check that ``tensors``, in the order of the names, can be written here.

        Raises:
            ValueError: naming the tensors whose shape or dtype differs, or that have
                no values.
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

    def tensors_of(self, source: Any, what: str = "weights") -> list[torch.Tensor]:
        """Return the tensors of this layout from what a user passes as weights.

        Args:
            source: a module, a state_dict (numpy arrays are accepted), or a
                TensorDict of parameters such as ``TensorDict.from_module(policy)``.
            what: where ``source`` was passed, for the message.

        Raises:
            KeyError: listing the names that are missing and those that are surplus.
            ValueError: naming tensors of another shape or dtype, or ones that are
                tied in the policy and differ in ``source``.
            TypeError: if ``source`` is none of these.
        """
        found = _by_name(source, what)
        missing = [name for name in self.names if name not in found]
        own = {_memory_of(found[name]) for name in self.names if name in found}
        surplus = [
            name
            for name, tensor in found.items()
            if name not in self.names
            and name not in self.aliases
            and _memory_of(tensor) not in own
        ]
        if missing or surplus:
            raise KeyError(_other_names(what, self.names, missing, surplus, found))
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


class Reader(Protocol):
    """A worker's end of a transport of weights."""

    def pull(self, place: int) -> None:
        """Copy the vector at ``place`` into the worker's own."""
        ...

    def publish_own(self) -> None:
        """Write the worker's own weights at place 0, for all workers to use."""
        ...


class Handle(Protocol):
    """What a worker needs to read weights; pickles."""

    @property
    def layout(self) -> WeightLayout:
        """The offset of each tensor in a vector."""
        ...

    def attach(self, own: torch.Tensor) -> Reader:
        """Return the reader that fills the worker's vector, uint8 ``[nbytes]``."""
        ...


class Publisher(Protocol):
    """The trainer's end of a transport of weights: ``PLACES`` vectors."""

    @property
    def handle(self) -> Handle:
        """What a worker attaches."""
        ...

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write weights, which no worker reads there at this time."""
        ...

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place, not to be written to."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class WeightScheme(Protocol):
    """A way for weights to reach the workers; ``weight_sync_schemes`` takes one."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Return the trainer's end of a new transport for this layout."""
        ...


@final
class SharedMemoryWeights:
    """Weights through shared memory: the default."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Reserve memory."""
        return WeightPublisher(layout)


@final
@dataclass(frozen=True)
class WeightsHandle:
    """What a worker needs to read weights from shared memory."""

    memory: MemoryHandle
    layout: WeightLayout

    def attach(self, own: torch.Tensor) -> Reader:
        """Map the trainer's memory."""
        return WeightReader(self, own)


@final
class WeightPublisher:
    """The trainer's end: owns the shared vectors."""

    def __init__(self, layout: WeightLayout) -> None:
        """Reserve memory.

        Raises:
            MemoryError: naming need and free memory.
        """
        self.layout = layout
        self._segment = Segment.create(PLACES * layout.nbytes, "The policy's weights")
        self._places = [
            layout.views(_vector(self._segment, place, layout))
            for place in range(PLACES)
        ]
        self._copies = [WeightCopies(layout.names, place) for place in self._places]

    @property
    def handle(self) -> WeightsHandle:
        """What a worker attaches."""
        return WeightsHandle(self._segment.handle, self.layout)

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write weights, in the order of the layout, on any device.

        Raises:
            ValueError: naming a tensor whose shape is not that of the layout.
        """
        self._copies[place].write(tensors)

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place, not to be written to."""
        return self._places[place]

    def close(self) -> None:
        """Give the shared memory back."""
        self._places.clear()
        self._copies.clear()
        self._segment.close()


@final
class WeightReader:
    """A worker's end: its own vector, and the module that lives in it."""

    def __init__(self, handle: WeightsHandle, own: torch.Tensor) -> None:
        """Attach the trainer's memory; nothing is read yet.

        Args:
            handle: of the trainer's memory.
            own: the worker's vector, uint8 ``[nbytes]``, that its module lives in.
        """
        layout = handle.layout
        self._segment = Segment.attach(handle.memory)
        self._published = [
            _vector(self._segment, place, layout) for place in range(PLACES)
        ]
        self._own = own

    def pull(self, place: int) -> None:
        """Copy the vector at ``place``, which the trainer leaves as it is meanwhile."""
        # Not by numpy, though that is quicker by itself: in workers glibc writes large
        # copies past the caches, and the policy reads these weights next.
        self._own.copy_(self._published[place])

    def publish_own(self) -> None:
        """Write the worker's own weights at place 0, for all workers to use."""
        self._published[0].copy_(self._own)

    def close(self) -> None:
        """Detach from the trainer's memory."""
        self._published.clear()
        self._segment.close()


def check_built(given: WeightLayout, built: WeightLayout | None) -> None:
    """Check that the weights of ``policy`` fit what ``policy_factory`` builds.

    Raises:
        ValueError: naming the first difference.
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
            "policy supplies the weights of what policy_factory builds, so both must "
            f"have the same ones, but {name!r} is {ours.get(name, 'missing')} in "
            f"policy and {theirs.get(name, 'missing')} in what policy_factory builds."
        )


def check_names(
    found: Iterable[str], expected: WeightLayout, what: str, hint: str
) -> None:
    """Check that a policy has the tensors of a layout, by their names.

    Raises:
        ValueError: naming those that are missing and those that are surplus.
    """
    names = list(found)
    missing = [name for name in expected.names if name not in names]
    surplus = [name for name in names if name not in expected.names]
    if missing or surplus:
        message = _other_names(what, expected.names, missing, surplus, names)
        raise ValueError(f"{message} {hint}")


def check_alike_weights(
    first: WeightLayout | None, other: WeightLayout | None, whose: str, firsts: str
) -> None:
    """Check that the policies that factories built have the same tensors.

    Args:
        first: layout of the one to compare with, None if it has no weights.
        other: of the other.
        whose: who has the other, for the message.
        firsts: who has the first.

    Raises:
        ValueError: naming the tensors that differ.
    """
    if first == other:
        return
    what = f"The policy that policy_factory built for {whose}"
    same = "All workers need the same network."
    if first is None or other is None:
        with_or_without = "no" if other is None else "some"
        raise ValueError(
            f"{what} has {with_or_without} weights, unlike that of {firsts}. {same}"
        )
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
        f"{'; '.join(differ) or 'its tensors are in another order, or tied'}. {same}"
    )


def _other_names(
    what: str,
    names: Sequence[str],
    missing: Sequence[str],
    surplus: Sequence[str],
    found: Iterable[str],
) -> str:
    differs = [
        f"{kind} {which}"
        for kind, which in (("missing", missing), ("surplus", surplus))
        if which
    ]
    shown = "" if not surplus and len(names) > 50 else f"; found {sorted(found)}"
    return (
        f"{what} must hold the tensors that the workers' policy was started with, but "
        f"{' and '.join(differs)}{shown}. Nothing was copied."
    )


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
    where = ", on the meta device and without values" if tensor.is_meta else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{where}"


def _memory_of(tensor: torch.Tensor) -> object:
    """Return what two names of one tied tensor have in common."""
    if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _memory_of(one) == _memory_of(other):
        return True
    if _KIND(one) != _KIND(other) or one.is_meta or other.is_meta:
        return False
    return bool(torch.equal(one.detach().cpu(), other.detach().cpu()))


def _vector(segment: Segment, place: int, layout: WeightLayout) -> torch.Tensor:
    array = np.frombuffer(
        segment.buffer, np.uint8, layout.nbytes, offset=place * layout.nbytes
    )
    return torch.from_numpy(array)
