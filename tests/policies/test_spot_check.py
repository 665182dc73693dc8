"""What is recorded, compared with its module, and made again, as often as that pays."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from pure_modules import Called, Computes
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import Tensor, nn
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.policies.fused import spot_check
from marl_collect.policies.fused.recordable import why_not_recordable
from marl_collect.policies.fused.runner import RecordingBudget
from marl_collect.policies.fused.spot_check import NEVER, SpotCheck, outputs_agree

LEVEL = 0.0


@pytest.mark.parametrize("frames", [1, 7, 200, 499, 2000, 5000, 20_000])
@pytest.mark.parametrize("updates", [False, True])
def test_one_in_5000_to_15000_frames_is_compared(frames: int, updates: bool) -> None:
    check = SpotCheck()
    slots = 200_000 // frames
    compared = []
    for slot in range(slots):
        frame = check.choose(frames, [slot if updates else 0])
        if slot < 10:
            assert frame == 0
        if frame != NEVER:
            assert 0 <= frame < frames
            compared.append(slot * frames + frame)
    gaps = np.diff([*compared, slots * frames])
    # With an update before each slot, the first one is compared that is due.
    assert gaps.max() <= (5_000 if updates else 15_000) + frames
    assert len(compared) <= 10 + slots * frames / 5_000
    if updates:
        assert np.mean([number % frames == 0 for number in compared]) > 0.5


def test_updates_are_compared_in_their_first_frame() -> None:
    check = SpotCheck()
    frames = [check.choose(1_000, [slot // 5]) for slot in range(100)]
    assert set(frames[15::5]) == {0}
    assert set(frames[15:]) == {0, NEVER}
    assert SpotCheck().choose(0, []) == NEVER  # An empty slot has no frame.


@pytest.mark.parametrize(
    ("key", "recorded", "called", "agree"),
    [
        ("action", np.array([1, 2]), np.array([1, 2]), True),
        ("action", np.array([1, 2]), np.array([1, 3]), False),
        ("loc", np.array([1.0, 1e-6]), np.array([1.00005, 2e-6]), True),
        ("loc", np.array([1.0, 0.0]), np.array([1.0, 2e-5]), False),
        ("loc", np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), True),
        ("loc", np.array([np.nan]), np.array([0.0]), False),
        ("loc", np.array([], np.float32), np.array([], np.float32), True),
        ("log_prob", np.array([3.0]), np.array([3.005]), True),
        ("log_prob", np.array([3.0]), np.array([3.05]), False),
    ],
)
def test_rounding_is_allowed(key: str, recorded: Any, called: Any, agree: bool) -> None:
    assert outputs_agree({("g", key): recorded}, {("g", key): called}) is agree


class ReadsOutside(nn.Module):
    pure_forward = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        noise = torch.rand(x.shape[0], x.shape[1], 2)
        hunters = torch.zeros(len(x), 2, dtype=torch.int64)
        return LEVEL + 0.1 * noise + 0.01 * self.layer(x).tanh(), hunters


def acting(net: nn.Module) -> TensorDictModule:
    keys = [("prey", "action"), ("hunter", "action")]
    return TensorDictModule(net, in_keys=[("prey", "observation")], out_keys=keys)


@pytest.fixture(autouse=True)
def _outside() -> Any:
    yield
    globals().update(LEVEL=0.0)


def levels(collector: Collector) -> list[float]:
    return collector.next()["prey", "action"][:, :, 0, 0].flatten().round().tolist()


def test_a_change_outside_acts_after_some_frames_then_the_module_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here after a tenth of the frames, to be quick."""
    monkeypatch.setattr(spot_check, "_INTERVAL", 1_000)
    with Collector(CountingEnv, acting(ReadsOutside()), frames_per_batch=50) as it:
        for _ in range(12):
            assert set(levels(it)) == {0.0}
        globals().update(LEVEL=3.0)
        late = [level for _ in range(32) for level in levels(it)]
        change = late.index(3.0)
        assert change <= 1_500
        assert set(late[change:]) == {3.0}
        assert it.explain()[0].startswith("Fused")
        globals().update(LEVEL=5.0)
        late = [level for _ in range(32) for level in levels(it)]
        assert set(late[late.index(5.0) :]) == {5.0}
        assert "changes without a change of its weights" in it.explain()[0]
        globals().update(LEVEL=7.0)
        assert set(levels(it)) == {7.0}


