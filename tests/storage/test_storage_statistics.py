"""Statistics equal those computed from the data, and the card shows them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storage_fuzz import batches, write
from storage_journal import forge_notes, notes
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector, open_dataset
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    DatasetError,
    RunDescription,
    Writer,
    concatenate,
)
from marl_collect.storage.encoding import range_of
from marl_collect.storage.frames import StoredFrames
from marl_collect.storage.statistics import Range


def check(dataset: Dataset) -> None:
    """Compare the statistics with the frames and episodes themselves."""
    statistics = dataset.statistics
    frames = flatten(dataset.transitions[:])
    assert set(statistics.ranges) == set(frames)
    for key, tensor in frames.items():
        value_range = statistics.ranges[key]
        assert (value_range.low, value_range.high) == (
            tensor.min().item(),
            tensor.max().item(),
        )
        assert value_range.nans == 0
    episodes = list(dataset.trajectories)
    assert statistics.episodes == len(episodes) > 0
    lengths = np.array([len(episode) for episode in episodes])
    assert statistics.lengths is not None
    assert statistics.team_return is not None
    assert statistics.lengths.mean == pytest.approx(lengths.mean())
    assert (statistics.lengths.low, statistics.lengths.high) == (
        lengths.min(),
        lengths.max(),
    )
    team = np.zeros(len(episodes))
    for group, summaries in statistics.returns.items():
        returns = np.array(
            [
                episode["next", group, "reward"].sum((0, 2)).numpy()
                for episode in episodes
            ]
        )
        team += returns.sum(1)
        for agent, summary in enumerate(summaries):
            assert summary.mean == pytest.approx(returns[:, agent].mean())
            assert summary.std == pytest.approx(returns[:, agent].std())
            assert summary.low == pytest.approx(returns[:, agent].min())
            assert summary.high == pytest.approx(returns[:, agent].max())
    assert statistics.team_return.std == pytest.approx(team.std())


@pytest.mark.parametrize("compression", ["lz4", "none"])
def test_statistics_equal_a_recomputation(tmp_path: Path, compression: str) -> None:
    write(tmp_path / "d", compression)
    check(open_dataset(tmp_path / "d"))
    check(concatenate([tmp_path / "d", tmp_path / "d"]))


def test_invalid_frames_are_left_out(tmp_path: Path) -> None:
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[10, 7], total_frames=34, seed=0
    ) as collector:
        description = DatasetDescription("c", collector.description)
        with Writer(tmp_path / "d", description) as writer:
            for batch in collector:
                batch = batch.clone()
                batch["hunter", "observation"][~batch["collector", "mask"]] = 1e9
                writer.add(batch)
    check(open_dataset(tmp_path / "d"))


def test_no_frame_is_read_for_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d")
    expected = open_dataset(tmp_path / "d").statistics

    def refuse(self: StoredFrames, numbers: Any) -> Any:
        raise AssertionError(f"read {numbers}")

    monkeypatch.setattr(StoredFrames, "read", refuse)
    assert open_dataset(tmp_path / "d").statistics == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, float("nan"), -3.0], Range(-3.0, 1.0, 1)),
        ([float("nan")] * 2, Range(None, None, 2)),
        ([float("inf"), 2.0, float("-inf")], Range(float("-inf"), float("inf"))),
        ([2**62, -(2**62)], Range(-(2**62), 2**62)),
        ([True, False], Range(0, 1)),
        ([], Range()),
    ],
)
def test_ranges_of_unusual_values_are_stored(
    values: list[Any], expected: Range
) -> None:
    actual = range_of(torch.tensor(values)[None], [len(values)])
    assert actual == expected
    text = json.dumps(actual.to_json(), allow_nan=False)
    assert Range.from_json(json.loads(text)) == expected
    low = range_of(torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16), [2])
    assert low == Range(1.5, 2.5)
    assert range_of(torch.ones(1, 2, dtype=torch.complex64), [2]) == Range()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"low": "much", "high": 1, "nans": 0}]', "not the end of a range"),
        (b"\xff", "is not a data file with notes"),
        (b"[[],[]", "is not a data file with notes"),
        (b"[]", "is not a data file with notes"),
    ],
)
def test_damaged_ranges_are_an_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    write(tmp_path / "d")
    text = notes(tmp_path / "d", 0)
    forge_notes(tmp_path / "d", 0, text[: text.index(b"[{")] + content)
    with pytest.raises(DatasetError, match=message) as error:
        _ = open_dataset(tmp_path / "d").statistics
    assert str(tmp_path / "d") in str(error.value)


def test_the_card_shows_what_the_dataset_holds(tmp_path: Path) -> None:
    for number in range(3):
        description, data = batches(2, number)
        versions = {"python": "3.11" if number < 2 else "3.12"}
        run = RunDescription(seed=number, policy={"kind": "random"}, versions=versions)
        with Writer(tmp_path / "d", description, run) as writer:
            for batch in data:
                writer.add(batch)
    dataset = open_dataset(tmp_path / "d")
    card = dataset.card()
    assert card == open_dataset(tmp_path / "d").card()
    assert card.startswith("# c\n")
    for line in (
        "| `('hunter', 'image')` | [2, 40, 36, 3] | uint8 | 0 | 255 | 0 |",
        "120 frames",
        "| kind=random |  | python 3.11 |",
        "| kind=random |  |  |",
        "| kind=random |  | python 3.12 |",
        "| prey | 3: prey_0, prey_1, prey_2 | Box [3]",
        "kind=random",
    ):
        assert line in card
    mean = dataset.statistics.lengths
    assert mean is not None
    assert f"| length |  |  | {mean.mean:,.5g} |" in card
    columns = {line.count("|") for line in card.splitlines() if line.startswith("| ")}
    assert columns <= {3, 5, 7, 8}
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace('"data"', repr(str(tmp_path / "d"))), {})


def test_an_empty_dataset_has_a_card(tmp_path: Path) -> None:
    description, _ = batches(1)
    with Writer(tmp_path / "d", description):
        dataset = open_dataset(tmp_path / "d")
        assert dataset.statistics.episodes == 0
        assert "No episode is complete." in dataset.card()
