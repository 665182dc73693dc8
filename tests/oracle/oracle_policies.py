"""The policies of the oracle; each treats its TensorDict in another way.

Where nothing else is said, actions follow from observations by products and sums that
are exact in float32, so that the same observation means the same action, bit by bit,
however many environments the policy acts for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from oracle_worlds import CHOICES, FEATURES, Group, World
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from marl_collect.core.random_actions import RandomPolicy
from marl_collect.models import MultiAgentMLP, make_policy
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.pool import PolicyPool

WorldAct = Callable[[World, TensorDictBase], Any]
Key = str | tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of policy.

    Attributes:
        build: makes it for a world.
        exact: bits may not differ; otherwise floats may, within 1e-5.
        suits: the worlds that it can act in.
        draws: where noise comes from: ``""``, ``"heads"`` (the environments'
            generators) or ``"torch"``.
        weights: whether it has parameters.
        lingers: what it writes at the root is there in the next frame, as it is in
            TorchRL for keys that the environment does not write.
        legal: whether its actions are legal.
        alone: it depends on how many environments it acts for at once.
        reads_init: it reads ``is_init``.
        keeps: it keeps something between calls that is no weight.
        refused: it may be refused with a ``PolicyError``.
        outside: it has settings outside the policy, which do not reach workers.
    """

    build: Callable[[World], Any]
    exact: bool = True
    suits: Callable[[World], bool] = lambda world: True
    draws: str = ""
    weights: bool = False
    lingers: bool = False
    legal: bool = False
    alone: bool = False
    reads_init: bool = False
    keeps: bool = False
    refused: bool = False
    outside: bool = False


KINDS: dict[str, Kind] = {}


def kind(**settings: Any) -> Callable[[Any], Any]:
    def add(build: Callable[[World], Any]) -> Callable[[World], Any]:
        KINDS[build.__name__] = Kind(build, **settings)
        return build

    return add


# Actions from numbers


def width(world: World, group: Group) -> int:
    """How many numbers one agent observes."""
    return FEATURES + (group.n if world.agent_ids and flat(group) else 0)


def flat(group: Group) -> bool:
    return group.observation == "flat" and group.mask != "observation"


def action_of(world: World, group: Group, numbers: Tensor) -> Tensor:
    """Return actions ``[..., n, *]`` for numbers ``[..., n, any]``."""
    if world.stack:
        numbers = numbers.flatten(-2)
    code = (numbers * 8192).sum(-1).long().abs()
    return _encoded(world, group, code)


def rough_action_of(world: World, group: Group, numbers: Tensor) -> Tensor:
    """Like ``action_of``, for numbers whose last bit is uncertain."""
    if world.stack:
        numbers = numbers.flatten(-2)
    powers = 2 ** torch.arange(numbers.shape[-1])
    return _encoded(world, group, ((numbers > 0.37) * powers).sum(-1))


def _encoded(world: World, group: Group, code: Tensor) -> Tensor:
    if group.action == "discrete":
        choice = code % CHOICES
        if world.categorical:
            return choice
        return nn.functional.one_hot(choice, CHOICES)
    if group.action == "multi":
        return torch.stack([code % CHOICES, code % 2], -1)
    # Sometimes outside the bounds; the environment then gets the bound.
    return torch.stack([code % 11 / 8 - 0.5, code % 7 / 4 - 0.5], -1)


class Chooses(nn.Module):
    """Numbers to actions, as a module."""

    def __init__(self, world: World, group: Group) -> None:
        super().__init__()
        self.world, self.group = world, group

    def forward(self, numbers: Tensor) -> Tensor:
        return action_of(self.world, self.group, numbers)


class PureChooses(Chooses):
    pure_forward = True

    def forward(self, numbers: Tensor) -> Tensor:
        return action_of(self.world, self.group, numbers)


class RoughlyChooses(Chooses):
    def forward(self, numbers: Tensor) -> Tensor:
        return rough_action_of(self.world, self.group, numbers)


class Scale(nn.Module):
    pure_forward = True

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers / 4


