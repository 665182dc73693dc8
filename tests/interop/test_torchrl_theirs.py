"""TorchRL's environments as ours, and its loss of QMIX with our batches."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

pytest.importorskip("torchrl")

from drawn_envs import FLAGS, Drawn, Shape
from gymnasium import spaces
from support.torch_worlds import random_batch
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    LazyTensorStorage,
    MultiOneHot,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import (
    InitTracker,
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

from marl_collect import Collector, check_env
from marl_collect.core.seeding import episode_seed
from marl_collect.core.tensordicts import key_path
from marl_collect.interop.torchrl import TorchRLWrapper, to_torchrl
from marl_collect.interop.torchrl_specs import space_of
from marl_collect.models import MultiAgentMLP, QMixer, make_policy

SINGLE = Shape(groups={"agents": 1}, single=True)
SEEN = {"none": [], "one": ["lamp"], "several": ["lamp", "picture", "wide", "lit"]}


class Loop:
    """Steps worlds as TorchRL does, and says what our batches have of them.

    Attributes:
        flags: of each agent, ``[K, n]`` by group and name.
        root: what the next frame has at its root.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed, self.env = shape, seed, Drawn(shape)
        self.worlds = math.prod(shape.worlds)
        self.episodes = [0] * self.worlds
        self.flags = {
            name: {flag: np.zeros((self.worlds, n), np.bool_) for flag in FLAGS}
            for name, n in shape.groups.items()
        }
        self.begin(np.ones(self.worlds, np.bool_))
        self.root = self.observed(self.now)

    def begin(self, over: Any) -> None:
        """Begin episodes, with the seed of the first of these worlds."""
        world = int(over.argmax())
        number = episode_seed(self.seed, world, self.episodes[world])
        torch.manual_seed(number)
        self.env.set_seed(number)
        if over.all():
            self.now = self.env.reset()
        else:
            for key in self.env.reset_keys:
                prefix = key[:-1] if isinstance(key, tuple) else ()
                flag = self.env.full_done_spec[*prefix, "done"]
                mask = torch.from_numpy(over).reshape(-1, *[1] * (flag.ndim - 1))
                self.now.set(key, mask.expand(flag.shape))
            self.now = self.env.reset(self.now).exclude(*self.env.reset_keys)
        for flags in self.flags.values():
            for flag in flags.values():
                flag[over] = False

    def entry(self, td: Any, name: str, *key: str) -> Any:
        """Return a group's entry, ``[K, n, ...]``, or None."""
        prefix = () if self.shape.single else (name,)
        value = td.get((*prefix, *key), None)
        if value is None:
            return None
        inner = value.shape[len(self.shape.worlds) + len(prefix) :]
        return np.array(value).reshape(self.worlds, self.shape.groups[name], *inner)

    def of_world(self, td: Any, key: str) -> Any:
        """Return an entry of the worlds, ``[K, 1]``, or None."""
        value = td.get(("team", key) if self.shape.team else key, None)
        return None if value is None else value.numpy().reshape(self.worlds, 1)

    def observed(self, td: Any, dead: Any = None) -> dict[Any, Any]:
        """Return what a batch has of a frame, in which ``dead`` were so before it."""
        shape, out = self.shape, {}
        for name in shape.groups:
            names = SEEN[shape.seen] + ["state"] * shape.single
            for seen in names:
                key = (name, "observation", *([seen] if len(names) > 1 else []))
                out[key] = self.entry(td, name, seen)
            if shape.info:
                out[name, "info", "luck"] = self.entry(td, name, "info", "luck")
            for key in out if dead else ():
                if key[0] == name:
                    out[key][dead[name]] = 0
            acts = ~self.flags[name]["done"]
            if shape.waits:
                acts &= self.entry(td, name, "mask")
            out[name, "mask"] = acts
            if shape.legal:
                legal = self.entry(td, name, "action_mask")
                out[name, "action_mask"] = legal | ~acts[..., None]
            for flag in FLAGS:
                out[name, flag] = self.flags[name][flag][..., None].copy()
        if not shape.single:
            out["state",] = np.array(td["state"]).reshape(self.worlds, 2)
        return out

    def reward(self, td: Any, name: str) -> Any:
        """Return a group's rewards, ``[K, n, 1]``."""
        reward = self.entry(td, name, "reward")
        if reward is None:
            gain = self.of_world(td, "gain" if self.shape.team else "reward")
            reward = gain[:, None].repeat(self.shape.groups[name], 1)
        return reward

    def end(self, td: Any) -> None:
        """Set the flags of agents; those that are alive get those of the world."""
        of_world = complete(partial(self.of_world, td))
        for name, flags in self.flags.items():
            own = complete(partial(self.entry, td, name))
            for ends in ([] if self.shape.single else [own]) + [of_world]:
                alive = ~flags["done"]
                for flag in FLAGS if ends is not None else ():
                    flags[flag] |= alive & ends[flag].reshape(self.worlds, -1)

    def step(self, frame: Any) -> dict[Any, Any]:
        """Step with the actions of a batch's frame, and return what is ``next``."""
        for name in self.shape.groups:
            key: Any = "action" if self.shape.single else (name, "action")
            spec = self.env.full_action_spec[key]
            action = frame[name, "action"].to(spec.dtype)
            self.now.set(key, action.reshape(spec.shape))
        stepped = self.env.step(self.now)
        self.now = self.env.step_mdp(stepped)
        td = stepped["next"]
        before = {name: flags["done"].copy() for name, flags in self.flags.items()}
        self.end(td)
        out = self.observed(td, before)
        for name in self.shape.groups:
            reward = self.reward(td, name)
            out[name, "reward"] = np.where(before[name][..., None], 0, reward)
            if self.shape.summed:
                out[name, "episode_reward"] = self.entry(td, name, "episode_reward")
        done, terminated = (
            np.concatenate([flags[flag] for flags in self.flags.values()], 1).all(1)
            for flag in FLAGS[:2]
        )
        ends = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
        out |= {(flag,): values[:, None] for flag, values in ends.items()}
        self.root = {key: out[key] for key in self.root}
        if done.any():
            for world in np.flatnonzero(done):
                self.episodes[world] += 1
            self.begin(done)
            for key, first in self.observed(self.now).items():
                over = done.reshape(-1, *[1] * (first.ndim - 1))
                self.root[key] = np.where(over, first, self.root[key])
        return out


