"""What changes a module's state, and what cannot be compared."""

import array
import copy
import enum
import functools
import importlib
import itertools
import random
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictParams,
    TensorDictSequential,
)
from torch import nn
from torch.nn.utils import parametrizations
from torchrl.data import Bounded, OneHot
from torchrl.modules import (
    MLP,
    EGreedyModule,
    LSTMModule,
    MultiAgentMLP,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QMixer,
    TanhNormal,
)
from workloads.counting import CountingEnv

from marl_collect.models import make_policy
from marl_collect.weights.state import ModuleState, is_users, same_state


class Counts:
    def count(self) -> None: ...


Counter = Counts()


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


def scaled(x: torch.Tensor, factor: list[float]) -> torch.Tensor:
    return x * factor[0]


def closure(level: float) -> Callable[[], float]:
    return lambda: level


def defaults(items: list[float]) -> list[Any]:
    return [lambda items=items: items, lambda *, items=items: items]


class Net(nn.Module):
    """Has attributes of every kind."""

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
        self.bytes = bytearray(3)
        self.numbers = array.array("d", [1.0])
        self.hidden = [nn.Linear(2, 2)]
        self.function = partial(scaled, factor=[1.0])
        self.closure = closure(1.0)
        self.default = defaults([1.0])[0]
        self.keyword = defaults([1.0])[1]
        self.register_buffer("graph", torch.tensor([0.0, 1.0]).to_sparse())


def setter(*path: str, value: Any) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        for name in path[:-1]:
            net = getattr(net, name)
        setattr(net, path[-1], value)

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "training": lambda net: net.eval(),
    "training of a layer": lambda net: net.layer.eval(),
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
    "bytes": lambda net: net.bytes.__setitem__(0, 7),
    "more bytes": lambda net: net.bytes.append(1),
    "numbers": lambda net: net.numbers.__setitem__(0, 2.0),
    "a new attribute": setter("new", value=None),
    "a removed attribute": lambda net: delattr(net, "space"),
    "a layer": lambda net: net.add_module("more", nn.Tanh()),
    "a hook": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "a hook before": lambda net: net.layer.register_forward_pre_hook(lambda *_: None),
    "a module in a list": lambda net: net.hidden[0].eval(),
    "an argument of a partial": lambda net: net.function.keywords["factor"].append(2),
    "a variable around a function": lambda net: net.closure.__closure__[0].__setattr__(
        "cell_contents", 2.0
    ),
    "a default of a function": lambda net: net.default().append(2.0),
    "a default of a keyword": lambda net: net.keyword().append(2.0),
    "another function": setter("closure", value=lambda: 1.0),
    "an attribute of a function": lambda net: setattr(net.closure, "level", 1.0),
    "an attribute of a class": lambda net: setattr(Net, "factor", 3.0),
    "in an attribute of a class": lambda net: Net.table.update(a=1.0),
}
OF_RECORDINGS: dict[str, Callable[[Any], Any]] = {
    "another tensor": setter("tensor", value=torch.ones(3)),
    "a layout": lambda net: setattr(net.tensor, "data", net.tensor.data[:2]),
    "a parameter": lambda net: setattr(
        net.layer, "weight", nn.Parameter(net.layer.weight.detach().clone())
    ),
    "other memory": lambda net: setattr(
        net.layer.weight, "data", net.layer.weight.data.clone()
    ),
    "another layout of a weight": lambda net: setattr(
        net.layer.weight, "data", net.layer.weight.data.t()
    ),
}
"""Recordings have the addresses of tensors, and read their values in every run."""
OF_UPDATES: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda net: net.tensor.add_(1),
    "a tensor through its data": lambda net: net.tensor.data.add_(1),
    "a tensor through numpy": lambda net: net.tensor.numpy().__setitem__(0, 7.0),
    "a sparse buffer": lambda net: net.graph._values().fill_(2.0),
    "a module in a list": lambda net: net.hidden[0].weight.data.add_(1),
}
"""Weights are no state, and travel in another way. Other tensors do not."""


@pytest.fixture
def net() -> Any:
    """A module; afterwards, its class is as before."""
    yield Net()
    Net.factor = 1.0
    Net.table.clear()


