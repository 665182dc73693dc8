"""``AgentLists``: an environment that uses lists of agents, as a ``ParallelEnv``."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_collect.envs.common import task_setter

Space = spaces.Space[Any]
_VALUES = ("observations", "rewards", "terminations", "truncations", "infos")


@final
class AgentLists(ParallelEnv[str, Any, Any]):
    """Makes a PettingZoo environment of one whose values are lists over agents.

    The environment has Gymnasium's methods. ``reset(seed=...)`` returns observations
    and infos. ``step(actions)`` returns observations, rewards, terminations,
    truncations and infos. Each of them is a list, a tuple or an array with one entry
    per agent. All but the observations may also be a single value, which then holds for
    every agent. The observation and action spaces are a ``Tuple`` space or a list of
    spaces.

    By default the episode ends with the first agent that is done. With
    ``done_on_any=False``, agents that are done get the first action of their space, or
    the number of a Box that is closest to 0, until the last agent is done.

    Example:
        >>> env = gymnasium.make("rware-tiny-2ag-v2", disable_env_checker=True)
        >>> env = PettingZooWrapper(AgentLists(env), time_limit=500)
    """

    def __init__(self, env: Any, agents: Sequence[str] | None = None) -> None:
        """Own ``env``.

        Args:
            env: the environment.
            agents: names of the agents, in the order of the lists. None: ``agent_0``,
                ``agent_1``, ....

        Raises:
            TypeError: if the spaces are not lists of spaces.
            ValueError: if the numbers of agents, observation spaces and action spaces
                differ.
        """
        observed = _spaces(env, "observation_space")
        acted = _spaces(env, "action_space")
        names = [f"agent_{i}" for i in range(len(acted))] if agents is None else agents
        if not len(names) == len(observed) == len(acted):
            raise ValueError(
                f"{env} must have as many agents as spaces, but there are {len(names)} "
                f"agents, {len(observed)} observation spaces and {len(acted)} action "
                "spaces."
            )
        self._env = env
        self._observed = dict(zip(names, observed, strict=True))
        self._acted = dict(zip(names, acted, strict=True))
        setter = task_setter(env)
        if setter is not None:
            self.set_task = setter
        # A Tuple space has tuples of actions; highway_env, for one, refuses lists.
        self._kind = list if isinstance(env.action_space, list) else tuple
        self._idle = {name: _idle(space) for name, space in self._acted.items()}
        inner = getattr(env, "unwrapped", env)
        spec = getattr(env, "spec", None)
        self.metadata = {
            **(getattr(env, "metadata", None) or {}),
            "name": spec.id if spec else type(inner).__name__,
        }
        if hasattr(env, "render_mode"):
            self.render_mode = env.render_mode
        self.possible_agents = list(names)
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Space:
        """Return the space of one agent's observations."""
        return self._observed[agent]

    def action_space(self, agent: str) -> Space:
        """Return the space of one agent's actions."""
        return self._acted[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        keywords = {} if options is None else {"options": options}
        returned = self._env.reset(seed=seed, **keywords)
        observations, infos = self._parts("reset", returned, (_VALUES[0], _VALUES[-1]))
        self.agents = list(self.possible_agents)
        return self._by_agent("observations", observations), self._by_agent(
            "infos", infos
        )

    def step(self, actions: Mapping[str, Any]) -> Any:
        """Step with the actions of the agents that are not done."""
        idle = self._idle.items()
        chosen = self._kind(actions.get(name, action) for name, action in idle)
        returned = self._parts("step", self._env.step(chosen), _VALUES)
        results = tuple(map(self._by_agent, _VALUES, returned))
        terminations, truncations = results[2], results[3]
        if True in terminations.values() or True in truncations.values():
            self.agents = [
                agent
                for agent in self.agents
                if not (terminations[agent] or truncations[agent])
            ]
        return results

    def render(self) -> Any:
        """Return what the environment renders; None if it does not."""
        render = getattr(self._env, "render", None)
        return None if render is None else render()

    def close(self) -> None:
        """Close the environment."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _parts(
        self, method: str, returned: Any, names: tuple[str, ...]
    ) -> tuple[Any, ...]:
        if isinstance(returned, tuple) and len(returned) == len(names):
            return returned
        summary = (
            f"{len(returned)} values"
            if isinstance(returned, tuple)
            else f"{returned!r:.200}"
        )
        raise TypeError(
            f"{self.metadata['name']}: {method}() must return a tuple of "
            f"{', '.join(names)}, as in Gymnasium, but returned {summary}."
        )

    def _by_agent(self, name: str, values: Any) -> dict[str, Any]:
        """Return the value of each agent that was alive before the step."""
        names = self.possible_agents
        if isinstance(values, (list, tuple)) or (
            isinstance(values, np.ndarray) and values.ndim
        ):
            if len(values) != len(names):
                raise ValueError(
                    f"{self.metadata['name']} must return {name} of its {len(names)} "
                    f"agents, but returned {len(values)}."
                )
            named = dict(zip(names, values, strict=True))
            if len(self.agents) == len(names):
                return named
            return {agent: named[agent] for agent in self.agents}
        if name == _VALUES[0]:
            raise TypeError(
                f"{self.metadata['name']} must return a list of observations, one per "
                f"agent, but returned {values!r:.200}."
            )
        return dict.fromkeys(self.agents, values)


def _spaces(env: Any, name: str) -> Sequence[Space]:
    agent_spaces = getattr(env, name, None)
    if isinstance(agent_spaces, spaces.Tuple):
        return cast("Sequence[Space]", agent_spaces.spaces)
    if isinstance(agent_spaces, (list, tuple)) and agent_spaces:
        return agent_spaces
    raise TypeError(
        f"{env} must have an {name} that is a Tuple space or a list of spaces, one per "
        f"agent, but it is {agent_spaces!r}."
    )


def _idle(space: Space) -> Any:
    """Return the action of agents that are done."""
    if isinstance(space, spaces.Dict):
        return {name: _idle(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_idle, space.spaces))
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.astype(space.dtype)
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    return np.zeros(space.shape or (), space.dtype or np.int64)
