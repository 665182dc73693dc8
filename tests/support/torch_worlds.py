"""Simulators in torch whose data follow from integers, with arrays or on a device."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from marl_collect import (
    BatchedEnv,
    Collector,
    EnvDescription,
    GroupDescription,
    RandomPolicy,
    Step,
)
from marl_collect.core.tensordicts import flatten
from marl_collect.models import make_policy

FRAMES = 35
"""Of a batch."""
COUNTED = ["frames", "batches", "episodes", "mean_returns", "mean_length"]
PRIME = 1009
GARBAGE = 77
"""What agents that are done observe and get, until the engine clears it."""


def mix(*numbers: Any) -> Any:
    """Return integers in ``[0, 1009)`` that depend on all of ``numbers``."""
    total: Any = 17
    for number in numbers:
        total = (total * 31 + number + 7) % PRIME
    return total


@dataclass(frozen=True)
class Kind:
    """One kind of agents."""

    n: int = 2  # number of agents
    nested: bool = False  # observations are Dicts of numbers and an image
    action: str = "discrete"  # or `multi`, `box`, `dict`, `one_hot`
    masked: bool = False  # has an action mask; needs Discrete actions
    waits: bool = False  # the simulator says who acts
    has_mask: bool = True  # whether `(g, "mask")` is in batches
    info: bool = False  # has an info
    total: bool = False  # has `episode_reward`
    shared: bool = False  # one reward for all agents

    def describe(self, name: str) -> GroupDescription:
        """Return the description of the group."""
        numbers = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        seen: Any = numbers
        if self.nested:
            image = spaces.Box(0, 255, (2, 2), np.uint8)
            seen = spaces.Dict({"numbers": numbers, "deep": spaces.Tuple([image])})
        moves = spaces.Box(-1, 1, (2,), np.float32)
        actions: dict[str, Any] = {
            "multi": spaces.MultiDiscrete([3, 2]),
            "box": moves,
            "dict": spaces.Dict({"move": moves, "say": spaces.Discrete(4)}),
        }
        return GroupDescription(
            tuple(f"{name}_{k}" for k in range(self.n)),
            seen,
            actions.get(self.action, spaces.Discrete(3)),
            categorical_actions=self.action != "one_hot",
            action_mask=self.masked,
            mask=self.has_mask,
            info={"luck": ()} if self.info else {},
            episode_reward=self.total,
        )


@dataclass(frozen=True)
class Spec:
    """Specifies a simulator; ``draw`` returns a random one."""

    kinds: Mapping[str, Kind]  # of agents, by group
    length: int = 7  # frames of the longest episode
    limit: int | None = None  # `time_limit`
    deaths: int = 0  # one in so many agents ends in a step; 0: none before the world
    cuts: bool = False  # agents and worlds may be truncated, too
    by_world: bool = False  # flags are those of worlds instead of agents
    any_ends: bool = False  # `done_on_any`
    state: bool = False  # has a state at the root
    repeats: bool = True  # whether it says that episodes repeat
    rounds: bool = False  # the sums of rewards depend on the order of adding

    @classmethod
    def draw(cls, seed: int) -> Self:
        """Return the simulator of a seed."""
        draw = random.Random(seed)

        def some() -> bool:
            return draw.random() < 0.5

        def kind() -> Kind:
            action = draw.choice(["discrete", "multi", "box", "dict", "one_hot"])
            has_mask = draw.random() < 0.8
            return Kind(
                n=draw.randint(1, 3),
                nested=some(),
                action=action,
                masked=action in ("discrete", "one_hot") and some(),
                waits=has_mask and some(),
                has_mask=has_mask,
                info=some(),
                total=some(),
                shared=some(),
            )

        return cls(
            {name: kind() for name in "abc"[: draw.randint(1, 3)]},
            length=draw.randint(1, 9),
            limit=draw.choice([None, 4, 6]),
            deaths=draw.choice([0, 5]),
            cuts=some(),
            by_world=some(),
            any_ends=some(),
            state=some(),
            repeats=some(),
        )


@final
class TorchWorlds(BatchedEnv):
    """K worlds of a specification; the same code for arrays and for tensors.

    Attributes:
        begun: number of calls of ``begin``.
        idle: return None from ``begin`` where no world begins, which waits.
    """

    def __init__(
        self, spec: Spec, worlds: int = 5, device: Any = None, *, idle: bool = False
    ) -> None:
        groups = {name: kind.describe(name) for name, kind in spec.kinds.items()}
        state = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        description = EnvDescription(
            "torch_worlds",
            groups,
            root={"state": state} if spec.state else {},
            done_on_any=spec.any_ends,
            repeats=spec.repeats,
            time_limit=spec.limit,
        )
        super().__init__(description, worlds, device)
        self.spec, self.idle = spec, idle
        self.begun = 0
        count = sum(kind.n for kind in spec.kinds.values())
        self.ranges: dict[str, slice] = {}
        first = 0
        for name, kind in spec.kinds.items():
            self.ranges[name] = slice(first, first + kind.n)
            first += kind.n
        self.where = torch.device("cpu" if device is None else device)
        self.agents = torch.arange(count, device=self.where)
        self.number = torch.zeros(worlds, count, dtype=torch.int64, device=self.where)
        self.dead = torch.zeros(worlds, count, dtype=torch.bool, device=self.where)
        self.steps = torch.zeros(worlds, dtype=torch.int64, device=self.where)
        self.ends = torch.zeros(worlds, dtype=torch.int64, device=self.where)
        self.level = 0

    def tensor(self, value: Any) -> torch.Tensor:
        """Return what the engine passed as a tensor."""
        device = self.simulator_device
        if device is None:
            assert isinstance(value, np.ndarray)
            return torch.from_numpy(value)
        assert isinstance(value, torch.Tensor)
        assert value.device.type == device.type
        return value

    def begin(self, which: Any, seeds: Any) -> Any:
        self.begun += 1
        where = None if which is None else self.tensor(which)
        if self.idle and where is not None and not where.any():
            return None
        seed = self.tensor(seeds)
        seed = mix(seed % PRIME, seed // PRIME % PRIME, self.level)
        new = (
            mix(seed[:, None], self.agents),
            torch.zeros_like(self.dead),
            torch.zeros_like(self.steps),
            1 + mix(seed, 99) % self.spec.length,
        )
        old = self.number, self.dead, self.steps, self.ends
        if where is not None:
            new = tuple(  # type: ignore[assignment]
                torch.where(where[:, None] if a.ndim > 1 else where, a, b)
                for a, b in zip(new, old, strict=True)
            )
        self.number, self.dead, self.steps, self.ends = new
        return self.look()

    def advance(self, actions: Mapping[str, Any]) -> Step:
        spec = self.spec
        digest = torch.cat([self.digest(n, actions[n]) for n in spec.kinds], 1)
        digest = torch.where(self.dead, 0, digest)
        waits = ~self.acts()
        digest = torch.where(waits, 0, digest)
        total = digest.sum(1, keepdim=True)
        self.steps = self.steps + 1
        self.number = mix(self.number, digest, total)
        over = self.steps >= self.ends
        ends = over[:, None].expand_as(self.dead)
        if spec.deaths and not spec.by_world:
            ends = ends | (mix(self.number, 5) % spec.deaths == 0)
        cut = torch.zeros_like(ends)
        if spec.cuts:
            cut = mix(self.number, 6) % 2 == 0
        terminated, truncated = ends & ~cut, ends & cut
        rewards: dict[str, Any] = {}
        for name, part in self.ranges.items():
            value = mix(self.number[:, part], 11) / 16 - 20
            value = torch.where(self.dead[:, part], GARBAGE, value)
            if spec.kinds[name].shared:
                value = mix(self.number[:, 0], 12) / 16 - 20
            if spec.rounds:
                # Only several small ones, added first, change how the others round.
                scale = (value.long() % 5).clamp(max=2)
                value = torch.exp2(torch.where(scale < 2, scale * -24, -54).double())
            rewards[name] = value.double()
        observations = self.look()
        flags: Any = {
            "terminated": {n: terminated[:, part] for n, part in self.ranges.items()},
            "truncated": {n: truncated[:, part] for n, part in self.ranges.items()},
        }
        if spec.by_world:
            cut = over & (self.number[:, 0] % 2 == 0)
            flags = {"terminated": over & ~cut, "truncated": cut}
            ends = over[:, None].expand_as(self.dead)
        if not spec.cuts:
            flags["truncated"] = None
            if spec.by_world:
                flags["terminated"] = over
        self.dead = self.dead | ends
        return Step(observations, rewards, **flags)

    def acts(self) -> torch.Tensor:
        """Return who acts, bool ``[K, N]``."""
        acts = mix(self.number, 13) % 3 > 0
        for name, part in self.ranges.items():
            if not self.spec.kinds[name].waits:
                acts[:, part] = True
        # Somebody acts: all do if nobody who is alive would.
        return acts | ~(acts & ~self.dead).any(1, keepdim=True)

    def digest(self, name: str, action: Any) -> torch.Tensor:
        """Return an integer for each agent's action, ``[K, n]``."""
        if isinstance(action, Mapping):
            moves = [self.digest(name, action[key]) for key in ("move", "say")]
            return mix(*moves)
        tensor = self.tensor(action)
        if tensor.is_floating_point():
            # Of numbers that any rounding changes, only a few bits matter.
            tensor = (tensor * 4).floor().long()
        return mix(*tensor.unbind(-1)) if tensor.ndim == 3 else tensor % PRIME

    def look(self) -> dict[Any, Any]:
        """Return what everybody observes, also agents that are done."""
        out: dict[Any, Any] = {}
        acts = self.acts()
        for name, part in self.ranges.items():
            kind, number = self.spec.kinds[name], self.number[:, part]
            steps = self.steps[:, None].expand_as(number)
            numbers = torch.stack([number / 1024, steps / 16, number % 7], -1)
            dead = self.dead[:, part, None]
            numbers = torch.where(dead, GARBAGE, numbers)
            out[name] = numbers
            if kind.nested:
                image = (
                    number[..., None, None]
                    + torch.arange(4, device=self.where).view(2, 2)
                ) % 256
                image = torch.where(dead[..., None], GARBAGE, image).to(torch.uint8)
                out[name] = {"numbers": numbers.double(), "deep": [image]}
            if kind.masked:
                bits = torch.arange(3, device=self.where)
                legal = (number[..., None] >> bits) % 2 == 0
                index = (number % 3)[..., None]
                out[name, "action_mask"] = legal.scatter(-1, index, value=True)
            if kind.info:
                out[name, "info", "luck"] = mix(number, 10) / 8
            if kind.waits:
                out[name, "mask"] = acts[:, part]
        if self.spec.state:
            out["state"] = torch.stack([self.number[:, 0] / 4, self.steps / 4], -1)
        return out

    def set_level(self, level: int) -> None:
        """Change what begins later; for ``call_env``."""
        self.level = level


