"""What a policy does to its input changes neither what it sees nor what is stored.

Every collector is compared with a loop that builds a TensorDict for each frame.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    evaluate,
)
from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.core.tensordicts import flatten
from marl_collect.errors import PolicyError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OBSERVATION, ACTION = ("a", "observation"), ("a", "action")
LENGTH, AGENTS, FRAMES = 5, 2, 12
Act = Callable[[TensorDictBase], Any]


class Clock(MultiAgentEnv):
    """Shows each agent the time, which no action changes; one row is written once."""

    resets = 0

    def __init__(self) -> None:
        box: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        group = GroupDescription(("a_0", "a_1"), box, box)
        self._what = EnvDescription("clock", {"a": group})

    @property
    def description(self) -> EnvDescription:
        return self._what

    def bind(self, row: Row) -> None:
        self._row = row
        self._flags = Flags(row, self._what)

    def reset_row(self, seed: int) -> None:
        self.resets += 1
        self._time = 0
        self._flags.clear()
        self._row["a", "mask"].fill(True)
        self._row[OBSERVATION][1] = 3  # Not written again before the next episode.
        self._show()

    def step_row(self) -> None:
        self._time += 1
        self._row["a", "reward"].fill(1)
        self._show()
        if self._time == LENGTH:
            self._flags.end_all(terminated=True, truncated=False)

    def _show(self) -> None:
        self._row[OBSERVATION][0] = (self._time, self._time**2 + 1)

    def render(self) -> None:
        return None

    def close(self) -> None:
        self._closed = True


# Policies that change their input


def overwrites(td: TensorDictBase) -> TensorDictBase:
    td[OBSERVATION] = td[OBSERVATION] / 10
    td[ACTION] = td[OBSERVATION] + 1
    return td


def another_shape(td: TensorDictBase) -> TensorDictBase:
    wide = torch.cat([td[OBSERVATION], td[OBSERVATION]], -1)
    td[ACTION] = wide[..., 1:3].clone()
    td[OBSERVATION] = (wide * 8).long()
    return td


def in_place(td: TensorDictBase) -> None:
    td[OBSERVATION].div_(10).add_(1)
    td[ACTION] = td[OBSERVATION].clone()


def pops(td: TensorDictBase) -> TensorDictBase:
    td[ACTION] = td.pop(OBSERVATION) + 1
    return td


def renames(td: TensorDictBase) -> TensorDictBase:
    td.rename_key_(OBSERVATION, ("a", "seen"))
    td[ACTION] = td["a", "seen"] + 1
    return td


def excludes(td: TensorDictBase) -> TensorDictBase:
    td[ACTION] = td[OBSERVATION] + 1
    return td.exclude(OBSERVATION, "done")


def returns_new(td: TensorDictBase) -> TensorDictBase:
    group = TensorDict({"action": td[OBSERVATION] + 1}, td["a"].batch_size)
    return TensorDict({"a": group}, td.batch_size)


def copies_first(td: TensorDictBase) -> TensorDictBase:
    td = td.clone(recurse=False)
    return overwrites(td)


def rewards_itself(td: TensorDictBase) -> TensorDictBase:
    td["a", "reward"] = td[OBSERVATION][..., :1] * 7
    td[ACTION] = td[OBSERVATION] + 1
    return td


class Differences:
    """Keeps the previous observation, or a view of it."""

    def __init__(self, *, view: bool) -> None:
        self.view = view
        self.before: torch.Tensor | None = None

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        observation = td[OBSERVATION]
        td[ACTION] = (
            observation * 2 if self.before is None else observation - self.before
        )
        self.before = observation[:, :] if self.view else observation
        return td


class OwnMemory:
    """Returns views of its own memory."""

    memory = torch.zeros(0)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        if self.memory.shape != td[OBSERVATION].shape:
            self.memory = torch.zeros_like(td[OBSERVATION])
        self.memory.copy_(td[OBSERVATION]).add_(1)
        td[ACTION] = self.memory
        td["a", "half"] = self.memory[..., :1]
        return td


class Counts(nn.Module):
    """Counts its calls, in Python and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        self.total += td[OBSERVATION].sum() + self.calls
        td[ACTION] = td[OBSERVATION] + self.calls
        td["a", "total"] = self.total.expand(*td["a"].batch_size).clone()
        return td