def complete(get: Any) -> dict[str, Any] | None:
    """Return three flags of those that are there; None if there is none."""
    given = {flag: get(flag) for flag in FLAGS}
    if given["done"] is None:
        return None
    flags = {flag: value != 0 for flag, value in given.items() if value is not None}
    done = flags["done"]
    if "truncated" not in flags:
        flags["truncated"] = done & ~flags.get("terminated", done)
    flags.setdefault("terminated", done & ~flags["truncated"])
    return flags


@pytest.mark.parametrize("seed", range(60))
def test_batches_equal_a_loop_over_torchrls_environment(seed: int) -> None:
    shape = Shape.draw(seed)

    def make() -> Any:
        return TorchRLWrapper(Drawn(shape))

    batch = random_batch(make, 25 * math.prod(shape.worlds), seed=seed)
    loop = Loop(shape, seed)
    for frame in batch.unbind(1):
        expected = dict(loop.root)
        expected |= {("next", *key): value for key, value in loop.step(frame).items()}
        for key, value in expected.items():
            actual = frame[key].numpy()
            assert actual.dtype == value.dtype, key
            np.testing.assert_array_equal(actual, value, err_msg=str(key))
        for name in shape.groups if shape.legal else ():
            action = frame[name, "action"]
            index = action.argmax(-1) if action.ndim == 3 else action
            assert frame[name, "action_mask"].gather(-1, index[..., None]).all()
    keys: Any = batch.keys(include_nested=True, leaves_only=True)
    further: set[Any] = {(name, "action") for name in shape.groups}
    further |= {("collector", "traj_ids"), *((flag,) for flag in FLAGS)}
    assert set(map(key_path, keys)) == expected.keys() | further
    assert sum(loop.episodes) > 2 * len(loop.episodes)
    if not shape.worlds and shape.seen != "none":
        check_env(make)


def test_a_batch_of_environments_passes_check_env() -> None:
    check_env(lambda: TorchRLWrapper(SerialEnv(2, lambda: Drawn(Shape()))))


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


