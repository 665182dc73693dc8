"""TorchRL's environments as ours, and its loss of QMIX with our batches."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential

pytest.importorskip("torchrl")

from gymnasium import spaces
from support.torch_worlds import random_batch
from tensordict import TensorDict
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    LazyTensorStorage,
    MultiOneHot,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import (
    EnvBase,
    PendulumEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VmasEnv,
)
from torchrl.modules import QValueModule
from torchrl.objectives import SoftUpdate
from torchrl.objectives.multiagent import QMixerLoss
from workloads.counting import CountingEnv

from marl_collect import Collector, ParallelEnv, check_env
from marl_collect.core.seeding import episode_seed
from marl_collect.interop.torchrl import TorchRLWrapper, to_torchrl
from marl_collect.interop.torchrl_specs import space_of
from marl_collect.models import MultiAgentMLP, QMixer


class LampsEnv(EnvBase):
    """Two agents with lamps, whose states come from torch's global generator.

    Agent ``i`` is done after ``i + 3`` steps but still has observations and rewards.
    """

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        lamp = Unbounded((2, 3))
        mask = Binary(shape=(2, 4), dtype=torch.bool)
        agents = Composite(lamp=lamp, action_mask=mask, shape=(2,))
        self.observation_spec = Composite(agents=agents, clock=Bounded(0, 9, (1,)))
        self.action_spec = Composite(
            agents=Composite(action=Categorical(4, (2,)), shape=(2,))
        )
        flag = Composite(done=Categorical(2, (2, 1), dtype=torch.bool), shape=(2,))
        reward = Unbounded((1,)) if shared else Unbounded((2, 1))
        self.reward_spec = (
            Composite(reward=reward)
            if shared
            else Composite(agents=Composite(reward=reward, shape=(2,)))
        )
        self.done_spec = Composite(
            agents=flag, done=Categorical(2, (1,), dtype=torch.bool)
        )

    def _set_seed(self, seed: int) -> None:
        """Do nothing: all random numbers come from torch's global generator."""

    def _frame(self) -> Any:
        legal = torch.ones(2, 4, dtype=torch.bool)
        done = self.steps >= torch.tensor([[3], [4]])
        legal[~done[:, 0], self.steps % 4] = False
        out = TensorDict(clock=torch.tensor([float(self.steps)]), done=done.all(0))
        agents = TensorDict(
            lamp=torch.rand(2, 3), action_mask=legal, done=done, batch_size=[2]
        )
        return out.set("agents", agents)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> Any:
        self.steps = 0
        return self._frame()

    def _step(self, tensordict: TensorDictBase) -> Any:
        action = tensordict["agents", "action"]
        assert tensordict["agents", "action_mask"].gather(-1, action[:, None]).all()
        self.steps += 1
        frame = self._frame()
        reward = action[:, None].float() + 1
        if self.shared:
            return frame.set("reward", reward.sum(0))
        return frame.set(("agents", "reward"), reward)


class RootEndsEnv(LampsEnv):
    """The root is terminated after three steps; the agents' own flags stay False."""

    def _frame(self) -> Any:
        frame = super()._frame()
        for flag in ("done", "terminated"):
            frame["agents", flag] = torch.zeros(2, 1, dtype=torch.bool)
            frame[flag] = torch.tensor([self.steps >= 3])
        return frame


