"""A device whose memory the host cannot read: the same data, by few copies."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.far_device import FAR, pinned_for_far
from support.torch_worlds import RICH, SIMPLE, Spec, TorchWorlds
from torch import nn

from marl_collect import Collector, Step
from marl_collect.core.host_copies import OnHost
from marl_collect.core.tensordicts import flatten
from marl_collect.models import make_policy


def on_host(batch: Any) -> dict[Any, torch.Tensor]:
    return {key: value.cpu().clone() for key, value in flatten(batch).items()}


def check_equal(actual: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("seed", range(4))
def test_random_actions(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    spec = RICH if seed == 0 else Spec.draw(seed)
    keywords: Any = {"frames_per_batch": 20, "seed": 3, "max_frames_per_traj": 6}
    with Collector(lambda: TorchWorlds(spec), **keywords) as collector:
        expected = [on_host(collector.next()) for _ in range(4)]
    with pinned_for_far(monkeypatch) as far:

        def make() -> Any:
            return TorchWorlds(spec, device=FAR)

        with Collector(make, **keywords) as collector:
            batches, sent = [], []
            for number in range(4):
                far.sent.clear()
                far.received.clear()
                batch = collector.next()
                copies = 1 + (number == 0)  # The first episodes begin on the host.
                assert [copy.pinned for copy in far.received] == [True] * copies
                sent.append(len(far.sent))
                assert {value.device for value in flatten(batch).values()} == {FAR}
                batches.append(on_host(batch))
            assert not far.reads
            assert sent[1:] == [sent[1]] * 3  # However many episodes end.
            state = collector.state_dict()
            collector.reset()
            collector.next()
            if spec.repeats:
                collector.load_state_dict(state)
                batches += [on_host(collector.next()) for _ in range(2)]
    for batch, other in zip(batches, expected, strict=False):
        check_equal(batch, other)


def batches_of(collector: Any, policy: nn.Module) -> list[Any]:
    """Return batches of three versions of the weights."""
    batches = []
    for _ in range(3):
        batches += [flatten(collector.next().clone()) for _ in range(2)]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.25)
        collector.update_policy_weights_(policy)
    return batches


@pytest.mark.parametrize("lives_there", [True, False], ids=["moved", "policy_device"])
@pytest.mark.parametrize("spec", [SIMPLE, RICH], ids=["simple", "rich"])
@pytest.mark.parametrize("recurrent", [None, "gru", "lstm"])
def test_a_policy_acts_on_the_device(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, recurrent: Any, *, lives_there: bool
) -> None:
    """Weights that the trainer has there, or on the host, are updated alike."""
    torch.manual_seed(1)
    policy = make_policy(
        TorchWorlds(spec).description,
        num_cells=(4,),
        recurrent=recurrent,
        check_mask=False,  # The check waits.
    )
    policy.register_forward_hook(lambda *_: None)  # Called in the numpy loop too.
    twin = copy.deepcopy(policy)
    keywords: Any = {"frames_per_batch": 20, "seed": 3, "total_frames": -1}
    with Collector(lambda: TorchWorlds(spec), twin, **keywords) as collector:
        expected = batches_of(collector, twin)
    with pinned_for_far(monkeypatch) as far:
        if lives_there:
            policy = policy.to(FAR)
        else:
            keywords["policy_device"] = FAR

        def make() -> Any:
            return TorchWorlds(spec, device=FAR)

        with Collector(make, policy, **keywords) as collector:
            far.reads.clear()
            far.received.clear()
            batches = batches_of(collector, policy)
            assert not far.reads
            assert len(far.received) == len(batches)
        actual = []
        for batch in batches:
            assert {value.device for value in batch.values()} == {FAR}
            actual.append({key: value.cpu() for key, value in batch.items()})
    for batch, other in zip(actual, expected, strict=True):
        check_equal(batch, other)
    assert not torch.equal(actual[0]["a", "logits"], actual[-1]["a", "logits"])


WORLDS = 5


def actions_for(spec: Spec, draw: np.random.Generator) -> dict[str, Any]:
    """Return random actions, as the engine passes them."""
    out: dict[str, Any] = {}
    for name, kind in spec.kinds.items():
        shape = WORLDS, kind.n
        moves = draw.uniform(-1, 1, (*shape, 2)).astype(np.float32)
        out[name] = {
            "box": moves,
            "dict": {"move": moves, "say": draw.integers(0, 4, shape)},
            "multi": draw.integers(0, 2, (*shape, 2)),
        }.get(kind.action, draw.integers(0, 3, shape))
    return out


def check_alike(actual: Any, expected: Any) -> None:
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            check_alike(actual[key], value)
    elif isinstance(expected, list):
        for one, two in zip(actual, expected, strict=True):
            check_alike(one, two)
    elif expected is None:
        assert actual is None
    else:
        assert isinstance(actual, np.ndarray)
        assert actual.dtype == expected.numpy().dtype
        assert (actual == expected.numpy()).all()


@pytest.mark.parametrize("seed", range(12))
def test_a_call_is_one_pinned_copy_each_way(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    spec = RICH if seed == 0 else Spec.draw(seed)
    host, draw = TorchWorlds(spec, WORLDS), np.random.default_rng(seed)
    with pinned_for_far(monkeypatch) as far:
        device = TorchWorlds(spec, WORLDS, FAR)
        simulator = OnHost(device)
        for call in range(6):
            far.sent.clear()
            far.received.clear()
            seeds = draw.integers(0, 2**31, WORLDS)
            actions = actions_for(spec, draw)
            if call % 3 == 2:
                which = None if call == 2 else draw.random(WORLDS) < 0.5
                here = simulator.begin(which, seeds), host.begin(which, seeds)
            else:
                here = vars(simulator.advance(actions)), vars(host.advance(actions))
            check_alike(*here)
            assert [copy.waits for copy in far.sent] == [False]
            assert [copy.pinned for copy in far.received] == [True]
            assert far.sent[0].pinned


def test_first_observations_are_valid_until_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of the worlds that ended begin with them only after others have begun."""
    advance = TorchWorlds.advance

    def resets(env: TorchWorlds, actions: Mapping[str, Any]) -> Step:
        return Step({}, {}, {}, None, first=advance(env, actions).observations)

    monkeypatch.setattr(TorchWorlds, "advance", resets)
    draw = np.random.default_rng(1)
    with pinned_for_far(monkeypatch):
        simulator = OnHost(TorchWorlds(RICH, WORLDS, FAR))
        simulator.begin(None, np.arange(WORLDS))
        first = simulator.advance(actions_for(RICH, draw)).first
        expected = [np.array(array) for array in leaves(first)]
        simulator.begin(np.ones(WORLDS, np.bool_), np.arange(WORLDS) + 8)
        for array, copied in zip(leaves(first), expected, strict=True):
            assert (array == copied).all()


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, np.ndarray):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for value in values for leaf in leaves(value)]


@pytest.mark.parametrize(
    "waits",
    [
        lambda data: data[data > 3],
        lambda data: data.masked_fill_(data > 1, 0)[data > 1],
        lambda data: data.any().item(),
        lambda data: data.sum().item(),
        lambda data: data.nonzero(),
        lambda data: data.repeat_interleave(data),
    ],
)
def test_what_waits_for_the_device_is_found(
    monkeypatch: pytest.MonkeyPatch, waits: Any
) -> None:
    with pinned_for_far(monkeypatch) as far:
        data = torch.arange(4).to(FAR)
        assert not far.reads
        waits(data)
        assert far.reads