def remembers(name: str, td: TensorDictBase) -> TensorDictBase:
    """Reads and writes an undeclared state."""
    state = td.get(("a", name), None)
    if state is None:
        state = torch.zeros_like(td[OBSERVATION])
    td[ACTION] = td[OBSERVATION] + state
    td["next", "a", name] = state + td[OBSERVATION] + 1
    return td


def halves_its_state(td: TensorDictBase) -> TensorDictBase:
    remembers("h", td)
    if ("a", "h") in td.keys(include_nested=True):
        td["a", "h"] = td["a", "h"] / 2
    else:
        td["a", "h"] = torch.zeros_like(td[OBSERVATION])
    return td


def here_and_ahead(td: TensorDictBase) -> TensorDictBase:
    """Writes a value and an estimate of the next one, and reads neither."""
    td[ACTION] = td[OBSERVATION] + 1
    td["a", "value"] = td[OBSERVATION].sum(-1, keepdim=True)
    td["next", "a", "value"] = td["a", "value"] + 1
    return td


def lingers(name: str, td: TensorDictBase) -> TensorDictBase:
    """Reads entries of the root that it wrote in the previous frame, as in TorchRL."""
    count = td.get(name, None)
    count = torch.zeros(td.batch_size[0], 1) if count is None else count
    td[ACTION] = td[OBSERVATION] + count.unsqueeze(-1)
    td[name] = count + 1
    return td


def beginnings(td: TensorDictBase) -> TensorDictBase:
    td[ACTION] = td[OBSERVATION] + td["is_init"].float().unsqueeze(-1)
    return td


def beginnings_in_a_copy(td: TensorDictBase) -> TensorDictBase:
    copied = td.clone(recurse=False)
    td[ACTION] = td[OBSERVATION] + copied.get("is_init").float().unsqueeze(-1)
    return td


KEYS: Any = {"in_keys": [OBSERVATION], "out_keys": [OBSERVATION]}
ACTS: Any = {"in_keys": [OBSERVATION], "out_keys": [ACTION]}


def normaliser() -> nn.Module:
    return TensorDictSequential(
        TensorDictModule(lambda o: o / 10, **KEYS),
        TensorDictModule(lambda o: o + 1, **ACTS),
    )


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(2, 2), **KEYS),
        TensorDictModule(nn.Linear(2, 2), **ACTS),
    )


def statistics() -> nn.Module:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.BatchNorm1d(AGENTS), **KEYS),
        TensorDictModule(nn.Linear(2, 2), **ACTS),
    )


POLICIES: dict[str, Callable[[], Any]] = {
    **{
        act.__name__: partial(lambda act: act, act)
        for act in (
            overwrites,
            another_shape,
            in_place,
            pops,
            renames,
            excludes,
            returns_new,
            copies_first,
            rewards_itself,
            halves_its_state,
            here_and_ahead,
            beginnings,
            beginnings_in_a_copy,
        )
    },
    "normaliser": normaliser,
    "encoder": encoder,
    "statistics": statistics,
    "holds": partial(Differences, view=False),
    "holds_a_view": partial(Differences, view=True),
    "own_memory": OwnMemory,
    "counts": Counts,
    "state": lambda: partial(remembers, "h"),
    "private_state": lambda: partial(remembers, "_h"),
    "lingers": lambda: partial(lingers, "count"),
    "lingers_privately": lambda: partial(lingers, "_count"),
}


def by_hand(policy: Act, n_envs: int) -> dict[Any, torch.Tensor]:
    """Collect with a TensorDict for each frame: ``[n_envs, FRAMES, ...]`` per key."""
    envs = [Clock() for _ in range(n_envs)]
    states: list[TensorDictBase] = [TensorDict({}) for _ in envs]
    roots = torch.stack([env.reset() for env in envs])
    is_init = torch.ones(n_envs, 1, dtype=torch.bool)
    frames: list[TensorDictBase] = []
    lingering = TensorDict({}, [n_envs])
    for _ in range(FRAMES):
        td = lingering.clone()
        td.update(roots.clone())
        td.update(torch.stack(states).clone())
        td["is_init"] = is_init.clone()
        out = policy(td)
        if out is not None and out is not td:
            td.update(out)
        td = td.clone()
        ahead = td.pop("next", TensorDict({}, [n_envs]))
        if ("a", "reward") in ahead.keys(True):
            del ahead["a", "reward"]
        frame = td.clone()
        if not frames:
            # The first frame shows the shapes of states, which begin as zeros.
            absent = [k for k in flatten(ahead) if k not in flatten(frame)]
            frame.update(ahead.select(*absent).apply(torch.zeros_like))
        following: Any = torch.stack(
            [
                env.step(TensorDict({"a": {"action": action}}))["next"]
                for env, action in zip(envs, td[ACTION], strict=True)
            ]
        )
        is_init = following["done"].clone()
        frame["next"] = ahead.clone().update(following)
        frame["next", "is_init"] = torch.zeros(n_envs, 1, dtype=torch.bool)
        frames.append(frame)
        known_keys = {*flatten(roots), *flatten(ahead), ("is_init",)}
        lingering = td.exclude(*known_keys)
        if is_init.all():
            roots = torch.stack([env.reset() for env in envs])
            states = list(ahead.apply(torch.zeros_like).unbind(0))
        else:
            roots, states = following.exclude(("a", "reward")), list(ahead.unbind(0))
    return flatten(torch.stack(frames, 1))


