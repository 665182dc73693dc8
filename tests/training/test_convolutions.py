"""The setting ``conv``."""

from functools import partial
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import describe
from marl_collect.models.convnet import MultiAgentConvNet
from marl_collect.training.convolutions import convolutions
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner

pytestmark = pytest.mark.processes

SPRITES = {"num_cells": [16, 32], "kernel_sizes": [8, 3], "strides": [8, 1]}
THREE = {"num_cells": [32, 32, 32], "kernel_sizes": [5, 5, 5], "strides": [2, 2, 2]}


def described(*shape: int) -> Any:
    return describe(partial(CountingEnv, image=shape))


@pytest.mark.parametrize(
    ("setting", "shape", "expected"),
    [
        ("auto", (88, 88, 3), SPRITES),
        ("auto", (84, 84, 3), THREE),
        ("three", (88, 88, 3), THREE),
        (
            "4k6s3, 8k3s2",
            (32, 40, 3),
            {"num_cells": [4, 8], "kernel_sizes": [6, 3], "strides": [3, 2]},
        ),
    ],
)
def test_a_setting_stands_for_layers(
    setting: str, shape: tuple[int, ...], expected: dict[str, list[int]]
) -> None:
    assert convolutions(setting, described(*shape)) == expected


def test_environments_without_pictures_need_no_layers() -> None:
    assert convolutions("nature", describe(CountingEnv))


def test_pictures_that_are_too_small_are_named() -> None:
    with pytest.raises(ValueError, match="smallest side has 32 pixels"):
        convolutions("nature", described(32, 32, 3))


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
def test_policy_and_critic_have_the_convolutions(algorithm: str) -> None:
    settings = {"conv": "4k6s3,8k3s2", "conv_dtype": "bfloat16"}
    options = TrainingOptions().with_settings(settings)
    description = described(32, 32, 3)
    learner = PPOLearner(description, Setup(algorithm), options, 0)
    for network in learner.networks.values():
        conv_nets = [m for m in network.modules() if isinstance(m, MultiAgentConvNet)]
        assert conv_nets
        assert all(net.net[0].out_channels == 4 for net in conv_nets)
        assert all(net.dtype == torch.bfloat16 for net in conv_nets)
