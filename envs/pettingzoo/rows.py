"""Writes the results of a PettingZoo environment to one row."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from gymnasium import spaces

from marl_collect.core.description import EnvDescription, Row
from marl_collect.core.flags import Flags
from marl_collect.envs.pettingzoo.description import AGENT_ID
from marl_collect.envs.pettingzoo.groups import (
    ACTION_MASK,
    AgentSpec,
    Space,
    ignored_mask,
    info_of,
    mask_of,
    summary,
)
from marl_collect.envs.pettingzoo.writers import (
    Array,
    Rewards,
    Writer,
    fill,
    observation_writer,
    unknown_agent,
)
from marl_collect.errors import warn

_ZEROED = ("observation", "info", "reward")
_ADVICE = "If agents that are missing only wait, pass absent='waiting'."


@final
class Rows:
    """Writes one environment's agents to the memory of a row.

    An agent *joins* with its first observation. It *leaves* in the step in which it is
    done; the observation and reward of that step are still written. From the next step
    on it is *dead*, and its row is zeros. Before an agent joins its row is zeros too,
    regardless of what the environment returns for it. A dead agent that the environment
    lists again *revives*.

    An agent that the environment no longer lists leaves too, even without a flag. With
    ``absent_wait`` it *waits* instead: it does not act, and keeps its last observation.
    All agents then join with the reset.

    Attributes:
        absent_wait: whether agents that are not listed wait.
        alive: agents that take part.
        waiting: whether the last call of ``select_present`` found agents that wait.
        unflagged: agents that left in this episode without a flag.
        came_back: those of them that the environment listed again.
        leaving: agents that the last step ended.
        dead: agents that earlier steps ended.
        absent: agents whose rows are zeros: the dead agents and those that have not
            joined yet.
        has_limit: whether the description has a ``time_limit``.
        at_limit: whether this frame is the one of the ``time_limit``.
        rewards: writes rewards.
        has_infos: whether infos, or action masks from them, are written.
        takes_infos: whether infos are written, or searched for masks that would be
            ignored.
        wants_state: whether the state is written.
    """

    def __init__(
        self,
        row: Row,
        description: EnvDescription,
        specs: Iterable[AgentSpec],
        *,
        watch_masks: bool,
        absent_wait: bool,
    ) -> None:
        """From now on, write to ``row``.

        Args:
            row: the memory.
            description: description of the environment.
            specs: specs of all agents.
            watch_masks: whether an action mask that would be ignored raises an error.
            absent_wait: see the class.
        """
        self.flags = Flags(row, description)
        self.absent_wait = absent_wait
        self.waiting = False
        # Agents whose end had no flag; None after the warning.
        self._vanished: set[Any] | None = set()
        self.unflagged: set[Any] = set()
        self.came_back: set[Any] = set()
        self.alive: list[Any] = []
        self.leaving: list[Any] = []
        self.dead: set[Any] = set()
        self.absent: set[Any] = set()
        self._specs = {spec.agent: spec for spec in specs}
        self._row = row
        self._description = description
        self._zeroed = [
            array
            for key, array in row.items()
            if len(key) > 1 and key[1] in ("observation", "info")
        ]
        self._masks = _arrays(row, description, "mask")
        self._action_masks = _arrays(row, description, ACTION_MASK)
        self.rewards = Rewards(row, description, list(self._specs.values()))
        self._infos = [
            (agent, key, array[spec.row, ...])
            for agent, spec in self._specs.items()
            for key in description.groups[spec.group].info
            for array in [row[spec.group, "info", key]]
        ]
        self._info_masks = {
            spec.agent: row[spec.group, ACTION_MASK][spec.row]
            for spec in self._specs.values()
            if spec.mask_in == "info"
        }
        self._unmasked = {
            spec.agent
            for spec in self._specs.values()
            if watch_masks and not spec.mask_in
        }
        self._watch_masks = watch_masks
        self.has_infos = bool(self._infos or self._info_masks)
        self.takes_infos = self.has_infos or bool(self._unmasked)
        self._writers: Mapping[Any, Writer] = {
            spec.agent: self._writer(spec) for spec in self._specs.values()
        }
        self._time_limit = description.time_limit
        self.has_limit = self._time_limit is not None
        self._frames = 0
        self.at_limit = False
        self._state = row.get(("state",))
        self.wants_state = self._state is not None

    def begin(
        self, agents: Sequence[Any], *, act: bool, dead: Collection[Any] = ()
    ) -> None:
        """Write that an episode begins with ``agents``. Observations are written later.

        Args:
            agents: agents that the environment lists.
            act: whether all of them act in the first step.
            dead: agents that take no part, and do not wait either.
        """
        self.flags.clear()
        self._frames = 0
        self.at_limit = False
        self.leaving.clear()
        self.dead.clear()
        self.absent = set(self._specs)
        for array in self._zeroed:
            array.fill(0)
        for mask in self._masks.values():
            mask.fill(False)
        for mask in self._action_masks.values():
            mask.fill(True)
        self.rewards.begin()
        self.alive = []
        for agent in agents:
            self.join(agent, acts=act)
        if self.absent_wait:
            for agent in self._specs:
                if agent not in agents and agent not in dead:
                    self.join(agent, acts=False)
            self.waiting = len(self.alive) > len(agents)
        if self._vanished:
            self._vanished.clear()
        self.unflagged.clear()
        self.came_back.clear()

    def begin_frame(self) -> None:
        """Zero the rows of agents that ended, and count the frame for a time limit.

        Without either, this need not be called.
        """
        for agent in self.leaving:
            spec = self._specs[agent]
            for key, array in self._row.items():
                if key[0] == spec.group and key[1] in _ZEROED:
                    array[spec.row] = 0
        self.dead.update(self.leaving)
        self.absent.update(self.leaving)
        self.leaving.clear()
        if self._time_limit is not None:
            self._frames += 1
            self.at_limit = self._frames == self._time_limit

    @property
    def cuts(self) -> bool:
        """Whether this step ends the episode of agents that the environment goes on."""
        any_left = self._description.done_on_any and bool(self.leaving)
        return self.at_limit or any_left

    def join(self, agent: Any, *, acts: bool) -> None:
        """Write that ``agent`` joins."""
        spec = self._spec(agent)
        self.alive.append(agent)
        self.absent.discard(agent)
        self.select(agent, acts=acts)
        n_agents = self._description.groups[spec.group].n_agents
        identity = self._row.get((spec.group, "observation", AGENT_ID))
        flat = self._row.get((spec.group, "observation"))
        if identity is not None and not _has(spec.observation, AGENT_ID):
            identity[spec.row, spec.row] = 1
        elif flat is not None and flat.shape[1:] != spec.observation.shape:
            flat[spec.row, spec.row - n_agents] = 1

    def select(self, agent: Any, *, acts: bool) -> None:
        """Write whether ``agent`` acts in the next step."""
        spec = self._specs[agent]
        if self._masks:
            self._masks[spec.group][spec.row] = acts
        if not acts and spec.group in self._action_masks:
            self._action_masks[spec.group][spec.row] = True

    def leave(self, agent: Any, *, terminated: bool, truncated: bool) -> None:
        """Write that ``agent`` is done in this step.

        At the time limit, an environment that does not know truncation has terminated
        the agent because of the limit.
        """
        spec = self._specs[agent]
        if self.at_limit and not truncated:
            terminated, truncated = False, True
        self.flags.end(spec.group, spec.row, terminated=terminated, truncated=truncated)
        self.alive.remove(agent)
        self.leaving.append(agent)
        self.select(agent, acts=False)

    def join_new(
        self, present: Iterable[Any], *flags: Mapping[Any, Any], act: bool
    ) -> None:
        """Write which agents join. Called before their results are written.

        Args:
            present: the environment's agents after the step. Dead agents among them
                are handled by ``revive``.
            flags: terminations and truncations, if they may contain agents that joined
                and ended in this step and are therefore not present.
            act: whether agents that join act in the next step.
        """
        for agent in present:
            gone = agent in self.dead or agent in self.leaving
            if not gone and agent not in self.alive:
                self.join(agent, acts=act)
        for ended in flags:
            for agent, flag in ended.items():
                if flag and agent in self.absent and agent not in self.dead:
                    self.join(agent, acts=False)

    def record_ends(
        self,
        present: Sequence[Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> None:
        """Write which agents leave. Called after ``join_new``.

        Args:
            present: the environment's agents after the step. A missing agent without a
                flag is truncated, or waits. An agent that left in this step is not
                restored, even if it is present; see ``revive``.
            terminations: agent to whether it is terminated.
            truncations: agent to whether it is truncated.
        """
        for agent in self.alive[:]:
            terminated = bool(terminations.get(agent, False))
            truncated = bool(truncations.get(agent, False))
            if terminated or truncated:
                self.leave(agent, terminated=terminated, truncated=truncated)
            elif agent not in present and not self.absent_wait:
                self.leave(agent, terminated=False, truncated=True)
                self.unflagged.add(agent)
                if present and self._vanished is not None:
                    self._vanished.add(agent)
                    if self._description.done_on_any:
                        self._vanished = None
                        warn(
                            f"{self._description.name}: {agent} left env.agents "
                            "without a termination or truncation, which ended the "
                            f"episode. {_ADVICE}"
                        )

    def select_present(self, present: Sequence[Any]) -> None:
        """Write that of the agents that are alive those of ``present`` act next."""
        self.waiting = False
        for agent in self.alive:
            acts = agent in present
            self.select(agent, acts=acts)
            self.waiting = self.waiting or not acts

    def revive(
        self,
        present: Sequence[Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
        *,
        act: bool,
    ) -> None:
        """Write that dead agents are back if the environment lists them as alive.

        Called before the observations and rewards of the step are written, so that
        those of the agents that are back are included.

        Args:
            present: the environment's agents after the step.
            terminations: agent to whether it is terminated.
            truncations: agent to whether it is truncated.
            act: whether agents that are back act in the next step.
        """
        for agent in present:
            if (
                agent in self.dead
                and not terminations.get(agent, False)
                and not truncations.get(agent, False)
            ):
                if agent in self.unflagged:
                    self.came_back.add(agent)
                if self._vanished and agent in self._vanished:
                    self._vanished = None
                    warn(
                        f"{self._description.name}: {agent} was recorded as dead, "
                        "because it left env.agents without a termination or "
                        f"truncation, but it came back. {_ADVICE}"
                    )
                spec = self._specs[agent]
                self.dead.remove(agent)
                self.flags.revive(spec.group, spec.row)
                self.join(agent, acts=act)

    def write_observations(self, observations: Mapping[Any, Any]) -> None:
        """Write the observations of all agents that are not absent.

        Raises:
            ValueError: if an agent is unknown or its observation does not fit its
                space.
        """
        writers = self._writers
        absent = self.absent
        for agent, observation in observations.items():
            if agent not in absent:
                try:
                    write = writers[agent]
                except KeyError:
                    raise unknown_agent(agent, writers) from None
                write(observation)

    def write_infos(
        self,
        infos: Mapping[Any, Mapping[str, Any]],
        agents: Collection[Any] | None = None,
    ) -> None:
        """Write the requested infos, and zeros for missing ones.

        Args:
            infos: agent to its infos.
            agents: agents whose infos are written; None for all. Absent agents are
                skipped.
        """
        for agent, key, view in self._infos:
            if agent in self.absent or (agents is not None and agent not in agents):
                continue
            info = info_of(infos, agent, self._description.name)
            if info and key in info:
                fill(view, info[key], agent, f"info {key!r}")
            else:
                view.fill(0)

    def write_action_masks(
        self, infos: Mapping[Any, Mapping[str, Any]], agents: Any
    ) -> None:
        """Write the action masks in the infos of ``agents``; by default all are legal.

        Raises:
            ValueError: if a mask does not fit or would be ignored; names the agent.
        """
        masks = self._info_masks
        for agent in agents:
            mask = mask_of(info_of(infos, agent, self._description.name))
            if agent in self.absent:
                continue
            if agent in masks:
                if mask is None:
                    masks[agent].fill(True)
                else:
                    fill(masks[agent], mask, agent, "action_mask in info")
            elif mask is not None and agent in self._unmasked:
                raise ignored_mask(agent, "info")

    def take_infos(self, infos: Mapping[Any, Any], agents: Any) -> None:
        """Write the infos of a step and its action masks, those of ``agents``."""
        if self.has_infos:
            self.write_infos(infos)
        else:
            try:
                if not any(infos.values()):  # Most environments return empty infos.
                    return
            except ValueError:  # An array is neither true nor false.
                pass
        self.write_action_masks(infos, agents)

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended."""
        return bool(self._row["done",][0])

    def take_returns(self) -> Iterator[str]:
        """Yield once which agents left without a flag and came back."""
        for agent in sorted(self.came_back, key=str):
            yield (
                f"{agent} left env.agents without a termination or truncation, and "
                "came back, so it is recorded as dead although it waits. Pass "
                "absent='waiting', or return a flag in the step in which it ends."
            )
        self.came_back.clear()

    def check_flags(self, *flags: Mapping[Any, Any]) -> None:
        """Check that flags belong to agents.

        Raises:
            ValueError: if one does not; names it.
        """
        for problem in self.unknown_flags(*flags):
            raise ValueError(problem)

    def unknown_flags(self, *flags: Mapping[Any, Any]) -> Iterator[str]:
        """Yield which of terminations and truncations belong to no agent."""
        for name, ended in zip(("termination", "truncation"), flags, strict=True):
            for agent in ended:
                if agent not in self._specs:
                    yield (
                        f"{self._description.name}: step() returned a {name} of "
                        f"{agent!r}, which is not one of its possible_agents "
                        f"{list(self._specs)}. To end an episode for all agents return "
                        "a flag for each, such as dict.fromkeys(self.agents, True)."
                    )

    def without_mask(self, infos: Mapping[Any, Any], agents: Any) -> Iterator[str]:
        """Yield which of ``agents`` have no mask although their infos must have one."""
        if not self._watch_masks:
            return
        for agent in agents:
            due = agent in self._info_masks and agent in self.alive
            info = info_of(infos, agent, self._description.name)
            if due and mask_of(info) is None:
                yield (
                    f"{agent} acts, but its info has no action_mask, although other "
                    "infos have one. If all of its actions are then legal, pass "
                    "action_mask='info'."
                )

    def write_state(self, state_of: Callable[[], Any]) -> None:
        """Write the state that ``state_of`` returns.

        In some environments ``state()`` fails after an agent has left, for example in
        ``multiwalker_v9`` after a fall. The row then keeps the last state.
        """
        if self._state is None:
            return
        try:
            state = state_of()
        except Exception:
            if not (self.leaving or self.dead):
                raise
            return
        fill(self._state, state, None, "state")

    def settle(self, *, over: bool) -> bool:
        """Write the root's flags; return whether the episode ended.

        Args:
            over: whether the environment has no agents left. Agents that wait or never
                joined are then done too: terminated if all agents that ended are,
                otherwise truncated. At the time limit all agents are done, and those
                left are truncated.
        """
        done = self.flags.settle()
        if (over or self.at_limit) and not done:
            truncated = self.at_limit or self._any("truncated")
            truncated = truncated or not self._any("terminated")
            self.flags.end_all(terminated=not truncated, truncated=truncated)
            done = True
        return done

    def _any(self, flag: str) -> bool:
        return any(self._row[group, flag].any() for group in self._description.groups)

    def _spec(self, agent: Any) -> AgentSpec:
        if agent not in self._specs:
            raise unknown_agent(agent, self._specs)
        return self._specs[agent]

    def _writer(self, spec: AgentSpec) -> Writer:
        key = (spec.group, "observation")
        writer = observation_writer(self._row, key, spec.observation, spec)
        if spec.mask_in == "observation":
            mask = self._row[spec.group, ACTION_MASK][spec.row]
            return _with_mask(mask, writer, spec)
        nested = isinstance(spec.observation, spaces.Dict)
        if nested and self._watch_masks and not _has(spec.observation, ACTION_MASK):
            return _without_mask(writer, spec)
        return writer


def _with_mask(mask: Array, writer: Writer, spec: AgentSpec) -> Writer:
    def write(value: Any) -> None:
        try:
            legal = value[ACTION_MASK]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"The observation of agent {spec.name} must have the entry "
                f"{ACTION_MASK!r} of its space, but found {summary(value)}."
            ) from error
        fill(mask, legal, spec.name, ACTION_MASK)
        writer(value)

    return write


def _without_mask(writer: Writer, spec: AgentSpec) -> Writer:
    def write(value: Any) -> None:
        if isinstance(value, (dict, Mapping)) and ACTION_MASK in value:
            raise ignored_mask(spec.name, "observation")
        writer(value)

    return write


def _arrays(row: Row, description: EnvDescription, name: str) -> dict[str, Array]:
    return {g: row[g, name] for g in description.groups if (g, name) in row}


def _has(space: Space, key: str) -> bool:
    return isinstance(space, spaces.Dict) and key in space.spaces
