"""Batches of simulators of many worlds, and bare loops over them.

Both sides store the same arrays, at the root and under ``next``; the bare loop writes
whole frames ``[K, ...]`` one after the other. It knows neither episodes nor returns.

The first rows have a simulator that costs nothing: each world has three agents that
observe 18 numbers and take one of five actions at random. The bare loop draws all
actions from one generator. The rows differ in the number of worlds and in how episodes
end; divide the times by each other to get the curve.

The other rows have VMAS and JaxMARL. Their bare loops call the library without our
adapter, and reset it as its users do. A network is the same for all systems, and draws
its actions; for VMAS, TorchRL's collector over its ``VmasEnv`` is measured, too.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import numpy as np
import torch
from gymnasium import spaces
from harness.turns import Alternative
from tensordict.nn import TensorDictModule
from torch import nn
from typing_extensions import override

from cases.case import Case
from marl_collect.collectors import Collector
from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription, GroupDescription

AGENTS, INPUTS, ACTIONS = 3, 18, 5
FRAMES = 64
"""Frames of each world in a batch."""
WORLDS = (1, 16, 64, 256, 1024, 4096)
CELLS = 64
"""Width of the network."""
PERIOD = 100
"""Steps of an episode that ends by its time limit, or on average if ends are random."""
ENDS = ("no ends", "1 % end per frame", "all end after 100 frames")


@final
class FreeWorlds(BatchedEnv):
    """Worlds with constant observations and rewards, which end as a table says."""

    def __init__(self, worlds: int, ends: str) -> None:
        """Prepare the table."""
        group = GroupDescription(
            tuple(f"agent_{i}" for i in range(AGENTS)),
            spaces.Box(-1, 1, (INPUTS,), np.float32),
            spaces.Discrete(ACTIONS),
        )
        limit = PERIOD if ends == ENDS[2] else None
        about = EnvDescription("free", {"agents": group}, time_limit=limit)
        super().__init__(about, worlds)
        chance = 1 / PERIOD if ends == ENDS[1] else 0.0
        self._ends = np.random.default_rng(0).random((97, worlds)) < chance
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

        self._env = vmas.make_env(
            scenario, worlds, continuous_actions=False, max_steps=PERIOD, seed=0
        )

    def begin(self, which: Any, seeds: Any) -> Any:
        """Begin episodes, and return the observations of all worlds."""
        del seeds
        if which is None or which.all():
            seen: Any = self._env.reset()
            return torch.stack(seen, 1).numpy()
        for world in np.flatnonzero(which).tolist():
            self._env.reset_at(world, return_observations=False)
        seen = self._env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )[0]
        return torch.stack(seen, 1).numpy()

    def advance(self, actions: Any) -> tuple[Any, Any, Any]:
        """Step all worlds; return observations, rewards and ends."""
        taken = torch.from_numpy(actions)[..., None]
        seen, rewards, done, _ = self._env.step(list(taken.unbind(1)))
        return torch.stack(seen, 1).numpy(), torch.stack(rewards, 1), done.numpy()


@final
class StockJaxMarl:
    """A JaxMARL task with one compiled step for all worlds, copied to the host."""

    def __init__(self, task: str, worlds: int) -> None:
        """Build the worlds."""
        import jax
        import jax.numpy as jnp
        import jaxmarl

        env = jaxmarl.make(task)

        def reset(seeds: Any) -> Any:
            keys = jax.vmap(lambda seed: jax.random.split(jax.random.PRNGKey(seed)))
            first, later = jnp.swapaxes(keys(seeds), 0, 1)
            seen, state = jax.vmap(env.reset)(first)
            return (later, state), jnp.stack([seen[a] for a in env.agents], 1)

        def step(worlds: Any, actions: Any) -> Any:
            keys, state = worlds
            later, now = jnp.swapaxes(jax.vmap(jax.random.split)(keys), 0, 1)
            by_agent = {a: actions[:, i] for i, a in enumerate(env.agents)}
            step_env = jax.vmap(env.step_env)
            seen, state, rewards, done, _ = step_env(now, state, by_agent)
            arrays = (jnp.stack([x[a] for a in env.agents], 1) for x in (seen, rewards))
            return (later, state), *arrays, done["__all__"]

        def renew(which: Any, new: Any, old: Any) -> Any:
            def chosen(a: Any, b: Any) -> Any:
                return jnp.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, b)

            return jax.tree.map(chosen, new, old)

        self._reset, self._step, self._renew = map(jax.jit, (reset, step, renew))
        self._seeds = np.arange(worlds, dtype=np.uint32)
        self._worlds: Any = None

    def begin(self, which: Any, seeds: Any) -> Any:
        """Begin episodes, and return the observations of all worlds."""
        del seeds
        self._seeds += len(self._seeds)
        new, seen = self._reset(self._seeds)
        self._worlds = new if which is None else self._renew(which, new, self._worlds)
        return np.asarray(seen)

    def advance(self, actions: Any) -> tuple[Any, Any, Any]:
        """Step all worlds; return observations, rewards and ends."""
        self._worlds, *arrays = self._step(self._worlds, actions)
        seen, rewards, over = map(np.asarray, arrays)
        return seen, rewards, over


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


@final
class Drawn(nn.Module):
    """Draws discrete actions of a small network; all agents share it."""

    def __init__(self, inputs: int, actions: int) -> None:
        """Build the network."""
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, CELLS), nn.Tanh()),
            *(nn.Linear(CELLS, CELLS), nn.Tanh()),
            nn.Linear(CELLS, actions),
        )

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions int64 ``[...]`` and their log-probabilities."""
        scores = self.layers(seen).log_softmax(-1)
        # The argument of the maximum of Gumbel noise is a draw of the softmax.
        action = (scores - torch.empty_like(scores).exponential_().log()).argmax(-1)
        return action, scores.gather(-1, action[..., None])[..., 0]

    def by_group(self, group: str) -> TensorDictModule:
        """Return the module on the keys of a group."""
        keys = [(group, "action"), (group, "log_prob")]
        return TensorDictModule(self, [(group, "observation")], keys)


