"""Every space of Gymnasium is right in batches and policies, or refused by name."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pettingzoo")

from pettingzoo import ParallelEnv
from support.zoo import Script, ScriptedEnv

from marl_collect import Collector, RandomPolicy
from marl_collect.envs import PettingZooWrapper
from marl_collect.models import make_critic, make_policy

torch = pytest.importorskip("torch")

STEPS = 3
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
SEEDS = st.integers(0, 2**16)
FLOATS = [np.float16, np.float32, np.float64]
INTEGERS = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64]


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    shape = draw(SHAPES)
    dtype: Any = draw(st.sampled_from([*FLOATS, *INTEGERS, np.bool_]))
    kind = np.dtype(dtype).kind
    if kind == "b":
        return spaces.Box(0, 1, shape, dtype)
    low: Any
    high: Any
    low, high = draw(st.sampled_from([(-1, 1), (0, 5), (2, 2), (-9, 0)]))
    if kind == "u":
        low, high = abs(low), abs(low) + abs(high)
    if kind == "f":
        ends = [(low, high), (-np.inf, np.inf), (low, np.inf)]
        low, high = draw(st.sampled_from(ends))
    return spaces.Box(low, high, shape, dtype)


def counts(most: int) -> st.SearchStrategy[Any]:
    sizes = st.lists(st.integers(1, most), min_size=1, max_size=3)
    flat = sizes.map(np.array)
    return st.one_of(flat, flat.map(lambda n: np.stack([n, n])))


LEAVES: st.SearchStrategy[Any] = st.one_of(
    boxes(),
    boxes(),
    st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, counts(4)),
    counts(3).map(lambda n: spaces.MultiBinary(n.ravel().tolist())),
    st.integers(1, 3).map(spaces.MultiBinary),
)


def dict_of(parts: Any) -> spaces.Dict:
    """Return a Dict space; its keys may be integers, unlike its annotations."""
    return spaces.Dict(parts)


STRANGE: st.SearchStrategy[Any] = st.sampled_from(
    [
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
        spaces.Box(-1, 1, (2,), np.longdouble),
        dict_of({0: spaces.Discrete(2), "0": spaces.Discrete(2)}),
    ]
)
NAMES = st.sampled_from(["a", "b", "a.b", "x/y", "observation", "done", "", 0, 1, 10])


def nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES, parts, max_size=3).map(dict_of),
        st.lists(parts, max_size=3).map(spaces.Tuple),
    )


SPACES = st.recursive(LEAVES, nested, max_leaves=4)


class Checked(ParallelEnv):
    """Two agents that observe samples, and whose actions must be in their space."""

    metadata = {"name": "checked_v0"}
    possible_agents = ["agent_0", "agent_1"]

    def __init__(self, observed: Any, acted: Any, seed: int) -> None:
        self.observed, self.acted = observed, acted
        self.received: list[Any] = []
        observed.seed(seed)
        self.shown = [
            {agent: observed.sample() for agent in self.possible_agents}
            for _ in range(STEPS + 1)
        ]

    def observation_space(self, agent: str) -> Any:
        return self.observed

    def action_space(self, agent: str) -> Any:
        return self.acted

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents, self.steps = self.possible_agents, 0
        return self.shown[0], {}

    def step(self, actions: Any) -> Any:
        for action in actions.values():
            assert self.acted.contains(action), (self.acted, action)
        self.received.append(dict(actions))
        self.steps += 1
        over = self.steps == STEPS
        self.agents = [] if over else self.possible_agents
        flags = dict.fromkeys(actions, over)
        return (
            self.shown[self.steps],
            dict.fromkeys(actions, 1.0),
            flags,
            dict.fromkeys(actions, False),
            {},
        )


def arrays_of(value: Any, space: Any, key: tuple[str, ...]) -> Iterator[Any]:
    """Yield key and array of each leaf of a value."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from arrays_of(value[name], part, (*key, str(name)))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from arrays_of(value[index], part, (*key, str(index)))
    else:
        yield key, np.asarray(value)


def starts_of(space: Any) -> Iterator[Any]:
    """Yield the smallest number of each leaf of a space of actions."""
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            yield from starts_of(part)
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            yield from starts_of(part)
    else:
        yield getattr(space, "start", 0)


