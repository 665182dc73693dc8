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

from marl_collect.errors import DatasetError
from marl_collect.storage import import_vault, vault

FLAGS = ("done", "terminated", "truncated")


def flags(frames: Any, *prefix: str) -> list[Any]:
    return [frames[*prefix, name].squeeze(-1).tolist() for name in FLAGS]


@pytest.fixture(params=[20_000, 5], ids=["one batch", "several batches"])
def small_batches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also write batches of few episodes."""
    monkeypatch.setattr(vault, "_FRAMES", request.param)


@pytest.mark.usefixtures("small_batches")
def test_episodes_have_the_values_of_their_steps(tmp_path: Path) -> None:
    arrays = make_arrays(rows=2, steps=12)
    arrays["terminals"][0, 3] = True  # Steps 0 to 3 of the first row.
    arrays["truncations"][0, 9] = True  # Steps 4 to 9; 10 and 11 end with the row.
    arrays["terminals"][1, 11] = True
    source = write_vault(tmp_path / "v" / "u", arrays)
    dataset = import_vault(source, tmp_path / "d")

    expected = [(0, 0, 4, True), (0, 4, 5, False), (0, 10, 1, False), (1, 0, 12, True)]
    for (row, start, frames, terminated), episode in zip(
        expected, dataset.trajectories, strict=True
    ):
        assert episode.shape == (frames,)
        steps = slice(start, start + frames)
        later = slice(start + 1, start + frames + (not terminated))
        agents, after = episode["agents"], episode["next", "agents"]
        for key, name in (("observation", "observations"), ("action", "actions")):
            assert np.array_equal(agents[key], arrays[name][row, steps])
        assert np.array_equal(after["reward"][..., 0], arrays["rewards"][row, steps])
        assert np.array_equal(episode["state"], arrays["infos.state"][row, steps])
        legals = arrays["infos.legals"][row] != 0
        assert np.array_equal(agents["action_mask"], legals[steps])
        for values, name in (
            (after["observation"], "observations"),
            (episode["next", "state"], "infos.state"),
        ):
            truth = arrays[name][row, later]
            if terminated:
                truth = np.concatenate([truth, np.zeros_like(truth[:1])])
            assert np.array_equal(values, truth)
        last = slice(start + 1, start + frames)
        assert np.array_equal(after["action_mask"][:-1], legals[last])
        assert after["action_mask"][-1].all()
        assert agents["mask"].all()
        end = [False] * (frames - 1) + [True]
        never = [False] * frames
        after_end = [end, end, never] if terminated else [end, never, end]
        assert flags(episode["next"]) == after_end
        assert flags(episode) == [never] * 3
        assert flags(after) == [
            [[x] * N for x in agent_flags] for agent_flags in after_end
        ]
        assert after["mask"].tolist() == [[not x] * N for x in end]
        assert agents["action"].dtype == torch.int64


def test_a_vault_is_described(tmp_path: Path) -> None:
    arrays = make_arrays(1, 12)
    source = write_vault(tmp_path / "2s3z.vlt" / "Good", arrays, quality="good")
    dataset = import_vault(source, tmp_path / "d")
    description = dataset.description
    assert description.task == "2s3z"
    group = description.environment.groups["agents"]
    assert group.agents == ("agent_0", "agent_1")
    assert group.action == spaces.Discrete(4)
    assert group.observation == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    (run,) = dataset.runs
    assert run.options == {"vault": "2s3z.vlt/Good", "quality": "good"}
    assert dataset.transitions.sample(8)["agents", "observation"].shape == (8, N, 3)


@pytest.mark.usefixtures("small_batches")
def test_agents_may_end_before_the_episode(tmp_path: Path) -> None:
    arrays = make_arrays(1, 9, n=3)
    arrays["terminals"][0, 1, 0] = True  # Its flag may be set once, or from then on.
    arrays["truncations"][0, 2:, 1] = True  # What came after its step 2 is unknown.
    arrays["terminals"][0, 4:, 2] = True  # Not all have terminated: step 4 is left out.
    arrays["truncations"][0, 5, 0] = arrays["terminals"][0, 8, 0] = True
    arrays["truncations"][0, 5:, 1] = True  # In its first step: it has no transition.
    arrays["terminals"][0, 5:8, 2] = False
    source = write_vault(tmp_path / "v" / "u", arrays)
    first, second = import_vault(source, tmp_path / "d").trajectories

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


def test_an_episode_truncated_in_its_first_step_has_no_transition(
    tmp_path: Path,
) -> None:
    arrays = make_arrays(1, 5)
    arrays["truncations"][0, [0, 4]] = True
    source = write_vault(tmp_path / "v" / "u", arrays)
    (episode,) = import_vault(source, tmp_path / "d").trajectories
    truth = arrays["observations"][0, 1:4]
    assert np.array_equal(episode["agents", "observation"], truth)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.bool_, np.float16])
def test_spaces_follow_from_the_arrays(tmp_path: Path, dtype: Any) -> None:
    arrays = make_arrays(1, 6)
    del arrays["infos.legals"], arrays["infos.state"]
    arrays["infos.arrived"] = np.zeros((1, 6), np.int32)  # Other infos are left out.
    arrays["terminals"] = np.zeros((1, 6, N), np.float32)
    arrays["terminals"][:, -1] = 1
    arrays["observations"] = np.ones((1, 6, N, 4, 4, 3), dtype)
    arrays["actions"] = np.array([0, 2, 1, 0, 1, 2] * N).reshape(1, 6, N)
    source = write_vault(tmp_path / "v" / "u", arrays)
    dataset = import_vault(source, tmp_path / "d")
    environment = dataset.description.environment
    group = environment.groups["agents"]
    assert group.action == spaces.Discrete(3)
    assert group.observation.shape == (4, 4, 3)
    assert group.observation.dtype == dtype
    assert not group.action_mask
    assert not environment.root
    (episode,) = dataset.trajectories
    assert np.array_equal(episode["agents", "observation"], arrays["observations"][0])
    assert episode["next", "terminated"][-1]


def test_actions_with_a_size_are_continuous(tmp_path: Path) -> None:
    arrays = make_arrays(1, 4)
    del arrays["infos.legals"]
    actions = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 4, N, 3)
    source = write_vault(tmp_path / "v" / "u", arrays | {"actions": actions})
    dataset = import_vault(source, tmp_path / "d")
    group = dataset.description.environment.groups["agents"]
    assert group.action == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    (episode,) = dataset.trajectories
    assert np.array_equal(episode["agents", "action"], actions[0, :3])


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
    check_error(tmp_path / "v" / "Poor", "is not the metadata of a vault")
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
    remaining = {
        k: v for k, v in arrays.items() if k not in ("observations", "actions")
    }
    mava = remaining | {"observations.view": arrays["observations"]}
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
    check_error(source, "the array rewards of the vault is missing or damaged")
    store.delete_range(ts.KvStore.KeyRange(b"actions.", b"actions/")).result()
    check_error(source, "the array actions of the vault is missing or damaged")
    for file in source.rglob("*ocdbt*"):
        if file.is_file():
            file.write_bytes(b"no store")
    check_error(source, "the array observations of the vault is missing or damaged")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A vault with two episodes, 2 and 3 frames long."""
    arrays = make_arrays(1, 6)
    arrays["truncations"][0, 2] = arrays["terminals"][0, 5] = True
    return write_vault(tmp_path / "v" / "u", arrays)


def test_an_import_that_stops_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault, "_FRAMES", 1)
    reports: list[tuple[int, int, list[int]]] = []

    def stop(done: int, total: int, ended: Any) -> None:
        reports.append((done, total, [episode.length for episode in ended]))
        if done == total:
            raise KeyboardInterrupt

    before = set(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        import_vault(source, tmp_path / "new" / "d", progress=stop)
    assert reports == [(0, 5, []), (2, 5, [2]), (5, 5, [3])]
    assert set(tmp_path.rglob("*")) == before


def test_a_missing_package_is_named_with_its_extra(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r"needs tensorstore.*marl-collect\[vault\]"):
        import_vault(source, tmp_path / "d")
    assert not (tmp_path / "d").exists()
