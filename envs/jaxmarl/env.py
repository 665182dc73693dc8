"""``JaxMarlEnv``: many worlds of a JaxMARL task."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
from gymnasium import spaces
from typing_extensions import override

from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.common import unbounded
from marl_collect.envs.jaxmarl import provider
from marl_collect.envs.pettingzoo.groups import AgentSpec, describe_groups
from marl_collect.errors import imports_of

with imports_of("jaxmarl", "JaxMarlEnv"):
    import jax
    import jax.numpy as jnp

if TYPE_CHECKING:
    import torch

_Space = spaces.Space[Any]


@final
class JaxMarlEnv(BatchedEnv):
    """Worlds of a JaxMARL task, such as ``"MPE_simple_spread_v3"``.

    A seed and the actions determine the episode of a world. With
    ``key, reset_key = split(PRNGKey(seed))`` an episode begins with
    ``reset(reset_key)``, and each step takes ``key, step_key = split(key)``. Data are
    those of the library's ``step_env`` with these keys.

    An end that the library's limit of steps causes is a truncation, other ends are
    terminations. Observations have the library's shapes and dtypes. If it returns the
    state of the world, that is ``"state"``. JAX chooses the device.

    With a ``device``, a ``Collector`` keeps its memory and its batches there, and JAX
    and torch see the same memory by DLPack, except for integers of 64 bits and memory
    that JAX cannot use as it is, which they copy. All worlds are then begun in every
    frame, as the library's own ``step`` does, and those that end are taken.

    Example:
        >>> from functools import partial
        >>> factory = partial(JaxMarlEnv, "HeuristicEnemySMAX", 256, scenario="3m")
    """

    def __init__(
        self,
        task: str,
        num_envs: int = 32,
        *,
        group_map: MarlGroupMapType | GroupMap | None = None,
        device: "torch.device | str | None" = None,
        **kwargs: Any,
    ) -> None:
        """Build the worlds. The first step compiles them, which takes seconds.

        Args:
            task: name of the task in JaxMARL.
            num_envs: number of worlds.
            group_map: group to agents; None groups by names and spaces.
            device: ``"cpu"`` or a GPU of torch and JAX, on which the worlds are
                computed. None means arrays, and that JAX chooses.
            kwargs: arguments of the task, such as ``max_steps=50``. SMAX takes the
                name of a scenario, and Overcooked that of a layout.

        Raises:
            TypeError: for an argument that the task does not have.
            ValueError: if a group map does not fit, there is no such task, or torch or
                JAX cannot use the device.
        """
        self._env = env = provider.build(task, kwargs)
        seen, state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        self._legal = _legal(env, state)
        agents: list[str] = list(env.agents)
        masked = "" if self._legal is None else "observation"
        specs = [
            AgentSpec(a, a, "", 0, _observed(seen[a]), _action(env, a), masked)
            for a in agents
        ]
        groups = describe_groups(specs, group_map)
        self._members = {name: group.agents for name, group in groups.items()}
        self._has_state = "world_state" in seen
        root = {"state": _observed(seen["world_state"])} if self._has_state else {}
        limit = provider.episode_limit(task, env)
        super().__init__(
            EnvDescription(task, groups, root, time_limit=limit), num_envs, device
        )
        self._take: Callable[[Any], Any] = np.asarray
        """Returns an array or a tensor of an array of JAX."""
        if self.simulator_device is not None:
            from torch.utils.dlpack import from_dlpack

            _check_platform(self.simulator_device)
            self._take = from_dlpack
        # One executable begins all worlds, whatever the number that are new, so an
        # episode does not depend on the worlds that begin with it.
        self._reset = jax.jit(self._fresh)
        self._renew = jax.jit(_chosen)
        self._step_env = jax.jit(jax.vmap(env.step_env))
        self._step = jax.jit(self._stepped)
        self._worlds_now: Any = None  # keys and states

    @override
    def begin(self, which: Any, seeds: Any) -> dict[Any, Any]:
        # Without its 64-bit mode, PRNGKey uses 32 bits of a seed.
        if self.simulator_device is None:
            seeds = seeds.astype(np.uint32)
        new, seen = self._reset(_to_jax(seeds))
        if which is not None:
            new = self._renew(_to_jax(which), new, self._worlds_now)
        self._worlds_now = new
        return self._observations(seen)

    @override
    def advance(self, actions: Mapping[str, Any]) -> Step:
        self._worlds_now, seen, rewards, terminated = self._step(
            self._worlds_now,
            {group: _to_jax(action) for group, action in actions.items()},
        )
        return Step(
            self._observations(seen), self._taken(rewards), self._taken(terminated)
        )

    def _observations(self, seen: Any) -> dict[Any, Any]:
        groups, legal, root = map(self._taken, seen)
        masks = {(name, "action_mask"): mask for name, mask in legal.items()}
        return {**groups, **masks, **root}

    def _taken(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._take(array) for name, array in tree.items()}

    def _fresh(self, seeds: Any) -> Any:
        seeds = seeds.astype(jnp.uint32)
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.PRNGKey(seed)))(seeds)
        seen, states = jax.vmap(self._env.reset)(keys[:, 1])
        return (keys[:, 0], _strong(states)), self._by_group(seen, states)

    def _stepped(self, worlds: Any, actions: Any) -> Any:
        keys, states = worlds
        keys = jax.vmap(jax.random.split)(keys)
        by_agent = {
            agent: actions[group][:, row]
            for group, members in self._members.items()
            for row, agent in enumerate(members)
        }
        step = self._step_env
        seen, after, rewards, _, _ = step(keys[:, 1], states, by_agent)
        # With its clock before the first frame, no world is at its limit. JAX traces
        # one step, and the compiler merges both.
        _, _, _, done, _ = step(keys[:, 1], _clock_back(states), by_agent)
        over = done["__all__"]
        terminated = self._stack({agent: flag | over for agent, flag in done.items()})
        earned = self._stack(
            {agent: r.reshape(-1).astype(jnp.float32) for agent, r in rewards.items()}
        )
        following = keys[:, 0], _strong(after)
        return following, self._by_group(seen, after), earned, terminated

    def _by_group(self, seen: Any, states: Any) -> Any:
        """Return the observations and legal actions by group, and the root."""
        legal: dict[str, Any] = {}
        if self._legal is not None:
            masks = self._stack(jax.vmap(self._legal)(states))
            legal = {group: mask.astype(bool) for group, mask in masks.items()}
        root = {"state": seen["world_state"]} if self._has_state else {}
        return self._stack(seen), legal, root

    def _stack(self, by_agent: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``[K, n, ...]`` by group."""
        return {
            group: jnp.stack([by_agent[agent] for agent in members], 1)
            for group, members in self._members.items()
        }


