"""After an update, workers have every change of a policy, or a warning names it."""

import array
import importlib
import os
import signal
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scripts import run_python
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.weights.sending import StateCopy, StateWatch

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:Sparse CSR")]


def test_a_warning_that_is_an_error_loses_no_change() -> None:
    module: Any = Holds()
    watch = StateWatch(module)
    module.lock, module.gain = threading.Lock(), 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="lock"):
            watch.changes()
    copied: Any = Holds()
    copy = StateCopy(copied)
    state = watch.changes()
    assert state is not None
    copy.apply(state)
    assert copied.gain == 2.0


def test_a_copy_that_starts_late_gets_the_changes_of_all_updates() -> None:
    """Such as that of a replaced worker."""
    module: Any = Holds()
    watch = StateWatch(module)
    for name in ("gain", "bias", "gain", "scale"):
        setattr(module, name, len(name))
        state = watch.changes()
    copied: Any = Holds()
    assert state is not None
    StateCopy(copied).apply(state)
    assert (copied.gain, copied.bias, copied.scale) == (4, 4, 5)


@pytest.mark.parametrize("passed", [False, True])
def test_a_replaced_submodule_is_refused_also_with_weights(passed: bool) -> None:
    net = Holds()
    net.bound = nn.Tanh()
    acting = policy(net)
    with MultiSyncCollector(CountingEnv, acting, frames_per_batch=4) as collector:
        net.bound = nn.ReLU()
        weights = acting.state_dict() if passed else None
        with pytest.raises(ValueError, match=r"is ReLU, but was Tanh"):
            collector.update_policy_weights_(weights)


class Config:
    def __init__(self) -> None:
        self.own = 0.0


def layer() -> nn.Module:
    built = nn.Linear(1, 1)
    nn.init.zeros_(built.weight)
    nn.init.zeros_(built.bias)
    return built


class Base(nn.Module):
    inherited = 0.0


class Holds(Base):
    """Acts with the sum of everything that it holds, so every change is visible."""

    level = 0.0
    levels = [0.0]

    def __init__(self) -> None:
        super().__init__()
        self.layers = [layer(), layer()]
        self.named = {"a": {"b": (layer(),)}}
        self._hidden = [layer()]
        self.config = Config()
        self.strange: Any = None
        self.owner = types.SimpleNamespace(layer=layer())
        self.inner = layer()
        self.large = np.zeros(1 << 18)
        self.nested = {"large": [np.zeros((1 << 18, 2))[:, 0]]}
        self.large_tensor = torch.zeros(1 << 19)
        self.table, self.board = torch.zeros(2), torch.zeros(2)
        self.entries = TensorDict(a=torch.zeros(1))
        self.bytes = bytearray(2)
        self.numbers = array.array("d", [0.0])
        self.register_buffer("coo", torch.tensor([0.0, 1.0]).to_sparse())
        self.register_buffer("csr", torch.tensor([[0.0, 1.0]]).to_sparse_csr())
        self.function: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        of_class = type(self).level + self.__class__.levels[0] + self.of_base()
        hidden = (*self.layers, *self.named["a"]["b"], *self._hidden)
        modules = sum(m.bias.sum() for m in (*hidden, self.owner.layer))
        arrays = self.large.sum() + self.nested["large"][0].sum()
        arrays += sum(self.bytes) + sum(self.numbers)
        tensors = self.large_tensor.sum() + self.table.sum() + self.board.sum()
        tensors += self.entries["a"].sum()
        tensors += self.coo.to_dense().sum() + self.csr.to_dense().sum() - 2
        objects = self.config.own
        objects += self.function() if self.function else 0.0
        total = of_class + modules + float(arrays) + tensors + objects
        total = total + self.inner(torch.zeros(1)).sum()
        hunters = torch.zeros(len(x), 2, dtype=torch.int64)
        return total + 0 * x[..., :2], hunters

    @classmethod
    def of_base(cls) -> float:
        return cls.inherited


class Pure(Holds):
    """The same, declared pure."""

    pure_forward = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x)


def policy(net: nn.Module) -> TensorDictModule:
    out_keys = [("prey", "action"), ("hunter", "action")]
    return TensorDictModule(net, in_keys=[("prey", "observation")], out_keys=out_keys)


def add(module: Any, _: Any, output: Tensor) -> Tensor:
    return output + 1


def set_bias_before(module: Any, inputs: Any) -> Any:
    module.bias.data.fill_(1.0)


def raised(numbers: Any) -> Any:
    other = numbers.copy()
    other[5] += 1.0
    return other


def other_layer() -> nn.Module:
    other = layer()
    set_bias(other)
    return other


