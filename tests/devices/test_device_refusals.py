"""What a rollout on a device does not support is an error that names it."""

from typing import Any

import pytest
import torch
from support.torch_worlds import RICH, SIMPLE, Kind, Spec, TorchWorlds, alike
from torch import nn

from marl_collect import Collector, check_env

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


@pytest.mark.parametrize("device", [None, "cpu"])
def test_check_env_checks_simulators_with_a_device(device: Any) -> None:
    check_env(lambda: TorchWorlds(RICH, 4, device, idle=True), episodes=3)


def test_a_device_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta', which holds no data"):
        TorchWorlds(SIMPLE, 2, "meta")
    with TorchWorlds(Spec({"a": Kind()}), 2, "cpu") as env:
        assert env.simulator_device == torch.device("cpu")
        assert isinstance(env.reset()["a", "observation"], torch.Tensor)
