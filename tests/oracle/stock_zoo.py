"""A model of the data contract around PettingZoo's own environments."""

import importlib
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from stock_replay import FLAGS, PACKAGES, Array, Frame, Key, Trial, leaves_of

from marl_collect import MarlGroupMapType

MASK = "action_mask"


def build(trial: Trial) -> Any:
    """Build the stock environment of a trial."""
    if trial.script is not None:
        from support.zoo import ScriptedEnv, ScriptedTurns

        return (ScriptedEnv if trial.parallel else ScriptedTurns)(trial.script)
    family, _, name = trial.task.partition("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module(f"{PACKAGES[family]}.{name}")
    make = module.parallel_env if trial.parallel else module.env
    return make(**trial.kwargs)


def wrap(trial: Trial, **options: Any) -> Any:
    """Return our environment around that of a trial."""
    from marl_collect.envs import PettingZooWrapper

    return PettingZooWrapper(build(trial), **options)


def stock_of(trial: Trial) -> "Stock":
    """Return the stock environment of a trial, with its numeric infos asked for."""
    env = build(trial)
    answer = env.reset(seed=0)
    infos = answer[1] if isinstance(env, ParallelEnv) else env.infos
    numbers: dict[str, tuple[int, ...]] = {}
    for info in infos.values():
        for key, value in info.items():
            array = np.asarray(value)
            if key != MASK and array.dtype.kind in "biuf":
                numbers[key] = array.shape
    return (Together if trial.parallel else Turns)(trial, env, numbers)


class Agent:
    """The expected entries of one agent."""

    def __init__(self, stock: "Stock", agent: Any, group: str, row: int) -> None:
        """Store the agent's spaces and its place."""
        self.name = agent
        self.group, self.row = group, row
        self.n_rows = len(stock.groups[group])
        space = stock.env.observation_space(agent)
        self.mask_seen = isinstance(space, spaces.Dict) and MASK in space.spaces
        if self.mask_seen:
            subspaces = {k: s for k, s in space.spaces.items() if k != MASK}
            space = spaces.Dict(subspaces)
        self.space = space
        self.action = stock.env.action_space(agent)
        self.ids = bool(stock.options.get("agent_ids"))
        self.info_shapes = stock.numbers
        self.begin()

    def begin(self) -> None:
        """Forget the episode."""
        self.joined = self.mask = False
        self.done = self.terminated = self.truncated = False
        self.buried = False
        self.total = 0.0
        self.legal: Array | None = None
        self.zero()

    def zero(self) -> None:
        """Write zeros, as before an agent joins and from the step after its end."""
        self.reward = np.float32(0)
        self.infos = {k: np.zeros(s, np.float32) for k, s in self.info_shapes.items()}
        self.seen: Frame = {
            key: np.zeros(space.shape or (), space.dtype)
            for key, space in leaves_of(self.space)
        }
        self._identify(0)

    def join(self) -> None:
        self.joined = True
        self._identify(1)

    def see(self, value: Any) -> None:
        for key, space in leaves_of(self.space):
            leaf = value
            for name in key:
                leaf = leaf[int(name)] if isinstance(leaf, tuple) else leaf[name]
            self.seen[key] = np.array(leaf).astype(space.dtype)
        self._identify(1)
        if self.mask_seen:
            self.legal = np.array(value[MASK]).astype(bool)

    def inform(self, info: Mapping[str, Any] | None) -> None:
        for key, shape in self.info_shapes.items():
            value = (info or {}).get(key, np.zeros(shape))
            self.infos[key] = np.asarray(value).astype(np.float32)
        if not self.mask_seen:
            mask = (info or {}).get(MASK)
            self.legal = None if mask is None else np.array(mask).astype(bool)

    def earn(self, reward: Any) -> None:
        self.reward = np.float32(reward)
        self.total += float(self.reward)

    def end(self, *, terminated: bool, truncated: bool) -> None:
        self.done, self.mask, self.buried = True, False, False
        self.terminated, self.truncated = terminated, truncated

    def come_back(self) -> None:
        """Take part again, after an end in an earlier step."""
        self.done = self.terminated = self.truncated = False
        self.join()

    def taken(self, actions: Frame, *, one_hot: bool) -> Any:
        """Return the action for the stock environment."""
        return _decode(self.action, (self.group, "action"), actions, self.row, one_hot)

    def _identify(self, present: int) -> None:
        if not self.ids:
            return
        identity = np.zeros(self.n_rows)
        identity[self.row] = present
        if isinstance(self.space, spaces.Dict):
            self.seen["agent_id",] = identity.astype(np.float32)
        else:
            flat = self.seen[()][: self.space.shape[0]]
            self.seen[()] = np.concatenate([flat, identity.astype(flat.dtype)])


def _decode(space: Any, key: Key, actions: Frame, row: int, one_hot: bool) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            name: _decode(subspace, (*key, name), actions, row, False)
            for name, subspace in space.spaces.items()
        }
    value = actions[key][row]
    if isinstance(space, spaces.Discrete):
        return np.int64((value.argmax() if one_hot else value) + space.start)
    if isinstance(space, spaces.Box):
        return np.clip(value, space.low, space.high).astype(space.dtype)
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return (value + start).astype(space.dtype)


