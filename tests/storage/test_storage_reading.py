"""What was written is read, bit by bit, in every way, and by foreign readers.

Values of every kind; frames, episodes, pieces of episodes, transitions over several
frames, and all of them normalised. Loaders yield every item once per epoch, seeded and
resumable.
"""

import math
import pickle
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from storage_streams import (
    DTYPES,
    SHAPES,
    Stream,
    add_run,
    bytes_of,
    complete_episodes,
    flat_frames,
    frames_of,
    read,
    traj_id,
    write,
)
from tensordict import TensorDict
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler
from torch.utils.data._utils import collate

from marl_collect import open_dataset
from marl_collect.storage import Dataset, Trajectories
from marl_collect.storage.statistics import Range

GAMMA = 0.9
ID, MASK = ("collector", "traj_ids"), ("collector", "mask")
EXTRA = ("g", "extra")
KINDS: dict[str, Any] = {
    "transitions": lambda dataset: dataset.transitions,
    "trajectories": lambda dataset: dataset.trajectories,
    "sequences": lambda dataset: dataset.trajectories.sequences(3),
    "n-steps": lambda dataset: dataset.trajectories.n_step(2),
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, TensorDict]:
    """A dataset of two runs, and its 600 frames in their order."""
    path = tmp_path_factory.mktemp("recording") / "d"
    batches = [*add_run(path, 0), *add_run(path, 1)]
    return open_dataset(path), torch.cat([batch.reshape(-1) for batch in batches])


