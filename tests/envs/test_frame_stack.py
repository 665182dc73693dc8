"""Stacks of observations, compared with the observations of the plain environment."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.zoo import Script, ScriptedEnv
from workloads.counting import CountingEnv

from marl_collect import Collector, check_env
from marl_collect.envs import FrameStack, PettingZooWrapper
from marl_collect.models import ImageInput, make_policy


def counting(**options: Any) -> CountingEnv:
    return CountingEnv(min_length=4, max_length=9, **options)


@pytest.mark.parametrize(
    "options", [{}, {"mask": False}, {"deaths": False}, {"image": (5, 4, 3)}], ids=str
)
def test_stacked_environments_fulfil_the_contract(options: dict[str, Any]) -> None:
    check_env(lambda: FrameStack(counting(**options), 3))
    check_env(lambda: FrameStack(FrameStack(counting(**options), 2), 1))


@pytest.mark.processes
def test_stacked_pictures_are_read_by_convolutions() -> None:
    make_env = lambda: FrameStack(counting(image=(32, 30, 3)), 4)  # noqa: E731
    policy = make_policy(make_env)
    weights = [w for w in policy.state_dict().values() if w.ndim >= 4]
    assert weights[0].shape[-3] == 4 * 3
    with Collector(make_env, policy, frames_per_batch=20, total_frames=20) as collector:
        batch = collector.next()
        expected = policy(batch.clone())
    pictures = batch["hunter", "observation", "image"]
    assert pictures.shape == (1, 20, 2, 4, 32, 30, 3)
    torch.testing.assert_close(
        expected["hunter", "logits"], batch["hunter", "logits"], rtol=1e-4, atol=1e-5
    )
    joined = ImageInput(stacked=True)(pictures)
    assert joined.shape == (1, 20, 2, 12, 32, 30)
    second = pictures[..., 1, :, :, 2].float() / 255
    torch.testing.assert_close(joined[..., 5, :, :], second)


def test_an_empty_observation_is_stacked_too() -> None:
    boxes: dict[str, Any] = {
        "full": spaces.Box(0, 9, (2,)),
        "empty": spaces.Box(0, 9, (0,)),
    }
    seen = {name: np.zeros(box.shape, np.float32) for name, box in boxes.items()}
    script = Script(observation=spaces.Dict(boxes), observe=lambda *_: seen)
    data = FrameStack(PettingZooWrapper(ScriptedEnv(script)), 3).rollout(4)
    assert data["agent", "observation", "empty"].shape == (4, 3, 3, 0)
    assert data["agent", "observation", "full"].shape == (4, 3, 3, 2)


def test_a_stack_needs_a_frame() -> None:
    with pytest.raises(ValueError, match="an integer of at least 1, but is 0"):
        FrameStack(counting(), 0)
    with pytest.raises(TypeError, match="frames must be an integer of .*is '3'"):
        FrameStack(counting(), "3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="FrameStack wraps an environment"):
        FrameStack(CountingEnv)  # type: ignore[arg-type]
