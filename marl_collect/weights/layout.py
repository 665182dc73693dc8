"""The layout of policy weights in a byte vector.

One vector holds all parameters and buffers that are strided. Each tensor is a view of
it, at a multiple of 64 bytes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, final

import numpy as np
import torch
from torch import nn

from marl_collect.core.description import ALIGNMENT, places
from marl_collect.weights.skeleton import weight_tensors
from marl_collect.weights.tensor_parts import is_plain

_LISTED = 3
"""Number of names that an error lists."""
address = torch.Tensor.data_ptr
is_contiguous = torch.Tensor.is_contiguous
_ON_CPU = attrgetter("is_cpu")
_KIND = attrgetter("shape", "dtype")
_INNER = "module."  # The beginning of names of the module in a TensorDictModule.
_EXTRA_STATE = "_extra_state"  # The key of ``get_extra_state()`` in a state_dict.


@final
@dataclass(frozen=True)
class WeightLayout:
    """Names, shapes, dtypes and offsets of the tensors in a weight vector.

    Attributes:
        names: of the tensors; a tied tensor has its first name.
        kinds: shape and dtype of each tensor.
        offsets: where the tensors begin, in bytes.
        nbytes: size of the vector.
        aliases: maps the other names of tied tensors to their first names.
    """

    names: tuple[str, ...]
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    offsets: tuple[int, ...]
    nbytes: int
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> "WeightLayout":
        """Return the layout of the parameters and buffers of a policy, or several."""
        tensors = weight_tensors(module)
        first = {id(tensor): name for name, tensor in tensors.items()}
        aliases = {
            name: first[id(tensor)]
            for name, tensor in _every_name(module).items()
            if name not in tensors and id(tensor) in first
        }
        *offsets, end = places(tensor.nbytes for tensor in tensors.values())
        return cls(
            names=tuple(tensors),
            kinds=tuple((tuple(t.shape), t.dtype) for t in tensors.values()),
            offsets=tuple(offsets),
            nbytes=max(end, ALIGNMENT),
            aliases=aliases,
        )

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of ``vector``, uint8 ``[nbytes]``."""
        return [
            vector[begin : begin + math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for begin, (shape, dtype) in zip(self.offsets, self.kinds, strict=True)
        ]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have these shapes and dtypes, in this order."""
        return tuple(map(_KIND, tensors)) == self.kinds

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
            for wrapped in ("module", "_orig_mod"):  # As DDP and torch.compile do.
                if missing and all(f"{wrapped}.{n}" in by_name for n in missing):
                    message += f" Of a wrapper, pass what it wraps: its .{wrapped}."
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


def readable(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return tensors with these values that are contiguous and on the CPU."""
    if all(map(is_contiguous, tensors)) and all(map(_ON_CPU, tensors)):
        return tensors
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def check_same_weights(
    expected: WeightLayout | None,
    built: WeightLayout | None,
    whose: str,
    why: str,
    *,
    ordered: bool = False,
) -> None:
    """Check that a policy that a factory built has the expected tensors.

    Args:
        expected: layout of the policy to compare with, None if it has no weights.
        built: layout of the policy that the factory built.
        whose: which policy is expected, for the message.
        why: the reason, the beginning of the message.
        ordered: whether the tensors must have the same order, and be tied alike.

    Raises:
        ValueError: if names, shapes or dtypes differ; the first difference is named.
    """
    ours, theirs = (
        {}
        if layout is None
        else {
            name: f"{dtype} {list(shape)}"
            for name, (shape, dtype) in zip(layout.names, layout.kinds, strict=True)
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
    if ordered and expected != built:
        raise ValueError(
            "All workers need the same network, but the policies that policy_factory "
            "built have their tensors in different orders, or tie different ones."
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
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: t for name, t in (*parameters, *buffers) if is_plain(t)}


def _by_name(source: Any, what: str) -> dict[str, torch.Tensor]:
    from tensordict import TensorDictBase

    if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
        return _every_name(source)
    if isinstance(source, TensorDictBase):
        items = source.items(include_nested=True, leaves_only=True)
        named = {k if isinstance(k, str) else ".".join(k): v for k, v in items}
    elif isinstance(source, Mapping):
        named = {
            str(name): tensor
            for name, tensor in source.items()
            if not str(name).endswith(_EXTRA_STATE)
        }
    else:
        raise TypeError(
            f"{what} must be a module, a state_dict or a TensorDict, but is a "
            f"{type(source).__name__}."
        )
    tensors = {name: _tensor(value, name, what) for name, value in named.items()}
    return {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}


def _tensor(value: Any, name: str, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(np.array(value), device="cpu")
    raise TypeError(
        f"{what} must hold tensors or numpy arrays, but {name!r} is a "
        f"{type(value).__name__}."
    )


def _described(tensor: torch.Tensor) -> str:
    where = " on the meta device, without values" if tensor.is_meta else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{where}"


def _memory_of(tensor: torch.Tensor) -> object:
    """Return an identity that all names of a tied tensor share."""
    if tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _memory_of(one) == _memory_of(other):
        return True
    if _KIND(one) != _KIND(other) or one.is_meta or other.is_meta:
        return False
    return bool(torch.equal(one.detach().cpu(), other.detach().cpu()))