class Stock:
    """The common base of both kinds of environments."""

    def __init__(
        self, trial: Trial, env: Any, numbers: Mapping[str, tuple[int, ...]]
    ) -> None:
        from marl_collect.envs import PettingZooEnv

        self.trial = trial
        self.env = env
        self.numbers = numbers
        self.options = dict(trial.options)
        group_map = self.options.get("group_map")
        if isinstance(group_map, str):
            self.options["group_map"] = MarlGroupMapType(group_map)
        self.factory = (
            partial(wrap, trial, **self.options, info_keys=dict(numbers))
            if trial.script is not None
            else partial(
                PettingZooEnv,
                trial.task,
                trial.parallel,
                **self.options,
                info_keys=dict(numbers),
                **trial.kwargs,
            )
        )
        self.waits = self.options.get("absent") == "waiting"
        with self.factory() as ours:
            self.groups = ours.group_map
            self.masked = {
                g for g, d in ours.description.groups.items() if d.action_mask
            }
            done_on_any = self.options.get("done_on_any")
        self.on_any = trial.parallel if done_on_any is None else done_on_any
        self.agents = {
            agent: Agent(self, agent, group, names.index(str(agent)))
            for agent in env.possible_agents
            for group, names in self.groups.items()
            if str(agent) in names
        }

    def close(self) -> None:
        self.env.close()

    def restart(self) -> None:
        """Rebuild the environment, so an episode follows from its seed alone."""
        self.env.close()
        self.env = build(self.trial)
        for agent in self.agents.values():
            agent.begin()
        self.root = dict.fromkeys(FLAGS, False)
        self.steps = 0
        self.last_state: Array | None = None

    def step(self, actions: Frame, *, cut: bool) -> tuple[Frame, Frame, bool]:
        """Step; return what is observed, what came of it, and whether it is over."""
        self.steps += 1
        for agent in self.agents.values():
            agent.reward = np.float32(0)
            if agent.done and not agent.buried:
                agent.buried = True
                agent.zero()
        self.act(actions)
        self.settle(cut=cut)
        outcome: Frame = {}
        for group, names in self.groups.items():
            members = self._members(names)
            outcome[group, "reward"] = np.array([[a.reward] for a in members])
            if self.options.get("episode_reward"):
                totals = [[a.total] for a in members]
                outcome[group, "episode_reward"] = np.array(totals, np.float32)
        return self.frame(), outcome, self.root["done"]

    def act(self, actions: Frame) -> None:
        """Step the environment and update the agents."""
        raise NotImplementedError

    @property
    def at_limit(self) -> bool:
        """Whether the time limit cuts the episode in this step."""
        return self.steps == self.options.get("time_limit")

    def end(self, agent: Agent, *, terminated: bool, truncated: bool) -> None:
        """End an agent; a termination at the limit is that of the limit."""
        if self.at_limit and not truncated:
            terminated, truncated = False, True
        agent.end(terminated=terminated, truncated=truncated)

    def settle(self, *, cut: bool) -> None:
        """Determine whether the episode is over, for which agents, and why."""
        agents = self.agents.values()
        alive = [agent for agent in agents if not agent.done]
        combine = any if self.on_any else all
        if not self.env.agents or self.at_limit:
            terminated = any(agent.terminated for agent in agents)
            truncated = self.at_limit or not terminated
            truncated = truncated or any(agent.truncated for agent in agents)
            if not combine(agent.done for agent in agents):
                for agent in alive:
                    agent.end(terminated=not truncated, truncated=truncated)
        done = combine(agent.done for agent in agents)
        terminated = done and combine(agent.terminated for agent in agents)
        if self.on_any:
            truncated = any(agent.truncated for agent in agents)
        else:
            truncated = done and not terminated
        if cut and not done:
            done = truncated = True
        self.root = {"done": done, "terminated": terminated, "truncated": truncated}
        if done:
            for agent in agents:
                if not agent.done:
                    agent.end(terminated=False, truncated=True)
                agent.mask = False

    def frame(self) -> Frame:
        """Return all current observations."""
        frame: Frame = {(flag,): np.array([self.root[flag]]) for flag in FLAGS}
        for group, names in self.groups.items():
            members = self._members(names)
            for key in members[0].seen:
                values = [agent.seen[key] for agent in members]
                frame[group, "observation", *key] = np.stack(values)
            for name in self.numbers:
                values = [agent.infos[name] for agent in members]
                frame[group, "info", name] = np.stack(values)
            if self.options.get("use_mask", True):
                frame[group, "mask"] = np.array([a.mask for a in members])
            if group in self.masked:
                frame[group, MASK] = np.stack([_legal(a) for a in members])
            for flag in FLAGS:
                flags = [[getattr(agent, flag)] for agent in members]
                frame[group, flag] = np.array(flags)
        if self.options.get("return_state"):
            frame["state",] = self._state()
        return frame

    def _state(self) -> Array:
        try:
            state = np.asarray(self.env.state())
        except Exception:
            # Some environments have no state once an agent is gone.
            if self.last_state is None or not any(a.done for a in self.agents.values()):
                raise
            return self.last_state
        space = getattr(self.env, "state_space", None)
        self.last_state = state.astype(state.dtype if space is None else space.dtype)
        return self.last_state

    def _members(self, names: list[str]) -> list[Agent]:
        by_name = {str(agent): state for agent, state in self.agents.items()}
        return [by_name[name] for name in names]