def test_comparisons_change_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and random numbers are those of the recording in all frames."""
    batches = []
    for compares in (True, False):
        if not compares:
            monkeypatch.setattr(SpotCheck, "choose", lambda *_: NEVER)
        torch.manual_seed(0)
        net = ReadsOutside()
        with Collector([CountingEnv] * 2, acting(net), frames_per_batch=20) as it:
            it.next()
            recorded = net.calls
            torch.manual_seed(1)
            batches.append(torch.stack([it.next().clone() for _ in range(5)]))
            assert net.calls - recorded == (5 if compares else 0)
            assert it.explain()[0].startswith("Fused")
    assert torch.equal(batches[0]["prey", "action"], batches[1]["prey", "action"])


FREE = 10
"""Recordings that need not pay."""


def test_a_recording_that_saves_nothing_is_not_repeated() -> None:
    budget = RecordingBudget()
    for _ in range(FREE):
        budget.record(seconds=1.0, saving=float("nan"))
    assert not budget.allows(1_000_000)


def with_levels(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Act with an attribute, and with a number that is read from a buffer."""
    hunters = torch.zeros(len(x), 2, dtype=torch.int64)
    return 0 * x[..., :2] + net.level + net.table.item(), hunters


def attribute(net: Any) -> None:
    net.level += 1.0


def read(net: Any) -> None:
    net.table += 1.0


def replace(net: Any) -> None:
    net.table = net.table + 1


@pytest.mark.parametrize("change", [attribute, read, replace])
def test_recordings_must_pay(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RecordingBudget.record

    def priced(budget: RecordingBudget, seconds: float, saving: float) -> None:
        """Let every recording cost as much as 20 frames save."""
        assert seconds > 0
        record(budget, 20.0, 1.0)

    monkeypatch.setattr(RecordingBudget, "record", priced)
    net: Any = Computes(with_levels, torch.zeros(()))
    net.level = 0.0
    for frames, pays in ((8, False), (32, True)):
        with Collector(CountingEnv, acting(net), frames_per_batch=frames) as collector:

            def explains(collector: Any = collector) -> str:
                """Collect a batch, check it, and return how the policy acted."""
                actions = collector.next()["prey", "action"]
                assert (actions == net.level + net.table).all()
                text: str = collector.explain()[0]
                return text

            assert explains().startswith("Fused")
            for number in range(1, 15):
                change(net)
                is_fused = explains().startswith("Fused")
                assert is_fused == (pays or number < FREE), number
            if pays:
                continue
            assert "change so often that recording it again" in explains()
            # 24 frames since the last change.
            assert explains().startswith("Fused")
            assert explains().startswith("Fused")


class Inherits(Computes):
    pass


class SaysAgain(Called):
    pure_forward = True


def acts(_: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :2] / 2000, torch.zeros(len(x), 2, dtype=torch.int64)


@pytest.mark.processes
def test_a_class_sent_by_value_keeps_what_it_declares_again() -> None:
    """cloudpickle leaves out attributes that equal those of the base."""

    class Again(Computes):
        pure_forward = True

        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    policy = acting(Again(acts))
    with MultiSyncCollector([CountingEnv], policy, frames_per_batch=9) as collector:
        collector.next()
        (text,) = collector.explain()
    assert text.startswith("Fused")


class Ours(nn.Module):
    __module__ = "marl_collect.interop.benchmarl"


def drawing_from_a_distribution_of_the_users_own() -> nn.Module:
    class Mine(torch.distributions.Normal):
        pass

    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["x"], distribution_class=Mine
    )


def calling(called: Any) -> TensorDictModule:
    return TensorDictModule(called, ["x"], ["y"])


@pytest.mark.parametrize(
    "policy",
    [
        *(kind(acts) for kind in (Computes, Inherits, SaysAgain)),
        *map(calling, (torch.tanh, nn.functional.softplus, nn.Tanh())),
    ],
)
def test_what_is_declared_pure_and_functions_of_torch_are_recordable(
    policy: Any,
) -> None:
    assert why_not_recordable(policy) is None


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Called(acts), "Called"),
        (calling(Called(acts)), "Called"),
        (calling(lambda x: input(x) or x), "<lambda>"),
        (calling(input), "input"),
        (drawing_from_a_distribution_of_the_users_own(), "Mine"),
        (lambda td: td, "<lambda>"),
        # The user's module is named before ours.
        (nn.Sequential(Ours(), Called(acts)), r"^1 \(Called"),
        (nn.Sequential(Ours()), "Ours"),
    ],
)
def test_undeclared_parts_are_named_with_the_remedy(policy: Any, name: str) -> None:
    reason = str(why_not_recordable(policy))
    assert re.search(name, reason)
    assert "if it computes from inputs and weights alone" in reason
    assert "pure_forward = True" in reason


def test_policies_on_other_devices_are_not_recordable() -> None:
    assert "is on meta" in str(why_not_recordable(nn.Linear(2, 2, device="meta")))
