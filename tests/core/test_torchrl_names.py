"""TensorDict methods, names of TorchRL and ``repr`` of environments; rows of data."""

import random
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

from marl_collect import Collector, ParallelEnv, RandomPolicy, SerialEnv
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
    with pytest.raises(KeyError, match="use reward_keys"):
        _ = env.reward_key
    alone = CountingEnv(n_prey=0)
    assert alone.action_key == ("hunter", "action")
    assert alone.reward_key == ("hunter", "reward")


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


def act(td: TensorDictBase) -> TensorDictBase:
    """Act by what is observed; the state counts the frames of each episode."""
    hidden = td.get("hidden", torch.zeros(*td.batch_size, 1))
    td.set("hidden", hidden)
    numbers = td["hunter", "observation"].long().sum(-1)
    if ("hunter", "action_mask") in td.keys(True):
        ranks = (torch.arange(4) + numbers[..., None]) % 4 + 1
        numbers = (ranks * td["hunter", "action_mask"]).argmax(-1)
    td["hunter", "action"] = numbers % 4
    if "prey" in td.keys():
        td["prey", "action"] = td["prey", "observation"][..., :2].frac()
    return td.set(("next", "hidden"), hidden + 1)


def step_by_step(env: Any, frames: int, seed: int) -> Any:
    """Return frames of single steps; what is done begins anew."""
    root, taken = env.reset(seed=seed), []
    for _ in range(frames):
        frame = env.step(act(root))
        taken.append(frame.clone())
        root = env.step_mdp(frame)
        over = root["done"].clone()
        assert not {"action", "reward"} & {key[-1] for key in root.keys(True)}
        if over.any():
            hidden = torch.where(over, 0, root["hidden"])
            root = env.reset(root.set("_reset", over)).set("hidden", hidden)
    return torch.stack(taken, len(env.batch_size))


@pytest.mark.parametrize("seed", range(12))
def test_all_ways_to_step_have_the_frames_of_a_collector(seed: int) -> None:
    draw = random.Random(seed)
    names = ("action_mask", "state", "episode_reward", "done_on_any", "deaths", "mask")
    options: dict[str, Any] = {name: draw.random() < 0.5 for name in names}
    options |= {"mask": True} if not options["done_on_any"] else {}
    options |= {"n_hunters": draw.randint(1, 3), "n_prey": draw.randint(0, 2)}
    lengths = [draw.randint(3, 9) for _ in range(draw.randint(1, 3))]
    makes = [
        partial(CountingEnv, **options, max_length=n, min_length=3) for n in lengths
    ]
    size: Any = {"frames_per_batch": 40 * len(makes), "total_frames": -1}
    with Collector(makes, act, seed=seed, trust_policy=True, **size) as collector:
        expected = collector.next()
    with makes[0]() if len(makes) == 1 else SerialEnv(len(makes), makes) as env:
        expected = expected if env.batch_size else expected[0]
        env.set_seed(seed)
        rolled = env.rollout(40, act, break_when_any_done=False)
        assert rolled["next", "done"].sum() > 3 * len(makes)
        stepped = step_by_step(env, 40, seed)
        fake = env.fake_tensordict()
    for frames in (rolled, stepped):
        for key in frames.keys(True, True):
            assert torch.equal(frames[key], expected[key]), key
    missing = {*expected.keys(True, True)} - {*rolled.keys(True, True)}
    assert missing == {("collector", "traj_ids")}
    for key in fake.keys(True, True):
        frame = rolled[key].select(-1 - (rolled[key].ndim - 1 - len(env.batch_size)), 0)
        assert (fake[key].shape, fake[key].dtype) == (frame.shape, frame.dtype), key
    hidden = {"hidden", ("next", "hidden")}
    assert {*rolled.keys(True, True)} - {*fake.keys(True, True)} == hidden


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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        (lambda env: env(), '"counting": hunter x 2, prey x 3'),
        (partial(SerialEnv, 3), '3 x "counting": hunter x 2, prey x 3'),
        (partial(ParallelEnv, 3), '3 x "counting": hunter x 2, prey x 3'),
    ],
)
def test_repr_has_the_name_and_the_groups(kind: Any, inside: str) -> None:
    with kind(CountingEnv) as env:
        name = type(env).__name__
        assert repr(env) == f"{name}({inside})"
    assert repr(env) == f"{name}({inside}, closed)"


@pytest.mark.parametrize("kind", [CountingEnv, SerialEnv, ParallelEnv])
def test_an_environment_that_was_not_built_has_a_repr(kind: Any) -> None:
    assert repr(object.__new__(kind)) == f"{kind.__name__}(not started)"


def test_repr_of_a_pettingzoo_environment_has_its_task() -> None:
    pytest.importorskip("pettingzoo.sisl.multiwalker_v9")
    from marl_collect.envs import PettingZooEnv

    with PettingZooEnv("multiwalker_v9") as env:
        assert repr(env) == 'PettingZooEnv("multiwalker_v9": walker x 3)'
