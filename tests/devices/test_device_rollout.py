"""A rollout on a device: the data of the one with arrays, or what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.torch_worlds import (
    FRAMES,
    RICH,
    SIMPLE,
    Kind,
    Spec,
    TorchWorlds,
    alike,
    check_equal,
    check_same,
    policy_for,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from marl_collect import (
    Collector,
    MultiSyncCollector,
    check_env,
    evaluate,
    open_dataset,
    record,
)
from marl_collect.collectors.options import ExplorationType
from marl_collect.core.tensordicts import flatten
from marl_collect.devices.rollout import DeviceRollout
from marl_collect.models import make_policy


@pytest.mark.parametrize("seed", range(40))
def test_random_actions_in_random_simulators(seed: int) -> None:
    check_same(alike(Spec.draw(seed)))


@pytest.mark.parametrize("seed", range(12))
def test_sums_of_rewards_are_added_frame_by_frame(seed: int) -> None:
    spec = Spec.draw(seed)
    kinds = {name: replace(kind, total=True) for name, kind in spec.kinds.items()}
    factories = alike(spec, kinds=kinds, rounds=True, length=60, limit=None, deaths=0)
    check_same(factories, batches=12, frames_per_batch=20)


def playable(seed: int, **changes: Any) -> Spec:
    """The simulator of a seed, without Dict actions, which heads do not have."""
    spec = replace(Spec.draw(seed), **changes)
    kinds = {
        name: replace(kind, action="box") if kind.action == "dict" else kind
        for name, kind in spec.kinds.items()
    }
    return replace(spec, kinds=kinds)


@pytest.mark.parametrize("seed", range(12))
def test_policies_in_random_simulators(seed: int) -> None:
    factories = alike(playable(seed))
    check_same(
        factories, policy_for(factories[0], recurrent=[None, "gru", "lstm"][seed % 3])
    )


OPTIONS: list[dict[str, Any]] = [
    {"max_frames_per_traj": 4},
    {"init_random_frames": 2 * FRAMES},
    {"reset_at_each_iter": True, "track_policy_version": True},
    {"split_trajs": True},
    {"trajs_per_batch": 6},
    {"trajs_per_batch": 6, "traj_format": "cat", "max_frames_per_traj": 5},
    {"set_truncated": True, "track_traj_ids": False},
    {"cat_results": -1, "use_buffers": False},
    {"frames_per_batch": [FRAMES], "storing_device": "cpu", "worker_idx": 2},
    {"exploration_type": ExplorationType.DETERMINISTIC, "total_frames": 100},
    {"frames_per_batch": 5},
    {"postproc": lambda batch: batch.exclude("next")},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_options(options: dict[str, Any]) -> None:
    factories = alike(RICH)
    check_same(factories, policy_for(factories[0], recurrent="gru"), **options)


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_compiled_policies(recurrent: Any) -> None:
    factories = alike(RICH)
    policy = policy_for(factories[0], recurrent=recurrent)
    keywords: Any = {"compile_policy": {"backend": "eager"}}
    check_same(factories, policy, init_random_frames=FRAMES, **keywords)
    with Collector(factories[1], policy, frames_per_batch=FRAMES, **keywords) as one:
        assert "OptimizedModule is called once per frame" in one.explain()[0]


def both(factories: Any, policy: Any, **keywords: Any) -> tuple[Any, Any]:
    keywords = {"frames_per_batch": FRAMES, "seed": 3} | keywords
    return tuple(Collector(f, policy, **keywords) for f in factories)  # type: ignore[return-value]


@pytest.mark.parametrize("policy", ["random", "gru", "plain"])
@pytest.mark.parametrize("seed", [0, 1, 5, 9])
def test_state_is_that_of_the_rollout_with_arrays(seed: int, policy: str) -> None:
    """A run goes on in both loops, whichever of them has saved its state."""
    factories = alike(playable(seed, length=12, limit=9, repeats=True))
    acts: Any = None
    if policy != "random":
        recurrent = "gru" if policy == "gru" else None
        acts = policy_for(factories[0], recurrent=recurrent)
    keywords = {"max_frames_per_traj": 7, "trajs_per_batch": 4 if seed else None}
    host, device = both(factories, acts, **keywords)
    third, fourth = both(factories, acts, **keywords)
    with host, device, third, fourth:
        for _ in range(2):
            check_equal(device.next(), host.next())
        fourth.load_state_dict(host.state_dict())
        third.load_state_dict(device.state_dict())
        assert third.stats()["cut_trajectories"] == []
        assert fourth.stats()["cut_trajectories"] == []
        for _ in range(2):
            expected = host.next()
            for other in (device, third, fourth):
                check_equal(other.next(), expected)


def test_worlds_that_do_not_repeat_begin_anew() -> None:
    factories = alike(RICH, repeats=False)
    host, device = both(factories, None)
    with host, device:
        host.next()
        state = host.state_dict()
        device.next()
        for collector in (host, device):
            with pytest.warns(UserWarning, match="does not repeat its episodes"):
                collector.load_state_dict(state)
        batch = device.next()
        check_equal(batch, host.next())
        assert ((batch["collector", "traj_ids"][:, 0] & 0xFFFFFFFF) > 0).all()


def command(collector: Any, number: int) -> None:
    """Do what a user may do before a batch."""
    if number == 1:
        collector.reset()
    if number == 2:
        collector.set_seed(11)
    if number == 3:
        collector.update_policy_weights_()
    if number == 4:
        assert collector.call_env("set_level", 3) == [None]
        assert collector.getattr_env("level") == [3]


@pytest.mark.filterwarnings("ignore:More than 2 batches are held")
def test_commands_between_batches() -> None:
    factories = alike(RICH)
    policy = policy_for(factories[0], recurrent="lstm")
    host, device = both(factories, policy)
    batches = []
    with host, device:
        for number in range(7):
            if number == 3:
                with torch.no_grad():
                    policy.get_parameter(next(iter(policy.state_dict()))).mul_(1.5)
            for collector in (host, device):
                command(collector, number)
            if number == 5:
                state = device.state_dict()
                host.load_state_dict(state)
                device.load_state_dict(state)
            batches.append((device.next(), host.next()))
    for batch, expected in batches:  # All of them are held: none has changed.
        check_equal(batch, expected)
    assert device.policy_version == host.policy_version == 1


def test_memory_of_batches_is_used_again_once_they_are_gone() -> None:
    _, factory = alike(SIMPLE)
    with Collector(factory, frames_per_batch=FRAMES, seed=1) as collector:
        addresses = set()
        for _ in range(6):
            batch = collector.next()
            addresses.add(batch["done"].untyped_storage().data_ptr())
            del batch
        assert len(addresses) == 1
        one = collector.next()["a", "observation"][:, 3:]
        copied = one.clone()
        with pytest.warns(UserWarning, match="More than 2 batches are held"):
            held = [collector.next() for _ in range(4)]
        assert torch.equal(one, copied)
        assert collector.stats()["slots"] == 5
        del held
        del one
        collector.next()
        collector.next()
        assert collector.stats()["slots"] <= 3


def test_zeros_like_a_batch() -> None:
    _, factory = alike(RICH)
    with Collector(factory, frames_per_batch=FRAMES, seed=1) as collector:
        zeros, batch = collector.fake_tensordict(), collector.next()
        assert flatten(zeros).keys() == flatten(batch).keys()
        assert all((value == 0).all() for value in flatten(zeros).values())


class Normalises(nn.Module):
    """Changes what it observes, keeps what it wrote, and reads who begins."""

    def forward(self, td: Any) -> Any:
        td["a", "observation"] = td["a", "observation"] / 8
        last = td.get(("a", "last"), torch.zeros(*td.batch_size, 2, 1))
        fresh = td["is_init"][..., None].float()
        td["a", "last"] = td["a", "observation"][..., :1] + last * (1 - fresh)
        td["a", "action"] = (td["a", "last"][..., 0] * 97).long() % 3
        return td


def test_policies_that_change_their_input() -> None:
    factories = alike(SIMPLE)
    check_same(factories, Normalises())
    with pytest.raises(ValueError, match=r"init_random_frames .*\['a/observation'\]"):
        Collector(
            factories[1], Normalises(), frames_per_batch=35, init_random_frames=35
        )


@pytest.mark.processes
def test_evaluation_records_and_workers_copy(tmp_path: Any) -> None:
    factories = alike(RICH)
    policy = policy_for(factories[0])
    results = [evaluate(policy, factory, episodes=9, seeds=4) for factory in factories]
    assert results[0].lengths == results[1].lengths
    assert results[0].team_returns == results[1].team_returns
    for name, factory in zip("ab", factories, strict=True):
        record(tmp_path / name, factory, policy, frames=70, seed=2)
    one, two = (open_dataset(tmp_path / name).trajectories for name in "ab")
    assert list(one.lengths) == list(two.lengths)
    assert list(one.seeds) == list(two.seeds)
    keywords: Any = {"frames_per_batch": 70, "seed": 3, "num_workers": 2}
    with (
        MultiSyncCollector(factories[0], policy, **keywords) as expected,
        MultiSyncCollector(factories[1], policy, **keywords) as actual,
    ):
        check_equal(actual.next(), expected.next())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compact_obs": True}, "compact_obs is not supported by .*TorchWorlds"),
        ({"check_actions": True}, "check_actions is not supported"),
        (
            {"curriculum": lambda seed, episode, level: level},
            "curriculum is not supported",
        ),
        (
            {"policies": {"one": None}, "assign": lambda seed, agents: {}},
            "policies and assign are not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_need_the_host_are_refused(
    options: dict[str, Any], match: str
) -> None:
    _, factory = alike(SIMPLE)
    with pytest.raises(ValueError, match=match):
        Collector(factory, frames_per_batch=FRAMES, **options)


class OnMeta(nn.Module):
    """A policy whose weights are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def parameters(self, recurse: bool = True) -> Any:
        weight = super().parameters(recurse)
        return iter([w.to("meta") for w in weight])

    def forward(self, td: Any) -> Any:
        raise AssertionError("it is not called")


