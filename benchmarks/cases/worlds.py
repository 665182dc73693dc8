"""Batches of simulators of many worlds, and bare loops over them.

Both sides store the same arrays, at the root and under ``next``. The bare loop draws
all actions from one generator, those of a network as the argmax of logits and Gumbel
noise, and writes whole frames ``[K, ...]`` one after the other. It knows neither
episodes nor returns. Networks have two hidden layers of 64 units.

The first rows have a simulator that costs nothing: each world has three agents that
observe 18 numbers and take one of five actions. They differ in the number of worlds and
in how episodes end; divide the times by each other to get the curve. Then whole
trajectories are compared with plain batches.

The last rows have VMAS and JaxMARL. Their bare loops call the library without our
adapter. Our collector is measured with arrays and with tensors of the torch device
"cpu", and for VMAS so is TorchRL's collector over its ``VmasEnv``.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import numpy as np
import torch
from gymnasium import spaces
from harness.turns import Alternative
from typing_extensions import override

from cases.case import Case
from marl_collect.collectors import Collector
from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models.policy import make_policy

AGENTS, INPUTS, ACTIONS = 3, 18, 5
FRAMES = 64
"""Frames of each world in a batch."""
WORLDS = (1, 16, 64, 256, 1024, 4096)
PERIOD = 100
"""Steps of an episode that ends by its time limit, or on average if ends are random."""
_TABLE = 997
"""Steps after which random ends repeat; so long that they come in every world."""
ENDS = ("no ends", "1 % end per frame", "all end after 100 frames")
DISCRETE: dict[str, Any] = {"continuous_actions": False, "max_steps": PERIOD}
"""Options of VMAS scenarios, whoever steps them."""


@final
class FreeWorlds(BatchedEnv):
    """Worlds with constant observations and rewards, which end as a table says."""

    def __init__(self, worlds: int, ends: str, period: int = PERIOD) -> None:
        """Prepare the table."""
        group = GroupDescription(
            tuple(f"agent_{i}" for i in range(AGENTS)),
            spaces.Box(-1, 1, (INPUTS,), np.float32),
            spaces.Discrete(ACTIONS),
        )
        limit = period if ends == ENDS[2] else None
        about = EnvDescription("free", {"agents": group}, time_limit=limit)
        super().__init__(about, worlds)
        chance = 1 / period if ends == ENDS[1] else 0.0
        self._ends = np.random.default_rng(0).random((_TABLE, worlds)) < chance
        self._observed = {
            "agents": np.zeros((worlds, AGENTS, INPUTS), np.float32),
        }
        self._rewards = {"agents": np.ones((worlds, AGENTS), np.float32)}
        self._steps = 0

    @override
    def begin(self, which: Any, seeds: Any) -> Any:
        """Return the constants."""
        return self._observed

    @override
    def advance(self, actions: Any) -> Step:
        """Return the constants."""
        self._steps += 1
        over = self._ends[self._steps % len(self._ends)]
        return Step(self._observed, self._rewards, over)


@final
class StockVmas:
    """A VMAS scenario with discrete actions, as its users step it."""

    def __init__(self, scenario: str, worlds: int) -> None:
        """Build the worlds."""
        import vmas

        self._env = vmas.make_env(scenario, worlds, seed=0, **DISCRETE)

    def begin(self, which: Any, seeds: Any) -> Any:
        """Begin episodes, and return the observations of all worlds."""
        del seeds
        if which is None or which.all():
            observations: Any = self._env.reset()
            return torch.stack(observations, 1).numpy()
        for world in np.flatnonzero(which).tolist():
            self._env.reset_at(world, return_observations=False)
        observations = self._env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )[0]
        return torch.stack(observations, 1).numpy()

    def advance(self, actions: Any) -> tuple[Any, Any, Any]:
        """Step all worlds; return observations, rewards and ends."""
        acts = torch.from_numpy(actions)[..., None]
        observations, rewards, dones, _ = self._env.step(list(acts.unbind(1)))
        return (
            torch.stack(observations, 1).numpy(),
            torch.stack(rewards, 1),
            dones.numpy(),
        )


@final
class StockJaxMarl:
    """A JaxMARL task with one compiled step for all worlds."""

    def __init__(
        self,
        task: str,
        worlds: int,
        convert: Callable[[Any], Any] = np.asarray,
        accept: Callable[[Any], Any] = np.asarray,
    ) -> None:
        """Build the worlds.

        Args:
            task: of JaxMARL.
            worlds: their number.
            convert: turns arrays of JAX into those that are returned.
            accept: turns arrays that are passed into some that JAX takes.
        """
        import jax
        import jax.numpy as jnp
        import jaxmarl

        env = jaxmarl.make(task)

        def reset(seeds: Any) -> Any:
            keys = jax.vmap(lambda seed: jax.random.split(jax.random.PRNGKey(seed)))
            first, later = jnp.swapaxes(keys(seeds), 0, 1)
            observations, state = jax.vmap(env.reset)(first)
            return (later, state), jnp.stack([observations[a] for a in env.agents], 1)

        def step(worlds: Any, actions: Any) -> Any:
            keys, state = worlds
            later, step_keys = jnp.swapaxes(jax.vmap(jax.random.split)(keys), 0, 1)
            by_agent = {a: actions[:, i] for i, a in enumerate(env.agents)}
            step_env = jax.vmap(env.step_env)
            observations, state, rewards, dones, _ = step_env(
                step_keys, state, by_agent
            )
            arrays = (
                jnp.stack([x[a] for a in env.agents], 1)
                for x in (observations, rewards)
            )
            return (later, state), *arrays, dones["__all__"]

        def renew(mask: Any, new: Any, old: Any) -> Any:
            def chosen(a: Any, b: Any) -> Any:
                return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

            return jax.tree.map(chosen, new, old)

        self._convert, self._accept = convert, accept
        self._reset, self._step = jax.jit(reset), jax.jit(step)
        self._renew = jax.jit(renew)
        self._seeds = np.arange(worlds, dtype=np.uint32)
        self._worlds: Any = None

    def begin(self, which: Any, seeds: Any) -> Any:
        """Begin episodes, and return the observations of all worlds."""
        del seeds
        self._seeds += len(self._seeds)
        new, observations = self._reset(self._seeds)
        if which is not None:
            new = self._renew(self._accept(which), new, self._worlds)
        self._worlds = new
        return self._convert(observations)

    def advance(self, actions: Any) -> tuple[Any, Any, Any]:
        """Step all worlds; return observations, rewards and ends."""
        self._worlds, *arrays = self._step(self._worlds, self._accept(actions))
        observations, rewards, over = map(self._convert, arrays)
        return observations, rewards, over


@final
class StockFree:
    """The simulator that costs nothing, without the contract of batches."""

    def __init__(self, worlds: int, ends: str) -> None:
        """Build the worlds."""
        self._env = FreeWorlds(worlds, ends)

    def begin(self, which: Any, seeds: Any) -> Any:
        """Return the constants."""
        return self._env.begin(which, seeds)["agents"]

    def advance(self, actions: Any) -> tuple[Any, Any, Any]:
        """Return the constants."""
        step = self._env.advance({"agents": actions})
        return step.observations["agents"], step.rewards["agents"], step.terminated


Act = Callable[[Any], dict[str, Any]]
"""Returns the outputs for observations ``[K, n, ...]``, ``[K, n, ...]`` by name."""


def random_actions(worlds: int, agents: GroupDescription) -> Act:
    """Return a function that draws actions."""
    random = np.random.default_rng(0)
    shape = (worlds, agents.n_agents)
    return lambda _: {"action": random.integers(0, agents.n_actions, shape)}


def network_actions(policy: Any) -> Act:
    """Return a function that samples from the network of ``make_policy``."""
    network = policy[0].module

    @torch.no_grad()
    def act(observed: Any) -> dict[str, Any]:
        # JAX's arrays are read-only, which torch.from_numpy warns about.
        logits = network(torch.tensor(observed))
        gumbel = torch.empty_like(logits).exponential_().log_().neg_()
        action = gumbel.add_(logits).argmax(-1)
        chances = logits.log_softmax(-1).gather(-1, action[..., None])
        return {
            "action": action.numpy(),
            "logits": logits.numpy(),
            "action_log_prob": chances[..., 0].numpy(),
        }

    return act


def bare_loop(
    stock: Any, description: EnvDescription, worlds: int, act: Act
) -> Callable[[], float]:
    """Return a call that fills one batch ``[FRAMES, K]``.

    Args:
        stock: the library's worlds, with ``begin`` and ``advance``.
        description: of one world, with one group.
        worlds: K.
        act: returns actions, and what else is stored.
    """
    ((group, agents),) = description.groups.items()
    row = description.row()
    keys = [key for key in row if key[-1] not in ("reward", "action")]
    shape = (FRAMES, worlds)
    memory: dict[Any, Any] = {
        (prefix, *key): np.zeros((*shape, *row[key].shape), row[key].dtype)
        for prefix in ("root", "next")
        for key in keys
    }
    reward = np.zeros((*shape, agents.n_agents, 1), np.float32)
    ids = np.zeros(shape, np.int64)
    names = [key[1:] for key in memory if key[0] == "next"]
    done_keys = [key for key in names if key[-1] in ("done", "terminated")]
    truncated_keys = [key for key in names if key[-1] == "truncated"]
    observation, mask = (group, "observation"), (group, "mask")
    seeds = np.zeros(worlds, np.int64)
    episode = np.zeros(worlds, np.int64)
    observed = stock.begin(None, seeds)
    outputs = {
        name: np.zeros((FRAMES, *values.shape), values.dtype)
        for name, values in act(observed).items()
    }

    def call() -> float:
        nonlocal observed
        root, following = (
            {key[1:]: array for key, array in memory.items() if key[0] == prefix}
            for prefix in ("root", "next")
        )
        for frame in range(FRAMES):
            policy_outputs = act(observed)
            for name, values in policy_outputs.items():
                outputs[name][frame] = values
            root[observation][frame] = observed
            root[mask][frame] = True
            for key in (*done_keys, *truncated_keys):
                root[key][frame] = False
            ids[frame] = episode
            observed, reward[frame, ..., 0], over = stock.advance(
                policy_outputs["action"]
            )
            following[observation][frame] = observed
            following[mask][frame] = ~over[:, None]
            for key in truncated_keys:
                following[key][frame] = False
            for key in done_keys:
                target = following[key][frame]
                target[...] = over.reshape(worlds, *([1] * (target.ndim - 1)))
            if over.any():
                episode[over] += 1
                first = stock.begin(over, seeds)
                observed = np.where(over[:, None, None], first, observed)
        return float(FRAMES * worlds)

    return call


def collect(
    stack: ExitStack,
    factory: Callable[[], BatchedEnv],
    worlds: int,
    policy: Any = None,
    **keywords: Any,
) -> Alternative:
    """Return our collector."""
    collector = stack.enter_context(
        Collector(
            factory,
            policy,
            frames_per_batch=FRAMES * worlds,
            total_frames=-1,
            seed=0,
            **keywords,
        )
    )
    return Alternative(lambda: float(_frames(collector.next())))


def _frames(batch: Any) -> int:
    """Return the number of frames, without those that pad trajectories."""
    padded = "mask" in batch["collector"].keys()
    return int(batch["collector", "mask"].sum()) if padded else batch.numel()


def batches(
    stack: ExitStack,
    factory: Callable[[], BatchedEnv],
    stock: Callable[[], Any],
    *,
    network: bool,
    torchrl: Callable[[EnvDescription], Any] | None = None,
    on_device: Callable[[], BatchedEnv] | None = None,
) -> dict[str, Alternative]:
    """Return the bare loop, our collector, and TorchRL's.

    Args:
        stack: closes what is started.
        factory: builds our environment, with one group.
        stock: builds the library's worlds.
        network: whether a network acts, and not chance.
        torchrl: builds TorchRL's environment, with the groups of the description.
        on_device: builds our environment with tensors of a device.
    """
    env = factory()
    description, worlds = env.description, env.worlds
    env.close()
    (agents,) = description.groups.values()
    policy, act = None, random_actions(worlds, agents)
    if network:
        policy = make_policy(factory, num_cells=(64, 64))
        act = network_actions(policy)
    systems = {
        "bare loop": Alternative(bare_loop(stock(), description, worlds, act)),
        "Collector": collect(stack, factory, worlds, policy),
    }
    if on_device is not None:
        systems["Collector, on a device"] = collect(stack, on_device, worlds, policy)
    if torchrl is not None:
        from torchrl.collectors import Collector as TheirCollector

        theirs: Any = TheirCollector(
            torchrl(description),
            policy,
            frames_per_batch=FRAMES * worlds,
            total_frames=-1,
        )
        stack.callback(theirs.shutdown)
        stream = iter(theirs)
        systems["TorchRL"] = Alternative(lambda: float(next(stream).numel()))
    return systems


def free(
    stack: ExitStack, worlds: int, ends: str, *, network: bool
) -> dict[str, Alternative]:
    """Return both systems with the simulator that costs nothing."""
    ours, stock = partial(FreeWorlds, worlds, ends), partial(StockFree, worlds, ends)
    return batches(stack, ours, stock, network=network)


def vmas(stack: ExitStack, scenario: str, worlds: int) -> dict[str, Alternative]:
    """Return the three systems with a VMAS scenario and a network."""
    from marl_collect.envs import VmasEnv

    ours = partial(VmasEnv, scenario, worlds, **DISCRETE)
    return batches(
        stack,
        ours,
        partial(StockVmas, scenario, worlds),
        network=True,
        torchrl=partial(torchrl_vmas, scenario, worlds),
        on_device=partial(ours, device="cpu"),
    )


def torchrl_vmas(
    scenario: str, worlds: int, ours: EnvDescription, device: str = "cpu"
) -> Any:
    """Return TorchRL's environment of a VMAS scenario, with the groups of ours."""
    from torchrl.envs import VmasEnv

    return VmasEnv(
        scenario=scenario,
        num_envs=worlds,
        device=device,
        group_map=ours.group_map,
        seed=0,
        **DISCRETE,
    )