class Counts(EnvBase):
    """Counts steps in its rewards, wherever they are, and ends after five."""

    difficulty = 7

    def __init__(self, *, action: Any, observation: Any, **specs: Any) -> None:
        super().__init__()
        self.action_spec = action
        self.observation_spec = observation
        self.reward_spec = specs.get("reward", Unbounded((1,)))
        if "done" in specs:
            self.full_done_spec = specs["done"]

    def hello(self, name: str) -> str:
        return f"hello {name}"

    def _set_seed(self, seed: int) -> None:
        """Do nothing: nothing is random."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> Any:
        self.steps = 0
        return self.observation_spec.zero().update(self.full_done_spec.zero())

    def _step(self, tensordict: TensorDictBase) -> Any:
        for key in self.action_keys:
            assert self.full_action_spec[key].is_in(tensordict[key])
        self.steps += 1
        rewards = self.full_reward_spec.zero().apply(lambda zero: zero + self.steps)
        flags = self.full_done_spec.zero().named_apply(
            lambda name, zero: zero + (self.steps == 5 and name != "truncated")
        )
        return self.observation_spec.zero().update(rewards).update(flags)


def one_agent(
    flags: Any = (), dtype: Any = torch.bool, rewards: Any = (("team", "gain"),)
) -> Counts:
    """Return an environment whose reward and flags have other keys and dtypes."""
    flag = Unbounded((1,), dtype=dtype)
    if dtype == torch.bool:
        flag = Categorical(2, (1,), dtype=dtype)
    names = ("done", "terminated", "truncated")
    return Counts(
        action=Bounded(-1, 1, (2,)),
        observation=Composite(seen=Unbounded((3,))),
        reward=Composite({key: Unbounded((1,)) for key in rewards}),
        done=Composite({(*flags, name): flag.clone() for name in names}),
    )


def two_agents(**nested: bool) -> Counts:
    """Return an environment whose entries are each at the root, or in a group."""
    specs: dict[str, Any] = {
        "action": lambda agents: Categorical(4, agents),
        "observation": lambda agents: Unbounded((*agents, 3)),
        "reward": lambda agents: Unbounded((*agents, 1)),
        "done": lambda agents: Categorical(2, (*agents, 1), dtype=torch.bool),
    }
    return Counts(
        **{
            name: Composite(agents=Composite({name: spec((2,))}, shape=(2,)))
            if nested.get(name)
            else Composite({name: spec(())})
            for name, spec in specs.items()
        }
    )


@pytest.mark.parametrize("shared", [False, True])
def test_a_multi_agent_environment_passes_check_env(shared: bool) -> None:
    check_env(lambda: TorchRLWrapper(LampsEnv(shared=shared)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"action_mask": True, "state": True},
        {"categorical_actions": False, "image": (4, 4, 3)},
        {"done_on_any": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_an_environment_converted_to_torchrl_and_back_is_equal(changes: Any) -> None:
    def factory() -> Any:
        return TorchRLWrapper(to_torchrl(CountingEnv(**changes)))

    check_env(factory)
    env, original = factory(), CountingEnv(**changes)
    converted_row, original_row = env.description.row(), original.description.row()
    assert {k: f.shape for k, f in converted_row.items()} == {
        k: f.shape for k, f in original_row.items()
    }
    assert env.group_map == original.group_map
    assert env.description.name == "_OurEnv"


def test_a_single_agent_environment_is_a_group_of_one() -> None:
    def factory() -> Any:
        return TorchRLWrapper(TransformedEnv(PendulumEnv(), StepCounter(7)))

    check_env(factory)
    env = factory()
    frames = env.rollout(20)
    assert frames.shape == (7,)
    assert frames["next", "agents", "truncated"][-1].all()
    assert frames["agents", "action"].shape == (7, 1, 1)
    assert set(frames["agents", "observation"].keys()) >= {"th", "thdot"}


@pytest.mark.parametrize(
    ("action", "space"),
    [
        (Categorical(3), spaces.Discrete(3)),
        (Binary(4), spaces.MultiBinary((4,))),
        (Bounded(-2, 3, (2,)), spaces.Box(-2, 3, (2,))),
    ],
)
def test_actions_are_passed_in_the_form_of_the_spec(action: Any, space: Any) -> None:
    seen = Composite(x=Unbounded((2,)), on=Binary(2))
    env = TorchRLWrapper(Counts(action=action, observation=seen))
    frames = env.rollout(9)
    assert frames["next", "terminated"].sum() == 1
    assert len(frames) == 5
    assert env.description.groups["agents"].action == space
    assert frames["agents", "observation"].shape == (5, 1)


def test_an_agent_that_comes_back_acts_again() -> None:
    pytest.importorskip("pettingzoo")
    from support.zoo import Script, ScriptedEnv

    from marl_collect.envs import PettingZooWrapper

    script = Script(ends={"agent_1": (1, "terminated")}, returns={"agent_1": 3})

    def inner() -> Any:
        return PettingZooWrapper(ScriptedEnv(script), done_on_any=False)

    frames = TorchRLWrapper(to_torchrl(inner())).rollout(5)
    after = frames["next", "agent"]
    assert after["mask"][:, 1].tolist() == [False, False, True, True, True]
    assert after["done"][:, 1, 0].tolist() == [True, True, False, False, False]
    assert after["observation"][:, 1, 1].tolist() == [1, 0, 3, 4, 5]
    assert after["reward"][:, 1, 0].tolist() == [11, 0, 0, 14, 15]


def test_agents_get_the_flags_of_the_root_alone_and_in_a_batch() -> None:
    alone = TorchRLWrapper(RootEndsEnv()).rollout(9)["next"]
    assert len(alone) == 3
    batch = lambda: TorchRLWrapper(SerialEnv(2, RootEndsEnv))  # noqa: E731
    together = random_batch(batch, 6)["next"]
    for flag, last in (("done", True), ("terminated", True), ("truncated", False)):
        for key in (flag, ("agents", flag)):
            assert (alone[key][-1] == last).all(), key
            for world in together:
                assert torch.equal(world[key], alone[key]), key


def test_every_agent_gets_a_reward_at_the_root() -> None:
    frames = TorchRLWrapper(LampsEnv(shared=True)).rollout(9)
    rewards = frames["next", "agents", "reward"][:3]
    assert torch.equal(rewards[:, 0], rewards[:, 1])
    expected = frames["agents", "action"][:3].sum(-1, keepdim=True).float() + 2
    assert torch.equal(rewards[:, 0], expected)


def test_the_policys_random_numbers_are_not_consumed() -> None:
    env = TorchRLWrapper(LampsEnv())
    env.set_seed(1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    actions = env.reset().get(("agents", "action_mask")).long().argmax(-1)
    env.step(TensorDict(agents=TensorDict(action=actions, batch_size=[2])))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.processes
def test_collectors_and_parallel_env_step_it() -> None:
    def one() -> Any:
        return TorchRLWrapper(LampsEnv())

    assert random_batch(one, 24).shape == (1, 24)
    frames = random_batch(partial(ParallelEnv, 2, one), 24)
    assert frames.shape == (2, 12)
    assert frames["next", "done"].sum() == 6
    lamps = frames["agents", "observation"]
    assert not torch.equal(lamps[0], lamps[1])
    assert not torch.equal(lamps[:, 1], lamps[:, 2])  # Each step draws.


def test_an_environment_without_repeats_is_not_seeded() -> None:
    class Unseedable(LampsEnv):
        def _set_seed(self, seed: int) -> None:
            raise NotImplementedError("no seeds here")

    check_env(lambda: TorchRLWrapper(Unseedable(), repeats=False))
    with pytest.raises(NotImplementedError, match="no seeds here"):
        TorchRLWrapper(Unseedable()).reset()


def test_worlds_of_a_batch_end_alone_and_pass_check_env() -> None:
    def make() -> Any:
        return TorchRLWrapper(SerialEnv(2, LampsEnv))

    check_env(make)
    frames = random_batch(make, 24)
    assert frames.shape == (2, 12)
    after = frames["next", "agents"]
    lived = (after["reward"] > 0).sum(1).flatten().tolist()
    assert lived == [9, 12, 9, 12]  # The first agent dies a step before the world.
    assert after["done"][:, :, 1].sum() == 6
    is_first = frames["clock"][:, :, 0] == 0
    assert is_first.nonzero()[:, 1].tolist() == [0, 4, 8] * 2
    description = TorchRLWrapper(LampsEnv()).description
    assert make().description.row() == description.row()


@pytest.mark.parametrize(
    ("scenario", "options"),
    [("buzz_wire", {}), ("simple_tag", {"continuous_actions": False, "max_steps": 9})],
)
def test_worlds_equal_torchrls_rollout(scenario: str, options: dict[str, Any]) -> None:
    pytest.importorskip("vmas", reason="needs the extra vmas")
    worlds, steps, seed = 5, 40, 3

    def make() -> Any:
        env = VmasEnv(scenario, num_envs=worlds, **options)
        sums = [(group, "reward") for group in env.group_map]
        resets = ["_reset"] * len(sums)
        return TransformedEnv(env, RewardSum(in_keys=sums, reset_keys=resets))

    batch = random_batch(lambda: TorchRLWrapper(make()), worlds * steps, seed=seed)
    stock = make()
    episodes = [0] * worlds
    stock.set_seed(episode_seed(seed, 0, 0))
    td = stock.reset()
    n_partial_ends = 0
    for step in range(steps):
        actions = batch[:, step].select(*stock.action_keys)
        frame = stock.step(td.update(actions))
        for key, expected in frame.items(include_nested=True, leaves_only=True):
            if key[-1] == "episode_reward" and key[0] != "next":
                continue  # Ours are under "next" only.
            assert torch.equal(batch[:, step][key], expected), (step, key)
        td = stock.step_mdp(frame)
        over = frame["next", "done"].flatten().nonzero().flatten().tolist()
        for world in over:
            episodes[world] += 1
        if over:
            n_partial_ends += len(over) < worlds
            stock.set_seed(episode_seed(seed, over[0], episodes[over[0]]))
            td = stock.reset(td.set("_reset", frame["next", "done"]))
            td = td.exclude("_reset")
    assert min(episodes) > 0 or n_partial_ends
    assert n_partial_ends or scenario != "buzz_wire"


def test_a_spec_without_the_agents_dimension_is_refused_by_name() -> None:
    spec = Composite(x=Unbounded((3, 2)))
    assert space_of(spec, (3,), "agents")["x"].shape == (2,)
    with pytest.raises(
        TypeError, match=r"agents/x has the shape \[3, 2\].* \[2\] first"
    ):
        space_of(spec, (2,), "agents")


def test_a_space_has_the_values_of_every_agent() -> None:
    low, high = torch.tensor([[-1.0, 0.0], [0.0, -2.0]]), torch.tensor([[1.0], [3.0]])
    spec = Bounded(low, high.expand(2, 2), (2, 2))
    space = space_of(spec, (2,), "agents")
    assert space == spaces.Box(np.array([-1.0, -2.0], np.float32), np.float32(3.0))


def test_close_closes_the_inner_environment() -> None:
    torchrl_env = LampsEnv()
    env = TorchRLWrapper(torchrl_env)
    env.close()
    env.close()
    assert torchrl_env.is_closed


@pytest.mark.parametrize("flags", [(), ("team",)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_rewards_and_flags_of_one_agent_may_be_numbers(flags: Any, dtype: Any) -> None:
    after = random_batch(lambda: TorchRLWrapper(one_agent(flags, dtype)), 7)["next"]
    assert after["agents", "reward"].flatten().tolist() == [1, 2, 3, 4, 5, 1, 2]
    over = [False] * 4 + [True] + [False] * 2
    assert after["done"].flatten().tolist() == over
    assert after["agents", "terminated"].flatten().tolist() == over


@pytest.mark.parametrize("wrap", [lambda e: e, TransformedEnv])
def test_attributes_of_the_environment_inside_are_forwarded(wrap: Any) -> None:
    with Collector(
        lambda: TorchRLWrapper(wrap(one_agent())), frames_per_batch=7
    ) as collector:
        assert collector.getattr_env("difficulty") == [7]
        with pytest.raises(AttributeError, match="inside.*an attribute 'easiness'"):
            collector.getattr_env("easiness")
    env = TorchRLWrapper(wrap(one_agent()))
    assert env.hello("you") == "hello you"
    with pytest.raises(AttributeError, match="it has observation_space"):
        env.observation_spec  # noqa: B018 - is refused with advice


def test_the_sum_of_rewards_keeps_its_key() -> None:
    def make() -> Any:
        sums = RewardSum(in_keys=[("agents", "reward")], reset_keys=["_reset"])
        return TorchRLWrapper(TransformedEnv(LampsEnv(), sums))

    check_env(make)
    env = make()
    assert env.description.groups["agents"].episode_reward
    batch = env.rollout(3)
    rewards = batch["next", "agents", "reward"]
    sums = batch["next", "agents", "episode_reward"]
    torch.testing.assert_close(sums, rewards.cumsum(0))
    assert batch["agents", "observation"].shape == (3, 2, 3)


@pytest.mark.parametrize("observation", [False, True])
@pytest.mark.parametrize("reward", [False, True])
@pytest.mark.parametrize("done", [False, True])
def test_roots_and_groups_may_mix(observation: bool, reward: bool, done: bool) -> None:
    places = {"observation": observation, "reward": reward, "done": done}
    env = TorchRLWrapper(two_agents(action=True, **places))
    batch = env.rollout(10)["next"]
    assert batch["agents", "reward"].flatten().tolist() == [
        *(1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    ]
    assert batch["done"].flatten().tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("nested", ["reward", "done"])
def test_an_action_at_the_root_of_two_agents_is_refused(nested: str) -> None:
    env = two_agents(**{nested: True})
    words = rf"\('agents', '{nested}'\) of group 'agents' has the shape \[2, 1\]"
    with pytest.raises(TypeError, match=words):
        TorchRLWrapper(env)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (CountingEnv, TypeError, "expects an environment of TorchRL"),
        (
            lambda: SerialEnv(2, lambda: SerialEnv(3, LampsEnv)),
            ValueError,
            r"at most one batch dimension.*\[2, 3\]",
        ),
        (
            lambda: Counts(
                action=MultiOneHot([2, 3]), observation=Composite(x=Unbounded((2,)))
            ),
            TypeError,
            "agents/action has the spec MultiOneHot",
        ),
        (
            lambda: one_agent(rewards=(("team", "gain"), ("team", "loss"))),
            TypeError,
            "reward of group 'agents' is ambiguous",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused_by_name(
    make: Any, error: type[Exception], message: str
) -> None:
    env = make()
    with pytest.raises(error, match=message):
        TorchRLWrapper(env)


def test_an_instance_instead_of_a_factory_is_refused_with_the_factory() -> None:
    with pytest.raises(TypeError, match=r"`lambda: TorchRLWrapper\(LampsEnv\(...\)\)`"):
        Collector(LampsEnv(), frames_per_batch=4)


def test_a_factory_of_a_torchrl_environment_is_shown_the_wrapper() -> None:
    line = (
        r"`lambda: TorchRLWrapper\(PendulumEnv\(\.\.\.\)\)`; see marl_collect.interop"
    )
    with pytest.raises(TypeError, match=line):
        Collector(PendulumEnv, frames_per_batch=7)


HUNTERS = partial(CountingEnv, n_prey=0, state=True)
OBSERVATION, ACTION, VALUES, CHOSEN = (
    ("hunter", name)
    for name in ("observation", "action", "action_value", "chosen_action_value")
)


@pytest.mark.processes
def test_qmix_trains_from_a_replay_buffer() -> None:
    torch.manual_seed(1)
    net = MultiAgentMLP(5, 4, 2, centralised=False, share_params=True)
    values = QValueModule(
        action_value_key=VALUES,
        out_keys=[ACTION, VALUES, CHOSEN],
        action_space="categorical",
    )
    policy = TensorDictSequential(
        TensorDictModule(net, [OBSERVATION], [VALUES]), values
    )
    mixer_net = QMixer(state_shape=(2,), mixing_embed_dim=8, n_agents=2)
    mixer = TensorDictModule(mixer_net, [CHOSEN, "state"], ["chosen_action_value"])
    loss = QMixerLoss(policy, mixer, delay_value=True, action_space="categorical")
    loss.set_keys(
        action=ACTION,
        action_value=VALUES,
        local_value=CHOSEN,
        global_value="chosen_action_value",
    )
    target = SoftUpdate(loss, tau=0.1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(60), batch_size=16)
    with Collector(
        HUNTERS, policy, frames_per_batch=30, total_frames=60, cat_results="stack"
    ) as collector:
        for batch in collector:
            flat = batch.reshape(-1)
            flat["next", "reward"] = flat["next", "hunter", "reward"].sum(-2)
            buffer.extend(flat)
    assert len(buffer) == 60
    modules = (net, mixer_net)
    before = [[p.clone() for p in module.parameters()] for module in modules]
    optimizer = torch.optim.Adam(
        [p for p in loss.parameters() if p.requires_grad], 1e-2
    )
    terms = loss(buffer.sample())
    total = sum(value for name, value in terms.items() if name.startswith("loss"))
    assert torch.isfinite(total)
    total.backward()
    optimizer.step()
    for module, old in zip(modules, before, strict=True):
        pairs = zip(module.parameters(), old, strict=True)
        assert any(not torch.equal(new.data, was.data) for new, was in pairs)
    target.step()