def step(module: Any, read: Key, written: Key) -> TensorDictModule:
    return TensorDictModule(module, in_keys=[read], out_keys=[written])


def acts(world: World, group: Group, module: Any = Chooses) -> TensorDictModule:
    return step(module(world, group), group.numbers, (group.name, "action"))


def replaces(world: World, change: Any, module: Any = Chooses) -> Any:
    """Return a policy that acts on what ``change`` makes of the observations."""

    def make(group: Group) -> list[Any]:
        new = step(change(group), group.numbers, group.numbers)
        return [new, acts(world, group, module)]

    return for_groups(world, make)


def for_groups(world: World, make: Callable[[Group], list[Any]]) -> Any:
    return TensorDictSequential(*[m for group in world.groups for m in make(group)])


class OnTensorDicts:
    """A callable on TensorDicts; ``act`` writes in place or returns a TensorDict."""

    def __init__(self, world: World, act: WorldAct) -> None:
        self.world, self.act = world, act

    def __call__(self, td: TensorDictBase) -> Any:
        return self.act(self.world, td)


def write(world: World, td: TensorDictBase) -> None:
    for group in world.groups:
        td[group.name, "action"] = action_of(world, group, td[group.numbers])


def on_tensordicts(**settings: Any) -> Callable[[Any], Any]:
    """Register a function that writes in place, or returns another TensorDict."""

    def add(act: Callable[[World, TensorDictBase], Any]) -> Callable[[World], Any]:
        def build(world: World) -> Any:
            return OnTensorDicts(world, act)

        KINDS[act.__name__] = Kind(build, **settings)
        return build

    return add


# Plain policies


@kind()
def random(world: World) -> Any:
    return None


@kind()
def random_policy(world: World) -> Any:
    return RandomPolicy()


def same(_: World, td: TensorDictBase) -> TensorDictBase:
    return td


def sets(world: World, td: TensorDictBase) -> TensorDictBase:
    for group in world.groups:
        td[group.numbers] = td[group.numbers] / 4
    return td


def divides(world: World, td: TensorDictBase) -> TensorDictBase:
    for group in world.groups:
        td[group.numbers].div_(4)
    return td


def sets_in_place(world: World, td: TensorDictBase) -> TensorDictBase:
    for group in world.groups:
        td.set_(group.numbers, td[group.numbers] / 4)
    return td


def without_numbers(world: World, td: TensorDictBase) -> TensorDictBase:
    return td.exclude(*[group.numbers for group in world.groups])


def actions_alone(world: World, td: TensorDictBase) -> TensorDictBase:
    return td.select(*[(group.name, "action") for group in world.groups])


HANDLED: dict[str, tuple[WorldAct, WorldAct]] = {
    "function": (same, same),
    "returns_nothing": (same, lambda _, td: None),
    "returns_a_clone": (lambda _, td: td.clone(), same),
    "returns_a_detached_clone": (lambda w, td: sets(w, td.detach().clone()), same),
    "returns_a_tensordict": (lambda _, td: td.to_tensordict(), same),
    "returns_an_applied_copy": (lambda _, td: td.apply(torch.clone), same),
    "copies_then_overwrites": (lambda w, td: sets(w, td.clone(False)), same),
    "excludes": (same, without_numbers),
    "selects": (same, actions_alone),
    "sets": (sets, same),
    "in_place": (divides, same),
    "set_in_place": (sets_in_place, same),
}
"""What a policy makes of its input before it acts, and what it returns afterwards."""


def handling(before: WorldAct, after: WorldAct) -> Callable[[World], Any]:
    def act(world: World, td: TensorDictBase) -> Any:
        td = before(world, td)
        write(world, td)
        return after(world, td)

    return lambda world: OnTensorDicts(world, act)


KINDS |= {name: Kind(handling(*handled)) for name, handled in HANDLED.items()}


@kind()
def modules(world: World) -> Any:
    return for_groups(world, lambda group: [acts(world, group)])