def random_batch(factory: Any, frames: int, **options: Any) -> Any:
    """Return a batch ``[K, T]`` of so many frames of random actions."""
    options |= {"frames_per_batch": frames, "total_frames": frames}
    with Collector(factory, RandomPolicy(), **options) as collector:
        (batch,) = collector
    return batch


SIMPLE = Spec({"a": Kind()}, length=6)
RICH = Spec(
    {
        "a": Kind(3, nested=True, masked=True, waits=True, info=True, total=True),
        "b": Kind(2, action="box", shared=True),
    },
    length=9,
    limit=7,
    deaths=5,
    cuts=True,
    state=True,
)


def alike(spec: Spec, worlds: int = 5, **changes: Any) -> tuple[Any, Any]:
    """Return two factories: one with arrays, and one with tensors on the CPU."""
    spec = replace(spec, **changes)
    return (lambda: TorchWorlds(spec, worlds), lambda: TorchWorlds(spec, worlds, "cpu"))


def policy_for(factory: Any, **keywords: Any) -> nn.Module:
    """A policy that is called in both loops: replayed operations may round."""
    torch.manual_seed(1)
    policy = make_policy(factory().description, num_cells=(8,), **keywords)
    policy.register_forward_hook(lambda *_: None)
    return policy


def check_equal(actual: Any, expected: Any) -> None:
    one, two = flatten(actual), flatten(expected)
    assert one.keys() == two.keys()
    assert actual.batch_size == expected.batch_size
    assert actual.names == expected.names
    for key, value in two.items():
        assert one[key].dtype == value.dtype, key
        assert torch.equal(one[key], value), key


def check_same(
    factories: Any, policy: Any = None, batches: int = 4, **keywords: Any
) -> None:
    keywords = {"frames_per_batch": FRAMES, "seed": 3} | keywords
    with (
        Collector(factories[0], policy, **keywords) as expected,
        Collector(factories[1], policy, **keywords) as actual,
    ):
        assert "On cpu" in actual.explain()[0]
        for _ in range(batches):
            batch, other = actual.next(), expected.next()
            assert (batch is None) == (other is None)
            if other is not None:
                check_equal(batch, other)
            one, two = actual.stats(), expected.stats()
            for name in COUNTED:
                assert one.get(name) == two.get(name), name