@pytest.fixture
def dataset(recording: tuple[Dataset, TensorDict]) -> Dataset:
    return recording[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_every_dtype_and_shape_come_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    monkeypatch.setattr("marl_collect.storage.frames._PART", 7)
    # As if the data did not fit into memory.
    monkeypatch.setattr("marl_collect.storage.cache.free_memory", lambda: 1)
    batches = Stream(extras={"extra": (dtype, shape)}).batches()
    for batch in batches:
        batch["constant"] = torch.full(batch.shape, 0.1)
    write(tmp_path, batches)
    dataset = open_dataset(tmp_path)
    frames = dataset.transitions[:]
    assert frames[EXTRA].dtype == dtype
    assert frames[EXTRA].shape == (24, 2, *shape)
    assert flat_frames(frames) == frames_of(*batches)

    episodes = complete_episodes(frames_of(*batches))
    trajectories = dataset.trajectories
    pieces = trajectories.sequences(trajectories.lengths.max(), burn_in=1)
    (padded,) = pieces.loader(len(episodes), shuffle=False)  # With a column of zeros.
    (steps,) = trajectories.n_step(1).loader(len(trajectories.transitions), seed=0)
    assert steps[EXTRA].dtype == dtype
    for data in padded.unbind(0):
        valid = data["collector", "mask"]
        read_again = flat_frames(data[valid].exclude(MASK))
        assert read_again == episodes[traj_id(read_again[0])]
        assert not any(bytes_of(data[EXTRA][~valid]))

    actual = dataset.transitions.ranges()[EXTRA]
    if dtype.is_complex:
        assert actual == Range()
        with pytest.raises(ValueError, match="complex"):
            dataset.transitions.moments(EXTRA)
        return
    values = frames[EXTRA].double() if dtype.is_floating_point else frames[EXTRA]
    numbers = values.flatten().tolist()
    known = [number for number in numbers if not math.isnan(number)]
    low, high = min(known, default=None), max(known, default=None)
    assert actual == Range(low, high, len(numbers) - len(known))
    check_moments(trajectories, pieces, padded)


def check_moments(trajectories: Trajectories, pieces: Any, padded: Any) -> None:
    """Moments are over all frames and agents. Normalised padding is zero."""
    frames = trajectories.transitions
    moments = frames.moments(EXTRA, "constant")
    of_agents = frames[:][EXTRA].double().flatten(0, 1)
    std = mean = torch.zeros(of_agents.shape[1:])
    if of_agents.numel():  # Otherwise torch warns.
        std, mean = torch.std_mean(of_agents, 0, correction=0)
    scaled = pieces.normalised(moments).__getitems__(list(range(len(pieces))))
    mask = padded["collector", "mask"]
    assert not scaled["constant"].any()
    for key in (EXTRA, ("next", *EXTRA)):
        expected = (padded[key].float() - mean.float()) / std.float().clamp(1e-6)
        expected *= mask.view(*mask.shape, *[1] * (expected.ndim - 2))
        torch.testing.assert_close(scaled[key], expected, equal_nan=True)


def test_values_under_next_are_normalised_by_their_own_moments(dataset: Any) -> None:
    key, after = ("hunter", "observation"), ("next", "hunter", "observation")
    moments = dataset.transitions.moments(key, after)
    values = dataset.transitions[:][after].double().flatten(0, 1)
    torch.testing.assert_close(moments[after].mean, values.mean(0).float())
    (scaled,) = dataset.transitions.normalised(moments).loader(600, shuffle=False)
    for name in (key, after):
        (alone,) = (
            dataset.transitions.select(name)
            .normalised({name: moments[name]})
            .loader(600, shuffle=False)
        )
        assert torch.equal(scaled[name], alone[name])
    by_name = {"state": dataset.transitions.moments("state")["state",]}
    (scaled,) = dataset.transitions.normalised(by_name).loader(600, shuffle=False)
    assert scaled["next", "state"].mean().abs() < 1


def test_unusual_batches_come_back(tmp_path: Path) -> None:
    zeros = Stream().batch()
    zeros["g", "observation"].zero_()
    zeros["next", "g", "observation"].zero_().neg_()
    names = ("", ".", "..", "a//b", "/", "a.b", "%2E", "\\")
    named = Stream(extras=dict.fromkeys(names, (torch.float32, (3,)))).batch()
    for name in names:
        named["in", name] = torch.rand(*named.shape)
    many_rows = Stream(n_envs=130).batch()
    for number, batch in enumerate((zeros, named, many_rows)):
        write(tmp_path / str(number), [batch])
        dataset, frames = open_dataset(tmp_path / str(number)), frames_of(batch)
        assert read(dataset) == frames
        lengths = [len(episode) for episode in complete_episodes(frames).values()]
        assert sorted(dataset.trajectories.lengths) == sorted(lengths)


@pytest.mark.processes
def test_foreign_readers_open_the_folder(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    duckdb = pytest.importorskip("duckdb")
    batches = Stream(says_begin=True).batches(3)
    write(tmp_path / "data", batches)
    frames: Any = torch.cat([batch.reshape(-1) for batch in batches])
    rewards = frames["next", "g", "reward"]
    table = pandas.read_parquet(tmp_path / "data")
    assert np.allclose([[[*v] for v in row] for row in table["next.g.reward"]], rewards)
    loaded = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "data" / "*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert np.allclose(loaded["next.g.reward"], rewards)
    assert loaded["frame_index"] == frames["frame"].tolist()
    rows = duckdb.sql(f"""
        SELECT "next.g.reward", count(*) OVER (PARTITION BY run, "collector.traj_ids")
        FROM read_parquet('{tmp_path}/data/*.parquet', file_row_number = true)
        ORDER BY file_row_number
    """).fetchall()
    assert np.allclose([reward for reward, _ in rows], rewards)
    ids = frames["collector", "traj_ids"].tolist()
    assert [count for _, count in rows] == [ids.count(i) for i in ids]


@pytest.mark.accelerator
def test_a_batch_of_an_accelerator_is_written(tmp_path: Path) -> None:
    batch = Stream(ragged=True).batch()
    write(tmp_path, [batch.to("cuda")])
    assert read(tmp_path) == frames_of(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_uniform_and_reproducible(dataset: Any, kind: str) -> None:
    items = KINDS[kind](dataset)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    indices = torch.randint(len(items), (50,), generator=generators[0])
    sample = items.sample(50, generator=generators[1])
    assert (sample == items.__getitems__(indices.tolist())).all()
    wrong: Any
    for wrong in (-1, "3", 1.5, True):
        with pytest.raises((TypeError, ValueError), match="n must be an integer"):
            items.sample(wrong)


def test_frames_are_read_in_any_order_as_copies(recording: Any, tmp_path: Path) -> None:
    transitions, flat = recording[0].transitions, recording[1]
    assert len(transitions) == len(flat) == 600
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(600, dtype=torch.bool)
    mask[[3, 598]] = True
    mixed = [torch.tensor(3), np.int32(4), -600, 5, 5]
    slices = slice(None), slice(10, 400, 7)
    for index in (*slices, -1, order, mask, mask.tolist(), mixed):
        chosen = torch.as_tensor(index) if isinstance(index, list) else index
        expected = flat[chosen]
        read = transitions[index]
        assert (read == expected).all()
        assert read.batch_size == expected.batch_size
        assert read["hunter"].batch_size == (*expected.batch_size, 2)
        read.zero_()
        assert (transitions[index] == expected).all()
    assert transitions[[]].shape == transitions[~mask & mask].shape == (0,)
    # The maps must not prevent pickling, nor be copied; nor our class loading.
    pickled = pickle.dumps(transitions)
    assert len(pickled) < 20_000 < transitions.nbytes
    assert (pickle.loads(pickled)[:] == flat).all()
    transitions[:4].memmap(tmp_path / "frames")
    assert (TensorDict.load_memmap(tmp_path / "frames") == flat[:4]).all()
    for wrong in (mask[:599], True, 1.5, torch.ones(2), [[1, 2]], mask[:, None], None):
        with pytest.raises(TypeError, match="a list of integers, or 600 booleans"):
            transitions[wrong]


def test_parts_by_return_are_ordered_and_complete(dataset: Any) -> None:
    episodes = dataset.trajectories
    parts = episodes.split_by_return()
    assert sum(map(len, parts)) == len(episodes)
    for below, above in pairwise(parts):
        assert below.returns.max() < above.returns.min()
    tied = episodes._take(np.zeros(10, np.int64))
    assert [len(part) for part in tied[:0].split_by_return()] == [0, 0, 0]
    assert sorted(map(len, tied[:1].split_by_return(np.array([0.5])))) == [0, 1]
    assert [len(part) for part in tied.split_by_return([0.8])] == [0, 10]
    wrong: Any
    for wrong in ([0.5, 0.5], [0], [0.5, 0.2], [1.0], 0.5, "1", [None]):
        with pytest.raises((TypeError, ValueError), match="quantiles must .*ascend"):
            episodes.split_by_return(wrong)


def test_a_selection_has_only_its_frames_and_keys(dataset: Any) -> None:
    episodes = dataset.trajectories
    short = episodes.filter(lambda e: e.length <= 12)
    assert 0 < len(short) < len(episodes)
    assert short.lengths.max() <= 12
    assert (short.transitions[:] == torch.cat(list(short))).all()
    assert [len(t) for t in short[2:5]] == short.lengths[2:5].tolist()
    assert repr(short).endswith(f"{len(short)} episodes, {short.lengths.sum()} frames)")
    selection = episodes.select(("hunter", "observation"), "state", "next")[0]
    assert set(selection.keys()) == {"hunter", "state", "next"}
    assert set(selection["hunter"].keys()) == {"observation"}
    assert selection.names == ["time"]
    assert selection["hunter"].batch_size == (len(selection), 2)
    assert (selection == episodes[0].select(*selection.keys(True, True))).all()


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("burn_in", [0, 3, 50])
def test_pieces_overlap_and_have_frames_in_front(
    dataset: Any, stride: int, burn_in: int
) -> None:
    episodes, length = dataset.trajectories[:12], 4
    sequences = episodes.sequences(length, stride=stride, burn_in=burn_in)
    remaining = iter(sequences)
    for episode in episodes:
        for begin in range(0, max(len(episode) - length, 0) + stride, stride):
            sequence, padding = next(remaining), max(0, burn_in - begin)
            expected = episode[begin - burn_in + padding : begin + length]
            mask = torch.zeros(burn_in + length, dtype=torch.bool)
            mask[padding : padding + len(expected)] = True
            assert torch.equal(sequence[MASK], mask)
            assert (sequence[mask].exclude(MASK) == expected).all()
            assert not sequence[~mask]["hunter", "observation"].any()
    assert next(remaining, None) is None
    assert (sequences[-1] == sequences[len(sequences) - 1]).all()
    assert (sequences[-2:] == sequences.__getitems__([-2, -1])).all()
    moments = dataset.transitions.moments("state")
    for nothing in (episodes[:0], episodes[:0].transitions, sequences):
        assert len(nothing.normalised(moments)) == len(nothing)
        assert len(nothing.normalised(moments).__getitems__([])) == 0


@pytest.mark.parametrize("n", [1, 3])
def test_n_step_transitions_equal_a_loop_over_episodes(dataset: Any, n: int) -> None:
    trajectories = dataset.trajectories
    steps = trajectories.n_step(n, gamma=GAMMA)
    assert len(steps) == trajectories.lengths.sum()
    items = iter(steps.__getitems__(list(range(len(steps)))))
    for episode in trajectories:
        for first in range(len(episode)):
            item, frames = next(items), episode[first : first + n]
            count, after = item.pop("steps_to_next_obs"), frames["next"]
            assert count.tolist() == [len(frames)]
            assert item.pop("gamma").item() == pytest.approx(GAMMA ** len(frames))
            for group in ("hunter", "prey"):
                rewards = enumerate(after[group, "reward"].double())
                total: Any = sum(GAMMA**i * reward for i, reward in rewards)
                actual = item["next", group].pop("reward")
                torch.testing.assert_close(actual, total.float())
                del after[group, "reward"]
            assert (item.pop("next") == after[-1]).all()
            assert (item == frames[0].exclude("next")).all()


def test_n_step_transitions_do_not_overwrite_a_group(tmp_path: Path) -> None:
    batches = Stream().batches()
    for batch in batches:
        batch["gamma", "observation"] = batch["frame"]
    write(tmp_path, batches)
    trajectories = open_dataset(tmp_path).trajectories
    with pytest.raises(ValueError, match=r"has keys under \['gamma'\]"):
        trajectories.n_step(2)
    some = trajectories.select("g", ("next", "g")).n_step(2)
    assert some[0]["gamma"].shape == (1,)


ORDERS = [8, 2, 3, 9, 7, 6, 4, 1, 5, 0], [9, 3, 0, 4, 5, 8, 6, 2, 7, 1]
"""Of ten items in two epochs with the seed 5, as docs/architecture.md has it."""


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1, 2])
def test_batches_are_those_of_torchs_samplers(
    dataset: Any,
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
    shuffle: bool,
    drop_last: bool,
) -> None:
    """Also from every state on. Three ranks are those of torchrun, one is given."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", str(rank or 0))
    options: Any = {"shuffle": shuffle, "drop_last": drop_last}
    if rank is None:
        options |= {"rank": 0, "world_size": 1}
    episodes, expected = dataset.trajectories[:10], []
    numbers = episodes.first(ID).tolist()
    world = 1 if rank is None else 3
    for order in ORDERS if shuffle else [range(10)] * 2:
        sampler: Any = DistributedSampler(
            episodes, world, rank or 0, shuffle=False, drop_last=drop_last
        )
        batches = BatchSampler(sampler, 3, drop_last)
        expected += [[numbers[order[i]] for i in batch] for batch in batches]

    def numbers_of(*loaders: Any) -> Iterator[list[int]]:
        return (batch[ID][:, 0].tolist() for batch in chain(*loaders))

    loader = episodes.loader(3, seed=5, **options)
    states = [loader.state_dict()]
    for actual, truth in zip(numbers_of(loader, loader), expected, strict=True):
        assert actual == truth
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    assert (loader.epoch, len(expected)) == (2, 2 * len(loader))
    for done, state in enumerate(states):
        for second in (loader, episodes.loader(3, seed=99, **options)):
            second.load_state_dict(state)
            rest = [*numbers_of(second, second)]
            assert rest[: len(expected) - done] == expected[done:]


@pytest.mark.processes
@pytest.mark.forks
@pytest.mark.parametrize("workers", [0, 2])
def test_loops_are_independent_and_workers_change_nothing(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    # Processes of other methods, such as TorchRL's default, run the script again.
    monkeypatch.setattr("torch.multiprocessing.Process", None)
    monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", None)
    before = {child.pid for child in psutil.Process().children()}
    state = torch.get_rng_state()
    alone = dataset.transitions.loader(batch_size=16, seed=2)
    epochs = [[*alone] for _ in range(3)]
    loader = dataset.transitions.loader(batch_size=16, seed=2, workers=workers)
    for expected, batch in zip(epochs[0][:2], loader, strict=False):
        assert (batch == expected).all()
    for *pair, two, three in zip(loader, loader, *epochs[1:], strict=True):
        assert (torch.cat(pair) == torch.cat([two, three])).all()
    older, newer = iter(alone), iter(alone)
    assert len([next(newer), *older]) == len(alone) + 1
    assert alone.state_dict()["batches"] == 1  # Of the latest loop.
    assert torch.equal(torch.get_rng_state(), state)
    # None is left, also of the loop that was left.
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.accelerator
@pytest.mark.forks
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_in_pinned_memory_for_a_gpu(dataset: Dataset, workers: int) -> None:
    # The processes are forked while this one uses the GPU.
    torch.zeros(1, device="cuda")
    pinned = dataset.transitions.loader(batch_size=8, seed=0, workers=workers)
    plain = dataset.transitions.loader(batch_size=8, seed=0)
    for batch, expected in zip(pinned, plain, strict=True):
        leaves = batch.values(include_nested=True, leaves_only=True)
        assert all(leaf.is_pinned() for leaf in leaves)
        assert (batch.to("cuda", non_blocking=True).cpu() == expected).all()


def test_a_plain_data_loader_reads_whole_batches(dataset: Any) -> None:
    for items in (KINDS[kind](dataset) for kind in KINDS):
        loader: Any = DataLoader(items, 3, collate_fn=items.collate)
        assert (next(iter(loader)) == items.__getitems__([0, 1, 2])).all()
    frames = dataset.transitions  # torch reads those of a ConcatDataset one by one.
    loader = DataLoader(ConcatDataset([frames, frames]), 16, collate_fn=frames.collate)
    assert (next(iter(loader)) == frames[:16]).all()
    kinds = [k for k in collate.default_collate_fn_map if isinstance(k, type)]
    assert not any(issubclass(kind, TensorDict) for kind in kinds)


STATE = {"items": 600, "world_size": 1, "batch_size": 9, "shuffle": 1, "drop_last": 0}
POSITION = STATE | {"seed": 0, "epoch": 0, "batches": 0}
REFUSALS = {
    "items 600, .*same arg": "trajectories.loader(9).load_state_dict(STATE)",
    "batch_size 9, but": "transitions.loader(8).load_state_dict(STATE)",
    "shuffle 1,": "transitions.loader(9, shuffle=False).load_state_dict(STATE)",
    "drop_last 0,": "transitions.loader(9, drop_last=True).load_state_dict(STATE)",
    r"state\['seed'\] must be": "transitions.loader(9).load_state_dict(STATE)",
    "batches.* at most 66, but is 67": (
        "transitions.loader(9).load_state_dict(POSITION | {'batches': 67})"
    ),
    "epoch.* at least 0, but is -1": (
        "transitions.loader(9).load_state_dict(POSITION | {'epoch': -1})"
    ),
    "give all of them one seed": "transitions.loader(1, rank=0, world_size=2)",
    "batch_size must be an integer of at least 1": "transitions.loader(0)",
    "workers must be an integer of at least 0": "transitions.loader(2, workers=-1)",
    "drop_last leaves no batch of 999 ": "transitions.loader(999, drop_last=True)",
    "rank is 2 and world_size is 2": "transitions.loader(1, rank=2, world_size=2)",
    "pass both, or neither": "transitions.loader(1, rank=1, seed=0)",
    "length must be .* at least 1, but is 0": "trajectories.sequences(0)",
    "at most 3, but is 4. Every": "trajectories.sequences(3, stride=4)",
    "at least 1, but is 0. Every": "trajectories.sequences(3, stride=0)",
    "burn_in .*1.5": "trajectories.sequences(3, burn_in=1.5)",
    "burn_in .* at least 0": "trajectories.sequences(3, burn_in=-1)",
    "n must be an integer of at least 1, but is 0": "trajectories.n_step(0)",
    "n must be .* at most 4_294_967_296, but is 1": "trajectories.n_step(10**30)",
    "length must be .* at most 4": "trajectories.sequences(10**30)",
    "burn_in must be .* at most 4": "trajectories.sequences(3, burn_in=10**30)",
    "n must be .* at most 4_294_967_296, but is 9": "transitions.sample(2**63)",
    "gamma must be .* at most 1": "trajectories.n_step(2, gamma=1.5)",
    "No reward is selected": "trajectories.select('collector').n_step(2)",
    "There is nothing to load": "trajectories[:0].loader(1)",
    r"nothing to sample in Trajectories\(": "trajectories[:0].sample(1)",
    r"nothing to sample in Transitions\(": "trajectories[:0].transitions.sample(1)",
    "no key nothing": "transitions.moments('nothing')",
    "There is no key hunter/position": "trajectories.select(('hunter', 'position'))",
    "Frame 600 is out of range: there are 600": "transitions[[0, 600]]",
    "Frame -601 is out of range": "transitions[-601]",
    "Episode 50 is out of range: there are 50": "trajectories[:50][50]",
    "Episode -51 is out of range": "trajectories[:50][-51]",
    "Frame 18446744073709551615 is out": "transitions[2**64 - 1]",
    "Episode 18446744073709551616 is out": "trajectories[2**64]",
    "Item 999 is out of range": "trajectories.sequences(4)[999]",
    "Item 600 is out": "trajectories.n_step(1).__getitems__([600])",
    'key "frame" not found': "transitions.normalised({('frame',): None})",
    "There are no complete episodes in": "trajectories[:0].stats()",
    "There are no episodes of .* to save": "trajectories[:0].save('x')",
    "the keys .*traj_ids.*'terminated": "trajectories.select('hunter').save('x')",
    "exists: save to a new": "trajectories.save(dataset.name)",
    "`marl-collect copy FOLDER s3://b/d`": "trajectories.save('s3://b/d')",
    "There are no frames in": "trajectories[:0].transitions.moments('state')",
}


@pytest.mark.parametrize("message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(dataset: Dataset, message: str) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, OSError), match=message):
        eval(f"dataset.{REFUSALS[message]}")