@kind()
def fused(world: World) -> Any:
    return for_groups(world, lambda group: [acts(world, group, PureChooses)])


@kind(suits=lambda w: len(w.groups) == 1 and flat(w.groups[0]))
def arguments(world: World) -> Any:
    """Takes observations, not TensorDicts."""
    group = world.groups[0]

    def act(observation: Tensor) -> Tensor:
        return action_of(world, group, observation)

    def by_hand(td: TensorDictBase) -> None:
        td[group.name, "action"] = act(td[group.numbers])

    vars(act)["by_hand"] = by_hand
    return act


@on_tensordicts(legal=True)
def legal(world: World, td: TensorDictBase) -> None:
    """Takes the first action that is legal."""
    write(world, td)
    for group in world.groups:
        if group.mask:
            first = td[group.name, "action_mask"].int().argmax(-1)
            if not world.categorical:
                first = nn.functional.one_hot(first, CHOICES)
            td[group.name, "action"] = first


# Policies that change the observation


@kind()
def normaliser(world: World) -> Any:
    return replaces(world, lambda group: lambda o: o / 4)


@kind()
def fused_normaliser(world: World) -> Any:
    return replaces(world, lambda group: Scale(), PureChooses)


@kind(exact=False, weights=True)
def encoder(world: World) -> Any:
    def linear(group: Group) -> Any:
        return nn.Linear(width(world, group), width(world, group))

    return replaces(world, linear, RoughlyChooses)


@kind()
def wider(world: World) -> Any:
    """Replaces the observation by one of another shape and dtype."""

    def make(group: Group) -> list[Any]:
        double = lambda o: torch.cat([o, o], -1).double()  # noqa: E731
        return [acts(world, group), step(double, group.numbers, group.numbers)]

    return for_groups(world, make)


@on_tensordicts(suits=lambda w: any(g.image for g in w.groups))
def image_to_float(world: World, td: TensorDictBase) -> TensorDictBase:
    for group in world.groups:
        if group.image:
            td[group.image] = td[group.image].float() / 256
    write(world, td)
    return td


@on_tensordicts(refused=True)
def sometimes_in_place(world: World, td: TensorDictBase) -> TensorDictBase:
    """Starts to change its input only after some frames."""
    for group in world.groups:
        numbers = td[group.numbers]
        late = (numbers[..., 1] > 2).unsqueeze(-1)
        if bool(late.any()):
            td[group.numbers] = torch.where(late, numbers / 4, numbers)
    write(world, td)
    return td


@on_tensordicts()
def pops(world: World, td: TensorDictBase) -> TensorDictBase:
    for group in world.groups:
        numbers = td.get(group.numbers)
        td.pop(group.numbers)
        td[group.name, "action"] = action_of(world, group, numbers)
    return td


@on_tensordicts()
def renames(world: World, td: TensorDictBase) -> TensorDictBase:
    for group in world.groups:
        td.rename_key_(group.numbers, (group.name, "seen"))
        seen = td[group.name, "seen"]
        td[group.name, "action"] = action_of(world, group, seen)
    return td


@on_tensordicts()
def returns_new(world: World, td: TensorDictBase) -> TensorDictBase:
    out = TensorDict({}, td.batch_size)
    for group in world.groups:
        numbers = td[group.numbers] / 4
        out[group.name, "action"] = action_of(world, group, numbers)
        out[group.name, "code"] = numbers.sum(-1)
        td[group.name, "beside"] = numbers  # What it leaves in its input counts too.
    return out


def pure(build: Callable[[World], Any]) -> Callable[[World], Any]:
    def built(world: World) -> Any:
        policy = build(world)
        policy.pure_forward = True
        return policy

    return built


RETURNING = (
    *("returns_nothing", "returns_a_clone", "returns_a_detached_clone"),
    *("returns_an_applied_copy", "copies_then_overwrites", "selects", "excludes"),
    *("returns_new", "returns_a_tensordict"),
)
KINDS |= {f"fused_{name}": Kind(pure(KINDS[name].build)) for name in RETURNING}
"""Their operations are recorded, whatever they return."""


