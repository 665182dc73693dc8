"""What a simulator on a device gets and returns is one copy each way, per call."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.far_device import FAR, pinned_for_far
from support.torch_worlds import RICH, Spec, TorchWorlds

from marl_collect import Step
from marl_collect.core.host_copies import OnHost

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
