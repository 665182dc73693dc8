"""Lists the weights of a module quickly when they are needed often."""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import final

from torch import Tensor, nn
from torch.jit import ScriptModule

from marl_collect.weights.skeleton import weight_tensors

_END = object()


@final
class WeightWalk:
    """Lists a module's weights, and walks through it again only if it has changed.

    Checking that every module still holds the same submodules, parameters and buffers
    is much faster than the walk.
    """

    def __init__(self, module: nn.Module) -> None:
        """Walk through ``module``."""
        self._module = module
        self._walk()

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter and buffer once, by its first name."""
        held = chain.from_iterable(self._held)
        if not self._known or not all(map(is_, held, self._seen)):
            self._walk()
        return self._tensors

    def _walk(self) -> None:
        self._tensors = weight_tensors(self._module)
        every = list(self._module.modules())
        # False if a module overrides how its parameters are listed: it is always
        # walked through.
        self._known = all(
            type(each).named_parameters is nn.Module.named_parameters
            and type(each).named_buffers is nn.Module.named_buffers
            and not isinstance(each, ScriptModule)
            for each in every
        )
        # Dict views, which always show the current entries. The end marker moves if
        # entries are added or removed, so lengths need no check.
        self._held: list[Iterable[object]] = [
            own.values()
            for each in every
            for own in (each._modules, each._parameters, each._buffers)
        ]
        self._held.append((_END,))
        self._seen = list(chain.from_iterable(self._held))
