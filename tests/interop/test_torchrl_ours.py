"""to_torchrl: our environments as TorchRL's."""

import importlib
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from drawn_envs import Drawn, Shape
from gymnasium import spaces
from support.far_device import FAR, pinned_for_far
from support.worlds import CountingWorlds
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    OneHot,
)
from torchrl.envs import EnvBase, StepCounter, TransformedEnv, check_env_specs
from workloads.counting import CountingEnv

from marl_collect import Collector, ParallelEnv, SerialEnv
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.tensordicts import flatten
from marl_collect.envs import MeltingpotEnv, PettingZooEnv
from marl_collect.interop.torchrl import TorchRLWrapper, to_torchrl
from marl_collect.interop.torchrl_specs import action_spec, observation_spec

PLAY_ON = {"break_when_any_done": False}
VARIANTS = [
    {},
    {"action_mask": True},
    {"action_mask": True, "categorical_actions": False, "n_prey": 0},
    {"state": True, "image": (6, 6, 3), "episode_reward": True, "mask": False},
    {"done_on_any": True, "n_hunters": 1},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(c) or "plain")
@pytest.mark.parametrize("size", [None, 3])
def test_an_environment_passes_check_env_specs(changes: Any, size: Any) -> None:
    env = to_torchrl(_build(changes, size))
    assert env.batch_size == (() if size is None else (size,))
    check_env_specs(env, seed=3)
    env.close()
    assert env.is_closed


REAL = {
    "torchrl": partial(ParallelEnv, 2, CountingEnv),
    "mpe2": partial(PettingZooEnv, "simple_tag_v3", max_cycles=8, return_state=True),
    "Box2D": partial(PettingZooEnv, "multiwalker_v9", agent_ids=True),
    "pettingzoo": partial(PettingZooEnv, "tictactoe_v3", parallel=False),
    "dmlab2d": partial(MeltingpotEnv, "collaborative_cooking__cramped", world_rgb=True),
}


@pytest.mark.processes
@pytest.mark.parametrize("library", REAL)
def test_real_environments_pass_check_env_specs(library: Any) -> None:
    pytest.importorskip(library, reason=f"needs {library}")
    env = to_torchrl(REAL[library]())
    check_env_specs(env, seed=1)
    env.close()


@pytest.mark.parametrize("size", [None, 2])
def test_the_same_seed_gives_the_same_episodes_in_both_libraries(size: Any) -> None:
    bridged, direct = to_torchrl(_build({}, size)), _build({}, size)
    bridged.set_seed(11)
    direct.set_seed(11)
    theirs = bridged.rollout(20, **PLAY_ON)
    actions = iter(theirs.select(*bridged.action_keys).unbind(-1))
    ours = direct.rollout(20, lambda td: td.update(next(actions)), **PLAY_ON)
    assert ours.get(("next", "done")).any()  # Resets, for one environment of the batch.
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        assert torch.equal(ours.get(key), theirs.get(key)), key


def test_worlds_give_the_data_of_single_environments() -> None:
    worlds = to_torchrl(CountingWorlds(3, action_mask=True))
    singles = to_torchrl(SerialEnv(3, partial(CountingEnv, action_mask=True)))
    assert worlds.batch_size == (3,)
    check_env_specs(worlds, seed=3)
    worlds.set_seed(11)
    singles.set_seed(11)
    actual = worlds.rollout(30, **PLAY_ON)
    actions = iter(actual.select(*worlds.action_keys).unbind(-1))
    expected = singles.rollout(30, lambda td: td.update(next(actions)), **PLAY_ON)
    assert actual["next", "done"].any(1).all()
    assert (actual == expected).all()
    root = worlds.reset()
    root["_step"] = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"steps all of its 3 worlds.*leave '_step'"):
        worlds.step(worlds.rand_action(root))
    worlds.close()


def test_random_actions_obey_the_action_mask() -> None:
    env = to_torchrl(CountingEnv(action_mask=True, deaths=False, n_hunters=4))
    frames = env.rollout(60, break_when_any_done=False)
    hunters = frames["hunter"]
    legal = hunters["action_mask"].gather(-1, hunters["action"].unsqueeze(-1))
    assert legal.all()
    assert not hunters["action_mask"].all()


def test_sums_of_rewards_begin_at_zero() -> None:
    env = to_torchrl(CountingEnv(episode_reward=True, n_prey=0, deaths=False))
    frames = env.rollout(40, break_when_any_done=False)["next", "hunter"]
    before = env.rollout(5)["hunter", "episode_reward"]
    assert not before[0].any()
    total = torch.zeros(2, 1)
    for frame in frames.unbind(0):
        total += frame["reward"]
        assert torch.equal(frame["episode_reward"], total)
        total *= ~frame["done"]