class OwnBuffers:
    """Returns views of its own memory, which the next call overwrites."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory: dict[str, Tensor] = {}

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        for group in self.world.groups:
            action = action_of(self.world, group, td[group.numbers])
            if self.memory.get(group.name, action[:0]).shape != action.shape:
                self.memory[group.name] = torch.empty_like(action)
            self.memory[group.name].copy_(action)
            td[group.name, "action"] = self.memory[group.name]
            td[group.name, "again"] = self.memory[group.name].view(action.shape)
        return td


@kind()
def own_buffers(world: World) -> Any:
    return OwnBuffers(world)


@on_tensordicts()
def writes_masks(world: World, td: TensorDictBase) -> TensorDictBase:
    """Overwrites other entries of the environment than the observation."""
    write(world, td)
    for group in world.groups:
        if world.use_mask:
            td[group.name, "mask"] = ~td[group.name, "mask"]
    return td


# Policies that write other entries


@on_tensordicts()
def several_outputs(world: World, td: TensorDictBase) -> TensorDictBase:
    write(world, td)
    total = torch.zeros(td.batch_size)
    for group in world.groups:
        numbers = td[group.numbers]
        td[group.name, "deep", "first"] = numbers[..., :2] * 2
        td[group.name, "deep", "even"] = numbers[..., 1] % 2 == 0
        td[group.name, "half"] = numbers.half()
        td[group.name, "whole"] = (numbers[..., 0] * 1024).int()
        total = total + numbers.sum((-1, -2))
    td["value"] = total.double().unsqueeze(-1)
    td["critic", "value"] = total
    return td


@on_tensordicts()
def keeps_its_input(world: World, td: TensorDictBase) -> TensorDictBase:
    """Writes an alias of an observation under another key."""
    for group in world.groups:
        td[group.name, "seen"] = td[group.numbers]
    write(world, td)
    return td


# Hidden states


class Remembers(nn.Module):
    """Numbers and a state to actions and the next state."""

    def __init__(self, world: World, group: Group, name: str) -> None:
        super().__init__()
        self.world, self.group = world, group
        self.state_shapes = {(group.name, name): (group.n, 2)}

    def forward(self, numbers: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        following = torch.stack(
            [(state[..., 0] + numbers[..., 1] + 1) % 64, state[..., 0] / 2], -1
        )
        joint = torch.cat([numbers, following], -1)
        return action_of(self.world, self.group, joint), following


def _declared(world: World, name: str) -> Any:
    def make(group: Group) -> list[Any]:
        return [
            TensorDictModule(
                Remembers(world, group, name),
                in_keys=[group.numbers, (group.name, name)],
                out_keys=[(group.name, "action"), ("next", group.name, name)],
            )
        ]

    return for_groups(world, make)


@kind()
def remembers(world: World) -> Any:
    return _declared(world, "h")


@kind()
def remembers_privately(world: World) -> Any:
    return _declared(world, "_h")


class Undeclared:
    """Reads and writes a state that no in_keys or out_keys name."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        for group in self.world.groups:
            numbers = td[group.numbers]
            state = td.get((group.name, self.name), None)
            if state is None:
                state = torch.zeros(*numbers.shape[:-1], 2)
            action, following = Remembers(self.world, group, self.name)(numbers, state)
            td[group.name, "action"] = action
            td["next", group.name, self.name] = following
        return td


@kind()
def remembers_unsaid(world: World) -> Any:
    return Undeclared(world, "h")