Acts = Callable[[Any], tuple[Any, ...]]
"""Returns actions ``[K, n]``, and what else is stored, from observations."""


def bare_loop(stock: Any, description: EnvDescription, worlds: int, acts: Acts) -> Any:
    """Return a call that fills one batch ``[FRAMES, K]``.

    Args:
        stock: has ``begin`` and ``advance``.
        description: of one world, with one group.
        worlds: K.
        acts: returns actions.
    """
    ((group, agents),) = description.groups.items()
    row = description.row()
    keys = [key for key in row if key[-1] not in ("reward", "action")]
    shape = (FRAMES, worlds)
    memory: dict[Any, Any] = {
        (where, *key): np.zeros((*shape, *row[key].shape), row[key].dtype)
        for where in ("root", "next")
        for key in keys
    }
    action = np.zeros((*shape, agents.n_agents), np.int64)
    reward = np.zeros((*shape, agents.n_agents, 1), np.float32)
    ids = np.zeros(shape, np.int64)
    names = [key[1:] for key in memory if key[0] == "next"]
    ended = [key for key in names if key[-1] in ("done", "terminated")]
    cut = [key for key in names if key[-1] == "truncated"]
    observation, mask = (group, "observation"), (group, "mask")
    seeds = np.zeros(worlds, np.int64)
    episode = np.zeros(worlds, np.int64)
    observed = stock.begin(None, seeds)
    outputs = [np.zeros((FRAMES, *o.shape), o.dtype) for o in acts(observed)[1:]]

    def call() -> float:
        nonlocal observed
        root, following = (
            {key[1:]: array for key, array in memory.items() if key[0] == where}
            for where in ("root", "next")
        )
        for frame in range(FRAMES):
            chosen, *others = acts(observed)
            action[frame] = chosen
            for array, value in zip(outputs, others, strict=True):
                array[frame] = value
            root[observation][frame] = observed
            root[mask][frame] = True
            for key in (*ended, *cut):
                root[key][frame] = False
            ids[frame] = episode
            observed, reward[frame, ..., 0], over = stock.advance(chosen)
            following[observation][frame] = observed
            following[mask][frame] = ~over[:, None]
            for key in cut:
                following[key][frame] = False
            for key in ended:
                target = following[key][frame]
                target[...] = over.reshape(worlds, *([1] * (target.ndim - 1)))
            if over.any():
                episode[over] += 1
                first = stock.begin(over, seeds)
                observed = np.where(over[:, None, None], first, observed)
        return float(FRAMES * worlds)

    return call


