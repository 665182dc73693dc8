"""``VmasEnv``: many worlds of a VMAS scenario."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from gymnasium import spaces
from typing_extensions import override

from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.pettingzoo.groups import AgentSpec, describe_groups
from marl_collect.envs.vmas.provider import FAMILY
from marl_collect.errors import imports_of
from marl_collect.options import Option, require

with imports_of("vmas", "VmasEnv"):
    import vmas
    from vmas.simulator.environment import Environment

if TYPE_CHECKING:
    import torch

_Space = spaces.Space[Any]

_NOT_TAKEN = frozenset(
    {"dict_spaces", "grad_enabled", "seed", "terminated_truncated", "wrapper"}
)
"""Arguments of ``vmas.make_env`` that change what it returns, or that are set here."""

MASKED = frozenset(
    {
        *("balance", "ball_passage", "ball_trajectory", "buzz_wire", "dispersion"),
        *("dropout", "give_way", "joint_passage", "joint_passage_size"),
        *("multi_give_way", "navigation", "passage", "reverse_transport", "simple"),
        *("simple_crypto", "simple_spread", "simple_tag", "simple_world_comm"),
        *("transport", "wheel", "wind_flocking"),
    }
)
"""Scenarios whose whole state is in the tensors that ``renew`` finds."""

FEW = 2
"""So many worlds are reset one by one in less time than all of the twin's together."""