class UndeclaredModule(nn.Module):
    """The same, with in_keys and out_keys that do not include the state."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.act = Undeclared(world, "h")
        self.in_keys = [group.numbers for group in world.groups]
        self.out_keys = [(group.name, "action") for group in world.groups]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return self.act(td)


@kind()
def remembers_undeclared(world: World) -> Any:
    return UndeclaredModule(world)


@on_tensordicts()
def next_only(world: World, td: TensorDictBase) -> TensorDictBase:
    """Writes an entry under ``next`` that it never reads."""
    write(world, td)
    for group in world.groups:
        td["next", group.name, "guess"] = td[group.numbers] * 2
    return td


@on_tensordicts(reads_init=True)
def looks_for_beginnings(world: World, td: TensorDictBase) -> TensorDictBase:
    """Reads ``is_init`` without listing it in in_keys."""
    first = td["is_init"].reshape(-1, 1, 1)
    for group in world.groups:
        numbers = td[group.numbers] + first.float() * 3
        td[group.name, "action"] = action_of(world, group, numbers)
    return td


class Counts:
    """Counts its frames at the root; a new episode resets the count."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        first = td["is_init"]
        count = td.get("_count", None)
        count = torch.zeros(first.shape) if count is None else count
        count = torch.where(first, torch.zeros_like(count), count + 1)
        td["_count"] = count
        for group in self.world.groups:
            numbers = td[group.numbers] + count.reshape(-1, 1, 1)
            td[group.name, "action"] = action_of(self.world, group, numbers)
            td[group.name, "count"] = numbers[..., 0]
        return td


@kind(lingers=True, reads_init=True)
def counts(world: World) -> Any:
    return Counts(world)


# Policies with statistics


class RunningSum(nn.Module):
    """Keeps the sum of its inputs, in a buffer, a frozen parameter or an attribute."""

    def __init__(self, world: World, kept: str) -> None:
        super().__init__()
        self.world = world
        total = torch.zeros((), dtype=torch.float64)
        if kept == "buffer":
            self.register_buffer("total", total)
        else:
            frozen = nn.Parameter(total, requires_grad=False)
            self.total = frozen if kept == "parameter" else total

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        for group in self.world.groups:
            numbers = td[group.numbers]
            self.total += numbers.double().sum()
            shifted = numbers + (self.total % 64).float()
            td[group.name, "action"] = action_of(self.world, group, shifted)
            td[group.name, "shifted"] = shifted
        return td


@kind(alone=True, keeps=True)
def statistics(world: World) -> Any:
    return RunningSum(world, "attribute")


@kind(alone=True, keeps=True, weights=True)
def statistics_in_buffers(world: World) -> Any:
    return RunningSum(world, "buffer")


@kind(alone=True, keeps=True, weights=True)
def statistics_in_frozen_parameters(world: World) -> Any:
    return RunningSum(world, "parameter")


@kind(exact=False, alone=True, keeps=True, weights=True)
def batch_norm(world: World) -> Any:
    norm = lambda group: nn.BatchNorm1d(group.n, momentum=0.25)  # noqa: E731
    return replaces(world, norm, RoughlyChooses)


# Settings outside tensors

CONSTANTS = ModuleType("constants_of_the_oracle")
CONSTANTS.STEP = 0.0  # type: ignore[attr-defined]
CONSTANTS.inner = SimpleNamespace(step=0.0)  # type: ignore[attr-defined]


@dataclass
class Config:
    """Has a setting, and deeper ones."""

    step: float = 0.0
    inner: dict[str, Any] = field(default_factory=dict)


