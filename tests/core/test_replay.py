"""Running episodes are restored by their seeds and actions."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.core.batch import SerialBatch
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.core.replay import MOST_BYTES, EpisodeActions, replay


def cut_short(length: Any) -> Any:
    """Return a batch of one environment whose episodes have ``length`` steps."""
    engine = CountingEnv(deaths=False, min_length=length, max_length=length).engine()
    memory = engine.allocate()
    engine.bind(memory)
    return engine, memory


def recorded(actions: Any, frame: Any) -> Any:
    """Return the record of the only environment's episode, whose seed is 4."""
    lengths = np.array([len(next(iter(actions.values())))])
    return EpisodeActions(lengths, actions), np.array([4]), frame


@pytest.mark.parametrize("length", [2, 5])
def test_replay_stops_if_an_episode_ends_before_the_record(length: int) -> None:
    engine, memory = cut_short(9)
    engine.reset([0], [4])
    for _ in range(5):
        engine.step()
    frame = {key: memory[key].copy() for key in engine.description.observed()}
    keys = engine.description.actions()
    episode = recorded({key: memory[key].repeat(5, 0) for key in keys}, frame)
    assert replay(engine, memory, *episode).tolist() == []
    other, elsewhere = cut_short(length)
    assert replay(other, elsewhere, *episode).tolist() == [0]
    assert elsewhere["done",][0, 0]


NAN = float("nan")


@pytest.mark.parametrize(
    ("now", "then", "arrives"),
    [(1.5, 1.5, True), (NAN, NAN, True), (NAN, 1.5, False), (1.5, NAN, False)],
)
def test_a_replay_that_ends_in_nan_has_arrived_if_the_record_has_it(
    now: float, then: float, *, arrives: bool
) -> None:
    class Last(Endless):
        def step_row(self) -> None:
            super().step_row()
            self.row["a", "observation"].fill(now)

    engine = SerialBatch([Last(4)])
    memory = engine.allocate()
    engine.bind(memory)
    expected = {key: np.array(memory[key]) for key in engine.description.observed()}
    expected["a", "mask"].fill(False)
    expected["a", "observation"].fill(then)
    actions = {("a", "action"): np.zeros((2, 1, 1), np.float32)}
    episode = recorded(actions, expected)
    assert replay(engine, memory, *episode).tolist() == ([] if arrives else [0])


def test_an_error_during_replay_names_a_possible_cause() -> None:
    engine, memory = cut_short(9)
    engine.reset([0], [4])
    engine.step_some = lambda indices: 1 / 0
    episode = recorded({key: memory[key] for key in memory if "action" in key}, {})
    with pytest.raises(ZeroDivisionError) as excinfo:
        replay(engine, memory, *episode)
    assert "repeats=False" in excinfo.value.__notes__[0]


class Endless(MultiAgentEnv):
    """One agent with large actions, and episodes that never end."""

    is_closed = False

    def __init__(self, nbytes: int = 2**21) -> None:
        observation_space = spaces.Box(0, 1e6, (1,), np.float32)
        wide = spaces.Box(-1, 1, (nbytes // 4,), np.float32)
        group = GroupDescription(("a_0",), observation_space, wide)
        self.steps = 0
        self._description = EnvDescription("endless", {"a": group})

    @property
    def description(self) -> Any:
        return self._description

    def bind(self, row: Any) -> None:
        self.row = row
        self.flags = Flags(row, self._description)

    def reset_row(self, seed: int) -> None:
        self.flags.clear()
        self.steps = 0
        self.row["a", "observation"].fill(0)

    def step_row(self) -> None:
        self.flags.settle()
        self.steps += 1
        self.row["a", "observation"].fill(self.steps)

    def render(self) -> Any:
        return None

    def close(self) -> None:
        self.is_closed = True


LONG = MOST_BYTES // 2**21 + 1
"""Number of steps whose actions exceed the limit."""

Brief = partial(Endless, 2**13)
"""As many steps exceed ``brief_memory``."""


@pytest.fixture
def brief_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit; workers have the real one."""
    monkeypatch.setattr("marl_collect.core.replay.MOST_BYTES", MOST_BYTES // 2**8)


@pytest.mark.usefixtures("brief_memory")
@pytest.mark.parametrize(("batches", "forgotten"), [(1, False), (LONG // 4, True)])
def test_endless_episodes_need_bounded_memory(batches: int, forgotten: bool) -> None:
    keywords: dict[str, Any] = {"frames_per_batch": 8, "total_frames": -1, "seed": 1}
    with Collector(Brief, None, **keywords) as collector:
        for _ in range(batches):
            before = collector.next()["next", "a", "observation"][..., -1, 0, 0].item()
        assert before == 8 * batches
        state = collector.state_dict()
    with Collector(Brief, None, **keywords) as other:
        warns = pytest.warns(UserWarning, match="not kept, so a new episode begins")
        with warns if forgotten else nullcontext():
            other.load_state_dict(state)
        after = other.next()["a", "observation"].flatten().tolist()
        first = 0 if forgotten else before
        assert after == [first + t for t in range(8)]


@pytest.mark.processes
def test_a_replaced_worker_names_the_episode_it_could_not_continue() -> None:
    keywords: Any = {"frames_per_batch": LONG, "total_frames": -1, "seed": 1}
    with MultiSyncCollector([Endless], None, max_worker_rss=1, **keywords) as collector:
        (first,) = collector.next()["collector", "traj_ids"].unique().tolist()
        (second,) = collector.next()["collector", "traj_ids"].unique().tolist()
        stats = collector.stats()
    assert (stats["recycled"], stats["cut_trajectories"]) == (1, [first])
    assert second == first + 1
