"""The shared memory that carries policy weights to the workers.

One byte vector holds all parameters and buffers. Each tensor is a view of it, at a
multiple of 64 bytes. The trainer's shared memory has places for two vectors, so one can
be written while workers still read the other:

    trainer                                        worker
    write(place, tensors)
    Collect(weights=place) ---------------------->  pull(place): copy the vector

The ``WeightBroadcaster`` alone decides which place holds which version and when a place
may be overwritten. The tensors of a worker's module are views of the worker's own
vector, so a pull is one copy.
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
        aliases: maps the other names of tied tensors to their first names.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int
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

    def tensors_of(self, source: Any, what: str = "weights") -> list[torch.Tensor]:
        """Return the tensors of this layout from weights that a user passed.

        Args:
            source: a module, a state_dict (numpy arrays are accepted), or a
                TensorDict of parameters such as ``TensorDict.from_module(policy)``.
            what: name of the argument, for error messages.

        Raises:
            KeyError: if names are missing or surplus.
            ValueError: if a tensor has another shape or dtype, or if tensors that are
                tied in the policy differ in ``source``.
            TypeError: if ``source`` is none of these types.
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
    """The worker's end of a weight transport."""

    def pull(self, place: int) -> None:
        """Copy the vector at ``place`` into the worker's own vector."""
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

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write weights to a place that no worker is reading."""
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
        self._segment = Segment.create(PLACES * layout.nbytes, "The policy's weights")
        self._places = [
            layout.views(_vector(self._segment, place, layout))
            for place in range(PLACES)
        ]
        self._copies = [WeightCopies(layout.names, place) for place in self._places]

    @property
    def handle(self) -> WeightsHandle:
        """The handle that workers attach."""
        return WeightsHandle(self._segment.handle, self.layout)

    def write(self, place: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write weights, in the order of the layout, from any device.

        Raises:
            ValueError: if a tensor has another shape than in the layout; it is named.
        """
        self._copies[place].write(tensors)

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place; they are read-only."""
        return self._places[place]

    def close(self) -> None:
        """Release the shared memory."""
        self._places.clear()
        self._copies.clear()
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
        self._published = [
            _vector(self._segment, place, layout) for place in range(PLACES)
        ]
        self._own = own

    def pull(self, place: int) -> None:
        """Copy the vector at ``place``; the trainer does not change it meanwhile."""
        # numpy's copy is faster, but in workers its large copies bypass the caches
        # (by glibc's memcpy), and the policy reads these weights next.
        self._own.copy_(self._published[place])

    def publish_own(self) -> None:
        """Write the worker's own weights to place 0, for all workers to read."""
        self._published[0].copy_(self._own)

    def close(self) -> None:
        """Detach from the trainer's memory."""
        self._published.clear()
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
        message = _other_names(what, expected.names, missing, surplus, names)
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


def _vector(segment: Segment, place: int, layout: WeightLayout) -> torch.Tensor:
    array = np.frombuffer(
        segment.buffer, np.uint8, layout.nbytes, offset=place * layout.nbytes
    )
    return torch.from_numpy(array)