def test_spaces_are_converted_to_matching_specs() -> None:
    subspaces = {
        "bits": spaces.MultiBinary(3),
        "several": spaces.MultiDiscrete([2, 5]),
        "table": spaces.MultiDiscrete([[2, 3], [4, 5]]),  # type: ignore[list-item]
        "late": spaces.Discrete(3, start=4),
        "pixel": spaces.Box(0, 255, (2, 2), np.uint8),
        "high": spaces.Box(1.0, 2.0, (2,), np.float32),
        "low": spaces.Box(-2.0, -1.0, (2,), np.float32),
    }
    spec = observation_spec(_description(spaces.Dict(subspaces)), (3,))[
        "g", "observation"
    ]
    assert spec.shape == (3, 2)
    kinds = {name: type(leaf).__name__ for name, leaf in spec.items()}
    assert isinstance(spec["bits"], Binary)
    assert isinstance(spec["several"], MultiCategorical)
    assert kinds["table"].startswith("Bounded")
    assert spec["pixel"].dtype == torch.uint8
    assert spec["late"].space.high.unique().tolist() == [6]
    for name in ("high", "low"):
        assert spec[name].is_in(torch.zeros(3, 2, 2))  # The row of a dead agent.
    assert spec.is_in(spec.rand())


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (spaces.Discrete(4), Categorical),
        (spaces.MultiDiscrete([2, 3]), MultiCategorical),
        (spaces.MultiBinary(3), Binary),
        (spaces.Box(0.5, 1, (2,), np.float32), Bounded),
    ],
)
def test_actions_have_the_spec_of_their_space(action: Any, kind: Any) -> None:
    description = _description(spaces.Box(-1, 1, (2,)), action)
    spec = action_spec(description, ())["g", "action"]
    assert isinstance(spec, kind)
    # Other than observations, which are zeros for an absent agent.
    assert isinstance(action, spaces.Box) != spec.is_in(torch.zeros_like(spec.rand()))
    env = CountingEnv(categorical_actions=False)
    spec = action_spec(env.description, ())["hunter", "action"]
    assert isinstance(spec, OneHot)
    assert spec.shape == (2, 4)


def test_a_factory_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="Call the factory first"):
        to_torchrl(CountingEnv)  # type: ignore[arg-type]


def _build(changes: Any, size: Any) -> Any:
    if size is None:
        return CountingEnv(**changes)
    return SerialEnv(size, lambda: CountingEnv(**changes))


def _description(observation: Any, action: Any = None) -> Any:
    group = GroupDescription(("a", "b"), observation, action or spaces.Discrete(2))
    return EnvDescription("test", {"g": group})


def test_without_torchrl_errors_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrl"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "marl_collect.interop.torchrl")
    with pytest.raises(ImportError, match=r'pip install "marl-collect\[torchrl\]"'):
        importlib.import_module("marl_collect.interop.torchrl")


def test_rendering_and_attributes_reach_the_inner_environment() -> None:
    counting: Any = CountingEnv()
    counting.difficulty = 7
    env = TransformedEnv(to_torchrl(counting), StepCounter())
    env.reset()
    picture = env.render()
    assert picture.dtype == np.uint8
    assert (picture == counting.render()).all()
    assert env.difficulty == 7
    with pytest.raises(AttributeError, match="easiness"):
        env.easiness  # noqa: B018 - does not exist
    with pytest.raises(ValueError, match="mode must be 'rgb_array'"):
        env.render("human")
    several = to_torchrl(SerialEnv(2, CountingEnv))
    several.reset()
    assert several.render().shape == (2, *picture.shape)
    blind = to_torchrl(PettingZooEnv("simple_spread_v3"))
    with pytest.raises(ValueError, match="renders no pictures"):
        blind.render()


@pytest.mark.parametrize("worlds", [(), (3,)])
def test_a_call_is_one_pinned_copy_each_way(
    monkeypatch: pytest.MonkeyPatch, worlds: tuple[int, ...]
) -> None:
    keywords: Any = {"frames_per_batch": 24, "seed": 5}
    shape = Shape(worlds)
    with Collector(lambda: TorchRLWrapper(Drawn(shape)), **keywords) as one:
        expected = [one.next().clone() for _ in range(3)]
    calls = 0

    def counted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(EnvBase, "reset", counted(EnvBase.reset))
    monkeypatch.setattr(Drawn, "_step", counted(Drawn._step))
    with (
        pinned_for_far(monkeypatch) as far,
        Collector(lambda: TorchRLWrapper(Drawn(shape, FAR)), **keywords) as two,
    ):
        for batch in expected:
            calls = 0
            far.sent.clear()
            far.received.clear()
            actual = flatten(two.next())
            for key, value in flatten(batch).items():
                assert torch.equal(actual[key], value), key
            # TorchRL checks a few flags by itself, without pinned memory.
            assert sum(copy.pinned for copy in far.received) == calls
            assert sum(copy.pinned for copy in far.sent) <= calls