@final
class VmasEnv(BatchedEnv):
    """Worlds of a VMAS scenario, such as ``"navigation"``, on the CPU or a GPU.

    Observations and continuous actions are float32. Agents called ``agent_0``,
    ``agent_1``, ... are the group ``agent``; groups whose agents have different spaces
    are split, as for PettingZoo.

    VMAS draws the random numbers of all worlds from one generator, so a seed alone
    does not determine the episode of a world: the description has ``repeats=False``.
    The generator is seeded, with the seed of the first world that begins, whenever
    worlds begin. Equal seeds of a collector thus give equal data.

    With a ``device``, a ``Collector`` keeps its memory and its batches there. VMAS
    waits for the device in many of its steps, and ``begin`` once more in each.

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
        device: "str | torch.device | None" = None,
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
            device: on which the worlds are computed, and between which and the memory
                of a ``Collector`` nothing is copied. None means the CPU and arrays.
            group_map: group to agents; None groups by names and spaces.
            kwargs: arguments of the scenario, such as ``n_agents=4``.

        Raises:
            TypeError: for an argument of ``vmas.make_env`` that cannot be chosen.
            UnknownTaskError: if there is no such scenario.
            ValueError: if a group map does not fit, or the device is no CPU or GPU that
                torch can use here.
        """
        FAMILY.require(scenario)
        if refused := sorted(_NOT_TAKEN & kwargs.keys()):
            raise TypeError(
                f"VmasEnv does not take {', '.join(refused)}: collectors seed it, and "
                "convert what it returns. Expected arguments of the scenario."
            )
        require("num_envs", num_envs, int, Option("", at_least=1))
        require("continuous_actions", continuous_actions, bool, Option(""))
        require("multidiscrete_actions", multidiscrete_actions, bool, Option(""))
        if multidiscrete_actions and continuous_actions:
            raise ValueError(
                "multidiscrete_actions=True needs continuous_actions=False."
            )
        from marl_collect.core.device_check import usable_device

        self._device = usable_device("device", device or "cpu")
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"device is {device}, but VmasEnv computes on 'cpu' or 'cuda'."
            )
        self._has_arrays = device is None
        # VMAS has one list of generator states for all environments of a process.
        self._generators: list[Any] = list(Environment.vmas_random_state)
        self._cuda_generator: Any = None
        self._make = partial(
            vmas.make_env,
            scenario,
            num_envs,
            continuous_actions=continuous_actions,
            multidiscrete_actions=multidiscrete_actions,
            device=self._device,
            **kwargs,
        )
        self._twin: Environment | None = None
        self._masked = scenario in MASKED
        with self._random():
            self._seed(0)
            self._env: Environment = self._make()
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
            None if device is None else self._device,
        )

    @override
    def begin(self, which: Any, seeds: Any) -> dict[str, Any] | None:
        import torch

        due: torch.Tensor | None = None
        if which is not None:
            due = torch.from_numpy(which) if self._has_arrays else which
            which = due.cpu().numpy()
            if not which.any():
                return None
            if which.all():
                which = None
        first = 0 if which is None else int(which.argmax())
        with self._random():
            together = self._masked and which is not None and which.sum() > FEW
            if together and self._twin is None:
                self._seed(0)
                self._twin = self._make()
            self._seed(int(seeds[first]) % 2**32)  # numpy's generator takes 32 bits
            if which is None:
                return self._by_group(self._env.reset())
            if together:
                assert self._twin is not None
                self._twin.reset(return_observations=False)
                assert due is not None
                renew(self._env, self._twin, due)
            else:
                for world in np.flatnonzero(which).tolist():
                    # It would return the observations of all worlds.
                    self._env.reset_at(world, return_observations=False)
            return self._by_group(self._observations())

    @override
    def advance(self, actions: Mapping[str, Any]) -> Step:
        import torch

        agents: list[Any] = [None] * len(self._env.agents)
        for group, members in self._groups.items():
            # VMAS copies what it changes.
            tensor = actions[group]
            if self._has_arrays:
                tensor = torch.from_numpy(tensor)
            if tensor.ndim == 2:
                tensor = tensor[..., None]
            for row, agent in enumerate(members):
                agents[agent] = tensor[:, row]
        with self._random():
            observations, rewards, done, _ = self._env.step(agents)
            # Scenarios return rewards of shape [K], but "wheel" returns [K, 1].
            by_agent = [reward.reshape(self.worlds) for reward in rewards]
            return Step(
                self._by_group(observations),
                {
                    group: self._stacked([by_agent[agent] for agent in members])
                    for group, members in self._groups.items()
                },
                self._result(done.bool()),
            )

    def _observations(self) -> Any:
        (observations,) = self._env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )
        return observations

    def _by_group(self, observations: list[Any]) -> dict[str, Any]:
        return {
            group: self._stacked([observations[agent] for agent in members])
            for group, members in self._groups.items()
        }

    def _stacked(self, agents: list[Any]) -> Any:
        """Return ``[K, n, ...]`` of what n agents have."""
        if isinstance(agents[0], Mapping):
            return {
                key: self._stacked([seen[key] for seen in agents]) for key in agents[0]
            }
        if self._has_arrays:  # NumPy stacks faster than torch.
            return np.stack([tensor.numpy() for tensor in agents], 1)
        import torch

        return torch.stack(agents, 1)

    def _result(self, tensor: "torch.Tensor") -> Any:
        return tensor.numpy() if self._has_arrays else tensor

    def _seed(self, seed: int) -> None:
        """Seed the generators of these worlds, as ``seed`` of VMAS does.

        That would also seed the generators of all GPUs, which belong to others.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        Environment.vmas_random_state[:] = [
            generator.get_state(),
            np.random.RandomState(seed).get_state(),
            random.Random(seed).getstate(),
        ]
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

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
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            of_others = torch.cuda.get_rng_state(self._device)
            if self._cuda_generator is not None:
                torch.cuda.set_rng_state(self._cuda_generator, self._device)
        try:
            with torch.inference_mode():
                yield
        finally:
            self._generators = shared[:]
            shared[:] = others
            if on_gpu:
                self._cuda_generator = torch.cuda.get_rng_state(self._device)
                torch.cuda.set_rng_state(of_others, self._device)


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


def renew(env: Any, twin: Any, which: "torch.Tensor") -> None:
    """Begin episodes in many worlds of VMAS at once.

    VMAS resets its worlds together or one by one, and each of these resets takes about
    as long as a step of all worlds. So a second environment, the *twin*, resets all of
    its worlds together, and the worlds that begin take their state from it.

    Args:
        env: of VMAS.
        twin: of the same scenario, with the same arguments, and just reset.
        which: the worlds, bool ``[K]``.
    """
    import torch

    roots = [(env.scenario, twin.scenario), (env.world, twin.world)]
    seen: set[int] = set()  # A scenario refers to its world.
    pairs = [pair for root in roots for pair in _pairs(*root, len(which), seen)]
    for owner, name, new in pairs:
        old = owner[name]
        mask = which.reshape(-1, *[1] * (old.ndim - 1))
        owner[name] = torch.where(mask, new, old)
    env.steps = torch.where(which, twin.steps, env.steps)


def _pairs(
    one: Any, other: Any, worlds: int, seen: set[int]
) -> Iterator[tuple[Any, Any, "torch.Tensor"]]:
    """Yield where an object holds tensors ``[K, ...]``, and those of an equal object.

    A place is a dictionary or list, and the name or index in it.
    """
    if id(one) in seen:
        return
    import torch

    seen.add(id(one))
    for owner, name, counterpart in _entries(one, other):
        value = owner[name]
        if not isinstance(value, torch.Tensor):
            yield from _pairs(value, counterpart, worlds, seen)
        elif (
            isinstance(counterpart, torch.Tensor)
            and value.shape == counterpart.shape
            and value.shape[:1] == (worlds,)
        ):
            yield owner, name, counterpart


def _entries(one: Any, other: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the places of what both objects hold, and what ``other`` has there."""
    if isinstance(one, list) and isinstance(other, list):
        yield from ((one, k, other[k]) for k in range(min(len(one), len(other))))
        return
    # VMAS loads the file of a scenario anew for each environment, with its classes.
    if type(one).__qualname__ != type(other).__qualname__:
        return
    if not isinstance(one, dict):
        # Objects of other libraries are not part of a simulation.
        if not any(base.__module__.startswith("vmas.") for base in type(one).__mro__):
            return
        one, other = vars(one), vars(other)
    yield from ((one, name, other[name]) for name in one if name in other)