def _to_jax(value: Any) -> Any:
    """Return what JAX takes of an array, which numpy or torch has."""
    if isinstance(value, np.ndarray):
        return value
    if value.dtype.itemsize == 8:  # JAX has integers of 32 bits.
        value = value.int()
    return jnp.from_dlpack(value.contiguous())


def _check_platform(device: "torch.device") -> None:
    """Check that JAX has a device of torch.

    Raises:
        ValueError: if it has not.
    """
    platform = "cpu" if device.type == "cpu" else "gpu"
    try:
        jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"device is {device}, but JAX finds no {platform}: {error}. Install JAX "
            "for this device, or omit device."
        ) from error


def _strong(states: Any) -> Any:
    """Return the states without weak types.

    Those of a reset and of a step differ, so the step would be compiled twice.
    """
    return jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), states)


def _chosen(which: Any, new: Any, old: Any) -> Any:
    """Return ``new`` in the worlds of ``which``, and ``old`` in the others."""

    def choose(a: Any, b: Any) -> Any:
        return jnp.where(which.reshape(-1, *([1] * (a.ndim - 1))), a, b)

    return jax.tree.map(choose, new, old)


def _clock_back(state: Any) -> Any:
    """Return a state whose clocks are before the first frame."""
    if hasattr(state, "state"):  # A world inside that of an enemy's policy.
        return state.replace(state=_clock_back(state.state))
    clocks = [name for name in ("step", "outer_t") if hasattr(state, name)]
    return state.replace(
        **{name: jnp.full_like(getattr(state, name), -1) for name in clocks}
    )


def _legal(env: Any, state: Any) -> Any:
    """Return the library's function from a state to legal actions; None for all."""
    legal = getattr(env, "get_legal_moves", env.get_avail_actions)
    try:
        jax.eval_shape(legal, state)
    except NotImplementedError:
        return None
    return legal


def _observed(seen: Any) -> _Space:
    # Declared shapes and bounds are not always those of the data.
    dtype = np.dtype(seen.dtype)
    return unbounded(seen.shape, np.float32 if dtype.kind == "f" else dtype)


def _action(env: Any, agent: str) -> _Space:
    space = env.action_space(agent)
    if hasattr(space, "num_categories"):
        return spaces.MultiDiscrete(np.asarray(space.num_categories))
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    low, high = (
        np.broadcast_to(np.asarray(bound, np.float32), space.shape)
        for bound in (space.low, space.high)
    )
    return spaces.Box(low, high, space.shape, np.float32)