def set_bias(module: Any) -> None:
    with torch.no_grad():
        module.bias.fill_(1.0)


SENT: dict[str, Callable[[Any], Any]] = {
    "a class attribute": lambda net: setattr(Holds, "level", 1.0),
    "a class attribute in place": lambda net: Holds.levels.__setitem__(0, 1.0),
    "a class attribute of a base": lambda net: setattr(Base, "inherited", 1.0),
    "an object": lambda net: setattr(net.config, "own", 1.0),
    "bytes in place": lambda net: net.bytes.__setitem__(0, 1),
    "more bytes": lambda net: net.bytes.append(1),
    "an array of numbers": lambda net: net.numbers.__setitem__(0, 1.0),
    "a small tensor through its data": lambda net: net.table.data.fill_(0.5),
    "a small tensor through numpy": lambda net: net.board.numpy().fill(0.5),
    "another sparse buffer": lambda net: setattr(net, "coo", torch.ones(2).to_sparse()),
    "a sparse buffer in place": lambda net: net.coo._values().fill_(2.0),
    "a compressed buffer": lambda net: net.csr.values().fill_(2.0),
    "a module in a list": lambda net: set_bias(net.layers[0]),
    "another module in a list": lambda net: net.layers.__setitem__(1, other_layer()),
    "a module in containers": lambda net: set_bias(net.named["a"]["b"][0]),
    "a module in a private list": lambda net: set_bias(net._hidden[0]),
    "a module in an object": lambda net: set_bias(net.owner.layer),
    "a hook": lambda net: net.inner.register_forward_hook(add),
    "a hook before the call": lambda net: net.inner.register_forward_pre_hook(
        set_bias_before
    ),
    "a large array in place": lambda net: net.large.__setitem__(3, 1.0),
    "another large array": lambda net: setattr(net, "large", raised(net.large)),
    "a large array in containers": lambda net: net.nested["large"][0].__setitem__(
        3, 1.0
    ),
    "a large tensor": lambda net: net.large_tensor.__setitem__(3, 1.0),
    "a large tensor through its data": lambda net: net.large_tensor.data.__setitem__(
        4, 1.0
    ),
    "a TensorDict in place": lambda net: net.entries["a"].fill_(1.0),
    "a function": lambda net: setattr(net, "function", lambda: 1.0),
}


@pytest.fixture(autouse=True)
def _classes() -> Any:
    yield
    Holds.level = Base.inherited = 0.0
    Holds.levels[0] = 0.0


def first(collector: Any) -> float:
    action = collector.next()["prey", "action"]
    assert (action == action.flatten()[0]).all()
    return float(action.flatten()[0])


@torch.no_grad()
def called(net: nn.Module) -> float:
    """Return the action of a call in this process."""
    outputs = policy(net)(CountingEnv().reset().unsqueeze(0))
    return float(outputs["prey", "action"].flatten()[0])


@pytest.mark.parametrize(
    ("kind", "module"),
    [(MultiSyncCollector, Holds), (Collector, Holds), (Collector, Pure)],
)
def test_every_change_acts_after_an_update_and_can_act_again(
    kind: Any, module: Any
) -> None:
    net = module()
    with kind([CountingEnv] * 2, policy(net), frames_per_batch=8) as collector:
        last = first(collector)
        for change, alter in SENT.items():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                alter(net)
                collector.update_policy_weights_()
            before, last = last, first(collector)
            assert before < last == called(net), change
        Holds.level = 0.0
        Holds.levels[0] = 7.0
        collector.update_policy_weights_()
        assert first(collector) == called(net)


IMPORTED = """
import torch
from torch import nn


class Imported(nn.Module):
    level = 0.0
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        hunters = torch.zeros(len(x), 2, dtype=torch.int64)
        return 0 * x[..., :2] + type(self).level, hunters
"""


