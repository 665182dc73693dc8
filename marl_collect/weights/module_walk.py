"""The weights of a module that is asked for them often."""

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
    """Lists a module's weights, and walks again only the parts that changed.

    To see that every module still holds the same submodules, parameters and buffers is
    much quicker than the walk.
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
        # A module that lists its parameters in a way of its own is not looked through.
        self._known = all(
            type(each).named_parameters is nn.Module.named_parameters
            and type(each).named_buffers is nn.Module.named_buffers
            and not isinstance(each, ScriptModule)
            for each in every
        )
        # Views, which always show the current content of the dicts. An end marker
        # moves if entries are added or removed, so no count is needed.
        self._held: list[Iterable[object]] = [
            own.values()
            for each in every
            for own in (each._modules, each._parameters, each._buffers)
        ]
        self._held.append((_END,))
        self._seen = list(chain.from_iterable(self._held))
