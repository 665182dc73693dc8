"""Within a slot the host starts few kernels on the device."""

from typing import Any

import pytest
from support.torch_worlds import RICH, SIMPLE, Spec, TorchWorlds, alike
from torch.utils._python_dispatch import TorchDispatchMode

from marl_collect import Collector
from marl_collect.devices.rollout import DeviceRollout
from marl_collect.models import make_policy

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