def at_random(worlds: int, agents: int, actions: int) -> Acts:
    """Return what draws actions from one generator."""
    random = np.random.default_rng(0)
    return lambda _: (random.integers(0, actions, (worlds, agents)),)


def drawn(net: Drawn) -> Acts:
    """Return what draws the actions of a network."""

    def acts(observed: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            # JAX's arrays are read-only, which torch warns about.
            return tuple(out.numpy() for out in net(torch.tensor(observed)))

    return acts


def free(stack: ExitStack, worlds: int, ends: str) -> dict[str, Alternative]:
    """Return both systems with the simulator that costs nothing."""
    return batches(
        stack,
        partial(FreeWorlds, worlds, ends),
        partial(StockFree, worlds, ends),
        network=False,
    )


def batches(
    stack: ExitStack,
    factory: Callable[[], BatchedEnv],
    stock: Callable[[], Any],
    *,
    network: bool,
    torchrl: Callable[[], Any] | None = None,
) -> dict[str, Alternative]:
    """Return the bare loop, our collector, and TorchRL's.

    Args:
        stack: closes what is started.
        factory: builds our environment, with one group.
        stock: builds the library's worlds.
        network: whether a network acts, and not chance.
        torchrl: builds TorchRL's environment, with one group.
    """
    env = factory()
    ((group, agents),) = env.description.groups.items()
    worlds, actions = env.worlds, int(agents.n_actions)
    env.close()
    net = Drawn(int(agents.observation.shape[0]), actions)  # type: ignore[index]
    acts = drawn(net) if network else at_random(worlds, agents.n_agents, actions)
    frames: Any = {"frames_per_batch": FRAMES * worlds, "total_frames": -1}
    policy = net.by_group(group) if network else None
    collector = stack.enter_context(Collector(factory, policy, seed=0, **frames))
    found = {
        "bare loop": Alternative(bare_loop(stock(), env.description, worlds, acts)),
        "Collector": Alternative(lambda: float(collector.next().numel())),
    }
    if torchrl is not None:
        from torchrl.collectors import Collector as TheirCollector

        their_env = torchrl()
        (their_group,) = their_env.group_map
        theirs: Any = TheirCollector(their_env, net.by_group(their_group), **frames)
        stack.callback(theirs.shutdown)
        stream = iter(theirs)
        found["TorchRL"] = Alternative(lambda: float(next(stream).numel()))
    return found


def vmas(stack: ExitStack, scenario: str, worlds: int) -> dict[str, Alternative]:
    """Return the three systems with a VMAS scenario."""
    from marl_collect.envs import VmasEnv

    def theirs() -> Any:
        from torchrl.envs import VmasEnv as TheirVmasEnv

        return TheirVmasEnv(
            scenario=scenario,
            num_envs=worlds,
            continuous_actions=False,
            max_steps=PERIOD,
            seed=0,
        )

    return batches(
        stack,
        partial(VmasEnv, scenario, worlds, continuous_actions=False, max_steps=PERIOD),
        partial(StockVmas, scenario, worlds),
        network=True,
        torchrl=theirs,
    )


def jaxmarl(
    stack: ExitStack, task: str, worlds: int, *, network: bool
) -> dict[str, Alternative]:
    """Return the bare compiled loop, and our collector, with a JaxMARL task."""
    from marl_collect.envs import JaxMarlEnv

    return batches(
        stack,
        partial(JaxMarlEnv, task, worlds),
        partial(StockJaxMarl, task, worlds),
        network=network,
    )


def cases() -> list[Case]:
    """Return a row for each simulator, number of worlds, and way to end or to act."""
    work = "frame of a world"
    spread = "MPE_simple_spread_v3"
    return [
        *(
            Case(
                f"{worlds} worlds, {ends}",
                partial(free, worlds=worlds, ends=ends),
                work,
            )
            for ends in ENDS
            for worlds in WORLDS
        ),
        *(
            Case(
                f"vmas/{scenario}, 1024 worlds, network",
                partial(vmas, scenario=scenario, worlds=1024),
                work,
            )
            for scenario in ("navigation", "simple_spread")
        ),
        *(
            Case(
                f"jaxmarl/{spread}, 4096 worlds, {acts}",
                partial(jaxmarl, task=spread, worlds=4096, network=acts == "network"),
                work,
            )
            for acts in ("random actions", "network")
        ),
    ]