def _legal(agent: Agent) -> Array:
    if agent.mask and agent.legal is not None:
        return agent.legal
    return np.ones(int(agent.action.n), dtype=bool)


class Together(Stock):
    """Agents that act at the same time."""

    def reset(self, seed: int) -> Frame:
        self.restart()
        observations, infos = self.env.reset(seed=seed)
        for name in self.env.agents:
            agent = self.agents[name]
            agent.join()
            agent.mask = True
            agent.see(observations[name])
            agent.inform(infos.get(name))
        if self.waits:
            for agent in self.agents.values():
                agent.join()
        return self.frame()

    def act(self, actions: Frame) -> None:
        one_hot = not self.options.get("categorical_actions", True)
        answers = self.env.step(
            {
                name: self.agents[name].taken(actions, one_hot=one_hot)
                for name in self.env.agents
            }
        )
        observations, rewards, terminations, truncations, infos = answers
        for name, agent in self.agents.items():
            terminated = bool(terminations.get(name, False))
            truncated = bool(truncations.get(name, False))
            present = name in self.env.agents
            if agent.done and present and not (terminated or truncated):
                agent.come_back()
            if agent.done or not (agent.joined or present or terminated or truncated):
                continue
            if not agent.joined:
                agent.join()
            if name in observations:
                agent.see(observations[name])
            agent.earn(rewards.get(name, 0))
            agent.inform(infos.get(name))
            agent.mask = present
            if terminated or truncated:
                self.end(agent, terminated=terminated, truncated=truncated)
            elif not (present or self.waits):
                self.end(agent, terminated=False, truncated=True)


class Turns(Stock):
    """Agents that take turns."""

    def reset(self, seed: int) -> Frame:
        self.restart()
        self.env.reset(seed=seed)
        for name in self.env.agents:
            self.agents[name].join()
            self.agents[name].inform(self.env.infos.get(name))
        self._next()
        return self.frame()

    def act(self, actions: Frame) -> None:
        """Step the agent whose turn it is, and those that ended."""
        env = self.env
        one_hot = not self.options.get("categorical_actions", True)
        name = env.agent_selection
        env.step(self.agents[name].taken(actions, one_hot=one_hot))
        self.agents[name].mask = False
        for other in env.agents:
            agent = self.agents[other]
            if agent.buried and not self._dead(other):
                agent.come_back()
            if not agent.done:
                if not agent.joined:
                    agent.join()
                agent.earn(env.rewards[other])
                agent.inform(env.infos.get(other))
        self._flags()
        while env.agents and self._dead(env.agent_selection):
            agent = self.agents[env.agent_selection]
            if not agent.buried:
                agent.see(env.observe(env.agent_selection))
            env.step(None)
            self._flags()
        self._next()

    def _dead(self, name: Any) -> bool:
        return bool(self.env.terminations[name] or self.env.truncations[name])

    def _flags(self) -> None:
        env = self.env
        for name, agent in self.agents.items():
            if agent.done or not agent.joined:
                continue
            terminated = bool(env.terminations.get(name, False))
            truncated = bool(env.truncations.get(name, False))
            if terminated or truncated:
                self.end(agent, terminated=terminated, truncated=truncated)
            elif name not in env.agents:
                self.end(agent, terminated=False, truncated=True)

    def _next(self) -> None:
        env = self.env
        if env.agents:
            agent = self.agents[env.agent_selection]
            agent.see(env.observe(env.agent_selection))
            if not agent.mask_seen:
                mask = (env.infos.get(env.agent_selection) or {}).get(MASK)
                agent.legal = None if mask is None else np.array(mask).astype(bool)
            agent.mask = True