class Slotted:
    """Has a setting in a slot."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0.0


class WithSettings(nn.Module):
    """Adds its settings to the numbers; one of them changes in each training step."""

    kept: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.noise = 0.0
        self.table = torch.zeros(2)
        self.array = np.zeros(2, np.float32)
        self.config = Config(inner={"a": [{"b": {"step": 0.0}}]})
        self.space, self.slotted = SimpleNamespace(step=0.0), Slotted()
        self.nested: dict[str, Any] = {"a": {"b": [({"c": 0.0},)]}}
        self.some = {0.0}
        self.steps = nn.Parameter(torch.zeros(()))  # Of training, a quarter of each.
        self.level = nn.Parameter(torch.zeros(()))
        self.layer, self.tied = _layer(), _layer()
        self.tied.bias = self.layer.bias
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        weights = self.level + self.layer.weight.sum() + self.tied.weight.sum()
        tensors = weights + self.kept.sum() + self.passing.sum() + self.table.sum()
        return numbers + tensors.detach() + self.total()

    def total(self) -> float:
        deep = self.config.inner["a"][0]["b"]["step"] + self.nested["a"]["b"][0][0]["c"]
        total: float = self.noise + self.config.step + self.space.step + deep
        total += self.slotted.step + max(self.some) + float(self.array.sum())
        return total + 0.5 * (not self.training)

    def change(self) -> None:
        """Change one setting, or one of the tensors in another way than training."""
        CHANGES[int(4 * self.steps) % len(CHANGES)](self)

    def settings(self) -> dict[str, Any]:
        names = ("noise", "table", "array", "config", "space", "slotted", "nested")
        more = ("some", "training", "passing")
        return {name: getattr(self, name) for name in (*names, *more)}

    def restore(self, settings: dict[str, Any]) -> None:
        self.passing.copy_(settings.pop("passing"))
        vars(self).update(settings)


def _layer() -> nn.Linear:
    layer = nn.Linear(1, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _raise(owner: Any, name: Any = "step", by: float = 0.5) -> None:
    if isinstance(owner, dict):
        owner[name] += by
    else:
        setattr(owner, name, getattr(owner, name) + by)


def _replace_layer(module: WithSettings) -> None:
    layer = _layer()
    layer.weight = nn.Parameter(module.layer.weight.detach() + 0.25)
    layer.bias = module.tied.bias
    module.layer = layer


def _switch_mode(module: WithSettings) -> None:
    if not module.training:
        module.noise += 1
    module.train(not module.training)


CHANGES: list[Callable[[Any], None]] = [
    lambda module: _raise(module, "noise"),
    lambda module: _raise(module.config),
    lambda module: _raise(module.nested["a"]["b"][0][0], "c"),
    lambda module: _raise(module.config.inner["a"][0]["b"]),
    lambda module: setattr(
        module, "config", Config(module.config.step + 0.5, module.config.inner)
    ),
    lambda module: module.table.add_(0.25),
    lambda module: _raise(module.space),
    lambda module: _raise(module.slotted),
    lambda module: module.some.add(max(module.some) + 0.5),
    lambda module: np.add(module.array, 0.25, out=module.array),
    _switch_mode,
    lambda module: setattr(module, "table", module.table + 0.25),
    lambda module: setattr(module, "level", nn.Parameter(module.level.data + 0.5)),
    lambda module: setattr(module.level, "data", module.level.data + 0.5),
    lambda module: setattr(module, "kept", module.kept + 0.25),
    lambda module: module.passing.add_(0.25),
    lambda module: module.layer.requires_grad_(False).weight.data.add_(0.25),
    _replace_layer,
    lambda module: setattr(module.tied, "weight", module.layer.weight),
]
"""Each makes what a module computes larger by one half."""


class PureWithSettings(WithSettings):
    pure_forward = True

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers)


class Outside(WithSettings):
    """Reads constants of a module, which are those of the trainer's process."""

    pure_forward = True

    def forward(self, numbers: Tensor) -> Tensor:
        step: float = CONSTANTS.STEP
        return numbers + step + CONSTANTS.inner.step

    def change(self) -> None:
        if CONSTANTS.inner.step >= CONSTANTS.STEP:
            CONSTANTS.STEP += 0.5  # type: ignore[attr-defined]
        else:
            CONSTANTS.inner.step += 0.5


def _with_settings(world: World, module: Any, chooses: Any) -> Any:
    CONSTANTS.STEP = CONSTANTS.inner.step = 0.0  # type: ignore[attr-defined]
    policy = _levels(world, module, chooses)
    policy.unused = nn.Parameter(torch.zeros(()))
    return policy


@kind(weights=True, keeps=True)
def settings(world: World) -> Any:
    return _with_settings(world, WithSettings, Chooses)


@kind(weights=True, keeps=True)
def fused_settings(world: World) -> Any:
    return _with_settings(world, PureWithSettings, PureChooses)


@kind(weights=True, keeps=True, outside=True)
def fused_constants(world: World) -> Any:
    return _with_settings(world, Outside, PureChooses)