def same(actual: TensorDictBase, expected: dict[Any, torch.Tensor]) -> None:
    actual_arrays = flatten(actual.exclude("collector"))
    public = {k: v for k, v in expected.items() if not any(n[0] == "_" for n in k)}
    if ("is_init",) not in actual_arrays:
        public = {k: v for k, v in public.items() if k[-1] != "is_init"}
    assert actual_arrays.keys() == public.keys()
    for key, values in public.items():
        assert actual_arrays[key].dtype == values.dtype, key
        torch.testing.assert_close(actual_arrays[key], values, rtol=1e-5, atol=1e-5)


def collected(collector: Any, frames: int = FRAMES) -> TensorDictBase:
    """Return the first ``frames`` frames, in two batches."""
    with collector:
        batches = [collector.next().clone() for _ in range(2)]
    return torch.cat(batches, 1)[:, :frames]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_collector_stores_the_same_as_a_loop(name: str, n_envs: int) -> None:
    expected = by_hand(copy.deepcopy(POLICIES[name]()), n_envs)
    collector = Collector(
        [Clock] * n_envs, POLICIES[name](), frames_per_batch=n_envs * FRAMES // 2
    )
    same(collected(collector), expected)


@pytest.mark.parametrize("name", POLICIES)
def test_workers_store_the_same_as_a_loop(name: str) -> None:
    expected = by_hand(POLICIES[name](), 1)
    collector = MultiSyncCollector(
        [Clock], POLICIES[name](), frames_per_batch=FRAMES // 2
    )
    same(collected(collector), expected)


@pytest.mark.parametrize("name", ["normaliser", "in_place", "pops", "state", "lingers"])
def test_async_workers_store_the_same_as_a_loop(name: str) -> None:
    expected = by_hand(POLICIES[name](), 1)
    collector = MultiAsyncCollector(
        [Clock], POLICIES[name](), frames_per_batch=FRAMES // 2
    )
    same(collected(collector), expected)


@pytest.mark.parametrize("name", ["normaliser", "in_place", "pops", "state", "lingers"])
def test_a_policy_with_a_parallel_env_stores_the_same_as_a_loop(name: str) -> None:
    expected = by_hand(POLICIES[name](), 2)
    collector = Collector(
        lambda: ParallelEnv(2, Clock), POLICIES[name](), frames_per_batch=FRAMES
    )
    same(collected(collector), expected)


@pytest.mark.parametrize("name", ["normaliser", "encoder", "pops"])
def test_compact_batches_keep_observations_that_the_policy_changes(name: str) -> None:
    expected = by_hand(POLICIES[name](), 1)
    collector = Collector(
        [Clock], POLICIES[name](), frames_per_batch=FRAMES // 2, compact_obs=True
    )
    same(collected(collector), expected)


@pytest.mark.parametrize("name", ["normaliser", "in_place", "pops", "private_state"])
def test_checked_actions_equal_those_of_a_loop(name: str) -> None:
    expected = by_hand(POLICIES[name](), 2)
    collector = Collector(
        [Clock] * 2, POLICIES[name](), frames_per_batch=FRAMES, check_actions=True
    )
    same(collected(collector), expected)


def chases(td: TensorDictBase, *, on_copies: bool) -> TensorDictBase:
    """Scales the observations of all agents, maybe in place, and acts on them."""
    for group in ("prey", "hunter"):
        observation = td[group, "observation"]
        observation = observation * 100 if on_copies else observation.mul_(100)
        code = observation.abs().sum(-1)
        if group == "hunter":
            td[group, "action"] = code.long() % 4
        else:
            td[group, "action"] = torch.stack([code.sin(), code.cos()], -1)
    return td


