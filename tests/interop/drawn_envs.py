"""Environments of TorchRL with random specs, whose data follow from integers."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from tensordict import TensorDict
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    Unbounded,
)
from torchrl.envs import EnvBase

FLAGS = ("done", "terminated", "truncated")
PRIME = 1009


@dataclass(frozen=True)
class Shape:
    """What an environment has, and where; ``draw`` returns a random one."""

    worlds: tuple[int, ...] = ()  # the batch size
    groups: Mapping[str, int] = field(default_factory=lambda: {"agents": 2})
    single: bool = False  # one agent, with all entries at the root
    team: bool = False  # the only reward and flags have a prefix; needs `single`
    seen: str = "several"  # observations: or `one`, or `none`
    action: str = "categorical"  # or `one_hot`, `box`, `several`, `bits`
    legal: bool = True  # has an action mask; needs an action with an index
    waits: bool = False  # says who acts
    info: bool = True
    summed: bool = False  # writes `episode_reward`
    shared: bool = False  # the reward is at the root
    flags: str = "both"  # or `group`, or `root`
    names: tuple[str, ...] = FLAGS
    dtype: torch.dtype = torch.bool  # of flags

    @classmethod
    def draw(cls, seed: int) -> Self:
        """Return the environment of a seed."""
        draw = random.Random(seed)

        def some() -> bool:
            return draw.random() < 0.5

        single = draw.random() < 0.3
        action = draw.choice(["categorical", "one_hot", "box", "several", "bits"])
        several = {name: draw.randint(1, 3) for name in "ab"[: draw.randint(1, 2)]}
        return cls(
            worlds=draw.choice([(), (1,), (3,)]),
            groups={"agents": 1} if single else several,
            single=single,
            team=single and some(),
            seen=draw.choice(["several", "one"] + ["none"] * (not single)),
            action=action,
            legal=action in ("categorical", "one_hot") and some(),
            waits=not single and some(),
            info=some(),
            summed=some(),
            shared=some(),
            flags=draw.choice(["both", "group", "root"]),
            names=draw.choice([FLAGS, FLAGS[:1], FLAGS[:2]]),
            dtype=draw.choice([torch.bool, torch.float32, torch.int64]),
        )


class Drawn(EnvBase):
    """Agents count with their actions, and see random numbers of torch's generator.

    They end at some numbers, and have observations and rewards after that too.
    """

    difficulty = 7

    def __init__(self, shape: Shape, device: Any = "cpu") -> None:
        super().__init__(device=torch.device(device), batch_size=shape.worlds)
        self.about, self.seed = shape, 0
        worlds = shape.worlds
        self.parts: dict[str, Any] = {}
        first = 0
        for name, n in shape.groups.items():
            self.parts[name] = first if shape.single else slice(first, first + n)
            first += n
        self.observation_spec = self._specs(self._seen, state=Unbounded((*worlds, 2)))
        self.action_spec = self._specs(lambda lead: {"action": self._choices(lead)})
        gain = Unbounded((*worlds, 1))
        flags = self._flag_specs(worlds)
        if shape.team:
            self.reward_spec = self._root_specs(team=Composite(gain=gain, shape=worlds))
            self.done_spec = self._root_specs(team=Composite(flags, shape=worlds))
        else:
            self.reward_spec = (
                self._root_specs(reward=gain)
                if shape.shared or shape.single
                else self._specs(lambda lead: {"reward": Unbounded((*lead, 1))})
            )
            self.full_done_spec = (
                self._root_specs(**flags)
                if shape.flags == "root" or shape.single
                else self._specs(
                    self._flag_specs, **(flags if shape.flags == "both" else {})
                )
            )
        shape_of_all = (*worlds, first)
        self.number = torch.zeros(shape_of_all, dtype=torch.int64, device=self.device)
        self.first = torch.zeros_like(self.number)
        self.steps = torch.zeros((*worlds, 1), dtype=torch.int64, device=self.device)
        self.ended = torch.zeros_like(self.number, dtype=torch.bool)
        self.total = torch.zeros_like(self.number, dtype=torch.float32)

    def _lead(self, name: str) -> tuple[int, ...]:
        inner = () if self.about.single else (self.about.groups[name],)
        return (*self.about.worlds, *inner)

    def _specs(self, make: Any, **root: Any) -> Any:
        if self.about.single:
            root |= make(self.about.worlds)
        else:
            for name in self.about.groups:
                lead = self._lead(name)
                root[name] = Composite(make(lead), shape=lead)
        return Composite(root, shape=self.about.worlds).to(self.device)

    def _root_specs(self, **root: Any) -> Any:
        return Composite(root, shape=self.about.worlds).to(self.device)

    def _seen(self, lead: tuple[int, ...]) -> dict[str, Any]:
        specs: dict[str, Any] = {}
        if self.about.seen != "none":
            specs["lamp"] = Unbounded((*lead, 3))
        if self.about.seen == "several":
            specs["picture"] = Bounded(0, 255, (*lead, 2, 2), dtype=torch.uint8)
            specs["wide"] = Unbounded((*lead, 1), dtype=torch.float64)
            specs["lit"] = Binary(shape=(*lead, 1), dtype=torch.bool)
        if self.about.legal:
            specs["action_mask"] = Binary(shape=(*lead, 4), dtype=torch.bool)
        if self.about.waits:
            specs["mask"] = Categorical(2, lead, dtype=torch.bool)
        if self.about.info:
            specs["info"] = Composite(luck=Unbounded(lead), shape=lead)
        if self.about.summed:
            specs["episode_reward"] = Unbounded((*lead, 1))
        return specs

    def _choices(self, lead: tuple[int, ...]) -> Any:
        makers: dict[str, Any] = {
            "categorical": lambda: Categorical(4, lead),
            "one_hot": lambda: OneHot(4, (*lead, 4), dtype=torch.int64),
            "box": lambda: Bounded(-1, 2, (*lead, 2)),
            "several": lambda: MultiCategorical([3, 2], (*lead, 2)),
            "bits": lambda: Binary(3, (*lead, 3)),
        }
        return makers[self.about.action]()

    def _flag_specs(self, lead: tuple[int, ...]) -> dict[str, Any]:
        dtype, size = self.about.dtype, (*lead, 1)
        if dtype == torch.bool:
            flag: Any = Categorical(2, size, dtype=dtype)
        else:
            flag = Unbounded(size, dtype=dtype)
        return {name: flag.clone() for name in self.about.names}

    def hello(self, name: str) -> str:
        return f"hello {name}"

    def _set_seed(self, seed: int | None) -> None:
        self.seed = (seed or 0) % PRIME

    def _acts(self) -> torch.Tensor:
        if not self.about.waits:
            return torch.ones_like(self.ended)
        acts = self.number % 3 > 0
        return acts | ~(acts & ~self.ended).any(-1, keepdim=True)

    def _look(self) -> dict[str, Any]:
        """Return what everybody observes; random numbers are drawn at each look."""
        noise = torch.rand(self.number.shape, device=self.device)
        lamp = torch.stack([self.number / 16, self.number % 7, noise], -1)
        picture = (self.number % 200)[..., None, None].to(torch.uint8)
        choices = torch.arange(4, device=self.device)
        fields: dict[str, torch.Tensor] = {
            "lamp": lamp,
            "picture": picture.expand(*self.number.shape, 2, 2),
            "wide": self.number[..., None].double() / 3,
            "lit": self.number[..., None] % 5 == 0,
            "action_mask": (self.number % 4)[..., None] >= choices,
            "mask": self._acts(),
            "episode_reward": self.total[..., None],
        }
        root = {"state": torch.cat([self.steps, self.number[..., :1]], -1).float()}
        return self._nested(fields, root, info=self.number / 8)

    def _nested(self, fields: Any, root: Any, *, info: Any = None) -> dict[str, Any]:
        """Return entries of all agents by group, those that the specs have."""
        at = len(self.about.worlds)
        out = dict(root)
        for name, part in self.parts.items():
            index = (slice(None),) * at + (part,)
            entries = {key: value[index] for key, value in fields.items()}
            if info is not None and self.about.info:
                luck = {"luck": info[index]}
                entries["info"] = TensorDict(luck, self._lead(name))
            if self.about.single:
                out |= entries
            else:
                out[name] = TensorDict(entries, self._lead(name))
        return out

    def _flags(self, *, over: torch.Tensor) -> dict[str, Any]:
        cut = self.number % 2 == 0
        done = self.ended if self.about.flags == "both" else self.ended | over
        world = over | self.ended.all(-1, keepdim=True)
        late = self.first[..., :1] % 2 == 0
        fields = {"done": done, "terminated": done & ~cut, "truncated": done & cut}
        root = {"done": world, "terminated": world & ~late, "truncated": world & late}
        names = self.about.names
        dtype = self.about.dtype
        at_root = {name: root[name].to(dtype) for name in names}
        in_groups = {name: fields[name][..., None].to(dtype) for name in names}
        if self.about.team:
            return {"team": TensorDict(at_root, self.batch_size)}
        if self.about.single or self.about.flags == "root":
            return at_root
        return self._nested(in_groups, at_root if self.about.flags == "both" else {})

    def _written(self, *parts: dict[str, Any]) -> TensorDict:
        """Return one TensorDict of several, with the entries that the specs have."""
        td = TensorDict({}, self.batch_size)
        for part in parts:
            td.update(TensorDict(part, self.batch_size))
        specs = (self.full_observation_spec, self.full_reward_spec, self.full_done_spec)
        wanted = {key for spec in specs for key in spec.keys(True, True)}
        return td.select(*(key for key in td.keys(True, True) if key in wanted))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        due = torch.ones_like(self.steps, dtype=torch.bool)
        mask = None if tensordict is None else tensordict.get(self.reset_keys[0], None)
        if mask is not None:
            due = mask.reshape(*self.steps.shape[:-1], -1)[..., :1]
        agents = torch.arange(self.number.numel(), device=self.device)
        new = (self.seed + 31 * agents.reshape(self.number.shape)) % PRIME
        self.number = torch.where(due, new, self.number)
        self.first = torch.where(due, new, self.first)
        self.steps = torch.where(due, 0, self.steps)
        self.ended = torch.where(due, False, self.ended)
        self.total = torch.where(due, 0.0, self.total)
        none = torch.zeros_like(due)
        return self._written(self._look(), self._flags(over=none))

    def _step(self, tensordict: Any) -> Any:
        worlds, moves = self.about.worlds, []
        for name in self.parts:
            key: Any = "action" if self.about.single else (name, "action")
            action = tensordict[key]
            assert action.dtype == self.full_action_spec[key].dtype
            if self.about.action == "one_hot":
                action = action.long().argmax(-1)
            elif self.about.action == "box":
                action = (action * 4).floor().long().sum(-1)
            elif self.about.action != "categorical":
                factors = 1 + torch.arange(action.shape[-1], device=self.device)
                action = (action.long() * factors).sum(-1)
            moves.append(action[..., None] if self.about.single else action)
        waits = self.ended | ~self._acts()
        move = torch.where(waits, 0, torch.cat(moves, -1))
        self.number = (31 * self.number + move + move.sum(-1, keepdim=True)) % PRIME
        self.steps = self.steps + 1
        gain = self.number / 4
        if self.about.shared or self.about.single:
            gain = gain.sum(-1, keepdim=True).expand(gain.shape)
        self.total = torch.where(self.ended, self.total, self.total + gain)
        if self.about.flags != "root":
            self.ended = self.ended | (self.number % 5 == 0)
        rewards: dict[str, Any] = {"reward": gain[..., :1]}
        if self.about.team:
            rewards = {"team": TensorDict(gain=gain[..., :1], batch_size=worlds)}
        elif not (self.about.shared or self.about.single):
            rewards = self._nested({"reward": gain[..., None]}, {})
        over = self.steps >= 3 + self.first[..., :1] % 3
        return self._written(self._look(), rewards, self._flags(over=over))