def test_a_policy_on_another_device_is_refused() -> None:
    from marl_collect.devices.choose import make_resident_runner
    from marl_collect.policies.choose import ActingOptions

    env = TorchWorlds(SIMPLE, 2, "cpu")
    unset = ("compact_obs", "check_actions", "cudagraph_policy", "curriculum")
    options = type("Options", (), dict.fromkeys((*unset, "policy_device")))
    with pytest.raises(ValueError, match="acts on cuda:1, but .* observations on cpu"):
        make_resident_runner(
            OnMeta(), env.engine(), ActingOptions(device="cuda:1"), options
        )


@pytest.mark.parametrize("device", [None, "cpu"])
def test_check_env_checks_simulators_with_a_device(device: Any) -> None:
    check_env(lambda: TorchWorlds(RICH, 4, device, idle=True), episodes=3)


def test_a_device_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta', which holds no data"):
        TorchWorlds(SIMPLE, 2, "meta")
    with TorchWorlds(Spec({"a": Kind()}), 2, "cpu") as env:
        assert env.simulator_device == torch.device("cpu")
        assert isinstance(env.reset()["a", "observation"], torch.Tensor)


FREE = {"empty", "detach", "alias", "lift_fresh", "_unsafe_view", "empty_strided"}
"""Operations that start no kernel."""


