"""Worlds of a simulator, and several environments of one process."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.worlds import OWN_SEED, CountingWorlds
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect import (
    BatchedEnv,
    Collector,
    EnvDescription,
    GroupDescription,
    SerialEnv,
    Step,
)
from marl_collect.core import batched
from marl_collect.core.action_check import suspicion
from marl_collect.core.batch import SerialBatch

K = 5


def test_all_worlds_that_end_in_a_step_begin_in_one_call() -> None:
    with Collector(
        lambda: CountingWorlds(K, min_length=5, max_length=5, deaths=False),
        None,
        frames_per_batch=7 * K,
        total_frames=7 * K,
    ) as collector:
        collector.next()
        (begin_calls,) = collector.getattr_env("begun")
    assert begin_calls[-1] == list(range(K))
    assert len(begin_calls) <= 3


def test_a_simulator_that_resets_itself_returns_the_first_observations() -> None:
    with Collector(
        lambda: CountingWorlds(K, resets_itself=True),
        None,
        frames_per_batch=30 * K,
        total_frames=30 * K,
        max_frames_per_traj=9,
    ) as collector:
        batch = collector.next()
        (begin_calls,) = collector.getattr_env("begun")
    done = batch["next", "done"][..., :-1, 0]
    truncated = batch["next", "step_count"][..., :-1, 0] == 9
    first = batch["hunter", "observation"][:, 1:, 0]
    assert done.any()
    assert (first[done][:, 1] == 0).all(), "steps since the reset"
    self_reset = done & ~truncated
    assert self_reset.any()
    assert (first[self_reset][:, 3] == OWN_SEED % 1009).all()
    assert truncated.any()
    n_begun = sum(map(len, begin_calls[1:]))
    assert n_begun == int((done & (first[..., 3] != OWN_SEED % 1009)).sum())


def test_first_observations_are_used_once() -> None:
    """The simulator's own episodes last 7 frames, and others 3 to 9."""
    with Collector(
        lambda: CountingWorlds(
            1, resets_itself=True, deaths=False, min_length=3, max_length=9
        ),
        None,
        frames_per_batch=200,
        max_frames_per_traj=6,
    ) as collector:
        batch = collector.next()[0]
    own = batch["hunter", "observation"][:, 0, 3] == OWN_SEED % 1009
    ended_own = own & batch["next", "done"][:, 0]
    assert ended_own[:-1].sum() > 5
    assert not own[1:][ended_own[:-1]].any(), "what began before is used again"


def test_first_needs_a_description_without_repeats() -> None:
    env = CountingWorlds(2, resets_itself=True, min_length=1, max_length=2)
    env._description = CountingEnv().description
    with env, pytest.raises(ValueError, match="repeats=False"):
        env.rollout(3)


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_tensors(entry) for key, entry in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


class Line(BatchedEnv):
    """Two agents per world that walk; what it returns can be replaced."""

    def __init__(self, worlds: int = 3, device: Any = None, **changes: Any) -> None:
        group = GroupDescription(
            ("a_0", "a_1"),
            spaces.Box(0, 100, (1,), dtype := changes.pop("dtype", np.float32)),
            changes.pop("action", spaces.Box(-1, 1, (1,), np.float32)),
            mask=changes.pop("mask", True),
        )
        limit = changes.pop("time_limit", 4)
        described = EnvDescription("line", {"a": group}, time_limit=limit)
        super().__init__(described, worlds, device)
        self.changes = changes
        self.seen: list[Any] = []
        self.at: Any = np.zeros((worlds, 2, 1), dtype)

    def returned(self, value: Any) -> Any:
        return value if self.simulator_device is None else as_tensors(value)

    def begin(self, which: Any, seeds: Any) -> Any:
        self.at[slice(None) if which is None else np.asarray(which)] = 0
        self.seeds = seeds
        first_on_device = which is None and self.simulator_device is not None
        begins = {} if first_on_device else self.changes
        return self.returned(begins.get("begins", {"a": self.at}))

    def advance(self, actions: Any) -> Any:
        self.seen.append(np.array(actions["a"]))
        self.at = self.at + 1
        if "step" in self.changes:
            return self.changes["step"]
        fields: dict[str, Any] = {
            "observations": {"a": self.at},
            "rewards": {"a": self.at[..., 0]},
            "terminated": np.zeros(self.worlds, bool),
        }
        changes = {n: v for n, v in self.changes.items() if n != "begins"}
        return Step(**self.returned(fields | changes))


def test_the_engine_counts_the_time_limit_and_clips_actions() -> None:
    env = Line()
    with env:
        root = env.reset()
        for _ in range(4):
            assert root["a", "mask"].all()
            root["a", "action"] = torch.full((3, 2, 1), 5.0)
            root = env.step(root)["next"].exclude(("a", "reward"))
    assert root["done"].all()
    assert root["truncated"].all()
    assert not root["terminated"].any()
    assert root["a", "truncated"].all()
    assert not root["a", "mask"].any()
    assert (root["a", "observation"] == 4).all(), "the last observation"
    assert all((actions == 1).all() for actions in env.seen)
    assert env.is_closed


