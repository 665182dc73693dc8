"""Modules on the meta device and lazy modules get their weights."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from marl_collect.weights.materialize import (
    infer_lazy,
    lazy_tensors,
    materialize,
    meta_tensors,
)


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.LSTM(8, 5, num_layers=2)
    )


def on_meta(factory: Any) -> Any:
    with torch.device("meta"):
        return factory()


def same(module: nn.Module, other_module: nn.Module) -> bool:
    left, right = module.state_dict(), other_module.state_dict()
    if left.keys() != right.keys():
        return False
    # tensordict before 0.12 saves batch size and device of TorchRL's parameters, too.
    tensors = [key for key in left if isinstance(left[key], torch.Tensor)]
    return all(torch.equal(left[key], right[key]) for key in tensors)


@pytest.mark.parametrize(
    "factory",
    [
        stack,
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ELU()),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
    ],
)
def test_a_seed_gives_the_same_weights_as_building_the_module_with_it(
    factory: Any,
) -> None:
    torch.manual_seed(3)
    built = factory()
    module = materialize(on_meta(factory), seed=3)
    assert same(module, built)
    assert not meta_tensors(module)


def test_the_argument_stays_on_meta_and_the_global_generator_is_not_used() -> None:
    module = on_meta(stack)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    materialize(module, seed=1)
    assert all(p.is_meta for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_weights_are_drawn_from_the_global_generator() -> None:
    module = on_meta(stack)
    torch.manual_seed(0)
    first = materialize(module)
    second = materialize(module)
    torch.manual_seed(0)
    assert not same(first, second)
    assert same(first, materialize(module))


def test_a_materialized_lstm_computes_with_its_new_weights() -> None:
    lstm = materialize(on_meta(lambda: nn.LSTM(3, 4)), seed=0)
    torch.manual_seed(0)
    expected, _ = nn.LSTM(3, 4)(torch.ones(2, 1, 3))
    actual, _ = lstm(torch.ones(2, 1, 3))
    torch.testing.assert_close(actual, expected)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(4, 4, bias=False)
            self.decode = nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight

    module = materialize(on_meta(Tied), seed=0)
    assert module.decode.weight is module.encode.weight
    assert len(list(module.parameters())) == 1


class Table(nn.Module):
    """Has buffers, one of them non-persistent, and a plain tensor."""

    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("rates", torch.zeros(3), persistent=False)
        self.register_buffer("open", torch.zeros(2, dtype=torch.bool))
        self.count = torch.zeros(2, dtype=torch.int64)
        if fills:
            self.reset_parameters = self._fill

    def _fill(self) -> None:
        self.mean.data.fill_(1.0)
        self.rates.copy_(torch.arange(3.0))
        self.open.fill_(True)
        self.count = torch.tensor([7, 8])


class FilledTable(Table):
    def __init__(self) -> None:
        super().__init__(fills=False)

    def reset_parameters(self) -> None:
        self._fill()


def test_buffers_of_every_kind_and_plain_tensors_are_filled() -> None:
    module = materialize(on_meta(FilledTable))
    assert module.mean.tolist() == [1, 1, 1]
    assert module.rates.tolist() == [0, 1, 2]
    assert module.open.tolist() == [True, True]
    assert module.count.tolist() == [7, 8]
    assert "rates" not in module.state_dict()


def test_a_meta_tensor_without_an_initialiser_raises_an_error_that_names_it() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Table(fills=False))
    names = {"1.mean", "1.rates", "1.open", "1.count"}
    with pytest.raises(ValueError, match="policy_factory") as error:
        materialize(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Table(False))))
    assert all(repr(name) in str(error.value) for name in names)
    assert "0.weight" not in str(error.value)
    assert not meta_tensors(materialize(module))


def test_a_partly_filled_parameter_is_an_error() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight[:2] = 0

    with pytest.raises(ValueError, match="weight"):
        materialize(on_meta(Half))


def test_the_error_of_a_failing_initialiser_names_it() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise KeyError("gain")

    with pytest.raises(ValueError, match=r"of 0 \(Broken\) fails: KeyError: 'gain'"):
        materialize(on_meta(lambda: nn.Sequential(Broken(2, 2))))


def test_existing_values_are_kept() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].to("meta")
    module[1].bias = on_meta(lambda: nn.Parameter(torch.empty(2)))
    kept = module[1].weight.detach().clone()

    # With the tests' seed 0, the same weights would be drawn again.
    found = materialize(module, seed=1)
    assert torch.equal(found[1].weight, kept)
    assert found[1].weight is not module[1].weight
    assert not meta_tensors(found)


def test_requires_grad_and_dtype_are_kept() -> None:
    def build() -> nn.Module:
        linear = nn.Linear(2, 3, dtype=torch.float64)
        linear.weight.requires_grad_(False)
        return linear

    found = materialize(on_meta(build))
    assert found.weight.dtype == torch.float64
    assert not found.weight.requires_grad
    assert found.bias.requires_grad


def actor(net: nn.Module) -> nn.Module:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(net, NormalParamExtractor("exp")),
            in_keys=[("walker", "observation")],
            out_keys=[("walker", "loc"), ("walker", "scale")],
        ),
        ProbabilisticTensorDictModule(
            in_keys=[("walker", "loc"), ("walker", "scale")],
            out_keys=[("walker", "action")],
            distribution_class=torch.distributions.Normal,
            return_log_prob=True,
        ),
    )


def observation() -> TensorDict:
    return TensorDict(
        {"walker": TensorDict({"observation": torch.zeros(3, 7)}, [3])}, []
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lazy_sizes_are_inferred_in_a_copy_and_the_argument_stays_lazy(
    device: str,
) -> None:
    with torch.device(device):
        policy = actor(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4)))
    names = lazy_tensors(policy)
    before = torch.get_rng_state()
    known = infer_lazy(policy, observation())
    assert len(names) == 4
    assert lazy_tensors(policy) == names
    assert meta_tensors(known) == names
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    eager = actor(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4)))
    assert same(materialize(known, seed=5), eager)
    assert type(materialize(known).module[0].module[0][0]) is nn.Linear


def test_inference_keeps_existing_values() -> None:
    net = nn.Sequential(nn.BatchNorm1d(7), nn.LazyLinear(8), nn.Linear(8, 4))
    kept = copy.deepcopy(net.state_dict())
    known = infer_lazy(actor(net), observation())
    values = known.module[0].module[0].state_dict()
    assert torch.equal(values["2.weight"], kept["2.weight"])
    assert values["0.num_batches_tracked"] == 0
    assert values["1.weight"].is_meta


def test_a_module_that_needs_values_is_inferred_on_the_cpu() -> None:
    class Peek(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x if x.sum().item() == 0 else -x

    net = nn.Sequential(Peek(), nn.LazyLinear(4))
    assert meta_tensors(infer_lazy(actor(net), observation()))


def test_an_input_of_the_wrong_size_is_an_error() -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.Linear(9, 4))
    with pytest.raises(ValueError, match="observation.*policy_factory"):
        infer_lazy(actor(net), observation())


def test_materializing_a_lazy_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="'weight'.*infer_lazy"):
        materialize(nn.LazyLinear(3))


def test_an_optimizer_created_before_materializing_raises_an_error() -> None:
    module = on_meta(lambda: nn.Linear(2, 2))
    lazy = actor(nn.LazyLinear(4))
    early = [torch.optim.Adam(m.parameters()) for m in (module, lazy)]
    ready = materialize(module)
    infer_lazy(lazy, observation())
    late = torch.optim.Adam(ready.parameters())
    for optimizer in early:
        with pytest.raises(RuntimeError, match=r"collector\.policy\.parameters"):
            optimizer.step()
    before = ready.weight.detach().clone()
    ready(torch.ones(2)).sum().backward()
    late.step()
    assert not torch.equal(ready.weight, before)  # type: ignore[arg-type]