class Kernels(TorchDispatchMode):
    """Counts kernels; ``outside``, in a simulator or a policy, none."""

    number = 0
    outside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not (self.outside or func.is_view or name in FREE):
            self.number += len(args[0]) if "_foreach" in name else 1
        return func(*args, **(kwargs or {}))

    def apart(self, call: Any) -> Any:
        """Return ``call``, during which nothing is counted."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self.outside = self.outside, True
            try:
                return call(*args, **kwargs)
            finally:
                self.outside = before

        return wrapped


@pytest.mark.parametrize(("spec", "most"), [(SIMPLE, 40), (RICH, 96)])
def test_kernels_of_a_frame(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, most: int
) -> None:
    """Every key that is copied counts, even if the device copies them together."""
    host, device = alike(spec)
    policy = make_policy(host().description, num_cells=(4,))
    kernels, step_all = Kernels(), DeviceRollout._step_all

    def steps(*args: Any, **kwargs: Any) -> Any:
        with kernels:
            return step_all(*args, **kwargs)

    monkeypatch.setattr(DeviceRollout, "_step_all", steps)
    for name in ("begin", "advance"):
        monkeypatch.setattr(
            TorchWorlds, name, kernels.apart(getattr(TorchWorlds, name))
        )
    monkeypatch.setattr(policy, "forward", kernels.apart(policy.forward))

    def started(frames: int) -> int:
        before = kernels.number
        size = {"frames_per_batch": 5 * frames}
        with Collector(device, policy, seed=1, **size) as collector:  # type: ignore[arg-type]
            collector.next()
            collector.next()
        return kernels.number - before

    per_frame = (started(30) - started(10)) / (2 * (30 - 10))
    assert most - 8 <= per_frame <= most
