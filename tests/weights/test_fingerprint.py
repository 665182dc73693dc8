"""What changes a fingerprint, and which values it cannot compare."""

import array
import copy
import enum
import importlib
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.weights.fingerprint import Fingerprint, _is_library

SCALE = 2.0
CONFIG: Any = types.ModuleType("fingerprint_config")
CONFIG.SCALE = 2.0
CONFIG.inner = types.SimpleNamespace(scale=2.0)


@dataclass
class Config:
    level: float = 1.0
    inner: dict[str, Any] = field(default_factory=lambda: {"a": [{"level": 1.0}]})


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 1.0


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Net(nn.Module):
    """Has settings of every kind."""

    factor = 1.0
    table: dict[str, float] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.noise = 1.0
        self.mode = Mode.ONE
        self.config = Config()
        self.slotted = Slotted()
        self.space = types.SimpleNamespace(level=1.0)
        self.nested = {"a": {"b": {"c": {"d": [1.0, (2.0, {3.0})]}}}}
        self.ordered = OrderedDict(a=1.0, b=2.0)
        self.queue = deque([1.0])
        self.array = np.ones(3)
        self.tensor = torch.ones(3)
        self.hidden = [nn.Linear(2, 2)]
        self.function = partial(scaled, factor=[1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x) * SCALE * CONFIG.SCALE * CONFIG.inner.scale

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x, [self.factor])


FACTOR = 1.0


def scaled(x: torch.Tensor, factor: list[float]) -> torch.Tensor:
    return x * factor[0] * FACTOR


def setter(*path: str, value: Any) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        for name in path[:-1]:
            net = getattr(net, name)
        setattr(net, path[-1], value)

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "training": lambda net: net.eval(),
    "any name": setter("noise", value=2.0),
    "another type": setter("noise", value=1),
    "the sign of zero": setter("noise", value=-0.0),
    "an enum": setter("mode", value=Mode.TWO),
    "an object": setter("config", "level", value=2.0),
    "an object in slots": setter("slotted", "level", value=2.0),
    "a namespace": setter("space", "level", value=2.0),
    "deep in an object": lambda net: net.config.inner["a"][0].update(level=2.0),
    "deep in containers": lambda net: net.nested["a"]["b"]["c"]["d"].__setitem__(0, 2),
    "another key": lambda net: net.nested["a"]["b"].update(e=net.nested),
    "an order": lambda net: net.ordered.move_to_end("a"),
    "a deque": lambda net: net.queue.append(1.0),
    "an array": lambda net: net.array.__setitem__(1, 2.0),
    "another tensor": setter("tensor", value=torch.ones(3)),
    "a layout": lambda net: setattr(net.tensor, "data", net.tensor.data[:2]),
    "a new attribute": setter("new", value=None),
    "a removed attribute": lambda net: delattr(net, "space"),
    "a parameter": lambda net: setattr(
        net.layer, "weight", nn.Parameter(net.layer.weight.detach().clone())
    ),
    "other memory": lambda net: setattr(
        net.layer.weight, "data", net.layer.weight.data.clone()
    ),
    "another layout of a weight": lambda net: setattr(
        net.layer.weight, "data", net.layer.weight.data.t()
    ),
    "a layer": lambda net: net.add_module("more", nn.Tanh()),
    "a hook": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "a module in a list": lambda net: net.hidden[0].eval(),
    "an argument of a partial": lambda net: net.function.keywords["factor"].append(2),
    "an attribute of a class": lambda net: setattr(Net, "factor", 3.0),
    "in an attribute of a class": lambda net: Net.table.update(a=1.0),
    "a global": lambda net: globals().update(SCALE=3.0),
    "a global of a helper": lambda net: globals().update(FACTOR=3.0),
    "a constant of a module": lambda net: setattr(CONFIG, "SCALE", 3.0),
    "in an object of a module": lambda net: setattr(CONFIG.inner, "scale", 3.0),
}


@pytest.fixture
def net() -> Any:
    """A module; afterwards, what it reads from outside is as before."""
    outside = SCALE, FACTOR
    yield Net()
    globals().update(SCALE=outside[0], FACTOR=outside[1])
    Net.factor = 1.0
    Net.table.clear()
    CONFIG.SCALE, CONFIG.inner.scale = 2.0, 2.0