@pytest.mark.parametrize(
    ("of_recording", "change"),
    [
        *itertools.product((False, True), CHANGES.values()),
        *itertools.product((True,), OF_RECORDINGS.values()),
        *itertools.product((False,), OF_UPDATES.values()),
    ],
    ids=[
        *(f"{of} of {name}" for of in ("update", "recording") for name in CHANGES),
        *(f"recording of {name}" for name in OF_RECORDINGS),
        *(f"update of {name}" for name in OF_UPDATES),
    ],
)
def test_a_change_is_seen_once(
    net: Any, of_recording: bool, change: Callable[[Any], Any]
) -> None:
    net.noise = 0.0  # Not -0.0, which is equal.
    state = ModuleState(net, of_recording=of_recording)
    assert state.unseen() is None
    assert not state.changed()
    change(net)
    assert state.changed()
    assert not state.changed()


def test_equal_values_are_the_same_state(net: Any) -> None:
    state = ModuleState(net, of_recording=True)
    net.noise = float("1.0")
    net.config = copy.deepcopy(net.config)
    net.array = net.array.copy()
    assert not state.changed()
    net.config.level = 2.0  # The new object is watched from now on.
    assert state.changed()


@pytest.mark.parametrize("of_recording", [False, True])
def test_training_changes_nothing(net: Any, of_recording: bool) -> None:
    state = ModuleState(net, of_recording=of_recording)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    assert not state.changed()


def test_using_parameters_of_a_tensordict_changes_nothing(net: Any) -> None:
    net.layer = TensorDictParams(TensorDict.from_module(nn.Linear(2, 2)))
    state = ModuleState(net)
    with net.layer.to_module(nn.Linear(2, 2, device="meta")):  # It is noted.
        pass
    assert not state.changed()


def test_nothing_of_a_recurrent_layer_in_a_list_is_unseen(net: Any) -> None:
    net.layers = [nn.GRU(2, 2)]
    assert ModuleState(net).unseen() is None


LARGE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "an array": lambda: (numbers := np.zeros(1 << 18), numbers),
    "a strided array": lambda: (numbers := np.zeros((9, 1 << 18)).T[::2], numbers),
    "a tensor": lambda: (numbers := torch.zeros(1 << 19), numbers.numpy()),
    "a sparse tensor": lambda: (
        numbers := torch.ones(1 << 18).to_sparse(),
        numbers._values().numpy(),
    ),
}
"""Values of more than 1 MiB, and their memory. torch does not count writes to it."""


@pytest.mark.parametrize("name", LARGE)
def test_large_arrays_are_compared_for_updates(net: Any, name: str) -> None:
    net.nested["large"], memory = LARGE[name]()
    state = ModuleState(net)
    assert len(state.bytes) < 1 << 16
    assert not state.changed()
    memory[-1] += 1
    assert state.changed()


UNSEEN: dict[str, Callable[[], Any]] = {
    "a lock": threading.Lock,
    "a generator": lambda: (number for number in range(3)),
    "a weak reference": lambda: weakref.ref(Counter),
    "a proxy": lambda: weakref.proxy(Counter),
    "a weak reference to a method": lambda: weakref.WeakMethod(Counter.count),
    "weak values": lambda: weakref.WeakValueDictionary({1: Counter}),
    "weak keys": lambda: weakref.WeakKeyDictionary({Counter: 0}),
    "a weak set": lambda: weakref.WeakSet([Counter]),
    "a weak reference in an object": lambda: Config(inner={"a": weakref.ref(Counter)}),
}
UNSEEN_BY_RECORDINGS: dict[str, Callable[[], Any]] = {
    "a random generator": lambda: random.Random(0),
    "a generator of numpy": lambda: np.random.default_rng(0),
    "a large array": lambda: np.zeros(1 << 18),
}


@pytest.mark.parametrize(
    ("name", "of_recording"),
    [
        *itertools.product(UNSEEN, (False, True)),
        *itertools.product(UNSEEN_BY_RECORDINGS, (True,)),
    ],
)
def test_what_cannot_be_compared_is_named(
    net: Any, name: str, of_recording: bool
) -> None:
    net.config.inner["strange"] = (UNSEEN | UNSEEN_BY_RECORDINGS)[name]()
    state = ModuleState(nn.Sequential(net), of_recording=of_recording)
    assert str(state.unseen()).startswith("0.config (")
    assert not state.changed()
    net.config.level = 2.0  # What is beside it can be compared.
    assert state.changed()


