"""``VmasEnv``: many worlds of a VMAS scenario."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.pettingzoo.groups import AgentSpec, describe_groups
from marl_collect.errors import imports_of

with imports_of("vmas", "VmasEnv"):
    import vmas
    from vmas.simulator.environment import Environment

_Space = spaces.Space[Any]

_NOT_TAKEN = frozenset(
    {"device", "dict_spaces", "grad_enabled", "seed", "terminated_truncated", "wrapper"}
)
"""Arguments of ``vmas.make_env`` that change what it returns, or that are set here."""


@final
class VmasEnv(BatchedEnv):
    """Worlds of a VMAS scenario, such as ``"navigation"``, on the CPU.

    Observations and continuous actions are float32. Agents called ``agent_0``,
    ``agent_1``, ... are the group ``agent``; groups whose agents have different spaces
    are split, as for PettingZoo.

    VMAS draws the random numbers of all worlds from one generator, so a seed alone
    does not determine the episode of a world: the description has ``repeats=False``.
    The generator is seeded, with the seed of the first world that begins, whenever
    worlds begin. Equal seeds of a collector thus give equal data.

    Example:
        >>> from functools import partial
        >>> factory = partial(VmasEnv, "navigation", num_envs=1024, n_agents=4)
    """

    def __init__(
        self,
        scenario: str,
        num_envs: int = 32,
        *,
        continuous_actions: bool = True,
        multidiscrete_actions: bool = False,
        max_steps: int | None = 100,
        group_map: MarlGroupMapType | GroupMap | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the worlds.

        Args:
            scenario: name of a file of VMAS' scenarios.
            num_envs: number of worlds.
            continuous_actions: False for Discrete actions.
            multidiscrete_actions: MultiDiscrete instead of Discrete actions.
            max_steps: frames after which an episode is truncated. VMAS has no default,
                and most scenarios never terminate. None for no limit.
            group_map: group to agents; None groups by names and spaces.
            kwargs: arguments of the scenario, such as ``n_agents=4``.

        Raises:
            TypeError: for an argument of ``vmas.make_env`` that cannot be chosen.
            ValueError: if a group map does not fit, or there is no such scenario.
        """
        if refused := sorted(_NOT_TAKEN & kwargs.keys()):
            raise TypeError(
                f"VmasEnv does not take {', '.join(refused)}: it runs on the CPU, and "
                "collectors seed it. Expected arguments of the scenario."
            )
        if multidiscrete_actions and continuous_actions:
            raise ValueError(
                "multidiscrete_actions=True needs continuous_actions=False."
            )
        # VMAS has one list of generator states for all environments of a process.
        self._generators: list[Any] = list(Environment.vmas_random_state)
        with self._random():
            self._env: Environment = vmas.make_env(
                scenario,
                num_envs,
                continuous_actions=continuous_actions,
                multidiscrete_actions=multidiscrete_actions,
                seed=0,
                **kwargs,
            )
            first = self._observations()
        specs = [
            AgentSpec(agent.name, agent.name, "", 0, _observed(seen), _action(space))
            for agent, seen, space in zip(
                self._env.agents, first, self._env.action_space, strict=True
            )
        ]
        rows = {spec.name: row for row, spec in enumerate(specs)}
        groups = describe_groups(specs, group_map)
        self._groups = {
            name: [rows[agent] for agent in group.agents]
            for name, group in groups.items()
        }
        super().__init__(
            EnvDescription(scenario, groups, repeats=False, time_limit=max_steps),
            num_envs,
        )

    @override
    def begin(
        self, which: NDArray[np.bool_] | None, seeds: NDArray[np.int64]
    ) -> dict[str, Any]:
        first = 0 if which is None else int(which.argmax())
        with self._random():
            self._env.seed(int(seeds[first]) % 2**32)  # numpy's generator takes 32 bits
            if which is None:
                return self._by_group(self._env.reset())
            for world in np.flatnonzero(which).tolist():
                # It would return the observations of all worlds.
                self._env.reset_at(world, return_observations=False)
            return self._by_group(self._observations())

    @override
    def advance(self, actions: Mapping[str, NDArray[Any]]) -> Step:
        import torch

        agents: list[Any] = [None] * len(self._env.agents)
        for group, members in self._groups.items():
            # VMAS copies what it changes.
            tensor = torch.from_numpy(actions[group])
            if tensor.ndim == 2:
                tensor = tensor[..., None]
            for row, agent in enumerate(members):
                agents[agent] = tensor[:, row]
        with self._random():
            observations, rewards, done, _ = self._env.step(agents)
        # Scenarios return rewards of shape [K], but "wheel" returns [K, 1].
        by_agent = [reward.numpy().reshape(self.worlds) for reward in rewards]
        return Step(
            self._by_group(observations),
            {
                group: np.stack([by_agent[agent] for agent in members], 1)
                for group, members in self._groups.items()
            },
            done.numpy(),
        )

    def _observations(self) -> Any:
        (observations,) = self._env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )
        return observations

    def _by_group(self, observations: list[Any]) -> dict[str, Any]:
        return {
            group: _stacked([observations[agent] for agent in members])
            for group, members in self._groups.items()
        }

    @contextmanager
    def _random(self) -> Iterator[None]:
        """Give VMAS the states of the generators that belong to these worlds.

        VMAS consists of many small operations. Without the counters of autograd, which
        ``torch.no_grad`` keeps, a step takes about a tenth less.
        """
        import torch

        shared = Environment.vmas_random_state
        others = shared[:]
        shared[:] = self._generators
        try:
            with torch.inference_mode():
                yield
        finally:
            self._generators = shared[:]
            shared[:] = others


def _stacked(agents: list[Any]) -> Any:
    """Return arrays ``[K, n, ...]`` of the observations of n agents."""
    if isinstance(agents[0], Mapping):
        return {key: _stacked([seen[key] for seen in agents]) for key in agents[0]}
    return np.stack([seen.numpy() for seen in agents], 1)


def _observed(seen: Any) -> _Space:
    if isinstance(seen, Mapping):
        return spaces.Dict({key: _observed(value) for key, value in seen.items()})
    return spaces.Box(-np.inf, np.inf, tuple(seen.shape[1:]), np.float32)


def _action(space: Any) -> _Space:
    """Convert a space of gym, which VMAS uses, to one of Gymnasium."""
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(space.nvec)
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    return spaces.Box(space.low, space.high, space.shape, np.float32)
