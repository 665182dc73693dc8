"""Vaults of flashbax, written with tensorstore as flashbax does, become datasets."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorstore", reason="needs the extra vault")

import tensorstore as ts
import torch
from gymnasium import spaces
from support.vaults import N, make_arrays, open_array, write_vault

from marl_collect.storage import Dataset, DatasetError, import_vault, vault

FLAGS = ("done", "terminated", "truncated")


def flags(frames: Any, *prefix: str) -> list[Any]:
    return [frames[*prefix, name].squeeze(-1).tolist() for name in FLAGS]


def imported(folder: Path, arrays: Any) -> Dataset:
    return import_vault(write_vault(folder / "v" / "u", arrays), folder / "d")


@pytest.fixture(params=[20_000, 5], ids=["one batch", "several batches"])
def small_batches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also write batches of few episodes."""
    monkeypatch.setattr(vault, "_FRAMES", request.param)


@pytest.mark.usefixtures("small_batches")
def test_episodes_have_the_values_of_their_steps(tmp_path: Path) -> None:
    arrays = make_arrays(rows=2, steps=13)
    arrays["terminals"][0, 3] = True  # Steps 0 to 3 of the first row.
    arrays["truncations"][0, 9] = True  # Steps 4 to 9.
    arrays["truncations"][0, 10] = True  # No transition; 11 and 12 end with the row.
    arrays["terminals"][1, 12] = True
    source = write_vault(tmp_path / "2s3z.vlt" / "Good", arrays, quality="good")
    dataset = import_vault(source, tmp_path / "d")
    assert dataset.description.task == "2s3z"
    group = dataset.description.environment.groups["agents"]
    assert group.agents == ("agent_0", "agent_1")
    assert group.action == spaces.Discrete(4)
    assert group.observation == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    (run,) = dataset.runs
    assert run.options == {"vault": "2s3z.vlt/Good", "quality": "good"}

    expected = [(0, 0, 4, True), (0, 4, 5, False), (0, 11, 1, False), (1, 0, 13, True)]
    for (row, start, frames, terminated), episode in zip(
        expected, dataset.trajectories, strict=True
    ):
        read = {name: values[row] for name, values in arrays.items()}
        now, later = {}, {}
        for name, values in read.items():
            now[name] = values[start : start + frames]
            later[name] = values[start + 1 : start + frames + (not terminated)]
            if terminated:  # Zeros.
                later[name] = np.append(later[name], values[:1] * 0, 0)
        legals = np.append(now["infos.legals"] != 0, np.ones((1, N, 4), bool), 0)
        end = np.arange(frames)[:, None] == frames - 1
        ends = end, end & terminated, end & (not terminated)
        truth: dict[Any, Any] = {
            ("agents", "observation"): now["observations"],
            ("agents", "action"): now["actions"],
            ("agents", "action_mask"): legals[:-1],
            ("agents", "mask"): np.ones((frames, N), bool),
            "state": now["infos.state"],
            ("next", "agents", "observation"): later["observations"],
            ("next", "agents", "reward"): now["rewards"][..., None],
            ("next", "agents", "action_mask"): legals[1:],
            ("next", "agents", "mask"): ~end.repeat(N, 1),
            ("next", "state"): later["infos.state"],
        }
        for name, values in zip(FLAGS, ends, strict=True):
            truth |= {name: end & False, ("next", name): values}
            truth["next", "agents", name] = values.repeat(N, 1)[..., None]
        for key, values in truth.items():
            assert np.array_equal(episode[key], values), key
        assert episode["agents", "action"].dtype == torch.int64


@pytest.mark.usefixtures("small_batches")
def test_agents_may_end_before_the_episode(tmp_path: Path) -> None:
    arrays = make_arrays(1, 9, n=3)
    arrays["terminals"][0, 1, 0] = True  # Its flag may be set once, or from then on.
    arrays["truncations"][0, 2:, 1] = True  # What came after its step 2 is unknown.
    arrays["terminals"][0, 4:, 2] = True  # Not all have terminated: step 4 is left out.
    arrays["truncations"][0, 5, 0] = arrays["terminals"][0, 8, 0] = True
    arrays["truncations"][0, 5:, 1] = True  # In its first step: it has no transition.
    arrays["terminals"][0, 5:8, 2] = False
    first, second = imported(tmp_path, arrays).trajectories

    after = first["next", "agents"]
    assert first.shape == (4,)
    assert after["done"][..., 0].T.int().tolist() == [
        [0, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 0, 0, 1],
    ]
    assert after["terminated"][-1, :, 0].tolist() == [True, False, False]
    assert after["truncated"][-1, :, 0].tolist() == [False, True, True]
    assert torch.equal(first["agents", "done"][1:], after["done"][:-1])
    assert torch.equal(first["agents", "mask"], ~first["agents", "done"][..., 0])
    acts = first["agents", "mask"][..., None]
    legals = torch.from_numpy(arrays["infos.legals"][0, :4] != 0)
    assert torch.equal(first["agents", "action_mask"], legals | ~acts)
    assert flags(first["next"])[1:] == [[False] * 4, [False] * 3 + [True]]
    truth = arrays["observations"][0, 1:5]
    assert np.array_equal(after["observation"], truth)

    assert second.shape == (3,)
    mask = [[False, False, True]] * 3
    assert second["agents", "mask"].tolist() == mask
    assert second["next", "truncated"][:, 0].tolist() == [False, False, True]
    assert not second["next", "agents", "terminated"].any()


