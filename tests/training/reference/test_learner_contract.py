"""What must not matter to a learner, in cases drawn at random.

A learner that is copied, saved or loaded between batches, and whose batches have
padding, learns what one learns that saw plain batches.
"""

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_cases import drawn
from drawn_env import DrawnEnv, combinations

from marl_collect import Collector
from marl_collect.models import load_policy
from marl_collect.training.learner import learner_of
from marl_collect.training.options import TrainingOptions

pytestmark = pytest.mark.processes

CASES = [(family, seed) for family in ("ppo", "values", "maddpg") for seed in range(16)]
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")
PROGRESS = (0.25, 0.5, 1.25)


class Case:
    """A learner's arguments, and how its batches come to it."""

    def __init__(self, family: str, seed: int) -> None:
        self.pick = random.Random(f"{family} {seed}")
        kind, self.setup, settings = drawn(family, seed)
        self.on_policy = family == "ppo"
        self.whole = settings.get("value.replay") == "episodes"
        self.whole |= not self.on_policy and settings.get("recurrent") is not None
        # Padding is learnt from as one row, so draws are those of one environment.
        self.environments = environments = self.pick.choice([1, 3])
        self.pads = self.on_policy or environments == 1
        buffers = [1_000] if self.whole else [40, 1_000]
        settings |= {
            "ppo.anneal": self.pick.random() < 0.5,
            "ppo.minibatch_frames": 100,
            "value.frames_per_update": 17,
            "value.episodes_per_update": 2,
            "value.buffer_frames": environments * self.pick.choice(buffers),
            "value.warm_up_frames": self.pick.choice([0, 70 * environments]),
            "value.epsilon_frames": 200 * environments,
        }
        self.options = TrainingOptions().with_settings(settings)
        self.factory = partial(DrawnEnv, kind)
        # The entropy of continuous actions is an estimate from random numbers.
        self.unsure = {"entropy"} if kind.continuous else set()
        self.seed = seed

    def batches(self) -> list[Any]:
        """Return three batches of the learner's first policy."""
        with Collector(
            [self.factory] * self.environments,
            self.learner().policy,
            frames_per_batch=60 * self.environments,
            seed=self.seed,
        ) as collector:
            batches: list[Any] = [collector.next().clone() for _ in PROGRESS]
        if self.whole and self.pads:
            before = [-1, *(int(batch[IDS][0, -1]) for batch in batches)]
            return [*map(whole_episodes, batches, before)]
        return batches

    def learner(self, seed: int = 0) -> Any:
        """Return a new learner."""
        make: Any = learner_of(self.setup.algorithm)
        description = self.factory().description
        return make(description, self.setup, self.options, seed=seed)

    def disguised(self, batch: Any) -> Any:
        """Return a batch with the same frames, and padding if it may have any."""
        if not self.pads:
            return batch
        frames = self.pick.randint(1, 9)
        if self.on_policy:
            return padded(batch, frames, row=self.pick.random() < 0.5)
        ids = batch[IDS][0]
        episodes = [batch[:, ids == k] for k in ids.unique()]
        longest = max(episode.shape[1] for episode in episodes) + frames
        return torch.cat([padded(e, longest - e.shape[1]) for e in episodes])


def whole_episodes(batch: Any, before: int) -> Any:
    """Return the episodes that begin and end in a batch of one environment.

    Args:
        batch: frames ``[1, T]``.
        before: id of the trajectory in the last frame of the batch before.
    """
    stop = int(batch["next", "done"].flatten().nonzero()[-1]) + 1
    begin = int((batch[IDS][0] != before).nonzero()[0])
    return batch[:, begin:stop]


def padded(batch: Any, frames: int, *, row: bool = False) -> Any:
    """Return a batch with frames of garbage, also in a row of its own."""
    repeated: Any = torch.cat([batch] * (1 + frames), 1)
    garbage = repeated[:, : batch.shape[1] + frames].clone()
    if row:
        garbage = torch.cat([garbage, garbage[:1]])
    valid = torch.zeros(garbage.shape, dtype=torch.bool)
    valid[: len(batch), : batch.shape[1]] = True
    for leaf in garbage.values(include_nested=True, leaves_only=True):
        invalid = leaf[~valid]
        leaf[~valid] = torch.full_like(
            invalid, float("nan") if invalid.is_floating_point() else 1
        )
    garbage[MASK] = valid
    return garbage


def loaded(case: Case, learner: Any, path: Path) -> Any:
    del path
    other = case.learner(seed=1)
    other.update(case.batches()[0], 0.0)  # What it has learnt does not remain.
    other.load_state_dict(learner.state_dict())
    return other


