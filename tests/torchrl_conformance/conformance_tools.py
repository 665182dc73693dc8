"""What both implementations run: one environment, its policies, and their names."""

import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IMPLEMENTATIONS = ("marl_collect", "torchrl")
LENGTH = 5
WALKERS = ("walker_0", "walker_1")
MODELS = ("MultiAgentMLP", "MultiAgentConvNet", "VDNMixer", "QMixer")
OBSERVATION, ACTION = ("walker", "observation"), ("walker", "action")
IDS = ("collector", "traj_ids")


class Walk(ParallelEnv):
    """Two walkers and a goal; observations are the time, the agent and a random number.

    The reward of an agent is its action plus one.
    """

    def __init__(
        self,
        length: int = LENGTH,
        *,
        death: int | None = None,
        masks: bool = False,
        box: bool = False,
        weights: bool = False,
        truncates: bool = False,
    ) -> None:
        """Play ``length`` steps; ``walker_1`` dies after ``death`` of them.

        Args:
            length: steps of an episode.
            death: step in which ``walker_1`` terminates; None for never.
            masks: whether infos have an ``action_mask``, which allows only action 1.
            box: whether actions are two numbers in [-1, 1].
            weights: whether infos have a ``weight``.
            truncates: whether episodes are truncated, not terminated.
        """
        self.metadata = {"name": "walk_v0"}
        self.render_mode = None
        self.possible_agents = [*WALKERS, "goal_0"]
        self.length, self.death, self.masks = length, death, masks
        self.box, self.weights, self.truncates = box, weights, truncates
        self.name = "walk"
        self.closed = False
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-100.0, 100.0, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return (
            spaces.Box(-1.0, 1.0, (2,), np.float32) if self.box else spaces.Discrete(4)
        )

    @property
    def state_space(self) -> Any:
        return spaces.Box(0.0, 100.0, (2,), np.float32)

    def state(self) -> Any:
        return np.full(2, self.time, np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.time = 0
        self.agents = list(self.possible_agents)
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions: Any) -> Any:
        self.time += 1
        actors = list(self.agents)
        over = self.time == self.length
        dead = {
            agent: agent == "walker_1" and self.time == self.death for agent in actors
        }
        terminated = {a: dead[a] or (over and not self.truncates) for a in actors}
        truncated = {a: over and self.truncates and not dead[a] for a in actors}
        self.agents = [a for a in actors if not (terminated[a] or truncated[a])]
        rewards = {a: float(np.sum(actions[a])) + 1 for a in actors}
        return (
            self._observe(actors),
            rewards,
            terminated,
            truncated,
            self._infos(actors),
        )

    def close(self) -> None:
        self.closed = True

    def _observe(self, agents: Any) -> Any:
        return {
            agent: np.array(
                [self.time, self.possible_agents.index(agent), self._rng.random()],
                np.float32,
            )
            for agent in agents
        }

    def _infos(self, agents: Any) -> Any:
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in agents}
        for info in infos.values():
            if self.masks:
                info["action_mask"] = np.array([0, 1, 0, 0], np.int8)
            if self.weights:
                info["weight"] = np.array([self.time], np.float32)
        return infos


def in_turns(**options: Any) -> AECEnv[Any, Any, Any]:
    """Return the same environment, one agent at a time."""
    return parallel_to_aec(Walk(**options))


def walk(implementation: "Implementation", **options: Any) -> Any:
    """Return the wrapped environment; keywords of the wrapper begin with ``zoo_``."""
    ours = {k.removeprefix("zoo_"): v for k, v in options.items() if k[:4] == "zoo_"}
    raw = {k: v for k, v in options.items() if k[:4] != "zoo_"}
    env = implementation.PettingZooWrapper(Walk(**raw), **ours)
    env.label, env.twice = "walk", twice
    return env


def twice(number: int) -> int:
    return 2 * number