def test_class_attributes_that_changed_before_the_start_reach_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers import the class, with the value that its file has."""
    (tmp_path / "imported_policy.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    kind: Any = importlib.import_module("imported_policy").Imported
    kind.level = 1.0
    net = kind()
    with MultiSyncCollector(
        CountingEnv, policy(net), frames_per_batch=8, on_worker_failure="restart"
    ) as collector:
        assert first(collector) == 1.0
        kind.level = 2.0
        kind.calls = 1000
        collector.update_policy_weights_()
        assert first(collector) == 2.0
        os.kill(collector.worker_pids[0], signal.SIGKILL)
        assert first(collector) == 2.0


def test_a_class_attribute_that_hides_another_one_is_sent_and_removed() -> None:
    net = Holds()
    with MultiSyncCollector(CountingEnv, policy(net), frames_per_batch=8) as collector:
        for value in (1.0, None, 2.0):
            if value is None:
                del Holds.inherited
            else:
                Holds.inherited = value
            collector.update_policy_weights_()
            assert first(collector) == called(net) == (value or 0.0)
    del Holds.inherited


UNSENT: dict[str, Callable[[], Any]] = {
    "a lock": threading.Lock,
    "a lock in an object": lambda: types.SimpleNamespace(lock=threading.Lock()),
    "a generator": lambda: (number for number in range(3)),
    "a weak reference": lambda: weakref.ref(Config),
}


@pytest.mark.parametrize("name", UNSENT)
def test_what_cannot_be_pickled_is_warned_of_once_and_the_rest_is_sent(
    name: str,
) -> None:
    net = Holds()
    with MultiSyncCollector(CountingEnv, policy(net), frames_per_batch=8) as collector:
        assert first(collector) == 0.0
        net.strange = net.inner.strange = UNSENT[name]()
        net.inner._cache = UNSENT[name]()  # Private, so taken as a cache.
        net.config.own = 1.0
        kind = type(net.strange).__name__
        match = (
            rf"attributes 'module\.inner\.strange' \({kind}\), 'module\.strange' "
            rf"\({kind}\) changed.*or build a new collector"
        )
        with pytest.warns(UserWarning, match=match) as record:
            collector.update_policy_weights_()
        assert len(record) == 1
        assert first(collector) == 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net.strange = UNSENT[name]()
            net.config.own = 2.0
            collector.update_policy_weights_()
            assert first(collector) == 2.0


def test_what_attributes_share_stays_shared() -> None:
    """Also weights and submodules in them, which are those of the worker."""

    class Shares(Holds):
        def forward(self, x: Tensor) -> Any:
            if self.strange is not None:
                (one, layer), config = self.strange, self.config
                assert layer is self.inner
                assert one is config.own
                one[0] += 1
            total, hunters = super().forward(x)
            return total + (0 if self.strange is None else config.own[0]), hunters

    net = Shares()
    net.config.own = 0.0
    with MultiSyncCollector(CountingEnv, policy(net), frames_per_batch=8) as collector:
        assert first(collector) == 0.0
        shared = torch.zeros(1)
        net.config = types.SimpleNamespace(own=shared)  # type: ignore[assignment]
        net.strange = (shared, net.inner)
        with torch.no_grad():
            net.inner.bias.fill_(1.0)
        collector.update_policy_weights_()
        action = collector.next()["prey", "action"][0, :, 0, 0]
        assert action.tolist() == [3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0]


def test_hooks_can_be_removed() -> None:
    net = Holds()
    with MultiSyncCollector(CountingEnv, policy(net), frames_per_batch=8) as collector:
        for expected in (0.0, 1.0, 0.0, 1.0):
            if expected:
                handle = net.inner.register_forward_hook(add)
            elif net.inner._forward_hooks:
                handle.remove()
            collector.update_policy_weights_()
            assert first(collector) == expected


def test_what_acting_changes_is_not_warned_of() -> None:
    """A cache, activations that hooks store, and tensors with a history."""

    class Stores(Holds):
        def __init__(self) -> None:
            super().__init__()
            self._cache = [np.zeros(1 << 18)]
            self.last: Any = None
            self._stored: list[Any] = []
            self.inner.register_forward_hook(lambda *call: self._stored.append(call))

        def forward(self, x: Tensor) -> Any:
            self._cache[0] += 1
            self.last = self.inner(x[..., :1])
            return super().forward(x)

    net = Stores()
    with MultiSyncCollector(CountingEnv, policy(net), frames_per_batch=8) as collector:
        first(collector)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(torch.zeros(1, 3, 3))
            collector.update_policy_weights_()


# What workers unpickle does not refer to the user's script


FORMAT = """
import sys

# As where a script imports tensordict before torch.
modules = dict(sys.modules)
sys.modules.clear()
sys.modules["__mp_main__"] = sys.modules["__main__"] = modules.pop("__main__")
sys.modules.update(modules | {"__mp_main__": sys.modules["__main__"]})

import torch
from torch import nn

from marl_collect.weights.skeleton import assemble_module, split_module, weight_tensors

module = nn.Linear(2, 2)
module.format = torch.channels_last  # Layers of images have one.
skeleton = split_module(module)
assert b"__mp_main__" not in skeleton.module, skeleton.module
copy = assemble_module(skeleton, list(weight_tensors(module).values()))
assert copy.format is torch.channels_last
"""


def test_a_memory_format_is_not_looked_up_in_the_script() -> None:
    process = run_python("-c", FORMAT)
    assert process.returncode == 0, process.stderr
