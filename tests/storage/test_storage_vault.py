"""Vaults of flashbax, written with tensorstore as flashbax does, become datasets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorstore", reason="needs the extra vault")

import tensorstore as ts
from gymnasium import spaces
from support.vaults import make_arrays, open_array, write_vault

from marl_collect.core.tensordicts import flatten
from marl_collect.storage import DatasetError, import_vault, vault


def episodes_of(arrays: Any, row: int) -> Iterator[tuple[int, int, Any, Any]]:
    """Yield start, number of frames, and each agent's end and whether it terminated."""
    start, ends = 0, dict[int, tuple[int, bool]]()
    _, steps, n = arrays["terminals"].shape
    for step in range(steps):
        for agent in range(n):
            terminal = bool(arrays["terminals"][row, step, agent])
            if terminal or arrays["truncations"][row, step, agent]:
                ends.setdefault(agent, (step - start, terminal))
        if len(ends) == n or step == steps - 1:
            whole = [by_terminal for _, by_terminal in ends.values()] == [True] * n
            frames = step - start + whole  # After another step there is no observation.
            lasts, terminated = np.full(n, frames - 1), np.zeros(n, np.bool_)
            for agent, (end, by_terminal) in ends.items():
                terminated[agent] = by_terminal and end < frames
                if terminated[agent] or not by_terminal:
                    lasts[agent] = end - (not by_terminal)
            if frames:
                yield start, frames, lasts, terminated
            start, ends = step + 1, {}


ACTIONS: dict[str, tuple[Any, Any]] = {
    "legals": (spaces.Discrete(4), np.int64),
    "numbers": (spaces.Discrete(4), np.int64),
    "floats": (spaces.Box(-np.inf, np.inf, (2,), np.float32), np.float32),
}
OBSERVATIONS: Any = [
    *((np.float32, -np.inf, np.inf), (np.float16, -np.inf, np.inf)),
    *((np.uint8, 0, 255), (np.int16, -(2**15), 2**15 - 1), (np.bool_, 0, 1)),
]


@pytest.mark.parametrize("most", [20_000, 5])  # Frames of a batch.
@pytest.mark.parametrize("acting", ACTIONS)
def test_episodes_have_the_values_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acting: str, most: int
) -> None:
    """A plain loop says where episodes and their agents end, which is drawn."""
    monkeypatch.setattr(vault, "_FRAMES", most)
    for dtype, low, high in OBSERVATIONS:
        rng, n = np.random.default_rng(len(acting)), 3
        arrays = make_arrays(rows=8, steps=13, n=n)
        for name in ("terminals", "truncations"):
            rare = np.array([0, 0.05, 0.1, 0.4])[rng.integers(0, 4, (8, 1, n))]
            arrays[name] = (rng.random((8, 13, n)) < rare).astype(dtype)
        arrays["terminals"][0, 4] = arrays["truncations"][1, 4] = True  # At once.
        arrays["truncations"][1, 5] = True  # No transition.
        shape = (8, 13, n, 2, 3)
        arrays["observations"] = (rng.normal(size=shape) * 9).astype(dtype)
        arrays["infos.arrived"] = np.zeros((8, 13), np.int32)  # It is left out.
        if acting != "legals":
            del arrays["infos.legals"], arrays["infos.state"]
        if acting == "floats":
            arrays["actions"] = rng.normal(size=(8, 13, n, 2)).astype(np.float32)
        folder = tmp_path / np.dtype(dtype).name
        source = write_vault(folder / "2s3z.vlt" / "Good", arrays, quality="good")
        dataset = import_vault(source, folder / "d")
        environment = dataset.description.environment
        group = environment.groups["agents"]
        box = spaces.Box(low, high, shape[3:], dtype)
        assert dataset.description.task == "2s3z"
        assert group.agents == ("agent_0", "agent_1", "agent_2")
        assert (group.observation, group.action) == (box, ACTIONS[acting][0])
        assert group.action_mask == bool(environment.root) == (acting == "legals")
        options = [{"vault": "2s3z.vlt/Good", "quality": "good"}]
        assert [run.options for run in dataset.runs] == options
        actual = iter(dataset.trajectories)
        for row, where in ((r, w) for r in range(8) for w in episodes_of(arrays, r)):
            episode = flatten(next(actual))
            truth = frames_of(arrays, row, *where)
            assert episode.keys() - truth.keys() == {("collector", "traj_ids")}
            for key, values in truth.items():
                assert np.array_equal(episode[key], values), key
            assert episode["agents", "action"].numpy().dtype == ACTIONS[acting][1]
        assert next(actual, None) is None


