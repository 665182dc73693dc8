"""Steps environments without PettingZoo's AEC-to-parallel conversion.

The conversion observes every agent twice per step and passes every call through
checking wrappers. The classes here avoid both. They are used only for the environments
and package versions in ``PROVEN``, for which ``make equality`` has shown that the data
are bitwise equal.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias, final

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import wrappers
from pettingzoo.utils.conversions import aec_to_parallel_wrapper

from marl_collect.envs.pettingzoo.mpe_physics import patch

Dicts: TypeAlias = tuple[
    dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]
]
"""Observations, rewards, terminations, truncations and infos by agent."""


class FastWorld:
    """The episodes of a fast path begin as PettingZoo's conversion begins them."""

    def __init__(self, env: ParallelEnv[Any, Any, Any], raw: Any) -> None:
        """Step ``raw``, which ``env`` wraps."""
        self.agents: list[Any] = []
        self._env = env
        self._raw = raw
        self._infos: dict[Any, Any] = {}

    def reset(
        self, seed: int | None = None, **options: Any
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode."""
        observations, self._infos = self._env.reset(seed=seed, **options)
        self.agents = self._env.agents[:]
        return observations, self._infos

    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step all agents."""
        raise NotImplementedError

    def state(self) -> Any:
        """Return the state."""
        return self._raw.state()


@final
class CycleWorld(FastWorld):
    """Steps any environment whose agents act in a cycle; observes each agent once."""

    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step all agents."""
        raw = self._raw
        rewards = dict.fromkeys(raw.agents, 0)
        for agent in raw.agents:
            raw.step(actions[agent])
            for other, reward in raw.rewards.items():
                rewards[other] += reward
        terminations = dict(raw.terminations)
        truncations = dict(raw.truncations)
        infos = dict(raw.infos)
        observations = {agent: raw.observe(agent) for agent in raw.agents}
        while raw.agents and (
            raw.terminations[raw.agent_selection]
            or raw.truncations[raw.agent_selection]
        ):
            raw.step(None)
        self.agents = raw.agents[:]
        return observations, rewards, terminations, truncations, infos


@final
class MpeWorld(FastWorld):
    """Steps the multi-agent particle environments of the package ``mpe2``."""

    def __init__(self, env: ParallelEnv[Any, Any, Any], raw: Any) -> None:
        """Step ``raw``, which ``env`` wraps."""
        super().__init__(env, raw)
        self._continuous = raw.continuous_actions
        patch(raw)
        self._yes = dict.fromkeys(raw.possible_agents, True)
        self._no = dict.fromkeys(raw.possible_agents, False)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step all agents."""
        raw = self._raw
        taken = [actions[name] for name in raw.possible_agents]
        # Plain integers, because the world computes with them faster than with NumPy's.
        raw.current_actions = taken if self._continuous else list(map(int, taken))
        raw._execute_world_step()  # noqa: SLF001 - no public method does only this
        raw.steps += 1
        world = raw.world
        observation = raw.scenario.observation
        # float64; writing to the float32 row makes the same cast as observe().
        observations = {agent.name: observation(agent, world) for agent in world.agents}
        # The conversion starts its sums at 0, which turns -0.0 into 0.0.
        rewards = {name: 0 + reward for name, reward in raw.rewards.items()}
        truncated = raw.steps >= raw.max_cycles
        terminated = not truncated and raw.scenario.is_terminal(world)
        if truncated or terminated:
            self.agents = []
        terminations = self._yes if terminated else self._no
        truncations = self._yes if truncated else self._no
        return observations, rewards, terminations, truncations, raw.infos


@final
class MultiwalkerWorld(FastWorld):
    """Steps ``multiwalker_v9``."""

    def __init__(self, env: ParallelEnv[Any, Any, Any], raw: Any) -> None:
        """Step ``raw``, which ``env`` wraps."""
        super().__init__(env, raw)
        self._world = raw.env
        self._index = {agent: i for i, agent in enumerate(raw.possible_agents)}
        self._no = dict.fromkeys(raw.possible_agents, False)
        constants = sys.modules[type(raw.env).__module__]
        hip, knee = float(constants.SPEED_HIP), float(constants.SPEED_KNEE)
        self._speeds = (hip, knee, hip, knee)
        self._torque = float(constants.MOTORS_TORQUE)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step all agents."""
        world = self._world
        index = self._index
        agents = self.agents
        *others, last = agents
        for agent in others:
            self._drive(world.walkers[index[agent]].joints, actions[agent].tolist())
        world.step(actions[last], index[last], is_last=True)
        # float64; writing to the float32 row makes the same cast as observe().
        observations = {agent: world.last_obs[index[agent]] for agent in agents}
        # The conversion starts its sums at 0, which turns -0.0 into 0.0.
        rewards = {agent: 0 + world.last_rewards[index[agent]] for agent in agents}
        over = world.frames >= world.max_cycles
        terminations = {
            agent: over or bool(world.last_dones[index[agent]]) for agent in agents
        }
        if over or any(world.last_dones):
            self.agents = [agent for agent in agents if not terminations[agent]]
        return observations, rewards, terminations, self._no, self._infos

    def _drive(self, joints: Sequence[Any], action: Sequence[float]) -> None:
        """Set the motors of one walker as its own code does, without NumPy scalars."""
        for joint, speed, value in zip(joints, self._speeds, action, strict=True):
            joint.motorSpeed = speed * ((value > 0) - (value < 0))
            joint.maxMotorTorque = self._torque * min(abs(value), 1.0)


ParallelWorld: TypeAlias = "ParallelEnv[Any, Any, Any] | FastWorld"

_MPE = "mpe2."
_CHECKS = (
    wrappers.OrderEnforcingWrapper,
    wrappers.ClipOutOfBoundsWrapper,
    wrappers.AssertOutOfBoundsWrapper,
)
"""Wrappers that change nothing if all actions are in the action space."""


def fast_parallel(env: ParallelEnv[Any, Any, Any]) -> FastWorld | None:
    """Return the fast path of ``env``, or None if it is not in ``PROVEN``."""
    raw = raw_environment(env)
    if raw is None:
        return None
    module = type(raw).__module__
    if installed_versions(module) not in PROVEN.get(module, ()):
        return None
    return world_of(env)


def world_of(env: ParallelEnv[Any, Any, Any]) -> FastWorld | None:
    """Return the fast path of ``env``, proven or not; None if there is none."""
    raw = raw_environment(env)
    if raw is None:
        return None
    module = type(raw).__module__
    if module.startswith(_MPE):
        return MpeWorld(env, raw)
    walks = module == "pettingzoo.sisl.multiwalker.multiwalker"
    return MultiwalkerWorld(env, raw) if walks else CycleWorld(env, raw)


def raw_environment(env: ParallelEnv[Any, Any, Any]) -> AECEnv[Any, Any, Any] | None:
    """Return the environment under the conversion; None if there are other wrappers."""
    # Exact types, because a subclass or a custom wrapper may change anything.
    if type(env) is not aec_to_parallel_wrapper:
        return None
    if getattr(env, "render_mode", None) == "human":
        return None
    inner = env.aec_env
    while type(inner) in _CHECKS:
        inner = inner.env
    raw: AECEnv[Any, Any, Any] | None = inner if inner is inner.unwrapped else None
    return raw


def installed_versions(module: str) -> tuple[str, ...]:
    """Return the package versions that the data of an environment may depend on."""
    packages = ["pettingzoo"]
    if module.startswith(_MPE):
        packages.append("mpe2")
    try:
        return tuple(version(package) for package in packages)
    except PackageNotFoundError:
        return ()


PROVEN: Mapping[str, tuple[tuple[str, ...], ...]] = {
    f"pettingzoo.{task}.{task.partition('.')[2]}": (("1.27.0",),)
    for task in (
        *("sisl.multiwalker", "sisl.pursuit", "butterfly.pistonball"),
        *("butterfly.cooperative_pong", "butterfly.knights_archers_zombies"),
        "classic.rps",
    )
} | {
    f"mpe2.{task}.{task}": (("1.27.0", "1.1.1"),)
    for task in (
        *("collect_treasure", "simple", "simple_adversary", "simple_crypto"),
        *("simple_formation", "simple_line", "simple_push", "simple_reference"),
        *("simple_speaker_listener", "simple_spread", "simple_tag"),
        "simple_world_comm",
    )
}
"""Module of an environment to its proven versions of PettingZoo (and mpe2).

A test compares it with ``scripts/equality.json``, which ``make equality`` writes.
"""
