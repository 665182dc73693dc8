"""A rollout on a device whose memory the host cannot read gives the same data."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.far_device import FAR, pinned_for_far
from support.torch_worlds import RICH, Spec, TorchWorlds

from marl_collect import Collector
from marl_collect.core.tensordicts import flatten


def on_host(batch: Any) -> dict[Any, torch.Tensor]:
    return {key: value.cpu().clone() for key, value in flatten(batch).items()}


def check_equal(actual: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("seed", range(4))
def test_random_actions(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    spec = RICH if seed == 0 else Spec.draw(seed)
    keywords: Any = {"frames_per_batch": 20, "seed": 3, "max_frames_per_traj": 6}
    with Collector(lambda: TorchWorlds(spec), **keywords) as collector:
        expected = [on_host(collector.next()) for _ in range(4)]
    with pinned_for_far(monkeypatch) as far:

        def make() -> Any:
            return TorchWorlds(spec, device=FAR)

        with Collector(make, **keywords) as collector:
            batches, sent = [], []
            for number in range(4):
                far.sent.clear()
                far.received.clear()
                batch = collector.next()
                copies = 1 + (number == 0)  # The first episodes begin on the host.
                assert [copy.pinned for copy in far.received] == [True] * copies
                sent.append(len(far.sent))
                assert {value.device for value in flatten(batch).values()} == {FAR}
                batches.append(on_host(batch))
            assert not far.reads
            assert sent[1:] == [sent[1]] * 3  # However many episodes end.
            state = collector.state_dict()
            collector.reset()
            collector.next()
            if spec.repeats:
                collector.load_state_dict(state)
                batches += [on_host(collector.next()) for _ in range(2)]
    for batch, other in zip(batches, expected, strict=False):
        check_equal(batch, other)
