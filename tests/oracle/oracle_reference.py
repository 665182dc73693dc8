"""The reference collector, written as plainly as possible.

Nothing of the engine is used: PettingZoo environments are stepped as PettingZoo
documents it, the policy is called as a user calls it, on a TensorDict made for the
call, and a batch is a list of frames. Seeds are derived in ``oracle_seeds``.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from oracle_seeds import NOISE, POOL_VERSION, episode_seed, generator
from oracle_worlds import CHOICES, Group, World, curriculum
from tensordict import TensorDict

from marl_collect.policies.assigned import AssignedPolicies

Key = tuple[str, ...]
Frame = dict[Key, torch.Tensor]
FLAGS = ("done", "terminated", "truncated")
MASK = "action_mask"
NOISE_OF_HEADS = 1000
"""First stream of the noise of heads."""
NOISE_OF_POLICY = 1_000_000
"""Streams of one of several policies."""


class ReferenceEnv:
    """One environment and the content of each agent's row, by the documented rules.

    Args:
        world: how the environment is built, and the options of ours. ``World`` lists
            most of these. ``infos`` has the shapes of the infos that are stored, by
            name, and ``masked_groups`` those with masks of actions.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.raw: Any = world.raw()
        self.places = {
            name: (group, i)
            for group, names in world.group_map.items()
            for i, name in enumerate(names)
        }
        self.action_spaces = {n: self.raw.action_space(n) for n in self.places}
        self.shows_mask: set[str] = set()
        self.leaves = {name: list(self._leaves_of(name)) for name in self.places}

    def _leaves_of(self, name: str) -> Iterator[tuple[Key, Key, Any]]:
        """Yield path, key and space of each array that an agent observes."""
        space = self.raw.observation_space(name)
        if isinstance(space, spaces.Dict) and MASK in space.spaces:
            self.shows_mask.add(name)
        for path, leaf in leaves_of(space):
            if path != (MASK,):
                yield path, (self.places[name][0], "observation", *path), leaf

    def reset(self, seed: int, task: Any = None) -> None:
        self.row: dict[Key, Any] = self._zeros()
        self.sums = dict.fromkeys(self.places, 0.0)
        self.alive: list[str] = []
        self.ended: list[str] = []
        self.steps = 0
        self.stacks = Stacks(self)
        reset_result = self.raw.reset(seed=seed, options=task)
        waiting = self.world.absent == "waiting"
        self._admit(list(self.places if waiting else self.raw.agents))
        if self.world.turns:
            self._pass_the_dead()
            self._look_at_turn()
            self._write_infos(self.raw.infos)
        else:
            self._observe(reset_result[0])
            self._write_infos(reset_result[1])
        self._finish()
        self.stacks.advance()

    def step(self, actions: Mapping[str, Any]) -> None:
        """Take the actions ``[n, ...]`` of each group."""
        row = self.row
        self.steps += 1
        for name in self.ended:
            group, i = self.places[name]
            for key, array in row.items():
                if key[0] == group and key[1] in ("observation", "info"):
                    array[i] = 0
        self.ended = []
        for group in self.world.group_map:
            row[group, "reward"][...] = 0
        # Agents that stay listed after their end get actions too.
        takers = self.actors() if self.world.turns else self.raw.agents
        actions_by_name = {name: self._taken(actions, name) for name in takers}
        if self.world.turns:
            self._turn(actions_by_name)
        else:
            observations, rewards, terminated, truncated, infos = self.raw.step(
                actions_by_name
            )
            # An agent that was never listed may join and end in the same step.
            ends = [a for a in observations if terminated[a] or truncated[a]]
            self._admit([a for a in ends if a not in self.alive and self._lives(a)])
            before = list(self.alive)
            self._end(terminated, truncated)
            self._admit([a for a in self.raw.agents if a not in (*ends, *self.alive)])
            present = {*before, *self.alive}
            self._observe({a: o for a, o in observations.items() if a in present})
            self._write_infos({a: i for a, i in infos.items() if a in present})
            self._reward({a: r for a, r in rewards.items() if a in present})
        self._finish()
        self.stacks.advance()

    def observed(self) -> dict[Key, Any]:
        """Return a copy of all entries at the root and under ``next``."""
        outcome = ("reward", "episode_reward")
        row = self.row | self.stacks.arrays
        return {k: v.copy() for k, v in row.items() if k[-1] not in outcome}

    def outcome(self) -> dict[Key, Any]:
        """Return the entries that are under ``next`` only."""
        outcome = ("reward", "episode_reward")
        return {k: v.copy() for k, v in self.row.items() if k[-1] in outcome}

    def cut(self) -> None:
        """Truncate the episode because of the collector's limit."""
        self.row["done",][:] = self.row["truncated",][:] = True
        self._finish()

    def _turn(self, actions: Mapping[str, Any]) -> None:
        raw = self.raw
        agent = raw.agent_selection
        raw.step(actions[agent])
        is_over = {a: raw.terminations[a] or raw.truncations[a] for a in raw.agents}
        new = [a for a in raw.agents if a not in self.alive]
        self._admit([a for a in new if self._lives(a) or not is_over[a]])
        self._reward({a: raw.rewards[a] for a in raw.agents})
        self._write_infos(raw.infos)
        self._end(raw.terminations, raw.truncations)
        self._pass_the_dead()
        self._finish()
        if raw.agents:
            # The observation of an agent that would be next is its last one, if the
            # episode ends with another one.
            self._look_at_turn()

    def _pass_the_dead(self) -> None:
        raw = self.raw
        while raw.agents:
            agent = raw.agent_selection
            if not (raw.terminations[agent] or raw.truncations[agent]):
                return
            self._observe({agent: raw.observe(agent)})
            raw.step(None)

    def _look_at_turn(self) -> None:
        agent = self.raw.agent_selection
        self._observe({agent: self.raw.observe(agent)})

    def actors(self) -> list[str]:
        """The agents that act in the next step."""
        if self.row["done",][0]:
            return []
        if self.world.turns:
            return [self.raw.agent_selection]
        return [name for name in self.alive if name in self.raw.agents]

    def _admit(self, agents: Sequence[str]) -> None:
        for name in agents:
            group, i = self.places[name]
            self.alive.append(name)
            for flag in FLAGS:
                self.row[group, flag][i] = False
            if self.world.agent_ids:
                key = (group, "observation")
                if (*key, "agent_id") in self.row:
                    self.row[*key, "agent_id"][i, i] = 1
                else:
                    self.row[key][i, i - len(self.world.group_map[group])] = 1

    def _lives(self, name: str) -> bool:
        group, i = self.places[name]
        return not self.row[group, "done"][i, 0]

    def _end(
        self, terminated: Mapping[str, bool], truncated: Mapping[str, bool]
    ) -> None:
        for name in self.alive[:]:
            over = terminated.get(name, False), truncated.get(name, False)
            if not any(over):
                if name in self.raw.agents or self.world.absent == "waiting":
                    continue
                over = False, True
            self._flag(name, *over)
            self.alive.remove(name)
            self.ended.append(name)

    @property
    def _is_at_limit(self) -> bool:
        return self.steps == self.world.time_limit

    def _flag(self, name: str, terminated: bool, truncated: bool) -> None:
        group, i = self.places[name]
        if self._is_at_limit and not truncated:
            terminated, truncated = False, True
        self.row[group, "terminated"][i] = terminated
        self.row[group, "truncated"][i] = truncated
        self.row[group, "done"][i] = True

    def _observe(self, observations: Mapping[str, Any]) -> None:
        for name, value in observations.items():
            group, i = self.places[name]
            for path, key, space in self.leaves[name]:
                leaf = value
                for part in path:
                    leaf = leaf[int(part) if isinstance(leaf, tuple) else part]
                rows = self.row[key]
                if rows.shape[1:] == (space.shape or ()):
                    rows[i] = leaf
                else:
                    rows[i, : len(leaf)] = leaf  # The agent's identity follows.
            if name in self.shows_mask:
                self.row[group, MASK][i] = value[MASK]

    def _write_infos(self, infos: Mapping[str, Any]) -> None:
        for name, (group, i) in self.places.items():
            is_told = self._lives(name) or name in self.ended
            info = (infos.get(name) if is_told else None) or {}
            for key in self.world.infos:
                self.row[group, "info", key][i] = info.get(key, 0)
            in_info = name not in self.shows_mask and group in self.world.masked_groups
            if in_info and name in infos:
                self.row[group, MASK][i] = info.get(MASK, True)

    def _reward(self, rewards: Mapping[str, float]) -> None:
        for name, reward in rewards.items():
            group, i = self.places[name]
            self.row[group, "reward"][i] = reward
        for name, (group, i) in self.places.items():
            self.sums[name] += float(self.row[group, "reward"][i, 0])
            if self.world.episode_reward:
                self.row[group, "episode_reward"][i] = self.sums[name]

    def _finish(self) -> None:
        """Derive the root's flags and the masks from the agents' flags."""
        row = self.row
        if not row["done",][0]:
            self._settle()
        if row["done",][0]:
            for group in self.world.group_map:
                row[group, "truncated"] |= ~row[group, "done"]
                row[group, "done"][:] = True
        actors = self.actors()
        for name, (group, i) in self.places.items():
            if self.world.use_mask:
                row[group, "mask"][i] = name in actors
            if group in self.world.masked_groups and name not in actors:
                row[group, MASK][i] = True
        if self.world.state:
            row["state",] = self._state()

    def _settle(self) -> None:
        """Write the root's flags."""
        row, groups = self.row, list(self.world.group_map)
        ends = any(row[group, "done"].any() for group in groups)
        is_over = self._is_at_limit or not self.raw.agents
        if is_over and not (self.world.any_ends and ends):
            # Agents that wait or never joined end with the episode: terminated if all
            # that ended were.
            was = any(row[group, "truncated"].any() for group in groups) or not ends
            for name, (group, i) in self.places.items():
                if not row[group, "done"][i, 0]:
                    self._flag(name, not was, was)
        flags = {f: np.concatenate([row[group, f] for group in groups]) for f in FLAGS}
        if self.world.any_ends:
            values = [bool(flags[f].any()) for f in FLAGS]
        else:
            done, terminated = (bool(flags[f].all()) for f in FLAGS[:2])
            values = [done, terminated, done and not terminated]
        for flag, value in zip(FLAGS, values, strict=True):
            row[flag,][0] = value

    def _state(self) -> Any:
        try:
            state = np.asarray(self.raw.state())
        except Exception:
            # Some environments have no state once an agent is gone.
            if all(map(self._lives, self.places)):
                raise
            return self.row["state",]
        space = getattr(self.raw, "state_space", None)
        return state.astype(state.dtype if space is None else space.dtype)

    def _taken(self, actions: Mapping[str, Any], name: str) -> Any:
        group, i = self.places[name]
        space, action = self.action_spaces[name], actions[group][i]
        if isinstance(space, spaces.Discrete):
            return (action if self.world.categorical else action.argmax()) + space.start
        if isinstance(space, spaces.Box):
            return np.clip(action, space.low, space.high)
        start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
        return (action + start).astype(space.dtype)

    def _zeros(self) -> dict[Key, Any]:
        world = self.world
        row: dict[Key, Any] = {(flag,): np.zeros(1, np.bool_) for flag in FLAGS}
        for group, names in world.group_map.items():
            n, first = len(names), names[0]
            row |= {
                key: np.zeros((n, *(space.shape or ())), space.dtype)
                for _, key, space in self.leaves[first]
            }
            if world.agent_ids:
                observed = (group, "observation")
                if observed in row:
                    identity = np.zeros((n, n), row[observed].dtype)
                    row[observed] = np.concatenate([row[observed], identity], 1)
                else:
                    row[*observed, "agent_id"] = np.zeros((n, n), np.float32)
            row |= {(group, flag): np.zeros((n, 1), np.bool_) for flag in FLAGS}
            row[group, "reward"] = np.zeros((n, 1), np.float32)
            if group in world.masked_groups:
                choices = int(self.action_spaces[first].n)
                row[group, MASK] = np.ones((n, choices), np.bool_)
            if world.use_mask:
                row[group, "mask"] = np.zeros(n, np.bool_)
            for key, shape in world.infos.items():
                row[group, "info", key] = np.zeros((n, *shape), np.float32)
            if world.episode_reward:
                row[group, "episode_reward"] = np.zeros((n, 1), np.float32)
        return row