def frames_of(
    arrays: Any, row: int, start: int, frames: int, lasts: Any, terminated: Any
) -> dict[Any, Any]:
    """Return the frames of an episode."""
    read = {name: values[row, start:][: frames + 1] for name, values in arrays.items()}
    if terminated.all():  # Zeros follow.
        read = {k: np.append(v[:frames], v[:1] * 0, 0) for k, v in read.items()}
    done = np.arange(frames + 1)[:, None] > lasts
    both: dict[Any, Any] = {
        ("agents", "observation"): read["observations"],
        ("agents", "mask"): ~done,
    }
    if "infos.legals" in read:
        # Every action is legal for an agent that does not act.
        both["agents", "action_mask"] = (read["infos.legals"] != 0) | done[..., None]
        both["state",] = read["infos.state"]
    of_all: Any = (), done.all(1), terminated.all()
    for path, ended, by_end in (of_all, (("agents",), done, terminated)):
        both[*path, "done"] = ended[..., None]
        both[*path, "terminated"] = (ended & by_end)[..., None]
        both[*path, "truncated"] = (ended & ~by_end)[..., None]
    truth = {key: values[:-1] for key, values in both.items()}
    truth |= {("next", *key): values[1:] for key, values in both.items()}
    truth["agents", "action"] = read["actions"][:frames]
    truth["next", "agents", "reward"] = read["rewards"][:frames, :, None]
    return truth


def check_error(source: Path, *texts: str) -> None:
    target = source.parent / "target"
    with pytest.raises(DatasetError) as error:
        import_vault(source, target)
    for text in (str(source), *texts):
        assert text in str(error.value)
    assert not target.exists()


def test_what_is_no_vault_of_og_marl_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist, or is not a folder"):
        import_vault(tmp_path / "none", tmp_path / "d")
    for uid in ("Poor", "Good"):
        write_vault(tmp_path / "v" / uid, make_arrays(1, 2))
    check_error(tmp_path / "v", "no metadata.json", "Its folders Good, Poor have one.")
    (tmp_path / "v" / "Poor" / "metadata.json").write_text("{")
    check_error(tmp_path / "v" / "Poor", "metadata.json cannot be read, or is damaged")
    old = write_vault(tmp_path / "v" / "old", make_arrays(1, 2), version=0.1)
    check_error(old, "the vault has version 0.1, but 1.x can be read")
    arrays = make_arrays(1, 4)
    for name, changed_array in (
        ("terminals", arrays["terminals"][..., 0]),
        ("rewards", arrays["rewards"][..., :1]),
        ("infos.legals", arrays["infos.legals"][..., 0]),
        ("infos.state", arrays["infos.state"].repeat(2, 0)),
        ("actions", arrays["actions"][..., None]),
    ):
        source = write_vault(tmp_path / "v" / name, arrays | {name: changed_array})
        check_error(source, "another vault: expected OG-MARL's", f"{name} ", "[1, 100")
    mava = arrays | {"observations.view": arrays["observations"]}
    del mava["observations"], mava["actions"]
    source = write_vault(tmp_path / "v" / "mava", mava)
    check_error(source, "It has rewards float32", "observations.view.")
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
    reports = [(0, 5, []), (2, 5, [2]), (5, 5, [3])]

    def stop(done: int, total: int, ended: Any) -> None:
        assert (done, total, [episode.length for episode in ended]) == reports.pop(0)
        if not reports:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_vault(source, target, progress=stop)
    assert set(tmp_path.rglob("*")) == before