def test_what_is_nested_too_deep_is_named(net: Any) -> None:
    for _ in range(100_000):
        net.nested = [net.nested]
    state = ModuleState(net)
    assert state.unseen() == "nested (nested too deep)"
    assert not state.changed()
    del net.nested
    assert state.changed()


def test_cycles_end(net: Any) -> None:
    net.nested = items = [1]
    items.append(items)  # type: ignore[arg-type]
    net.config.inner["self"] = net.config

    def repeat() -> Any:
        return repeat

    net.function = repeat
    state = ModuleState(net)
    assert not state.changed()
    items[0] = 2
    assert state.changed()


@pytest.mark.parametrize("installed", [False, True])
def test_code_in_a_folder_of_pip_is_a_library_s(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``pip install --target``: the folder is not called site-packages."""
    # A name of its own: an imported module stays.
    name = f"state_package_{'of_pip' if installed else 'of_a_user'}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text(
        "from torch import nn\n\n\nclass Of(nn.Module):\n    level = 1.0\n"
    )
    if installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    kind: Any = importlib.import_module(name).Of
    assert is_users(kind) is not installed
    state = ModuleState(kind())
    kind.level = 2.0
    assert state.changed() is not installed


def test_a_class_whose_module_is_a_descriptor_can_be_compared() -> None:
    class Odd:
        __module__ = property(lambda _: "odd")

    odd = Odd()
    assert same_state(odd, odd)


# Modules of all kinds


def holding(value: Any) -> nn.Module:
    net = nn.Linear(2, 2)
    net.value = value
    return net


def hooked(**options: Any) -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_forward_hook(lambda *_: None, **options)
    return net


def after_a_call(net: nn.Module, *shape: int) -> nn.Module:
    net(torch.zeros(shape))
    return net


def memoised() -> Any:
    return functools.lru_cache(lambda: 1)


def td(module: nn.Module, *out: str) -> TensorDictModule:
    return TensorDictModule(module, ["x"], [*out])


def actor() -> nn.Module:
    net = td(nn.Sequential(nn.Linear(2, 4), NormalParamExtractor()), "loc", "scale")
    return ProbabilisticActor(net, ["loc", "scale"], distribution_class=TanhNormal)


LAYERS: list[nn.Module] = [
    *(nn.Linear(2, 2), nn.Bilinear(2, 2, 2), nn.Embedding(2, 2), nn.PReLU()),
    *(nn.Conv1d(2, 2, 2), nn.Conv2d(2, 2, 2, padding="same"), nn.Flatten()),
    *(nn.ConvTranspose2d(2, 2, 2), nn.BatchNorm1d(2), nn.LayerNorm([2, 2])),
    *(nn.GroupNorm(1, 2), nn.RMSNorm(2), nn.Dropout(), nn.RNN(2, 2), nn.GRUCell(2, 2)),
    *(nn.GRU(2, 2, batch_first=True), nn.LSTM(2, 2, num_layers=2, bidirectional=True)),
    *(nn.LSTM(2, 3, proj_size=2), nn.MultiheadAttention(2, 1)),
    *(nn.TransformerEncoderLayer(2, 1, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
    *(nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})),
    *(nn.ParameterList([torch.zeros(2)]), nn.ParameterDict({"a": torch.zeros(2)})),
    *(nn.LazyLinear(2), nn.Linear(2, 2, device="meta")),
    *(nn.Linear(2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64)),
]
KINDS: dict[str, Callable[[], Any]] = {
    **{
        f"{type(n).__name__} {i}": partial(copy.deepcopy, n)
        for i, n in enumerate(LAYERS)
    },
    "GRU after a call": lambda: after_a_call(nn.GRU(2, 2), 1, 1, 2),
    "LazyLinear after a call": lambda: after_a_call(nn.LazyLinear(2), 1, 3),
    "Transformer": lambda: nn.Transformer(2, 1, 1, 1, 2),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    "spectral_norm of hooks": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
    "traced": lambda: torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)),
    "holding a scripted module": lambda: nn.Sequential(
        torch.jit.script(nn.Linear(2, 2))
    ),
    "compiled": lambda: torch.compile(nn.Linear(2, 2)),
    "tied": lambda: nn.ModuleList([layer := nn.Linear(2, 2), layer]),
    "a hook": hooked,
    "a hook with keywords": lambda: hooked(with_kwargs=True),
    "a hook that is always called": lambda: hooked(always_call=True),
    "TensorDictModule": lambda: td(nn.Linear(2, 2), "y"),
    "TensorDictModule of a function": lambda: TensorDictModule(
        torch.tanh, ["x"], ["y"]
    ),
    "TensorDictSequential": lambda: TensorDictSequential(td(nn.Linear(2, 2), "y")),
    "ProbabilisticTensorDictModule": lambda: ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal
    ),
    "MLP": lambda: MLP(2, 2, num_cells=[4], dropout=0.5),
    "MLP after a call": lambda: after_a_call(MLP(2, 2, num_cells=[4]), 1, 2),
    "MultiAgentMLP": lambda: MultiAgentMLP(
        2, 2, 2, centralised=True, share_params=False, num_cells=[4]
    ),
    "MultiAgentMLP after a call": lambda: after_a_call(
        MultiAgentMLP(2, 2, 2, centralised=False, share_params=True, num_cells=[4]),
        *(1, 2, 2),
    ),
    "LSTMModule": lambda: LSTMModule(2, 2, in_key="x", out_key="y"),
    "EGreedyModule": lambda: EGreedyModule(OneHot(2)),
    "OrnsteinUhlenbeckProcessModule": lambda: OrnsteinUhlenbeckProcessModule(
        Bounded(-1, 1, (2,))
    ),
    "actor of TanhNormal": actor,
    "QMixer": lambda: QMixer((2,), 4, 2, torch.device("cpu")),
    "make_policy": lambda: make_policy(CountingEnv()),
    "make_policy with memory": lambda: make_policy(CountingEnv(), recurrent="gru"),
    "numbers": lambda: holding([1, 2.5, True, None, 1j, "text", b"bytes", ...]),
    "containers": lambda: holding({"a": [({1}, frozenset("b")), deque([1])]}),
    "a defaultdict": lambda: holding(defaultdict(list, a=[1])),
    "an object": lambda: holding(Config()),
    "an object in slots": lambda: holding(Slotted()),
    "an enum": lambda: holding([Mode.ONE, InteractionType.RANDOM]),
    "classes": lambda: holding([Config, dict, nn.Linear]),
    "functions": lambda: holding([scaled, closure(1.0), torch.tanh, len, memoised()]),
    "a partial": lambda: holding(partial(scaled, factor=[1.0])),
    "a method": lambda: holding(Counter.count),
    "an array": lambda: holding(np.zeros((2, 2))),
    "an array of objects": lambda: holding(np.array([object(), "text"])),
    "scalars of numpy": lambda: holding([np.float32(1), np.int64(2), np.dtype("f4")]),
    "generators of numpy": lambda: holding([np.random.default_rng(0), random.Random()]),
    "a generator of torch": lambda: holding(torch.Generator()),
    "tensors": lambda: holding([torch.zeros(2), torch.zeros(2).to_sparse()]),
    "tensors with a history": lambda: holding([torch.ones(2, requires_grad=True) * 2]),
    "a TensorDict": lambda: holding(TensorDict(a=TensorDict(b=torch.zeros(2)))),
    "a lazily stacked TensorDict": lambda: holding(
        TensorDict.lazy_stack([TensorDict(a=torch.zeros(2))] * 2)
    ),
    "types of torch": lambda: holding([torch.int8, torch.device("cpu"), torch.strided]),
    "specs": lambda: holding([Bounded(-1, 1, (2,)), OneHot(2)]),
    "an optimizer": lambda: holding(torch.optim.Adam([nn.Parameter(torch.zeros(2))])),
    "a lock": lambda: holding(threading.Lock()),
    "weak references": lambda: holding([weakref.ref(Counter), weakref.proxy(Counter)]),
    "a module in a list": lambda: holding([nn.GRU(2, 2)]),
    "an iterator": lambda: holding(iter([1, 2])),
    "a module of Python": lambda: holding(random),
    "an environment": lambda: holding(CountingEnv()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of_recording", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_looking_twice_at_a_module_gives_equal_bytes(
    kind: str, of_recording: bool
) -> None:
    module = KINDS[kind]()
    state = ModuleState(module, of_recording=of_recording)
    assert ModuleState(module, of_recording=of_recording).bytes == state.bytes
    looks = [content for content, _ in state.parts().values()]
    assert [content for content, _ in state.parts().values()] == looks
    assert not any([state.changed(), state.changed()])
    module.train(not module.training)
    assert state.changed()