def test_an_environment_without_repeats_is_not_seeded() -> None:
    class Unseedable(Drawn):
        def _set_seed(self, seed: int | None) -> None:
            raise NotImplementedError("no seeds here")

    check_env(lambda: TorchRLWrapper(Unseedable(Shape()), repeats=False))
    with pytest.raises(NotImplementedError, match="no seeds here"):
        TorchRLWrapper(Unseedable(Shape())).reset()


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
    torchrl_env = Drawn(Shape())
    env = TorchRLWrapper(torchrl_env)
    env.close()
    env.close()
    assert torchrl_env.is_closed


@pytest.mark.parametrize("wrap", [lambda e: e, TransformedEnv])
def test_attributes_of_the_environment_inside_are_forwarded(wrap: Any) -> None:
    with Collector(
        lambda: TorchRLWrapper(wrap(Drawn(SINGLE))), frames_per_batch=7
    ) as collector:
        assert collector.getattr_env("difficulty") == [7]
        with pytest.raises(AttributeError, match="inside.*an attribute 'easiness'"):
            collector.getattr_env("easiness")
    env = TorchRLWrapper(wrap(Drawn(SINGLE)))
    assert env.hello("you") == "hello you"
    with pytest.raises(AttributeError, match="it has observation_space"):
        env.observation_spec  # noqa: B018 - is refused with advice


def altered(**specs: Any) -> Drawn:
    """Return an environment of one agent with other specs."""
    env = Drawn(SINGLE)
    for name, spec in specs.items():
        setattr(env, name, spec)
    return env


def of_two(name: str, spec: Any) -> Composite:
    return Composite(agents=Composite({name: spec}, shape=(2,)))


FLAG = Categorical(2, (2, 1), dtype=torch.bool)
OF_TWO = r"\('agents', '{}'\) of group 'agents' has the shape \[2, 1\]"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (CountingEnv, TypeError, "expects an environment of TorchRL"),
        (
            lambda: SerialEnv(2, lambda: SerialEnv(3, lambda: Drawn(Shape()))),
            ValueError,
            r"at most one batch dimension.*\[2, 3\]",
        ),
        (
            lambda: altered(action_spec=MultiOneHot([2, 3])),
            TypeError,
            "agents/action has the spec MultiOneHot",
        ),
        (
            lambda: altered(
                reward_spec=Composite(gain=Unbounded((1,)), loss=Unbounded((1,)))
            ),
            TypeError,
            "reward of group 'agents' is ambiguous",
        ),
        # An action at the root, of two agents.
        (
            lambda: altered(reward_spec=of_two("reward", Unbounded((2, 1)))),
            TypeError,
            OF_TWO.format("reward"),
        ),
        (
            lambda: altered(full_done_spec=of_two("done", FLAG)),
            TypeError,
            OF_TWO.format("done"),
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
    with pytest.raises(TypeError, match=r"`lambda: TorchRLWrapper\(Drawn\(...\)\)`"):
        Collector(Drawn(Shape()), frames_per_batch=4)


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


@pytest.mark.parametrize("transforms", [[], [InitTracker]])
def test_a_policy_reads_is_init_as_a_mask(transforms: list[Any]) -> None:
    def make() -> Any:
        inner = to_torchrl(HUNTERS())
        return TorchRLWrapper(TransformedEnv(inner, *(kind() for kind in transforms)))

    policy = TensorDictModule(
        lambda begins: (~begins).long().expand(-1, 2), ["is_init"], [ACTION]
    )
    with Collector(make, policy, frames_per_batch=9, max_frames_per_traj=3) as running:
        batch = running.next()
    begins = torch.arange(9) % 3 == 0
    assert batch["is_init"].dtype == batch["next", "is_init"].dtype == torch.bool
    assert (batch["is_init"][0, :, 0] == begins).all()
    assert not batch["next", "is_init"].any()
    assert (batch[ACTION][0] == (~begins)[:, None]).all()


def test_a_policy_reads_the_is_init_of_a_group() -> None:
    key = ("agents", "observation", "is_init")

    def make() -> Any:
        return TorchRLWrapper(TransformedEnv(Drawn(SINGLE), InitTracker()))

    with Collector(make, make_policy(make), frames_per_batch=40) as running:
        batch = running.next()
    ids = batch["collector", "traj_ids"][0]
    begins = torch.cat([torch.tensor([True]), ids[1:] != ids[:-1]])
    assert 1 < begins.sum() < 40
    assert (batch[key].flatten() == begins).all()
    assert "is_init" not in batch.keys()


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