def collect(env: Checked, policy: Any) -> None:
    """Collect an episode, and compare what is observed."""
    with Collector(
        lambda: PettingZooWrapper(env), policy, frames_per_batch=STEPS, seed=0
    ) as collector:
        batch = collector.next()[0]
    for step in range(STEPS):
        for where, frame in (((), step), (("next",), step + 1)):
            for row, agent in enumerate(env.possible_agents):
                shown = env.shown[frame][agent]
                key = (*where, "agent", "observation")
                for leaf, array in arrays_of(shown, env.observed, key):
                    stored = batch[leaf][step, row].numpy()
                    assert np.array_equal(stored, array), leaf
                    assert stored.dtype == array.dtype, leaf
    # What the environment got does not change later.
    for step, actions in enumerate(env.received[-STEPS:]):
        for row, agent in enumerate(env.possible_agents):
            taken = arrays_of(actions[agent], env.acted, ("agent", "action"))
            for (leaf, array), first in zip(taken, starts_of(env.acted), strict=True):
                stored = batch[leaf][step, row].numpy()
                assert np.array_equal(stored, array - first), leaf
    assert batch["next", "done"].ravel().tolist() == [False] * (STEPS - 1) + [True]


PLAIN = spaces.Box(-1, 1, (2,), np.float32)


@settings(max_examples=80)
@given(space=SPACES, seed=SEEDS)
def test_observations(space: Any, seed: int) -> None:
    env = Checked(space, spaces.Discrete(3), seed)
    collect(env, RandomPolicy())
    arrays = arrays_of(env.shown[0]["agent_0"], space, ())
    if any(array.size for _, array in arrays):
        collect(env, make_policy(PettingZooWrapper(env), num_cells=(4,)))
        make_critic(PettingZooWrapper(env), num_cells=(4,))
        return
    for make in (make_policy, make_critic):
        with pytest.raises(TypeError, match="no network for agent/observation, which"):
            make(PettingZooWrapper(env))


@settings(max_examples=80)
@given(space=SPACES, seed=SEEDS)
def test_actions(space: Any, seed: int) -> None:
    env = Checked(PLAIN, space, seed)
    collect(env, RandomPolicy())
    try:
        policy = make_policy(PettingZooWrapper(env), num_cells=(4,))
    except (TypeError, ValueError) as error:
        assert "of group 'agent'" in str(error)  # noqa: PT017
        assert not _has_head(space)
        return
    assert _has_head(space)
    collect(env, policy)


def _has_head(space: Any) -> bool:
    """Whether ``make_policy`` is documented to have a head for the space."""
    if isinstance(space, spaces.Box):
        flat = len(space.shape) == 1 and space.dtype.kind == "f"
        return flat and bool((space.low < space.high).all())
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return len(space.shape) == 1
    return isinstance(space, spaces.Discrete)


@pytest.mark.parametrize("place", ["observation", "action"])
@settings(max_examples=30)
@given(space=st.one_of(STRANGE, nested(STRANGE).filter(lambda space: space.spaces)))
def test_spaces_without_arrays_are_refused_by_name(place: str, space: Any) -> None:
    both = (space, PLAIN) if place == "observation" else (PLAIN, space)
    env = Checked.__new__(Checked)
    env.observed, env.acted = both
    with pytest.raises((TypeError, ValueError), match=rf"agent_0/{place}.* has "):
        PettingZooWrapper(env)


def test_a_mask_alone_is_no_observation() -> None:
    masked = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    shown = {"action_mask": np.array([1, 0, 1], np.int8)}
    script = Script(
        action=spaces.Discrete(3), observation=masked, observe=lambda i, s, a: shown
    )
    with pytest.raises(TypeError, match="is empty.*action_mask=None"):
        make_policy(PettingZooWrapper(ScriptedEnv(script)))
    env = PettingZooWrapper(ScriptedEnv(script), action_mask=None)
    policy = make_policy(env, num_cells=(4,))
    with Collector(lambda: env, policy, frames_per_batch=10) as collector:
        batch = collector.next()
    seen = batch["agent", "observation", "action_mask"]
    assert (seen == torch.tensor([1, 0, 1])).all()


def test_floats_for_boolean_actions_are_refused() -> None:
    env = Checked(PLAIN, spaces.Box(0, 1, (2,), np.bool_), 0)
    key = ("agent", "action")

    def act(data: Any) -> Any:
        return data.set(key, torch.full((*data.batch_size, 2, 2), 0.3))

    with pytest.raises(TypeError, match="agent/action has dtype float32.*bool"):
        Collector(
            lambda: PettingZooWrapper(env), act, frames_per_batch=3, trust_policy=True
        )