def test_a_world_that_ends_in_the_frame_of_the_time_limit_is_not_cut() -> None:
    ends = np.array([True, False, False])
    with Line(time_limit=1, terminated=ends) as env:
        step = env.rollout(1)["next"][:, 0]
    for flags in (step, step["a"][:, 0], step["a"][:, 1]):
        assert flags["terminated"][:, 0].tolist() == [True, False, False]
        assert flags["truncated"][:, 0].tolist() == [False, True, True]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"step": None}, TypeError, "must return a Step, but returned None"),
    ({"observations": {}}, KeyError, "no observations of 'a'"),
    ({"observations": {"a": np.zeros((3, 2))}}, ValueError, "a/observation of sha"),
    (
        {"observations": {"a": np.zeros((3, 2, 1), complex)}},
        TypeError,
        r"of dtype \S*complex128, but its space has \S*float32",
    ),
    (
        {"observations": {"a": np.full((3, 2, 1), 300)}, "dtype": np.uint8},
        TypeError,
        r"a/observation of dtype \S*int64, but its space has \S*uint8",
    ),
    ({"rewards": {}}, KeyError, "no rewards of group 'a'"),
    ({"rewards": {"a": np.zeros((2, 3))}}, ValueError, "rewards of 'a' of shape"),
    ({"terminated": np.zeros(2)}, ValueError, "terminated of shape"),
    ({"terminated": {"b": 0}}, KeyError, "no terminated of group 'a'"),
    ({"truncated": np.zeros((3, 1))}, ValueError, "truncated of shape"),
    ({"begins": {"b": 0}}, KeyError, "no observations of 'a'"),
]
WRONG_ON_A_DEVICE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"first": {"a": 1}}, TypeError, "first=, which a simulator with a device"),
    (
        {"observations": {"a": torch.zeros(3, 2, 1, device="meta")}},
        TypeError,
        "returned a/observation as meta: expected a tensor of this device",
    ),
    ({"terminated": None}, TypeError, "returned terminated as NoneType"),
    ({"begins": 7}, TypeError, "must return observations, or None"),
    ({"begins": None}, ValueError, "returned None, .* world 0 ended in frame 3"),
    (
        {
            "mask": False,
            "observations": {
                "a": torch.zeros(3, 2, 1),
                ("a", "mask"): torch.ones(3, 2, dtype=torch.bool),
            },
        },
        ValueError,
        "mask=False in its description",
    ),
]


@pytest.mark.parametrize(
    ("device", "wrong"),
    [(None, wrong) for wrong in WRONG]
    + [("cpu", wrong) for wrong in WRONG + WRONG_ON_A_DEVICE],
)
def test_what_a_simulator_returns_wrongly_is_named(device: Any, wrong: Any) -> None:
    changes, error, message = wrong
    factory = lambda: Line(device=device, **changes)  # noqa: E731
    with (
        pytest.raises(error, match=message),
        Collector(factory, frames_per_batch=18, seed=1) as collector,
    ):
        collector.next()


class Arrays(Line):
    """Observes arrays in steps, although it may have a device."""

    def advance(self, actions: Any) -> Any:
        return replace(super().advance(actions), observations={"a": self.at})


def test_arrays_instead_of_tensors_are_named() -> None:
    env = Arrays(device="cpu")
    with env, pytest.raises(TypeError, match="has device=cpu, so it must return ten"):
        env.rollout(2)
    with (
        Collector(lambda: Arrays(device="cpu"), frames_per_batch=18) as collector,
        pytest.raises(TypeError, match="as ndarray"),
    ):
        collector.next()


def test_without_observations_worlds_do_not_begin() -> None:
    with Line(device="cpu", begins=None) as env:
        worlds = env.engine()
        worlds.bind(worlds.allocate())
        with pytest.raises(TypeError, match="must return observations if worlds begin"):
            worlds.reset([1], [2])


ACTIONS: list[tuple[spaces.Space[Any], Any, str]] = [
    (spaces.Discrete(3), 3, "from 0 to 2"),
    (spaces.Discrete(3), -1, "from 0 to 2"),
    (spaces.MultiDiscrete([2, 4]), [1, 4], r"below \[2, 4\]"),
    (spaces.MultiBinary(2), [0, 2], "below 2"),
    (spaces.Box(-1, 1, (1,), np.float32), [float("nan")], "no NaN"),
]


@pytest.mark.parametrize(("space", "action", "message"), ACTIONS)
def test_an_impossible_action_of_an_agent_that_acts_is_an_error(
    space: spaces.Space[Any], action: Any, message: str
) -> None:
    with Line(action=space) as env:
        root = env.rand_action(env.reset())
        root["a", "action"][2, 1] = torch.tensor(action)
        with pytest.raises(ValueError, match=f"a_1 in a/action, in world 2.*{message}"):
            env.step(root)
    acts = np.ones((3, 2), bool)
    acts[2, 1] = False
    at = np.zeros((3, 2, 1), np.float32)
    waits = {"a": at, ("a", "mask"): acts}
    with Line(action=space, begins=waits, observations=waits) as env:
        root = env.rand_action(env.reset())
        root["a", "action"][2, 1] = torch.tensor(action)
        env.step(root)


