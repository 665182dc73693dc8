"""The content of a slot does not depend on how its frames are written."""

from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect.buffers import frame_writer as slot_writer
from marl_collect.buffers.compact_observations import restore_next
from marl_collect.collectors import Collector
from marl_collect.core.tensordicts import flatten

FRAMES = 600
assert slot_writer._BLOCK * 2 < FRAMES


def collected(envs: int, n_batches: int, **options: Any) -> dict[Any, torch.Tensor]:
    with Collector(
        [CountingEnv] * envs,
        frames_per_batch=envs * FRAMES // n_batches,
        total_frames=envs * FRAMES,
        seed=0,
        **options,
    ) as collector:
        batches = [batch.clone() for batch in collector]
    if options.get("compact_obs"):
        batches = [restore_next(batch).exclude("collector") for batch in batches]
    return flatten(torch.cat(batches, dim=1))


def same(actual: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    for key, values in actual.items():
        assert torch.equal(values, expected[key]), key


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("compact", [False, True])
def test_one_long_slot_equals_many_short_ones(envs: int, compact: bool) -> None:
    expected = collected(envs, n_batches=30)
    assert expected["next", "done"].any()
    actual = collected(envs, n_batches=1, compact_obs=compact)
    assert actual.keys() >= {key for key in expected if key[0] != "collector"}
    same(actual, expected)


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("compact", [False, True])
def test_large_arrays_are_written_like_small_ones(
    envs: int, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = collected(envs, n_batches=1, compact_obs=compact)
    monkeypatch.setattr(slot_writer, "SMALL", 0)
    same(collected(envs, n_batches=1, compact_obs=compact), expected)
