"""Begins episodes in many worlds of VMAS at once.

VMAS resets its worlds together or one by one, and each of these resets takes about as
long as a step of all worlds. So a second environment, the *twin*, resets all of its
worlds together, and the worlds that begin take their state from it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MASKED = frozenset(
    [
        "balance",
        "ball_passage",
        "ball_trajectory",
        "buzz_wire",
        "dispersion",
        "dropout",
        "give_way",
        "joint_passage",
        "joint_passage_size",
        "multi_give_way",
        "navigation",
        "passage",
        "reverse_transport",
        "simple",
        "simple_crypto",
        "simple_spread",
        "simple_tag",
        "simple_world_comm",
        "transport",
        "wheel",
        "wind_flocking",
    ]
)
"""Scenarios whose whole state is in the tensors that ``renew`` finds."""

FEW = 2
"""So many worlds are reset one by one in less time than all of the twin's together."""

_Setter = Callable[[Any], None]


def renew(env: Any, twin: Any, which: "torch.Tensor") -> None:
    """Give worlds of an environment the state that they have in its twin.

    Args:
        env: of VMAS.
        twin: of the same scenario, with the same arguments, and just reset.
        which: the worlds, bool ``[K]``.
    """
    import torch

    masks = {1: which}
    roots = [(env.scenario, twin.scenario), (env.world, twin.world)]
    seen: set[int] = set()  # A scenario refers to its world.
    pairs = [pair for root in roots for pair in _pairs(*root, len(which), seen)]
    for put, old, new in pairs:
        shape = (-1, *[1] * (old.ndim - 1))
        mask = masks.setdefault(old.ndim, which.reshape(shape))
        put(torch.where(mask, new, old))
    env.steps = torch.where(which, twin.steps, env.steps)


def _pairs(
    one: Any, other: Any, worlds: int, seen: set[int]
) -> Iterator[tuple[_Setter, Any, Any]]:
    """Yield the tensors ``[K, ...]`` that two equal objects hold, and their setters."""
    if id(one) in seen:
        return
    import torch

    seen.add(id(one))
    for name, value, counterpart in _entries(one, other):
        if not isinstance(value, torch.Tensor):
            yield from _pairs(value, counterpart, worlds, seen)
        elif (
            isinstance(counterpart, torch.Tensor)
            and value.shape == counterpart.shape
            and value.shape[:1] == (worlds,)
        ):
            yield _setter(one, name), value, counterpart


def _entries(one: Any, other: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the names, or indices, and values of what both objects hold."""
    if isinstance(one, list) and isinstance(other, list):
        yield from ((k, *both) for k, both in enumerate(zip(one, other, strict=False)))
        return
    # VMAS loads the file of a scenario anew for each environment, with its classes.
    if type(one).__qualname__ != type(other).__qualname__:
        return
    if not isinstance(one, dict):
        if not _is_of_vmas(type(one)):
            return
        one, other = vars(one), vars(other)
    yield from ((name, one[name], other[name]) for name in one if name in other)


def _is_of_vmas(kind: type) -> bool:
    """Whether objects of a class, or of one derived from it, belong to a simulation."""
    return any(base.__module__.startswith("vmas.") for base in kind.__mro__)


def _setter(owner: Any, name: Any) -> _Setter:
    if isinstance(owner, dict | list):
        return lambda tensor: owner.__setitem__(name, tensor)
    return lambda tensor: vars(owner).__setitem__(name, tensor)
