"""What a rollout on a device does not support is an error that names it."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.torch_worlds import RICH, SIMPLE, Kind, Spec, TorchWorlds, alike
from torch import nn

from marl_collect import (
    BatchedEnv,
    Collector,
    EnvDescription,
    GroupDescription,
    Step,
    check_env,
)

FRAMES = 35


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
    options = type("Options", (), dict.fromkeys(OPTIONS))
    with pytest.raises(ValueError, match="acts on cuda:1, but .* observations on cpu"):
        make_resident_runner(
            OnMeta(), env.engine(), ActingOptions(device="cuda:1"), options
        )


OPTIONS = [
    *("compact_obs", "check_actions", "cudagraph_policy", "curriculum"),
    "policy_device",
]


class Line(BatchedEnv):
    """Two agents that count; what it returns can be replaced."""

    def __init__(self, worlds: int = 3, **changes: Any) -> None:
        group = GroupDescription(
            ("a_0", "a_1"),
            spaces.Box(0, 100, (1,), changes.pop("dtype", np.float32)),
            changes.pop("action", spaces.Discrete(3)),
            mask=changes.pop("mask", True),
            categorical_actions=changes.pop("categorical_actions", True),
        )
        description = EnvDescription("line", {"a": group}, time_limit=4)
        super().__init__(description, worlds, "cpu")
        self.changes = changes
        self.at = torch.zeros(worlds, 2, 1)

    def begin(self, which: Any, seeds: Any) -> Any:
        if which is None:
            return {"a": self.at * 0}
        self.at = torch.where(which[:, None, None], 0.0, self.at)
        return self.changes.get("begins", {"a": self.at})

    def advance(self, actions: Any) -> Any:
        self.at = self.at + 1
        if "step" in self.changes:
            return self.changes["step"]
        fields: dict[str, Any] = {
            "observations": {"a": self.at},
            "rewards": {"a": self.at[:, 0, 0]},
            "terminated": torch.zeros(self.worlds, dtype=torch.bool),
        }
        changes = {n: v for n, v in self.changes.items() if n != "begins"}
        return Step(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"step": None}, TypeError, "must return a Step, but returned None"),
        ({"first": {"a": 1}}, TypeError, "first=, which a simulator with a device"),
        ({"observations": {}}, KeyError, "no observations of 'a'"),
        ({"observations": {"a": torch.zeros(3, 2)}}, ValueError, "a/observation of sh"),
        ({"observations": {"a": np.zeros((3, 2, 1))}}, TypeError, "as ndarray"),
        (
            {"observations": {"a": torch.zeros(3, 2, 1, dtype=torch.complex64)}},
            TypeError,
            "of dtype torch.complex64, but its space has torch.float32",
        ),
        (
            {"observations": {"a": torch.zeros(3, 2, 1, device="meta")}},
            TypeError,
            "returned a/observation as meta: expected a tensor of this device",
        ),
        ({"rewards": {}}, KeyError, "no rewards of group 'a'"),
        ({"rewards": {"a": torch.zeros(2, 3)}}, ValueError, "rewards of 'a' of shape"),
        ({"terminated": None}, TypeError, "returned terminated as NoneType"),
        ({"terminated": torch.zeros(2)}, ValueError, "terminated of shape"),
        ({"terminated": {"b": 0}}, KeyError, "no terminated of group 'a'"),
        ({"truncated": torch.zeros(3, 1)}, ValueError, "truncated of shape"),
        ({"begins": {"b": 0}}, KeyError, "no observations of 'a'"),
        ({"begins": 7}, TypeError, "must return observations, or None"),
        ({"begins": None}, ValueError, "returned None, .* world 0 ended in frame 3"),
        (
            {
                "mask": False,
                "observations": {
                    "a": torch.zeros(3, 2, 1),
                    ("a", "mask"): torch.ones(3, 2, dtype=torch.bool),
                },
            },
            ValueError,
            "mask=False in its description",
        ),
    ],
)
def test_what_a_simulator_returns_wrongly_is_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        Collector(lambda: Line(**changes), frames_per_batch=18, seed=1) as collector,
        pytest.raises(error, match=message),
    ):
        collector.next()


ACTIONS: list[tuple[spaces.Space[Any], Any, str]] = [
    (spaces.Discrete(3), 3, r"action 3 of agent a_1 .*world 2 and frame 5 .*Discrete"),
    (spaces.Discrete(3), -1, "The action -1 of agent a_1"),
    (spaces.MultiDiscrete([2, 4]), [1, 4], r"action \[1, 4\] of agent a_1"),
    (spaces.MultiBinary(2), [0, 2], "MultiBinary"),
    (spaces.Box(-1, 1, (1,), np.float32), [float("nan")], "action .nan. of agent"),
]


@pytest.mark.parametrize(("space", "action", "message"), ACTIONS)
def test_an_impossible_action_is_an_error_at_the_end_of_the_batch(
    space: spaces.Space[Any], action: Any, message: str
) -> None:
    frame = 0

    def act(td: Any) -> Any:
        nonlocal frame
        shape = (*td.batch_size, 2, *(space.shape or ()))
        wanted = torch.zeros(shape, dtype=torch.as_tensor(action).dtype)
        if len(wanted) == 3 and td["a", "observation"][2, 1, 0] == 1 and frame > 4:
            wanted[2, 1] = torch.as_tensor(action)
        frame += 1
        return td.set(("a", "action"), wanted)

    with Collector(
        lambda: Line(action=space), act, frames_per_batch=18, seed=1, trust_policy=True
    ) as collector:
        frame = 0
        with pytest.raises(ValueError, match=message):
            collector.next()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_check_env_checks_simulators_with_a_device(device: Any) -> None:
    check_env(lambda: TorchWorlds(RICH, 4, device, idle=True), episodes=3)


def test_arrays_instead_of_tensors_are_named_where_they_are_copied() -> None:
    env = Line(observations={"a": np.zeros((3, 2, 1), np.float32)})
    with env, pytest.raises(TypeError, match="has device=cpu, so it must return ten"):
        env.rollout(2)
    with Line(begins=None) as env:
        worlds = env.engine()
        worlds.bind(worlds.allocate())
        with pytest.raises(TypeError, match="must return observations if worlds begin"):
            worlds.reset([1], [2])


def test_a_device_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta', which holds no data"):
        TorchWorlds(SIMPLE, 2, "meta")
    with TorchWorlds(Spec({"a": Kind()}), 2, "cpu") as env:
        assert env.simulator_device == torch.device("cpu")
        assert isinstance(env.reset()["a", "observation"], torch.Tensor)
