"""TensorDict methods, names of TorchRL and ``repr`` of environments; rows of data."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from workloads.counting import CountingEnv

from marl_collect import ParallelEnv, RandomPolicy, SerialEnv
from marl_collect.buffers.trajectories import split_trajectories
from marl_collect.core.groups import explicit_groups
from marl_collect.core.tensordicts import take_rows


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
        ("auto_register_info_dict", "info_keys="),
        ("set_info_dict_reader", "info_keys="),
        ("observation_keys", r"env\.description\.observed\(\)"),
    ],
)
def test_an_absent_attribute_names_its_replacement(name: str, advice: str) -> None:
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
    truncated = rollout(set_truncated=True)["next"]
    assert truncated["done"][-1].all()
    assert truncated["hunter", "done"][-1].all()
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
    interop = pytest.importorskip("marl_collect.interop.torchrl")
    pytest.importorskip("torchrl")
    spec = interop.to_torchrl(env).full_action_spec
    for actions in (env.action_space, spec):
        frames = env.rollout(8, RandomPolicy(actions), break_when_any_done=False)
        for key in env.action_keys:
            space = env.action_space[key[0]][key[1]]
            assert all(space.contains(a.numpy()) for a in frames[key])
    with pytest.raises(TypeError, match="a Gymnasium space or a TorchRL spec"):
        RandomPolicy(3)


def test_the_advice_names_what_exists() -> None:
    envs = pytest.importorskip("marl_collect.envs.pettingzoo.env")
    assert "info_keys" in inspect.signature(envs.PettingZooEnv).parameters
    assert ("hunter", "observation") in CountingEnv().description.observed()


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


def test_hidden_state_is_carried_and_cleared() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        hidden = td.get("hidden", torch.zeros(2, 1))
        td.set("hidden", hidden)
        td.set(("hunter", "action"), torch.zeros(2, 2, dtype=torch.int64))
        td.set(("prey", "action"), torch.zeros(2, 3, 2))
        return td.set(("next", "hidden"), hidden + 1)

    with SerialEnv(2, CountingEnv) as env:
        rollout = env.rollout(40, policy, break_when_any_done=False)
    steps = rollout["hunter", "observation"][..., 0, 1]
    alive = rollout["hunter", "mask"][..., 0]
    assert rollout["next", "done"].any()
    assert torch.equal(rollout["hidden"][..., 0][alive], steps[alive])


def test_fake_tensordict_has_the_keys_of_a_step() -> None:
    with CountingEnv() as env:
        fake = env.fake_tensordict()
        real = env.rand_step(env.reset())
        assert set(fake.keys(True, True)) == set(real.keys(True, True))
        for key in fake.keys(True, True):
            assert fake[key].shape == real[key].shape, key
            assert fake[key].dtype == real[key].dtype, key


def test_misuse_is_explained() -> None:
    with CountingEnv() as env:
        with pytest.raises(RuntimeError, match="reset"):
            env.rand_step()
        root = env.reset()
        with pytest.raises(KeyError, match="hunter/action"):
            env.step(root)
        env.rand_action(root)
        root["hunter", "action"] = torch.zeros(2, 1)
        with pytest.raises(ValueError, match=r"expected shape \[2\]"):
            env.step(root)
        root["hunter", "action"] = torch.full((2,), 0.9)
        with pytest.raises(TypeError, match="float32: expected integers, torch.int64"):
            env.step(root)
        steps: Any
        for steps, error in ((0, ValueError), (2.5, TypeError)):
            with pytest.raises(error, match="max_steps must be an integer"):
                env.rollout(steps)
        rollout = env.rollout(100)
        with pytest.raises(RuntimeError, match="is over"):
            env.rand_step(rollout[-1].exclude("next"))
    with SerialEnv(2, [CountingEnv, partial(CountingEnv, min_length=15)]) as envs:
        rollout = envs.rollout(30)
        with pytest.raises(RuntimeError, match="The episode of environment 0 is over"):
            envs.rand_step(rollout[:, -1].exclude("next"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_rows_are_those_of_an_index(dtype: torch.dtype) -> None:
    names = [None, "time"]
    group = {"observation": torch.randint(0, 256, (7, 5, 3, 4)).to(dtype)}
    data = TensorDict(
        {
            "agents": TensorDict(group, [7, 5, 3], names=[*names, None]),
            "done": torch.rand(7, 5, 1) < 0.5,
        },
        [7, 5],
        names=names,
    )
    rows = torch.tensor([6, 0, 6])
    actual, expected = take_rows(data, rows), data[rows]
    assert actual.names == expected.names
    assert actual["agents"].names == expected["agents"].names
    assert actual["agents"].batch_size == (3, 5, 3)
    for key in ("done", ("agents", "observation")):
        assert torch.equal(actual[key], expected[key])
    actual["agents", "observation"].zero_()
    assert data["agents", "observation"].any()


def test_texts_and_lazy_stacks_are_split_into_trajectories() -> None:
    def rollout(first: int) -> TensorDict:
        ids = torch.tensor([0, 0, 1, 1, 1]) + first
        done = torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool)[:, None]
        texts = NonTensorStack(*(NonTensorData(str(frame)) for frame in range(5)))
        content = {"value": torch.rand(5, 1) + 1, "text": texts, "next": {"done": done}}
        return TensorDict({**content, "collector": {"traj_ids": ids}}, [5])

    rollouts = [rollout(0), rollout(2)]
    out = split_trajectories(LazyStackedTensorDict(*rollouts, stack_dim=0))
    assert out.shape == (4, 3)
    assert out["text"][1] == ["2", "3", "4"]
    assert torch.equal(out["value"][3], rollouts[1]["value"][2:])
    assert torch.equal(out["value"][2, :2], rollouts[1]["value"][:2])
    assert not out["value"][2, 2].any()


def test_repr_has_the_name_and_the_groups() -> None:
    env = CountingEnv()
    name = env.description.name
    groups = ", ".join(f"{g} x {o.n_agents}" for g, o in env.description.groups.items())
    assert "hunter x 2" in groups
    assert repr(env) == f'CountingEnv("{name}": {groups})'
    env.close()
    assert repr(env) == f'CountingEnv("{name}": {groups}, closed)'


@pytest.mark.processes
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_repr_of_a_batch_has_the_number_of_environments(kind: Any) -> None:
    env_text = repr(CountingEnv()).removeprefix("CountingEnv(").removesuffix(")")
    with kind(3, CountingEnv) as env:
        assert repr(env) == f"{kind.__name__}(3 x {env_text})"
    assert repr(env) == f"{kind.__name__}(3 x {env_text}, closed)"


@pytest.mark.parametrize("kind", [CountingEnv, SerialEnv, ParallelEnv])
def test_an_environment_that_was_not_built_has_a_repr(kind: Any) -> None:
    assert repr(object.__new__(kind)) == f"{kind.__name__}(not started)"


def test_repr_of_a_pettingzoo_environment_has_its_task() -> None:
    pytest.importorskip("pettingzoo.sisl.multiwalker_v9")
    from marl_collect.envs import PettingZooEnv

    with PettingZooEnv("multiwalker_v9") as env:
        assert repr(env) == 'PettingZooEnv("multiwalker_v9": walker x 3)'
