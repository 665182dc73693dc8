"""TorchRL's attributes and arguments on environments, or errors that explain."""

import inspect
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict
from workloads.counting import CountingEnv

from marl_collect import RandomPolicy, SerialEnv
from marl_collect.core.groups import explicit_groups


def test_an_environment_has_torchrls_attributes() -> None:
    env = CountingEnv()
    groups = list(env.group_map)
    assert env.reward_keys == [(group, "reward") for group in groups]
    assert env.action_keys == [(group, "action") for group in groups]
    assert env.n_agents == sum(map(len, env.group_map.values()))
    assert env.batch_dims == 0
    assert SerialEnv(2, CountingEnv).batch_dims == 1
    assert env.device == torch.device("cpu")
    assert env.to("cpu") is env
    with pytest.raises(ValueError, match="policy_device and storing_device"):
        env.to("cuda")
    if len(groups) == 1:
        assert env.action_key == env.action_keys[0]
        assert env.reward_key == env.reward_keys[0]
    else:
        with pytest.raises(KeyError, match="use reward_keys"):
            _ = env.reward_key


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("full_action_spec", "action_space"),
        ("specs", "to_torchrl"),
        ("append_transform", "to_torchrl"),
        ("maybe_reset", "step_and_maybe_reset"),
        ("done_keys", "done"),
        ("state_dict", r"collector\.state_dict\(\)"),
    ],
)
def test_an_attribute_that_does_not_exist_names_its_replacement(
    name: str, advice: str
) -> None:
    with pytest.raises(AttributeError, match=rf"CountingEnv has no {name}.*{advice}"):
        getattr(CountingEnv(), name)
    batch = SerialEnv(2, CountingEnv)
    with pytest.raises(AttributeError, match=advice):
        getattr(batch, name)


def test_a_transformed_environment_names_to_torchrl() -> None:
    transforms = pytest.importorskip("torchrl.envs")
    with pytest.raises(AttributeError, match="to_torchrl"):
        transforms.TransformedEnv(CountingEnv(), transforms.StepCounter(5))


def test_reset_takes_a_seed() -> None:
    env = CountingEnv()
    env.set_seed(4)
    expected = env.rollout(6)
    first = env.reset(seed=4)
    assert (first == expected[0].select(*first.keys(True, True))).all()


def test_step_mdp_returns_the_following_root() -> None:
    env = CountingEnv()
    frame = env.rand_step(env.reset())
    root = env.step_mdp(frame)
    expected = frame["next"].exclude(*env.reward_keys)
    assert set(root.keys(True, True)) == set(expected.keys(True, True))
    assert (root == expected).all()
    for group in env.group_map:
        assert "action" not in root[group].keys()
        assert "reward" not in root[group].keys()


def rollout(**options: Any) -> Any:
    env = CountingEnv()
    env.set_seed(3)
    torch.manual_seed(0)
    return env.rollout(5, break_when_any_done=False, **options)


def test_rollout_takes_torchrls_options() -> None:
    expected = rollout()
    calls: list[Any] = []
    called = rollout(callback=lambda env, frame: calls.append((env, frame.clone())))
    assert (called == expected).all()
    assert (torch.stack([frame for _, frame in calls]) == expected).all()
    assert all(isinstance(env, CountingEnv) for env, _ in calls)
    lazy = rollout(return_contiguous=False)
    assert isinstance(lazy, LazyStackedTensorDict)
    assert (lazy == expected).all()
    out = torch.zeros_like(expected)
    assert rollout(out=out) is out
    assert (out == expected).all()
    assert (rollout(trust_policy=True) == expected).all()
    assert (rollout(auto_cast_to_device=True) == expected).all()
    with pytest.raises(ValueError, match="return_contiguous=False"):
        rollout(out=out, return_contiguous=False)


def test_random_policies_take_spaces_and_specs() -> None:
    env = CountingEnv()
    frames = env.rollout(8, RandomPolicy(env.action_space), break_when_any_done=False)
    for key in env.action_keys:
        space = env.action_space[key[0]][key[1]]
        assert all(space.contains(a.numpy()) for a in frames[key])
    interop = pytest.importorskip("marl_collect.interop.torchrl")
    pytest.importorskip("torchrl")
    spec = interop.to_torchrl(env).full_action_spec
    frames = CountingEnv().rollout(8, RandomPolicy(spec))
    for key in env.action_keys:
        assert all(
            env.action_space[key[0]][key[1]].contains(a.numpy()) for a in frames[key]
        )
    with pytest.raises(TypeError, match="a Gymnasium space or a TorchRL spec"):
        RandomPolicy(3)


def test_the_advice_names_what_exists() -> None:
    envs = pytest.importorskip("marl_collect.envs.pettingzoo.env")
    env = CountingEnv()
    for name in ("auto_register_info_dict", "set_info_dict_reader"):
        with pytest.raises(AttributeError, match="info_keys="):
            getattr(env, name)
    assert "info_keys" in inspect.signature(envs.PettingZooEnv).parameters
    with pytest.raises(AttributeError, match=r"env\.description\.observed\(\)"):
        getattr(env, "observation_keys")  # noqa: B009 - mypy knows that it is missing
    assert ("hunter", "observation") in env.description.observed()


@pytest.mark.parametrize("action_mask", [False, True])
def test_random_policies_draw_one_hot_rows(action_mask: bool) -> None:
    env = CountingEnv(n_prey=0, categorical_actions=False, action_mask=action_mask)
    policy = RandomPolicy(env.action_space)
    frames = env.rollout(50, policy, break_when_any_done=False)
    for key in env.action_keys:
        rows = frames[key]
        assert (rows.sum(-1) == 1).all()
        assert (rows.flatten(0, -2).sum(0) > 0).sum() > 1
        if action_mask:
            acts = frames[key[0], "mask"]
            assert frames[key[0], "action_mask"][acts][rows[acts].bool()].all()
    space = env.action_space["hunter"]["action"]
    assert space.contains(space.sample())
    assert not space.contains(space.sample() * 0)


def test_an_error_within_a_property_is_not_hidden() -> None:
    class Unfinished(CountingEnv):  # type: ignore[misc]
        @property
        def description(self) -> Any:
            unfinished: Any = self
            return unfinished.never_set

    with pytest.raises(AttributeError, match="no attribute 'never_set'"):
        _ = Unfinished().observation_space


def test_torchrls_group_maps_are_accepted() -> None:
    torchrl = pytest.importorskip("torchrl.envs")
    agents = ["a", "b"]
    for kind in torchrl.MarlGroupMapType:
        assert explicit_groups(kind, agents) == kind.get_group_map(agents)