NUMBERED = np.array([0, 2, 1, 0, 1, 2] * N).reshape(1, 6, N), spaces.Discrete(3)
CONTINUOUS = (
    np.linspace(-1, 1, 36, dtype=np.float32).reshape(1, 6, N, 3),
    spaces.Box(-np.inf, np.inf, (3,), np.float32),
)


@pytest.mark.parametrize(
    ("dtype", "acting"),
    [
        *((dtype, NUMBERED) for dtype in (np.uint8, np.int16, np.bool_)),
        (np.float16, CONTINUOUS),
    ],
)
def test_spaces_follow_from_the_arrays(tmp_path: Path, dtype: Any, acting: Any) -> None:
    arrays = make_arrays(1, 6)
    del arrays["infos.legals"], arrays["infos.state"]
    arrays["infos.arrived"] = np.zeros((1, 6), np.int32)  # Other infos are left out.
    arrays["terminals"] = np.zeros((1, 6, N), np.float32)
    arrays["terminals"][:, -1] = 1
    arrays["observations"] = np.ones((1, 6, N, 4, 4, 3), dtype)
    arrays["actions"], space = acting
    dataset = imported(tmp_path, arrays)
    environment = dataset.description.environment
    group = environment.groups["agents"]
    assert group.action == space
    assert group.observation.shape == (4, 4, 3)
    assert group.observation.dtype == dtype
    assert not group.action_mask
    assert not environment.root
    (episode,) = dataset.trajectories
    assert np.array_equal(episode["agents", "observation"], arrays["observations"][0])
    assert np.array_equal(episode["agents", "action"], arrays["actions"][0])
    assert episode["next", "terminated"][-1]


def check_error(source: Path, *texts: str) -> None:
    target = source.parent / "target"
    with pytest.raises(DatasetError) as error:
        import_vault(source, target)
    for text in (str(source), *texts):
        assert text in str(error.value)
    assert not target.exists()


def test_a_folder_without_metadata_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist, or is not a folder"):
        import_vault(tmp_path / "none", tmp_path / "d")
    for uid in ("Poor", "Good"):
        write_vault(tmp_path / "v" / uid, make_arrays(1, 2))
    check_error(tmp_path / "v", "no metadata.json", "Its folders Good, Poor have one.")
    (tmp_path / "v" / "Poor" / "metadata.json").write_text("{")
    check_error(tmp_path / "v" / "Poor", "metadata.json cannot be read, or is damaged")
    old = write_vault(tmp_path / "v" / "old", make_arrays(1, 2), version=0.1)
    check_error(old, "the vault has version 0.1, but 1.x can be read")


def test_other_structures_are_an_error(tmp_path: Path) -> None:
    arrays = make_arrays(1, 4)
    for name, changed_array in (
        ("terminals", arrays["terminals"][..., 0]),
        ("rewards", arrays["rewards"][..., :1]),
        ("infos.legals", arrays["infos.legals"][..., 0]),
        ("infos.state", arrays["infos.state"].repeat(2, 0)),
        ("actions", arrays["actions"][..., None]),
    ):
        source = write_vault(tmp_path / "v" / name, arrays | {name: changed_array})
        check_error(source, "other shapes: expected OG-MARL's", f"{name} ", "[1, 'T'")
    mava = arrays | {"observations.view": arrays["observations"]}
    del mava["observations"], mava["actions"]
    source = write_vault(tmp_path / "v" / "mava", mava)
    check_error(source, "without observations, actions", "It has rewards, terminals")
    source = write_vault(tmp_path / "v" / "short", make_arrays(1, 1))
    check_error(source, "has no transition: 1 steps are written")
    arrays["actions"][0, 2, 1] = 4
    source = write_vault(tmp_path / "v" / "illegal", arrays)
    check_error(source, "has the action 4, but actions are integers from 0 to 3")


def test_missing_and_damaged_arrays_are_named(tmp_path: Path) -> None:
    source = write_vault(tmp_path / "v" / "u", make_arrays(1, 2000))
    steps = open_array(source, "vault_index")
    before = steps.read().result()
    steps.write(-1).result()
    check_error(source, "vault_index is -1, but must be")
    steps.write(before).result()
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{source}"}).result()
    (chunk,) = [k for k in store.list().result() if k.startswith(b"rewards./0")]
    content = store.read(chunk).result().value
    store.write(chunk, content[: len(content) // 2]).result()
    check_error(source, "array rewards of the vault", "cannot be read, or is damaged")
    store.delete_range(ts.KvStore.KeyRange(b"actions.", b"actions/")).result()
    check_error(source, "array actions of the vault", "cannot be read, or is damaged")
    for file in source.rglob("*ocdbt*"):
        if file.is_file():
            file.write_bytes(b"no store")
    check_error(source, "array observations of the vault", "or is damaged")


def test_an_import_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = make_arrays(1, 6)  # Two episodes, 2 and 3 frames long.
    arrays["truncations"][0, 2] = arrays["terminals"][0, 5] = True
    source = write_vault(tmp_path / "v" / "u", arrays)
    before, target = set(tmp_path.rglob("*")), tmp_path / "new" / "d"
    monkeypatch.setattr(vault, "_FRAMES", 1)
    reports: list[tuple[int, int, list[int]]] = []

    def stop(done: int, total: int, ended: Any) -> None:
        reports.append((done, total, [episode.length for episode in ended]))
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_vault(source, target, progress=stop)
    assert reports == [(0, 5, []), (2, 5, [2]), (5, 5, [3])]
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r"needs tensorstore.*marl-collect\[vault\]"):
        import_vault(source, target)
    assert set(tmp_path.rglob("*")) == before