def leaves_of(space: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield path and space of each array that a value of ``space`` consists of."""
    if isinstance(space, spaces.Dict):
        for name, subspace in space.spaces.items():
            yield from leaves_of(subspace, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, subspace in enumerate(space.spaces):
            yield from leaves_of(subspace, (*path, str(index)))
    else:
        yield path, space


@dataclass(frozen=True)
class Ended:
    """An episode that ended.

    Attributes:
        length: in frames.
        returns: of each agent.
    """

    length: int
    returns: dict[str, float]


class Stacks:
    """The stacked observations of an episode, if the world has any."""

    def __init__(self, env: ReferenceEnv) -> None:
        self.env, frames = env, env.world.stack
        self.arrays = {
            key: np.stack([array] * frames, 1)
            for key, array in env.row.items()
            if frames and key[1:2] == ("observation",)
        }
        self.started: set[str] = set()
        self.over: set[str] = set()

    def advance(self) -> None:
        """Stack the observations of agents that act next or have just ended."""
        env, row = self.env, self.env.row
        done = {n for n, (g, i) in env.places.items() if row[g, "done"][i, 0]}
        acting = set(env.actors() if env.world.use_mask else env.places) - done
        self.started -= self.over - done
        for name, (group, i) in env.places.items():
            for key, stack in self.arrays.items():
                if key[0] != group:
                    continue
                if name in self.over & done:
                    stack[i] = 0
                elif name in acting | (done - self.over):
                    before = stack[i, 1:] if name in self.started else row[key][i]
                    stack[i, :-1] = before
                    stack[i, -1] = row[key][i]
        self.started |= acting | (done - self.over)
        self.over = done


class ReferenceWorker:
    """Some environments and a copy of the policy that acts for them together."""

    def __init__(
        self,
        world: World,
        policy: Any,
        indices: Sequence[int],
        seed: int,
        *,
        limit: int | None = None,
        reads_init: bool = False,
        lingers: bool = False,
        given: bool = False,
    ) -> None:
        self.world = world
        self.policy = copy.deepcopy(getattr(policy, "by_hand", policy))
        self.indices, self.limit = list(indices), limit
        self.reads_init, self.lingers = reads_init, lingers
        self.given = given  # Episodes have the seed itself.
        self.level: int | None = None  # Of a curriculum, for episodes that begin.
        self.levels: list[int | None] = [None] * len(self.indices)
        self.winds = [0] * len(self.indices)  # In which episodes begin.
        self.envs = [ReferenceEnv(world) for _ in indices]
        self.ended: list[Ended] = []
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Begin with episode 0 and fresh noise, as if there had been no restart."""
        self.seed = seed
        self.generation = 0
        self.discovered = self.policy is None
        self.episodes = [-1] * len(self.envs)
        self.lengths = [0] * len(self.envs)
        self.first = [True] * len(self.envs)
        self.due = [False] * len(self.envs)
        self.waits = [True] * len(self.envs)
        self.carried: list[Frame] = [
            {key: torch.zeros(shape) for key, shape in self._states().items()}
            for _ in self.envs
        ]
        self.left: list[Frame] = [{} for _ in self.envs]
        self.noise: dict[tuple[int, int], np.random.Generator] = {}
        self.chosen: list[dict[str, list[int]]] = [{} for _ in self.envs]

    def _states(self) -> dict[Key, tuple[int, ...]]:
        """Return the shapes of the states that the policy's modules declare."""
        shapes: dict[Key, tuple[int, ...]] = {}
        for module in getattr(self.policy, "modules", list)():
            for key, shape in getattr(module, "state_shapes", {}).items():
                shapes[(key,) if isinstance(key, str) else tuple(key)] = tuple(shape)
        return shapes

    def begin(self, k: int) -> None:
        """Begin the next episode of environment k, before its next frame."""
        self.episodes[k] += 1
        self.levels[k], self.winds[k] = self.level, self.envs[k].raw.wind
        self.due[k], self.waits[k] = True, False
        self.lengths[k], self.first[k] = 0, True
        self.carried[k] = {
            key: torch.zeros_like(v) for key, v in self.carried[k].items()
        }

    def restart(self) -> None:
        """Restart in another process."""
        self.generation += 1
        self.noise = {}
        self.waits = [True] * len(self.envs)

    def frames(
        self,
        *,
        random: bool,
        recorded: "Callable[[int], Frame] | None" = None,
        leveled: "Callable[[int], int] | None" = None,
        corrected: Callable[[int, Frame], None] | None = None,
    ) -> list[Frame]:
        """Return one frame of each environment.

        Args:
            random: act at random.
            recorded: tells the frame that a collector gave for environment k, from
                which is taken what an environment drew that does not repeat.
            leveled: tells the level in which environment k begins an episode, where
                that depends on timing.
            corrected: told what environment k's policy wrote; may correct last bits.
        """
        for k, env in enumerate(self.envs):
            if self.waits[k]:
                self.begin(k)
            if self.due[k]:
                self.due[k] = False
                env.raw.drawn = recorded and int(recorded(k)["state",][0])
                index, episode = self.indices[k], self.episodes[k]
                seed = self.seed
                if not self.given:
                    seed = episode_seed(seed, index, episode)
                if leveled is not None:
                    self.levels[k] = leveled(k)
                level = self.levels[k]
                task = None if level is None else curriculum(seed, episode, level)
                wind, env.raw.wind = env.raw.wind, self.winds[k]
                env.reset(seed, task)
                env.raw.wind = wind
                self._assign(k, seed)
            env.raw.drawn = recorded and int(recorded(k)["next", "state"][0])
        if not self.discovered:
            self._discover()
        roots = [self._root(k) for k in range(len(self.envs))]
        if random or self.policy is None:
            blank = self._unwritten(roots)
            acted_roots = [root | self._drawn(k, root) for k, root in enumerate(roots)]
            outputs = [
                (fitted(frame, blank[k]), self.carried[k])
                for k, frame in enumerate(acted_roots)
            ]
        else:
            outputs = self._act(roots)
        frames = []
        for k, (root, following) in enumerate(outputs):
            self._cast(root)
            if corrected is not None:
                together = root | {("next", *key): v for key, v in following.items()}
                corrected(k, together)
                root = {key: v for key, v in together.items() if key[0] != "next"}
                following = {
                    key[1:]: v for key, v in together.items() if key[0] == "next"
                }
            frames.append(self._step(k, root, following))
        return frames

    def _step(self, k: int, root: Frame, following: Frame) -> Frame:
        env = self.envs[k]
        env.step({g.name: root[g.name, "action"].numpy() for g in self.world.groups})
        self.lengths[k] += 1
        if self.limit and self.lengths[k] >= self.limit and not env.row["done",][0]:
            env.cut()
        frame = {key: v.clone() for key, v in root.items()}
        frame |= {("next", *key): v.clone() for key, v in following.items()}
        outputs = tensors(env.observed() | env.outcome())
        frame |= {("next", *key): v for key, v in outputs.items()}
        if self.reads_init:
            frame["is_init",] = torch.tensor([self.first[k]])
            frame["next", "is_init"] = torch.tensor([False])
        if self.limit is not None:
            frame["step_count",] = torch.tensor([self.lengths[k] - 1])
            frame["next", "step_count"] = torch.tensor([self.lengths[k]])
        number = (self.indices[k] << 32) + self.episodes[k]
        frame["collector", "traj_ids"] = torch.tensor(number)
        if self.levels[k] is not None:
            frame["collector", "level"] = torch.tensor(self.levels[k])
        groups = [group.name for group in self.world.groups]
        frame = {
            key: value
            for key, value in frame.items()
            if not any(name[0] == "_" and name not in groups for name in key)
        }
        self.first[k] = False
        self.carried[k] = {
            key: v.clone() for key, v in following.items() if key not in env.row
        }
        known_keys = {*env.row, *following, ("is_init",)}
        self.left[k] = {
            key: v.clone() for key, v in root.items() if key not in known_keys
        }
        if env.row["done",][0]:
            self.ended.append(Ended(self.lengths[k], dict(env.sums)))
            self.begin(k)
        return frame

    def _root(self, k: int) -> Frame:
        root = tensors(self.envs[k].observed())
        root |= {key: v.clone() for key, v in self.carried[k].items()}
        if self.lingers:
            root |= {key: v.clone() for key, v in self.left[k].items()}
        if self.reads_init:
            root["is_init",] = torch.tensor([self.first[k]])
        return root

    def _assign(self, k: int, seed: int) -> None:
        """Note the index of each agent's policy, if there are several."""
        if isinstance(self.policy, AssignedPolicies):
            names = self.policy.assign(seed, tuple(self.world.agents))
            index = {name: i for i, name in enumerate(self.policy.names)}
            if "pool_0" in index:  # It is full, and samples uniformly.
                number = generator(seed, POOL_VERSION).random()
                version = int(number * self.policy.module("pool").size)
                index["pool"] = index[f"pool_{version}"]
            self.chosen[k] = {
                group: [index[names[agent]] for agent in agents]
                for group, agents in self.world.group_map.items()
            }

    def _act(self, roots: list[Frame]) -> list[tuple[Frame, Frame]]:
        """Return what the policy leaves at the root and under ``next``."""
        if not isinstance(self.policy, AssignedPolicies):
            return self._called(self.policy, roots)
        results: list[Any] = []
        for index, name in enumerate(self.policy.names):
            policy, first = self.policy[name], index * NOISE_OF_POLICY
            if policy is None:
                random_rows = [
                    r | self._drawn(k, r, first) for k, r in enumerate(roots)
                ]
                results.append([(root, {}) for root in random_rows])
            else:
                results.append(self._called(policy, roots, first))
        return [
            self._merged(k, root, [outputs[k] for outputs in results])
            for k, root in enumerate(roots)
        ]

    def _merged(
        self, k: int, root: Frame, outputs: list[tuple[Frame, Frame]]
    ) -> tuple[Frame, Frame]:
        """Take each agent's row from its policy's outputs, or 0 if it has none."""
        merged: tuple[Frame, Frame] = dict(root), {}
        observed = self.envs[k].row.keys() | {("is_init",)}
        for part, merged_row in enumerate(merged):
            for key in {key for output in outputs for key in output[part]} - observed:
                like = next(o[part][key] for o in outputs if key in o[part])
                merged_row[key] = torch.zeros_like(like)
                for i, index in enumerate(self.chosen[k][key[0]]):
                    if key in outputs[index][part]:
                        merged_row[key][i] = outputs[index][part][key][i]
        for group, indices in self.chosen[k].items():
            merged[0][group, "policy_id"] = torch.tensor(indices)
        return merged

    def _called(
        self, policy: Any, roots: list[Frame], first: int = 0
    ) -> list[tuple[Frame, Frame]]:
        """Call a policy on a new TensorDict; return the content afterwards."""
        size = len(roots)
        td = TensorDict({}, [size])
        for group in self.world.groups:
            td[group.name] = TensorDict({}, [size, group.n])
        for key in {key for root in roots for key in root}:
            like = next(root[key] for root in roots if key in root)
            rows = [root.get(key, torch.zeros_like(like)) for root in roots]
            td[key] = torch.stack(rows)
        self._give_noise(policy, first)
        out = policy(td)
        self._take_noise_back(policy)
        if out is not None and out is not td:
            td.update(out)
        flat = {
            (key,) if isinstance(key, str) else tuple(key): v
            for key, v in td.items(include_nested=True, leaves_only=True)
        }
        flat = {key: v.detach().clone() for key, v in flat.items()}
        ahead = {key[1:]: v for key, v in flat.items() if key[0] == "next"}
        root_values = {key: v for key, v in flat.items() if key[0] != "next"}
        return [
            (
                {n: v[k] for n, v in root_values.items()},
                {n: v[k] for n, v in ahead.items()},
            )
            for k in range(size)
        ]

    def _discover(self) -> None:
        """Find the undeclared states of the policy, which begin as 0."""
        self.discovered = True
        ahead = self._tried([self._root(k) for k in range(len(self.envs))])
        for k, (_, following) in enumerate(ahead):
            row = self.envs[k].row
            states = {key: v for key, v in following.items() if key not in row}
            self.carried[k] = {
                key: torch.zeros_like(v) for key, v in states.items()
            } | self.carried[k]

    def _unwritten(self, roots: list[Frame]) -> list[Frame]:
        """Return zeros at the keys that the policy would write if it acted."""
        if self.policy is None:
            return [{} for _ in roots]
        results = self._tried(roots)
        blank = [
            {k: torch.zeros_like(v) for k, v in root.items()} for root, _ in results
        ]
        for frame in blank:
            frame |= {k: v - 1 for k, v in frame.items() if k[-1] == "policy_id"}
        return blank

    def _tried(self, roots: list[Frame]) -> list[tuple[Frame, Frame]]:
        """Return the policy's outputs without changing the policy."""
        policy, noise = self.policy, self.noise
        self.policy, self.noise = copy.deepcopy(policy), copy.deepcopy(noise)
        with torch.random.fork_rng():
            results = self._act(roots)
        self.policy, self.noise = policy, noise
        return results

    def _cast(self, root: Frame) -> None:
        for group in self.world.groups:
            key = (group.name, "action")
            dtype = torch.float32 if group.action == "box" else torch.int64
            root[key] = root[key].to(dtype)

    def _generator(self, k: int, stream: int) -> np.random.Generator:
        if (k, stream) not in self.noise:
            self.noise[k, stream] = generator(
                self.seed, NOISE, self.indices[k], stream, self.generation
            )
        return self.noise[k, stream]

    def _drawn(self, k: int, root: Frame, first: int = 0) -> Frame:
        """Draw uniformly among the legal actions of environment k."""
        actions: Frame = {}
        for stream, group in enumerate(self.world.groups, first):
            size = (group.n, 2) if group.action in ("box", "multi") else (group.n,)
            noise = self._generator(k, stream).random(size)
            actions[group.name, "action"] = torch.from_numpy(
                self._action(group, noise, root)
            )
        return actions

    def _action(self, group: Group, noise: Any, root: Frame) -> Any:
        if group.action == "box":
            return (noise * 2 - 1).astype(np.float32)
        if group.action == "multi":
            return (noise * [CHOICES, 2]).astype(np.int64)
        legal = np.ones((group.n, CHOICES), np.bool_)
        if self.world.masked(group):
            legal = root[group.name, "action_mask"].numpy()
        choices = [
            np.flatnonzero(row)[int(u * row.sum())]
            for row, u in zip(legal, noise, strict=True)
        ]
        if self.world.categorical:
            return np.array(choices, np.int64)
        return np.eye(CHOICES, dtype=np.int64)[choices]

    def _give_noise(self, policy: Any, first: int) -> None:
        sizes = {g.name: g.n for g in self.world.groups}
        for number, head in enumerate(_heads(policy)):
            rows = []
            for k in range(len(self.envs)):
                generator = self._generator(k, first + NOISE_OF_HEADS + number)
                shape = (sizes[head.group], head.noise_size)
                if head.noise_kind == "normal":
                    row = generator.standard_normal(shape, np.float32)
                else:
                    row = generator.standard_exponential(shape, np.float32)
                    row = -np.log(np.maximum(row, np.finfo(np.float32).tiny))
                rows.append(torch.from_numpy(row))
            head.noise = torch.stack(rows)

    def _take_noise_back(self, policy: Any) -> None:
        for head in _heads(policy):
            head.noise = None


def _heads(policy: Any) -> list[Any]:
    modules: Any = getattr(policy, "modules", list)()
    return [m for m in modules if hasattr(m, "noise_kind")]


def fitted(frame: Frame, blank: Frame) -> Frame:
    """Return a frame in the form that frames with actions of the policy have.

    Args:
        frame: what the environment wrote, and random actions.
        blank: zeros at the keys that the policy leaves, if there is one.
    """
    if not blank:
        return frame
    return {key: frame.get(key, zero).to(zero.dtype) for key, zero in blank.items()}


def tensors(arrays: Mapping[Key, Any]) -> Frame:
    """Return arrays as tensors."""
    return {key: torch.from_numpy(array) for key, array in arrays.items()}