def jaxmarl(
    stack: ExitStack, task: str, worlds: int, *, network: bool
) -> dict[str, Alternative]:
    """Return the bare compiled loop, and our collector, with a JaxMARL task."""
    from marl_collect.envs import JaxMarlEnv

    ours, stock = partial(JaxMarlEnv, task, worlds), partial(StockJaxMarl, task, worlds)
    tensors = partial(ours, device="cpu")
    return batches(stack, ours, stock, network=network, on_device=tensors)


def trajectories(stack: ExitStack, worlds: int, ends: str) -> dict[str, Alternative]:
    """Return our collector with batches ``[K, T]`` and with whole trajectories."""
    factory = partial(FreeWorlds, worlds, ends)
    forms = {
        f"trajs_per_batch={worlds}, {form}": collect(
            stack, factory, worlds, trajs_per_batch=worlds, traj_format=form
        )
        for form in ("cat", "padded")
    }
    return {"plain batches": collect(stack, factory, worlds), **forms}


def cases() -> list[Case]:
    """Return a row for each number of worlds, way to act and way to end."""
    work = "frame of a world"
    steps = [
        Case(
            f"{worlds} worlds, {acting}, {ends}",
            partial(free, worlds=worlds, ends=ends, network=acting == "network"),
            work,
        )
        for acting, endings in (("random actions", ENDS), ("network", ENDS[1:2]))
        for ends in endings
        for worlds in WORLDS
    ]
    collectors = [
        Case(
            f"{worlds} worlds, trajectories, {ends}",
            partial(trajectories, worlds=worlds, ends=ends),
            work,
        )
        for ends in ENDS[1:]
        for worlds in (64, 1024)
    ]
    # Worlds of balance end one by one.
    simulated = [("simple_spread", 1024)]
    simulated += [(name, k) for name in ("navigation", "balance") for k in WORLDS[3:]]
    scenarios = [
        Case(
            f"vmas/{scenario}, {worlds} worlds, network",
            partial(vmas, scenario=scenario, worlds=worlds),
            work,
        )
        for scenario, worlds in simulated
    ]
    spread = "MPE_simple_spread_v3"
    compiled = [
        Case(
            f"jaxmarl/{spread}, {worlds} worlds, {acting}",
            partial(jaxmarl, task=spread, worlds=worlds, network=acting == "network"),
            work,
        )
        for acting in ("random actions", "network")
        for worlds in WORLDS[3:]
    ]
    return [*steps, *collectors, *scenarios, *compiled]
