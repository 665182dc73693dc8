"""Every frame that the ranks of a job record into one folder, against the reference."""

import copy
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_cases import flat, same
from oracle_policies import KINDS
from oracle_reference import Frame, ReferenceWorker
from oracle_strategies import budget, repeating_worlds, suitable_in_workers
from oracle_worlds import curriculum

from marl_collect import open_dataset, record

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]


def play(worker: ReferenceWorker, frames: int, episodes: int) -> dict[int, list[Frame]]:
    """Play so many frames or episodes at least; return each trajectory by its id."""
    trajectories = defaultdict(list)
    with torch.no_grad():
        while frames > 0 or min(worker.episodes) < episodes:
            for frame in worker.frames(random=False):
                number = int(frame["collector", "traj_ids"])
                trajectories[number].append(frame)
            frames -= 1
    return trajectories


@budget(12)
@given(st.data())
def test_all_ranks_record_the_frames_of_their_environments(data: st.DataObject) -> None:
    draw = data.draw
    world = draw(repeating_worlds())
    name = draw(st.just("random") | st.sampled_from(suitable_in_workers(world)))
    kind = KINDS[name]
    ranks, workers = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    each, frames = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    batches, seed = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    limit = draw(st.none() | st.integers(1, 6))
    # Without episodes, frames are recorded.
    episodes = draw(st.just(0) | st.integers(1, 3 * workers * each))
    compact = draw(st.booleans())
    level = draw(st.none() | st.integers(0, 2))
    told: Any = {} if level is None else {"curriculum": curriculum, "level": level}
    policy = kind.build(world)
    pristine = copy.deepcopy(policy)
    size = workers * each
    amount: Any = {"frames": batches * frames * size}
    if episodes:
        amount = {"episodes": episodes}
    with TemporaryDirectory() as folder:
        for rank in range(ranks):
            record(
                Path(folder) / "data",
                world.factory(each),
                policy,
                num_workers=workers,
                envs_per_worker=1 if world.batched else each,
                frames_per_batch=frames * size,
                max_frames_per_traj=limit,
                compact_obs=compact,
                seed=seed,
                rank=rank,
                world_size=ranks,
                **amount,
                **told,
            )
        dataset = open_dataset(Path(folder) / "data")
        recorded = flat(dataset.transitions[:])
    expected: dict[int, list[Frame]] = {}
    for first in range(0, ranks * size, each):
        worker = ReferenceWorker(
            world,
            None if name.startswith("random") else pristine,
            range(first, first + each),
            seed,
            limit=limit,
            reads_init=kind.reads_init,
            lingers=kind.lingers,
        )
        worker.level = level
        most = -(-episodes // size)  # Of an environment.
        expected |= play(worker, 0 if episodes else batches * frames, most)
    if episodes:  # One more of the first environments, if the number is not a multiple.
        share, rest = divmod(episodes, size)
        expected = {
            number: trajectory
            for number, trajectory in expected.items()
            if number & 0xFFFFFFFF < share + ((number >> 32) % size < rest)
        }
    assert len(dataset) == sum(map(len, expected.values()))
    written = [(run.options["rank"], run.options["world_size"]) for run in dataset.runs]
    assert sorted(written) == [(rank, ranks) for rank in range(ranks)]
    ids = recorded["collector", "traj_ids"]
    for number, trajectory in expected.items():
        assert recorded.keys() == trajectory[0].keys()
        for key, values in recorded.items():
            value = torch.stack([frame[key] for frame in trajectory])
            assert same(values[ids == number], value), (number, key)