@dataclass(frozen=True)
class Implementation:
    """The names of one library, imported when they are needed.

    Args:
        name: ``marl_collect`` or ``torchrl``.
    """

    name: str

    def __reduce__(self) -> Any:
        return Implementation, (self.name,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _find(self.name, name)

    def make(self, **options: Any) -> Callable[[], Any]:
        return partial(walk, self, **options)

    def batch_of(self, size: int, **options: Any) -> Callable[[], Any]:
        """Return a factory of ``size`` environments that are stepped as one."""
        return partial(_serial, self, size, self.make(**options))

    def collector(self, make: Any = None, policy: Any = None, **options: Any) -> Any:
        """Return a ``Collector`` of two environments, or of ``make``."""
        options = {"frames_per_batch": 20, "total_frames": -1, **options}
        return self.Collector(make or self.batch_of(2), policy, **options)


def _serial(implementation: Implementation, size: int, make: Any) -> Any:
    return implementation.SerialEnv(size, make)


NAMES = {
    "marl_collect": {
        "marl_collect": (
            *("Collector", "MultiSyncCollector", "MultiAsyncCollector", "SerialEnv"),
            *("ParallelEnv", "ExplorationType", "MarlGroupMapType", "RandomPolicy"),
            "split_trajectories",
        ),
        "marl_collect.envs": ("PettingZooWrapper", "MeltingpotEnv"),
        "marl_collect.models": MODELS,
    },
    "torchrl": {
        "torchrl.collectors": (
            *("Collector", "MultiSyncCollector", "MultiAsyncCollector"),
        ),
        "torchrl.envs": (
            *("SerialEnv", "ParallelEnv", "PettingZooWrapper", "MeltingpotEnv"),
        ),
        "torchrl.envs.utils": ("ExplorationType", "MarlGroupMapType", "RandomPolicy"),
        "torchrl.collectors.utils": ("split_trajectories",),
        "torchrl.modules": MODELS,
    },
}
"""Names of each library by module.

Only the module of the wanted name is imported: processes of a ``ParallelEnv`` need no
torch.
"""


def _find(library: str, name: str) -> Any:
    for module, names in NAMES[library].items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"no {name} of {library} is compared")


class ToActions(nn.Module):
    """Actions of all groups: an index per agent that depends on the weight alone."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, walkers: torch.Tensor, goals: torch.Tensor) -> Any:
        return tuple(
            (x[..., 0] * 0 + self.value).to(torch.int64) for x in (walkers, goals)
        )


def weight_policy(value: float = 1.0) -> TensorDictModule:
    """Return a policy that always takes the action of its weight."""
    return TensorDictModule(
        ToActions(value),
        in_keys=[OBSERVATION, ("goal", "observation")],
        out_keys=[ACTION, ("goal", "action")],
    )


def with_value(value: float) -> TensorDict:
    """Return the weights with which ``weight_policy`` takes another action."""
    return TensorDict({"module": {"value": torch.tensor(value)}})


def times(batch: Any) -> torch.Tensor:
    """Return the time of every frame, as the first walker observes it."""
    numbers: torch.Tensor = batch[OBSERVATION][..., 0, 0]
    return numbers


def check_same(build: Callable[[Implementation], Iterable[Any]]) -> None:
    """Check that both libraries build TensorDicts with the same entries.

    The random number of an observation depends on seeds, which each library derives in
    its own way, so it is not compared. Trajectories are numbered as they appear.
    """
    pytest.importorskip("torchrl")
    ours, theirs = (comparable(build(Implementation(name))) for name in IMPLEMENTATIONS)
    for actual, expected in zip(ours, theirs, strict=True):
        # TorchRL does not name the dimensions of some results.
        assert expected.names in (actual.names, [None] * expected.ndim)
        assert set(actual.keys(True)) == set(expected.keys(True))
        for key, value in expected.items(True):
            if not isinstance(value, torch.Tensor):
                assert actual[key].batch_size == value.batch_size, key
                continue
            assert actual[key].dtype == value.dtype, key
            assert torch.equal(actual[key], value), key
        assert actual.batch_size == expected.batch_size


def comparable(tds: Iterable[Any]) -> list[Any]:
    """Return copies without what depends on seeds or numberings."""
    copies = [td.clone() for td in tds]
    numbers: dict[int, int] = {}
    for td in copies:
        for key in td.keys(True, True):
            if key[-1] == "observation":
                td[key] = td[key][..., :2]
            elif key == IDS:
                rows = [
                    numbers.setdefault(i, len(numbers))
                    for i in td[key].flatten().tolist()
                ]
                td[key] = torch.tensor(rows).view(td[key].shape)
    return copies


@contextmanager
def forked() -> Any:
    """Let TorchRL's processes be forks of a server that has imported it.

    Starting Python anew takes each seconds, and this process may hold Ray's threads.
    """
    import torch.multiprocessing as mp  # noqa: TID251 - TorchRL reads its setting

    before = mp.get_start_method(allow_none=True)
    mp.set_start_method("forkserver", force=True)
    mp.set_forkserver_preload(["torchrl.collectors", "torchrl.envs"])
    try:
        yield
    finally:
        mp.set_start_method(before, force=True)