@pytest.mark.parametrize("change", CHANGES)
def test_everything_that_a_recording_assumes_is_compared(net: Any, change: str) -> None:
    if change == "the sign of zero":
        net.noise = 0.0
    before = Fingerprint(net)
    assert before.unseen == []
    assert before.holds()
    assert Fingerprint(net) == before
    CHANGES[change](net)
    assert not before.holds()
    assert Fingerprint(net) != before


OF_WEIGHTS = {
    "a layout",
    "a parameter",
    "other memory",
    "another layout of a weight",
    "another tensor",
    "a hook",
    "a layer",
}


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - OF_WEIGHTS))
def test_updates_see_the_same_except_for_weights(net: Any, change: str) -> None:
    if change == "the sign of zero":
        net.noise = 0.0
    before = Fingerprint(net, values=True)
    assert before.holds()
    CHANGES[change](net)
    assert not before.holds()


def test_equal_values_are_the_same_state(net: Any) -> None:
    before = Fingerprint(net)
    net.noise = float("1.0")
    net.config = copy.deepcopy(net.config)
    net.array = net.array.copy()
    assert before.holds()
    net.config.level = 2.0  # The new object is watched from now on.
    assert not before.holds()


def test_training_changes_nothing(net: Any) -> None:
    for module in (net, MultiAgentMLP(2, 2, 2, centralised=False, share_params=True)):
        weights = {id(tensor) for tensor in module.parameters()}
        states = (
            Fingerprint(module),
            Fingerprint(module, values=True, weights=weights),
        )
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        assert all(state.holds() for state in states)


def test_tensors_of_modules_in_lists_are_compared_for_updates(net: Any) -> None:
    weights = {id(tensor) for tensor in net.parameters()}
    addresses = Fingerprint(net)
    values = Fingerprint(net, values=True, weights=weights)
    with torch.no_grad():
        net.hidden[0].weight.add_(1)
    assert addresses.holds()
    assert not values.holds()


LARGE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "an array": lambda: (numbers := np.zeros(1 << 18), numbers),
    "a strided array": lambda: (numbers := np.zeros((9, 1 << 18)).T[::2], numbers),
    "a tensor": lambda: (numbers := torch.zeros(1 << 18), numbers.numpy()),
    "a sparse tensor": lambda: (
        numbers := torch.ones(1 << 18).to_sparse(),
        numbers._values().numpy(),
    ),
}
"""Values of more than 1 MiB, and their memory. torch does not count writes to it."""


@pytest.mark.parametrize("name", LARGE)
def test_large_arrays_are_compared_for_updates(net: Any, name: str) -> None:
    net.nested["large"], memory = LARGE[name]()
    state = Fingerprint(net, values=True)
    assert not state.is_data
    assert state.holds()
    memory[-1] += 1
    assert not state.holds()


def test_changes_of_a_large_array_of_numpy_are_not_seen_by_recordings(net: Any) -> None:
    net.config.inner["strange"] = np.zeros(1 << 18)
    assert Fingerprint(net).unseen == ["config.inner.strange (ndarray)"]


def test_bytes_and_small_tensors_are_compared_by_value(net: Any) -> None:
    net.bytes, net.numbers = bytearray(3), array.array("d", [1.0])
    memory = net.tensor.numpy()
    for change in (
        lambda: net.bytes.append(1),
        lambda: net.bytes.__setitem__(0, 7),
        lambda: net.numbers.__setitem__(0, 2.0),
        lambda: memory.__setitem__(0, 7.0),
    ):
        state = Fingerprint(net, values=True)
        assert state.holds()
        change()
        assert not state.holds()


def test_hooks_are_compared_but_not_what_they_store(net: Any) -> None:
    stored: list[Any] = []
    net.register_forward_hook(lambda *call: stored.append(call))
    state = Fingerprint(net, values=True)
    stored.append(1)
    assert state.holds()
    net.layer.register_forward_pre_hook(lambda *call: None)
    assert not state.holds()


def test_tensors_are_compared_by_value_for_updates(net: Any) -> None:
    addresses, values = Fingerprint(net), Fingerprint(net, values=True)
    net.tensor.add_(1)
    assert addresses.holds()
    assert not values.holds()