def test_evaluation_acts_on_the_environments_observations() -> None:
    returns = [
        evaluate(
            partial(chases, on_copies=on_copies), [CountingEnv] * 2, episodes=8, seeds=3
        ).agent_returns
        for on_copies in (True, False)
    ]
    assert returns[0] == returns[1]
    assert len(set(returns[0])) > 1


@pytest.mark.parametrize("name", ["state", "private_state", "lingers_privately"])
def test_the_state_has_everything_that_a_policy_carries(name: str) -> None:
    expected = by_hand(POLICIES[name](), 2)
    options: Any = {"frames_per_batch": FRAMES, "seed": 0}
    with MultiSyncCollector([Clock] * 2, POLICIES[name](), **options) as collector:
        first = collector.next().clone()
        state = collector.state_dict()
    with MultiSyncCollector([Clock] * 2, POLICIES[name](), **options) as collector:
        collector.load_state_dict(state)
        second = collector.next().clone()
    same(torch.cat([first, second], 1), expected)


def begins_late(change: Callable[[TensorDictBase], Any]) -> Act:
    calls = [0]

    def act(td: TensorDictBase) -> TensorDictBase:
        calls[0] += 1
        td[ACTION] = td[OBSERVATION] + 1
        if calls[0] > 6:
            change(td)
        return td

    return act


LATE: dict[str, tuple[Callable[[TensorDictBase], Any], str]] = {
    "set": (lambda td: td.set(OBSERVATION, td[OBSERVATION] / 2), "input a/observation"),
    "in_place": (lambda td: td[OBSERVATION].div_(2), "input a/observation"),
    "pop": (lambda td: td.pop(OBSERVATION), "input a/observation"),
    "shape": (lambda td: td.set(ACTION, td[ACTION][..., :1]), "a/action of shape"),
    "missing": (lambda td: td.pop(ACTION), "did not write a/action"),
}


@pytest.mark.parametrize("late", LATE)
def test_changes_that_begin_later_are_noticed(late: str) -> None:
    change, message = LATE[late]
    collector = Collector([Clock], begins_late(change), frames_per_batch=FRAMES)
    with collector, pytest.raises(PolicyError, match=message):
        collector.next()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step_count", torch.ones(1, 1), "writes step_count"),
        (("collector", "mask"), torch.ones(1, 1), "writes collector/mask"),
        ("done", torch.ones(1, 1, dtype=torch.bool), "changes done"),
        ("brief", torch.ones(1, 1, dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)
def test_outputs_that_cannot_be_stored_are_refused_at_the_start(
    key: Any, value: torch.Tensor, message: str
) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        td[ACTION] = td[OBSERVATION] + 1
        td[key] = value
        return td

    with pytest.raises((TypeError, ValueError), match=message):
        Collector([Clock], act, frames_per_batch=FRAMES)


def test_an_error_of_the_policy_says_what_it_was_called_on() -> None:
    network = nn.Linear(7, 4)
    policy = TensorDictModule(network, [("hunter", "observation")], [("hunter", "x")])
    with pytest.raises(RuntimeError, match="cannot be multiplied") as excinfo:
        Collector(CountingEnv, policy, frames_per_batch=FRAMES)
    (note,) = excinfo.value.__notes__
    assert note.startswith("The policy was called on observations of counting, ")
    assert note.endswith(" in a group: hunter/observation [1, 2, 5].")


def test_the_policy_is_probed_on_the_observations_of_the_first_reset() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        norm = td[OBSERVATION].norm()
        if not norm > 0:
            raise ZeroDivisionError("no environment shows zeros")
        td[ACTION] = td[OBSERVATION] / norm
        return td

    with Collector([Clock], act, frames_per_batch=LENGTH) as collector:
        assert collector.getattr_env("resets") == [1]
        collector.next()
        # The second episode has begun.
        assert collector.getattr_env("resets") == [2]


def test_the_input_of_a_policy_that_does_not_change_it_is_created_once() -> None:
    inputs = []

    def act(td: TensorDictBase) -> TensorDictBase:
        inputs.append(id(td))
        td[ACTION] = td[OBSERVATION] + 1
        return td

    with Collector([Clock], act, frames_per_batch=FRAMES) as collector:
        assert "copies" not in collector.explain()[0]
        inputs.clear()
        collector.next()
    assert len(set(inputs)) == 1
    with Collector([Clock], overwrites, frames_per_batch=FRAMES) as collector:
        assert "copies" in collector.explain()[0]