@kind(weights=True, keeps=True)
def assigned_settings(world: World) -> Any:
    return _assigned(**built(world, "settings", "fused_settings"))


class DrawsWithoutUse(nn.Module):
    """Draws numbers, of which it uses some."""

    pure_forward = True

    def forward(self, numbers: Tensor) -> Tensor:
        torch.rand(2)
        return numbers + torch.randint(0, 8, numbers.shape[:1]).reshape(-1, 1, 1) / 4


@kind(draws="torch")
def draws_without_use(world: World) -> Any:
    return _levels(world, DrawsWithoutUse, PureChooses)


# Networks


class Level(nn.Module):
    """Adds its one weight to the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(()))

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers + self.level


class PureLevel(Level):
    pure_forward = True

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers + self.level


def _levels(world: World, level: Any, chooses: Any, name: str = "raised") -> Any:
    def make(group: Group) -> list[Any]:
        between, action = (group.name, name), (group.name, "action")
        chosen = step(chooses(world, group), between, action)
        return [step(level(), group.numbers, between), chosen]

    return for_groups(world, make)


@kind(weights=True)
def level(world: World) -> Any:
    return _levels(world, Level, Chooses)


@kind(weights=True)
def fused_level(world: World) -> Any:
    return _levels(world, PureLevel, PureChooses)


def _made(world: World, **options: Any) -> Any:
    env = world.build()
    return make_policy(env.description, num_cells=(8,), **options)


NETWORK: dict[str, Any] = {
    "exact": False,
    "weights": True,
    "draws": "heads",
    "legal": True,
}


NETWORKS: dict[str, dict[str, Any]] = {
    "shared": {},
    "unshared": {"share_params": False},
    "centralised": {"centralised": True, "share_params": False},
    "recurrent": {"recurrent": "gru", "hidden_size": 4, "last_action": True},
    "recurrent_lstm": {"recurrent": "lstm", "hidden_size": 4, "share_params": False},
}
KINDS |= {
    name: Kind(partial(_made, **options), **NETWORK, reads_init="recurrent" in options)
    for name, options in NETWORKS.items()
}


# Several policies


@dataclass(frozen=True)
class ByHash:
    """Gives every agent one of the policies, another one in other episodes."""

    names: tuple[str, ...]

    def __call__(self, seed: int, agents: tuple[str, ...]) -> dict[str, str]:
        count = len(self.names)
        return {a: self.names[crc32(f"{seed}{a}".encode()) % count] for a in agents}


def _assigned(**policies: Any) -> Any:
    return AssignedPolicies(policies, ByHash(tuple(policies)))


def built(world: World, *names: str) -> dict[str, Any]:
    return {name: KINDS[name].build(world) for name in names}


@kind()
def assigned(world: World) -> Any:
    return _assigned(**built(world, "returns_nothing", "fused", "random"))


@kind()
def assigned_results(world: World) -> Any:
    """Several policies that return what they return in different ways."""
    names = (
        *("returns_a_clone", "returns_nothing", "returns_a_tensordict", "selects"),
        *("returns_an_applied_copy", "returns_new"),
    )
    return _assigned(**built(world, *names))


@kind(weights=True)
def assigned_weights(world: World) -> Any:
    return _assigned(**built(world, "level", "function", "fused_level"))


@kind()
def assigned_states(world: World) -> Any:
    names = "remembers", "remembers_privately", "next_only"
    return _assigned(**built(world, *names))


@kind(weights=True)
def assigned_pool(world: World) -> Any:
    trained = fused_level(world)
    pool = PolicyPool(trained, size=3)
    for _ in range(3):
        with torch.no_grad():
            for weight in trained.parameters():
                weight += 0.5
        pool.update()
    return _assigned(a=trained, pool=pool, c=level(world))


@kind(**NETWORK)
def assigned_networks(world: World) -> Any:
    return _assigned(**built(world, "shared", "random", "unshared"))


class Busy(nn.Module):
    """Returns its input after as many operations as convolutions need."""

    pure_forward = by_row = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.zeros(100, 160))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(-1)[..., None, None].expand(*x.shape[:-1], 128, 100)
        return x + (rows @ self.zeros).sum((-1, -2)).unsqueeze(-1)


def busy(inputs: int, outputs: int, n_agents: int, **options: Any) -> nn.Module:
    return nn.Sequential(Busy(), MultiAgentMLP(inputs, outputs, n_agents, **options))


@kind(**NETWORK)
def assigned_rows(world: World) -> Any:
    def build(**options: Any) -> Any:
        return make_policy(world.build().description, network=busy, **options)

    ids, separate = build(agent_ids=True), build(share_params=False)
    return _assigned(a=build(), **built(world, "shared"), c=ids, d=separate)


@kind(**NETWORK, reads_init=True)
def assigned_recurrent(world: World) -> Any:
    return _assigned(**built(world, "centralised", "recurrent"))


# TorchRL's modules


def one_choice(world: World) -> bool:
    return all(group.action == "discrete" and not group.mask for group in world.groups)


@kind(draws="torch", suits=one_choice)
def epsilon_greedy(world: World) -> Any:
    from torchrl.data import Categorical, OneHot
    from torchrl.modules import EGreedyModule

    def make(group: Group) -> list[Any]:
        spec: Any = Categorical(CHOICES, (group.n,))
        if not world.categorical:
            spec = OneHot(CHOICES, (group.n, CHOICES), dtype=torch.int64)
        key = (group.name, "action")
        return [acts(world, group), EGreedyModule(spec, eps_init=0.5, action_key=key)]

    return for_groups(world, make)


@kind(exact=False, weights=True, draws="torch", suits=one_choice)
def actor(world: World) -> Any:
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

    categorical = torch.distributions.Categorical

    def make(group: Group) -> list[Any]:
        logits = (group.name, "logits")
        net = MLP(width(world, group), CHOICES, depth=1, num_cells=4)
        return [
            ProbabilisticActor(
                TensorDictModule(net, [group.numbers], [logits]),
                in_keys={"logits": logits},
                out_keys=[(group.name, "action")],
                distribution_class=(
                    categorical if world.categorical else OneHotCategorical
                ),
                return_log_prob=True,
                log_prob_key=(group.name, "log_prob"),
            )
        ]

    return for_groups(world, make)


@kind(exact=False, weights=True, reads_init=True, suits=lambda w: w.state)
def torchrl_lstm(world: World) -> Any:
    from torchrl.modules import LSTMModule

    size, units, states = len(world.agents) + 1, 3, ["rs_h", "rs_c"]
    following = [("next", state) for state in states]
    memory = LSTMModule(
        size, units, in_keys=["state", *states], out_keys=["memory", *following]
    )
    memory.state_shapes = dict.fromkeys(states, (1, units))

    def act(group: Group) -> Any:
        def choose(seen: Tensor) -> Tensor:
            repeated = seen.unsqueeze(-2).expand(*seen.shape[:-1], group.n, units)
            return rough_action_of(world, group, repeated * 10)

        return step(choose, "memory", (group.name, "action"))

    return TensorDictSequential(memory, *map(act, world.groups))


@kind(draws="torch", suits=lambda w: all(flat(g) for g in w.groups))
def dropout(world: World) -> Any:
    return _levels(world, nn.Dropout, PureChooses, "dropped")


@kind()
def compiled(world: World) -> Any:
    """Compiled without Inductor, which takes seconds per shape."""
    module = lambda *of: torch.compile(PureChooses(*of), backend="eager")  # noqa: E731
    return for_groups(world, lambda group: [acts(world, group, module)])


OF_ONE_FRAME = {
    *("several_outputs", "remembers", "remembers_privately", "assigned_states"),
    *("looks_for_beginnings", "counts", "draws_without_use", "batch_norm"),
    *("actor", "torchrl_lstm"),
}
"""Kinds that read a vector of numbers of each agent, so no stack of several."""
