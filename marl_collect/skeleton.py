"""A policy without its weights, as bytes: modules travel, tensors do not.

Every parameter and buffer is replaced, while pickling, by its number; the worker
puts views of its own weight vector in the same places. Tied weights keep one
number and so stay tied, whatever their device nothing is copied, and non-persistent
buffers are included. Tensors that are plain attributes travel by value, on the CPU.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

_WEIGHT = "weight"
_PLAIN = "plain"


@dataclass(frozen=True)
class Skeleton:
    """A pickled module and what stands in its numbered places.

    Attributes:
        module: cloudpickled, weights left out.
        trainable: ``requires_grad`` of each parameter, None for a buffer.
    """

    module: bytes
    trainable: tuple[bool | None, ...]


def weight_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of ``module`` once, by its first name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def take_apart(module: nn.Module) -> Skeleton:
    """Pickle ``module`` without its weights.

    Raises:
        TypeError: if it cannot be pickled; the message proposes ``policy_factory``.
    """
    tensors = list(weight_tensors(module).values())
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    stream = io.BytesIO()
    try:
        _Pickler(stream, numbers).dump(module)
    except Exception as error:
        raise TypeError(
            f"The policy {type(module).__name__} cannot be sent to the workers "
            f"({type(error).__name__}: {error}). Pass policy_factory, a callable that "
            "builds the policy in each worker, instead of policy."
        ) from error
    trainable = tuple(
        tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
        for tensor in tensors
    )
    return Skeleton(stream.getvalue(), trainable)


def put_together(skeleton: Skeleton, tensors: Sequence[torch.Tensor]) -> nn.Module:
    """Unpickle the module, with ``tensors`` as its weights, in the order of numbers."""
    weights = [
        tensor if trainable is None else nn.Parameter(tensor, requires_grad=trainable)
        for tensor, trainable in zip(tensors, skeleton.trainable, strict=True)
    ]
    return _Unpickler(io.BytesIO(skeleton.module), weights).load()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, stream: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        number = self._numbers.get(id(obj))
        if number is not None:
            return (_WEIGHT, number)
        if obj.device.type not in ("cpu", "meta"):
            return (_PLAIN, obj.detach().cpu().numpy())
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, weights: Sequence[torch.Tensor]) -> None:
        super().__init__(stream)
        self._weights = weights

    def persistent_load(self, pid: Any) -> Any:
        kind, value = pid
        return self._weights[value] if kind == _WEIGHT else torch.from_numpy(value)