class Counts:
    def count(self) -> None: ...


Counter = Counts()


def generator() -> Any:
    return (number for number in range(3))


UNSEEN: dict[str, Callable[[], Any]] = {
    "a random generator": lambda: random.Random(0),
    "a generator of torch": torch.Generator,
    "a lock": threading.Lock,
    "a generator": generator,
    "a weak reference": lambda: weakref.ref(CONFIG),
    "a proxy": lambda: weakref.proxy(CONFIG),
    "a weak reference to a method": lambda: weakref.WeakMethod(Counter.count),
    "weak values": lambda: weakref.WeakValueDictionary({1: CONFIG}),
    "a weak set": lambda: weakref.WeakSet([CONFIG]),
    "an array of objects": lambda: np.array([object()]),
    "too much": lambda: [[index] for index in range(100_001)],
    "a function of the clock": lambda: __import__("time").time,
    "a random function": lambda: random.random,
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_compared_is_named(net: Any, name: str) -> None:
    net.config.inner["strange"] = UNSEEN[name]()
    for values in (False, True):
        state = Fingerprint(net, values=values)
        assert any(where.startswith("config.inner.strange") for where in state.unseen)
        assert not state.is_data


def reads_the_clock(x: torch.Tensor) -> torch.Tensor:
    import time

    return x * time.monotonic()


def reads_by_name(x: torch.Tensor, name: str = "SCALE") -> torch.Tensor:
    return x * getattr(CONFIG, name)


def evaluates(x: torch.Tensor) -> torch.Tensor:
    return x * eval("SCALE")


@pytest.mark.parametrize("function", [reads_the_clock, reads_by_name, evaluates])
def test_what_code_reads_in_hidden_ways_is_named(function: Any) -> None:
    assert Fingerprint(function).unseen != []


def test_variables_around_a_function_are_compared() -> None:
    value = 1.0

    def act(x: torch.Tensor) -> torch.Tensor:
        return sum(x * value for _ in range(2)) + later  # type: ignore[return-value]

    before = Fingerprint(act)
    later = 0.0
    assert not before.holds()
    before = Fingerprint(act)
    value = 2.0
    assert not before.holds()
    before = Fingerprint(act)
    act.level = 1.0  # type: ignore[attr-defined]
    assert not before.holds()


def test_modules_that_are_imported_inside_are_compared() -> None:
    sys.modules["fingerprint_config"] = CONFIG

    def act(x: torch.Tensor) -> torch.Tensor:
        from fingerprint_config import SCALE  # type: ignore[import-not-found]

        return x * SCALE

    try:
        before = Fingerprint(act)
        assert before.holds()
        CONFIG.SCALE = 5.0
        assert not before.holds()
    finally:
        CONFIG.SCALE = 2.0
        del sys.modules["fingerprint_config"]


def test_cycles_end() -> None:
    items: list[Any] = [1]
    items.append(items)
    config = Config()
    config.inner["self"] = config
    before = Fingerprint([items, config])
    assert before.holds()
    items[0] = 2
    assert not before.holds()


def test_data_are_told_from_code() -> None:
    assert Fingerprint({"a": Config(), "b": (Mode.ONE, torch.ones(2))}).is_data
    for value in (scaled, Net, nn.Linear(1, 1), [scaled], Config(level=scaled)):  # type: ignore[arg-type]
        assert not Fingerprint(value).is_data


@pytest.mark.parametrize("installed", [False, True])
def test_code_in_a_folder_of_pip_is_a_library_s(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``pip install --target``: the folder is not called site-packages."""
    # A name of its own: an imported module stays.
    name = f"fingerprint_package_{'of_pip' if installed else 'of_a_user'}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text(
        "LEVEL = 1.0\ndef level():\n    return LEVEL\n"
    )
    if installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module(name)
    _is_library.cache_clear()
    before = Fingerprint(module.level)
    module.LEVEL = 2.0
    assert before.holds() is installed


def test_a_class_whose_module_is_a_descriptor_can_be_marked() -> None:
    class Odd:
        __module__ = property(lambda _: "odd")

    odd = Odd()
    assert Fingerprint([odd]) == Fingerprint([odd])
