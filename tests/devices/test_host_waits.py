"""Within a slot the host does not wait for the device, and starts few kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.host_waits import Operations
from support.torch_worlds import RICH, SIMPLE, Spec, TorchWorlds, alike
from torch import nn

from marl_collect import Collector
from marl_collect.devices.rollout import DeviceRollout
from marl_collect.models import make_policy


@contextmanager
def counted(
    monkeypatch: pytest.MonkeyPatch, policy: nn.Module | None = None
) -> Iterator[Operations]:
    """Count in the frames of all slots, apart from simulators and the policy."""
    operations = Operations()
    step_all = DeviceRollout._step_all

    def apart(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, operations.outside = operations.outside, True
            try:
                return call(*args, **kwargs)
            finally:
                operations.outside = before

        return wrapped

    def steps(*args: Any, **kwargs: Any) -> Any:
        with operations.on():
            return step_all(*args, **kwargs)

    monkeypatch.setattr(DeviceRollout, "_step_all", steps)
    for name in ("begin", "advance"):
        monkeypatch.setattr(TorchWorlds, name, apart(getattr(TorchWorlds, name)))
    if policy is not None:
        monkeypatch.setattr(policy, "forward", apart(policy.forward))
    yield operations


def run(spec: Spec, policy: Any, frames: int, **keywords: Any) -> None:
    _, factory = alike(spec)
    with Collector(factory, policy, frames_per_batch=frames, seed=1, **keywords) as one:
        one.next()
        one.next()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("acts", ["random", "gru"])
def test_nothing_waits(monkeypatch: pytest.MonkeyPatch, seed: int, acts: str) -> None:
    spec = RICH if seed == 0 else Spec.draw(seed)
    if acts == "gru":
        spec = RICH if seed % 2 else SIMPLE
    host, _ = alike(spec)
    policy = None
    if acts == "gru":
        policy = make_policy(
            host().description, num_cells=(4,), recurrent="gru", check_mask=False
        )
    with counted(monkeypatch) as operations:
        run(spec, policy, 40, max_frames_per_traj=5)
        waits, kernels = operations.waits.total(), operations.kernels.total()
        run(spec, policy, 80, max_frames_per_traj=5)
    # Noise is drawn on the host before the first frame, and copied to the device.
    assert set(operations.waits) <= {"from_numpy"}
    assert operations.waits.total() == 2 * waits
    assert operations.kernels.total() > 2 * kernels


def test_the_counter_finds_what_waits() -> None:
    operations = Operations()
    with operations.on():
        data = torch.arange(4)
        if data.any():
            data[data > 1] = 0
        data.sum().item()
        data.nonzero()
        data.tolist()
        data[data > 3]
        data.numpy()
    assert operations.waits.total() >= 7


@pytest.mark.parametrize(("spec", "most"), [(SIMPLE, 40), (RICH, 96)])
def test_kernels_of_a_frame(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, most: int
) -> None:
    """Every key that is copied counts, even if the device copies them together."""
    host, _ = alike(spec)
    policy = make_policy(host().description, num_cells=(4,))
    with counted(monkeypatch, policy) as operations:
        run(spec, policy, 5 * 10)
        few = operations.kernels.total()
        run(spec, policy, 5 * 30)
    frames = 2 * (30 - 10)
    kernels = (operations.kernels.total() - 2 * few) / frames
    assert most - 8 <= kernels <= most
