"""Every space of Gymnasium is right in batches and policies, or refused by name."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pettingzoo")

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


class Checked:
    """Two agents that observe samples, and whose actions must be in their space."""

    def __init__(self, observed: Any, acted: Any, seed: int = 0) -> None:
        observed.seed(seed)
        self.shown = [[observed.sample() for _ in range(2)] for _ in range(STEPS + 1)]
        self.observed, self.acted = observed, acted
        self.received: dict[tuple[int, int], Any] = {}
        spaces_of_both = {"observation": observed, "action": acted}
        self.script = Script(2, max_cycles=STEPS, observe=self.look, **spaces_of_both)

    def look(self, agent: int, step: int, action: Any) -> Any:
        if step:
            assert self.acted.contains(action), (self.acted, action)
            self.received[step - 1, agent] = action
        return self.shown[step][agent]

    def wrapped(self) -> PettingZooWrapper:
        return PettingZooWrapper(ScriptedEnv(self.script))


def arrays_of(value: Any, space: Any, key: tuple[str, ...]) -> Iterator[Any]:
    """Yield key and array of each leaf of a value, and where its space starts."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from arrays_of(value[name], part, (*key, str(name)))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from arrays_of(value[index], part, (*key, str(index)))
    else:
        yield key, np.asarray(value), getattr(space, "start", 0)


def collect(env: Checked, policy: Any) -> None:
    """Collect an episode, and compare what is observed."""
    with Collector(env.wrapped, policy, frames_per_batch=STEPS, seed=0) as collector:
        batch = collector.next()[0]
    for step in range(STEPS):
        for where, frame in (((), step), (("next",), step + 1)):
            for row, shown in enumerate(env.shown[frame]):
                key = (*where, "agent", "observation")
                for leaf, array, _ in arrays_of(shown, env.observed, key):
                    stored = batch[leaf][step, row].numpy()
                    assert np.array_equal(stored, array), leaf
                    assert stored.dtype == array.dtype, leaf
    # What the environment got does not change later.
    for (step, row), action in env.received.items():
        for leaf, array, first in arrays_of(action, env.acted, ("agent", "action")):
            stored = batch[leaf][step, row].numpy()
            assert np.array_equal(stored, array - first), leaf
    assert len(env.received) == 2 * STEPS
    assert batch["next", "done"].ravel().tolist() == [False] * (STEPS - 1) + [True]


PLAIN = spaces.Box(-1, 1, (2,), np.float32)


@settings(max_examples=80)
@given(space=SPACES, seed=SEEDS)
def test_observations(space: Any, seed: int) -> None:
    env = Checked(space, spaces.Discrete(3), seed)
    collect(env, RandomPolicy())
    arrays = arrays_of(env.shown[0][0], space, ())
    if any(array.size for _, array, _ in arrays):
        collect(env, make_policy(env.wrapped(), num_cells=(4,)))
        make_critic(env.wrapped(), num_cells=(4,))
        return
    for make in (make_policy, make_critic):
        with pytest.raises(TypeError, match="no network for agent/observation, which"):
            make(env.wrapped())


# An action of no numbers has a layer without weights.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@settings(max_examples=80)
@given(space=SPACES, seed=SEEDS)
def test_actions(space: Any, seed: int) -> None:
    env = Checked(PLAIN, space, seed)
    collect(env, RandomPolicy())
    try:
        policy = make_policy(env.wrapped(), num_cells=(4,))
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
    script = Script(observation=both[0], action=both[1])
    with pytest.raises((TypeError, ValueError), match=rf"agent_0/{place}.* has "):
        PettingZooWrapper(ScriptedEnv(script))


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
    env = Checked(PLAIN, spaces.Box(0, 1, (2,), np.bool_))
    key = ("agent", "action")

    def act(data: Any) -> Any:
        return data.set(key, torch.full((*data.batch_size, 2, 2), 0.3))

    with pytest.raises(TypeError, match="agent/action has dtype float32.*bool"):
        Collector(env.wrapped, act, frames_per_batch=3, trust_policy=True)