@pytest.mark.parametrize(("space", "action", "message"), ACTIONS)
def test_an_impossible_action_on_a_device_is_an_error_at_the_end_of_the_batch(
    space: spaces.Space[Any], action: Any, message: str
) -> None:
    del message
    frame = 0

    def act(td: Any) -> Any:
        nonlocal frame
        shape = (*td.batch_size, 2, *(space.shape or ()))
        wanted = torch.zeros(shape, dtype=torch.as_tensor(action).dtype)
        if td["a", "observation"][2, 1, 0] == 1 and frame > 4:
            wanted[2, 1] = torch.as_tensor(action)
        frame += 1
        return td.set(("a", "action"), wanted)

    options: Any = {"frames_per_batch": 18, "seed": 1, "trust_policy": True}
    with Collector(lambda: Line(device="cpu", action=space), act, **options) as it:
        frame = 0
        text = re.escape(f"action {action} of agent a_1")
        where = f"{text} .*world 2 and frame 5 .*{type(space).__name__}"
        with pytest.raises(ValueError, match=where):
            it.next()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_large_and_infinite_actions_are_clipped_without_a_warning(dtype: Any) -> None:
    with Line(action=spaces.Box(-1, 1, (1,), dtype)) as env:
        root = env.rand_action(env.reset())
        large = torch.tensor([6e4, 6e4, 6e4, -6e4, np.inf, -np.inf])
        root["a", "action"] = large.to(root["a", "action"].dtype).reshape(3, 2, 1)
        env.step(root)
    assert env.seen[-1].ravel().tolist() == [1, 1, 1, -1, 1, -1]


def test_only_actions_of_a_policy_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []

    def recording(actions: Any, *args: Any, **options: Any) -> Any:
        is_suspicious = suspicion(actions, *args, **options)

        def recorded() -> Any:
            checked.append(actions)
            return is_suspicious()

        return recorded

    monkeypatch.setattr(batched, "suspicion", recording)

    def act(td: Any) -> Any:
        return td.set(("a", "action"), torch.full((*td.shape, 2), 3))

    with Collector(
        lambda: Line(action=spaces.Discrete(3)),
        act,
        frames_per_batch=6,
        init_random_frames=6,
    ) as collector:
        collector.next()
        assert not checked
        with pytest.raises(ValueError, match="action 3 of agent a_0 in a/action, in"):
            collector.next()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"worlds": 0}, "worlds must be"),
        ({"worlds": 2.0}, "worlds must be"),
        ({"time_limit": 0}, "time_limit must be"),
        ({"time_limit": 2.5}, "time_limit must be"),
    ],
)
def test_impossible_sizes_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Line(**keywords)


def test_a_reward_of_a_world_is_the_reward_of_all_its_agents() -> None:
    with Line(rewards={"a": np.array([1.0, 2.0, 3.0])}) as env:
        reward = env.rollout(2)["next", "a", "reward"]
    assert reward[:, 0, :, 0].tolist() == [[1, 1], [2, 2], [3, 3]]


def test_only_some_worlds_begin_and_none_steps_alone() -> None:
    with Line() as env:
        root = env.reset(seed=4)
        before = env.seeds.copy()
        root = env.rand_step(root)["next"]
        root["_reset"] = torch.tensor([[False], [True], [False]])
        result = env.reset(root)
        assert result["a", "observation"][:, 0, 0].tolist() == [1, 0, 1]
        assert (env.seeds == before).tolist() == [True, False, True]
        result["_step"] = torch.tensor([True, False, False])
        with pytest.raises(ValueError, match="steps all of its 3 worlds in one call"):
            env.rand_step(result)


class Closes:
    """A CountingEnv that raises ``error`` when it is closed."""

    def __init__(self) -> None:
        self.env: Any = CountingEnv()
        self.error: Exception | None = None
        self.closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def close(self) -> None:
        self.closed += 1
        self.env.close()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("raising", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_close_closes_everything_and_raises_the_first_error(raising: list[int]) -> None:
    envs: list[Any] = [Closes() for _ in range(3)]
    errors = {k: OSError(f"environment {k}") for k in raising}
    for k, error in errors.items():
        envs[k].error = error
    with pytest.raises(OSError, match=f"environment {raising[0]}") as excinfo:
        SerialBatch(envs).close()
    assert excinfo.value is errors[raising[0]]
    assert [env.closed for env in envs] == [1, 1, 1]


def test_environments_built_before_an_error_are_closed() -> None:
    closed: list[CountingEnv] = []

    def good() -> CountingEnv:
        env: Any = CountingEnv()
        close = env.close

        def noting() -> None:
            closed.append(env)
            close()

        env.close = noting
        return env

    with pytest.raises(CountingError):
        SerialEnv(3, [good, good, lambda: CountingEnv(fault=Fault("raise", "create"))])
    assert len(closed) == 2