def read_again(case: Case, learner: Any, path: Path) -> Any:
    other = case.learner(seed=1)
    learner.save(path)
    other.load(path)
    expected = learner.policy.state_dict()
    assert_equal([*load_policy(path).state_dict().values()], [*expected.values()])
    return other


COPIES: list[Callable[[Case, Any, Path], Any]] = [
    loaded,
    read_again,
    lambda _, learner, __: copy.deepcopy(learner),
    lambda _, learner, __: pickle.loads(pickle.dumps(learner)),
]


def assert_equal(actual: Any, expected: Any, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def tensors_of(learner: Any) -> list[Any]:
    """Return all weights, and the states with which a critic reads the next batch."""
    modules = [*learner.networks.values(), *learner.untrained.values()]
    weights = [weight for module in modules for weight in module.parameters()]
    states = getattr(learner, "_states", {})
    return weights + [state for k in sorted(states) for state in states[k].values()]


def counts(case: Case, batches: list[Any]) -> list[tuple[int, float, int]]:
    """Return frames, epsilon and gradient steps of a buffer after each batch."""
    value, frames, due = case.options.value, 0, 0
    result = []
    for batch in batches:
        frames += batch.numel()
        share = min(1.0, frames / value.epsilon_frames)
        epsilon = 1 - share * 0.95
        if case.options.last_action and frames < value.warm_up_frames:
            epsilon = 1.0
        if frames >= value.warm_up_frames:
            due += int(batch["next", "done"].sum()) if case.whole else batch.numel()
        per_update = (
            value.episodes_per_update if case.whole else value.frames_per_update
        )
        result.append((frames, epsilon, due // per_update))
    return result


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_copies_and_padding_do_not_matter(
    family: str, seed: int, tmp_path: Path
) -> None:
    case = Case(family, seed)
    copied, at = COPIES[seed % 4], case.pick.randint(1, 2)
    close = {"rtol": 1e-4, "atol": 2e-5} if case.on_policy else {}
    straight, original = case.learner(), case.learner()
    batches = case.batches()
    variants = [case.disguised(batch) for batch in batches]
    metrics = []
    for number, batch in enumerate(batches):
        policy = copy.deepcopy([*straight.policy.parameters()])
        metrics.append(straight.update(batch, PROGRESS[number]))
        frames, epsilon, updates = counts(case, batches)[number]
        assert straight.frames == frames
        if case.on_policy:
            share = 1 - min(1, PROGRESS[number]) if case.options.ppo.anneal else 1
            assert metrics[-1]["lr"] == pytest.approx(share * case.options.ppo.lr)
            same = map(torch.equal, policy, straight.policy.parameters())
            assert all(same) == (share == 0)
        else:
            assert straight.updates == updates
        if family == "values":
            assert (straight.warm_up_frames is None) == case.options.last_action
            assert metrics[-1]["epsilon"] == pytest.approx(epsilon)
            buffers = dict(straight.policy.named_buffers())
            (acting,) = [b for name, b in buffers.items() if "epsilon" in name]
            assert float(acting) == pytest.approx(epsilon)
    for number in range(at):
        original.update(variants[number], PROGRESS[number])
    other = copied(case, original, tmp_path / "learner.pt")
    for learner in (other, original):  # What one learns does not disturb the other.
        for number in range(at, len(variants)):
            actual = learner.update(variants[number], PROGRESS[number])
            for name in metrics[number].keys() - case.unsure:
                expected = pytest.approx(metrics[number][name], 1e-3, 1e-4, nan_ok=True)
                assert actual[name] == expected, name
        assert (learner.frames, learner.updates) == (straight.frames, straight.updates)
        assert_equal(tensors_of(learner), tensors_of(straight), **close)


def test_the_cases_have_everything() -> None:
    """Every way to copy meets padding, memory and a buffer that is full."""
    facts: dict[str, list[dict[str, Any]]] = {"ppo": [], "values": [], "maddpg": []}
    for family, seed in CASES:
        case = Case(family, seed)
        full = case.options.value.buffer_frames < 180
        facts[family].append(vars(case) | {"copied": seed % 4, "full": full})
        facts[family][-1]["memory"] = case.options.recurrent is not None
    assert combinations(facts["ppo"], "copied", "memory") == 8
    for family in ("values", "maddpg"):
        assert combinations(facts[family], "copied", "pads") == 8
    assert combinations(facts["values"], "whole", "pads") == 4
    assert combinations(facts["values"], "pads", "full") == 4
