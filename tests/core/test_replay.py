"""Running episodes are restored by their seeds and actions."""

import io
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.core.batch import SerialBatch
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.core.replay import (
    MOST_BYTES,
    ActionRecorder,
    EpisodeActions,
    RecordedEpisodes,
    replay,
)
from marl_collect.parallel_env import ParallelEnv, SerialEnv

# Pickled by value: importing this file in a worker would import torch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def counting() -> Any:
    return CountingEnv(action_mask=True, state=True)


def advance(env: Any, frames: int) -> Any:
    """Continue the episode of ``env`` with actions from one seed."""
    torch.manual_seed(3)
    return env.rollout(frames, auto_reset=False, break_when_any_done=False)


KINDS = {
    "single": counting,
    "serial": lambda: SerialEnv(3, counting),
    "parallel": lambda: ParallelEnv(3, counting, num_processes=2),
}


@pytest.mark.torchrl_defect("D4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [1, 4, 20])
def test_a_restored_environment_continues_exactly(kind: Any, frames: int) -> None:
    with KINDS[kind]() as env, KINDS[kind]() as other:
        torch.manual_seed(0)
        env.set_seed(5)
        root = env.reset()
        for _ in range(frames):
            _, root = env.step_and_maybe_reset(env.rand_action(root))
        file = io.BytesIO()
        torch.save(env.state_dict(), file)
        expected = advance(env, 20)

        other.reset()
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        assert (advance(other, 20) == expected).all()
        # Load the state again, into the environment that has moved on.
        env.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        assert (advance(env, 20) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_stays_when_the_environment_moves_on(kind: Any) -> None:
    with KINDS[kind]() as env, KINDS[kind]() as other:
        env.set_seed(5)
        env.rand_step(env.reset())
        state = env.state_dict()
        expected = advance(env, 20)
        other.load_state_dict(state)
        assert (advance(other, 20) == expected).all()


def test_a_state_can_move_between_serial_and_parallel() -> None:
    with KINDS["serial"]() as serial, KINDS["parallel"]() as parallel:
        serial.set_seed(1)
        root = serial.reset()
        root["_step"] = torch.tensor([True, False, True])
        serial.rand_step(root)  # Episodes of different lengths.
        parallel.load_state_dict(serial.state_dict())
        assert (advance(parallel, 9) == advance(serial, 9)).all()


def test_restoring_a_state_without_a_reset_does_not_reset() -> None:
    with KINDS["serial"]() as env, KINDS["serial"]() as other:
        other.load_state_dict(env.state_dict())
        with pytest.raises(RuntimeError, match="was not reset"):
            other.rand_step()
        assert (other.reset() == env.reset()).all()


def test_a_state_of_another_number_of_environments_is_refused() -> None:
    with SerialEnv(2, counting) as env:
        state = env.state_dict()
    with (
        SerialEnv(3, counting) as other,
        pytest.raises(ValueError, match="has 2 environments, but this batch has 3"),
    ):
        other.load_state_dict(state)


def test_replay_restores_the_frame_of_each_environment() -> None:
    with SerialEnv(3, counting) as env:
        engine = env.engine()
        memory = engine.allocate()
        engine.bind(memory)
        keys = engine.description.actions()
        recording = ActionRecorder(memory, keys)
        engine.reset(range(3), [4, 5, 6])
        for indices in ([0, 1, 2], [0, 2], [2]):
            for key in keys:
                memory[key][...] = len(indices) / 4
            recording.step(indices)
            engine.step_some(indices)
        observed = list(engine.description.observed())
        expected = {key: memory[key].copy() for key in observed}
        rows = np.array([2, 0, 1])
        actions = [EpisodeActions.of(recording.actions(k) or {}) for k in rows.tolist()]
        episodes = RecordedEpisodes(rows, 4 + rows, EpisodeActions.join(actions))
        assert episodes.actions.lengths.tolist() == [3, 2, 1]
        engine.reset(range(3), [0, 0, 0])
        replay(engine, memory, episodes)
        for key in observed:
            assert (memory[key] == expected[key]).all(), key


class Unrepeatable:
    """A CountingEnv whose description has ``repeats=False``."""

    def __new__(cls) -> Any:
        from dataclasses import replace

        env = counting()
        env._description = replace(env.description, repeats=False)
        return env


def test_environments_without_repeats_begin_new_episodes() -> None:
    with SerialEnv(2, Unrepeatable) as env, SerialEnv(2, Unrepeatable) as other:
        env.set_seed(1)
        env.rollout(3)
        with pytest.warns(UserWarning, match="new episodes begin instead"):
            other.load_state_dict(env.state_dict())
        assert (
            other.rand_action()["hunter", "observation"]
            == env.reset()["hunter", "observation"]
        ).all()


def cut_short(length: Any) -> Any:
    """Return a batch of one environment whose episodes have ``length`` steps."""
    engine = CountingEnv(deaths=False, min_length=length, max_length=length).engine()
    memory = engine.allocate()
    engine.bind(memory)
    return engine, memory


def recorded(actions: Any, frame: Any) -> RecordedEpisodes:
    """Return the record of the only environment's episode, whose seed is 4."""
    rows, seeds = np.array([0]), np.array([4])
    return RecordedEpisodes(rows, seeds, EpisodeActions.of(actions), frame)


@pytest.mark.parametrize("length", [2, 5])
def test_replay_stops_if_an_episode_ends_before_the_record(length: int) -> None:
    engine, memory = cut_short(9)
    recording = ActionRecorder(memory, engine.description.actions())
    engine.reset([0], [4])
    for _ in range(5):
        recording.step([0])
        engine.step()
    frame = {key: memory[key].copy() for key in engine.description.observed()}
    episode = recorded(recording.actions(0) or {}, frame)
    assert replay(engine, memory, episode) == []
    other, elsewhere = cut_short(length)
    assert replay(other, elsewhere, episode) == [0]
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
    actions = EpisodeActions.of({("a", "action"): np.zeros((2, 1, 1), np.float32)})
    episode = RecordedEpisodes(np.array([0]), np.array([3]), actions, expected)
    assert replay(engine, memory, episode) == ([] if arrives else [0])


def test_an_error_during_replay_names_a_possible_cause() -> None:
    engine, memory = cut_short(9)
    engine.reset([0], [4])
    engine.step_some = lambda indices: 1 / 0
    episode = recorded({key: memory[key] for key in memory if "action" in key}, {})
    with pytest.raises(ZeroDivisionError) as excinfo:
        replay(engine, memory, episode)
    assert "repeats=False" in excinfo.value.__notes__[0]


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_an_environment_whose_replay_diverges_begins_a_new_episode(kind: str) -> None:
    def make(processes: Any = ParallelEnv if kind == "parallel" else SerialEnv) -> Any:
        return processes(2, counting)

    with make() as env, make() as other:
        env.set_seed(1)
        env.rollout(3)
        state = env.state_dict()
        state["environments"][1]["frame"]["prey/observation"] += 1
        with pytest.warns(UserWarning, match="differ from the recorded ones"):
            other.load_state_dict(state)
        root = other.rand_action()["prey", "observation"]
        assert (root[0] == env.rand_action()["prey", "observation"][0]).all()
        assert (root[1] == env.reset()["prey", "observation"][1]).all()


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
@pytest.mark.parametrize(("steps", "forgotten"), [(LONG - 1, False), (LONG, True)])
def test_the_memory_of_an_endless_episode_is_bounded(
    steps: int, forgotten: bool
) -> None:
    with SerialEnv(2, Brief) as env, SerialEnv(2, Brief) as other:
        env.rollout(steps)
        state = env.state_dict()
        kept_actions = [environment["actions"] for environment in state["environments"]]
        assert [actions is None for actions in kept_actions] == [forgotten] * 2
        warns = pytest.warns(UserWarning, match="not kept, so a new episode begins")
        with warns if forgotten else nullcontext():
            other.load_state_dict(state)
        following = other.rand_step()["next", "a", "observation"]
        assert following.flatten().tolist() == [1 if forgotten else steps + 1] * 2


@pytest.mark.usefixtures("brief_memory")
@pytest.mark.parametrize(("batches", "forgotten"), [(1, False), (LONG // 4, True)])
def test_the_memory_of_a_collector_of_an_endless_episode_is_bounded(
    batches: int, forgotten: bool
) -> None:
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


def test_a_replaced_worker_names_the_episode_it_could_not_continue() -> None:
    keywords: Any = {"frames_per_batch": LONG, "total_frames": -1, "seed": 1}
    with MultiSyncCollector([Endless], None, max_worker_rss=1, **keywords) as collector:
        (first,) = collector.next()["collector", "traj_ids"].unique().tolist()
        (second,) = collector.next()["collector", "traj_ids"].unique().tolist()
        stats = collector.stats()
    assert (stats["recycled"], stats["cut_trajectories"]) == (1, [first])
    assert second == first + 1


KEY = ("walker", "action")


def recorder(frames: Any) -> tuple[ActionRecorder, Any]:
    """Record the frames ``[T, ...]`` of one environment; return its memory too."""
    memory: Any = {KEY: np.zeros((1, *frames.shape[1:]), frames.dtype)}
    recording = ActionRecorder(memory, [KEY])
    record(recording, memory, frames)
    return recording, memory


def record(recording: ActionRecorder, memory: Any, frames: Any) -> None:
    for frame in frames:
        memory[KEY][...] = frame
        recording.step([0])


def taken(recording: ActionRecorder) -> Any:
    actions = recording.actions(0)
    assert actions is not None
    return actions[KEY]


@pytest.mark.parametrize("shape", [(6, 2), (6,), (6, 0)])
def test_recorded_actions_stay_when_further_ones_follow(shape: Any) -> None:
    frames = np.arange(np.prod(shape), dtype=float).reshape(shape)
    recording, memory = recorder(frames[:0])
    assert taken(recording).shape == (0, *shape[1:])
    record(recording, memory, frames)
    early = taken(recording)
    record(recording, memory, frames[:2] + 100)
    late = taken(recording)
    record(recording, memory, frames[:3] + 200)
    np.testing.assert_array_equal(early, frames)
    np.testing.assert_array_equal(late, np.concatenate([frames, frames[:2] + 100]))
    assert late.flags.writeable  # Torch warns of tensors on memory that is not.
    recording.begin([0])
    assert taken(recording).shape == (0, *shape[1:])


def test_continuing_from_recorded_actions_does_not_change_them() -> None:
    recording, memory = recorder(np.repeat([0, 1, 2], 4))
    state = taken(recording)
    other, other_memory = recorder(np.zeros(1, np.int64))
    other.load(0, {KEY: state})
    record(other, other_memory, np.full(2, 9))
    record(recording, memory, np.full(2, 7))
    np.testing.assert_array_equal(state, np.repeat([0, 1, 2], 4))
    np.testing.assert_array_equal(taken(other), [*state, 9, 9])
    np.testing.assert_array_equal(taken(recording), [*state, 7, 7])
