"""Policies that are lazy or on the meta device, and the weights that a seed gives them.

The weights are computed as the documentation of ``materialize`` describes it: every
module is initialised by its ``reset_parameters``, children before parents.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from workloads.counting import CountingEnv

from marl_collect.models import (
    MultiAgentConvNet,
    MultiAgentGRU,
    MultiAgentMLP,
    RecurrentModule,
    make_policy,
)

SEED: Final = 7
AGENTS, FEATURES, UNITS = 2, 5, 3
OBSERVATION = ("hunter", "observation")
hunters: Final = partial(CountingEnv, n_prey=0)


class Picture(nn.Module):
    """A convolution over the features."""

    def __init__(self, channels: int | None) -> None:
        super().__init__()
        self.net = MultiAgentConvNet(
            *(AGENTS, False, True),
            in_features=channels,
            num_cells=[2],
            kernel_sizes=[(1, 3)],
            strides=1,
        )

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation[..., None, None, :])


def digit(output: Tensor) -> Tensor:
    return (10 * output.sum(-1)).long() % 4


def _networks(*, known: bool) -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each network; if its sizes are known, not lazy, on the CPU."""
    inputs = FEATURES if known else None
    device = None if known else "meta"
    mlp = partial(MultiAgentMLP, n_agent_outputs=2, n_agents=AGENTS, centralised=False)

    def torchrls(**options: Any) -> nn.Module:
        from torchrl.modules import MultiAgentMLP as TorchRLs

        sizes = {"depth": 1, "num_cells": UNITS}
        return TorchRLs(inputs, 2, AGENTS, centralised=False, **sizes, **options)

    return {
        "mlp on meta": lambda: mlp(FEATURES, share_params=False, device=device),
        "lazy mlp": lambda: mlp(inputs, share_params=True, num_cells=[UNITS]),
        "lazy mlp on meta": lambda: mlp(inputs, share_params=True, device=device),
        "lazy linear": lambda: nn.Linear(FEATURES, 2) if known else nn.LazyLinear(2),
        "lazy convolution": lambda: Picture(1 if known else None),
        **{name: partial(torchrls, **options) for name, options in TORCHRL.items()},
    }


TORCHRL: Final[dict[str, dict[str, Any]]] = {
    "torchrl shared": {"share_params": True},
    "torchrl separate": {"share_params": False},
    "torchrl cannot be copied": {"share_params": False, "use_td_params": False},
}
NAMES: Final = [
    "mlp on meta",
    "lazy mlp",
    "lazy mlp on meta",
    "lazy linear",
    "lazy convolution",
    "lazy gru",
    *TORCHRL,
    "make_policy on meta",
]
UNCOPYABLE: Final = "torchrl cannot be copied"
COPYABLE: Final = [name for name in NAMES if name != UNCOPYABLE]
WAYS: Final = ["policy", "policy_factory", "both", "list"]
REFUSED: Final = "cannot be copied .* pass policy_factory instead of policy"
"""The message for a policy that cannot be copied, if it is passed as ``policy``."""


def arguments(names: Sequence[str], way: str, workers: int) -> dict[str, Any]:
    """Return what a collector gets."""
    factory: Callable[[], nn.Module] = partial(weightless, names)
    chosen: dict[str, Any] = {}
    if way in ("policy", "both"):
        chosen["policy"] = factory()
    if way != "policy":
        chosen["policy_factory"] = [factory] * workers if way == "list" else factory
    return chosen


def weightless(names: Sequence[str], *, known: bool = False) -> TensorDictSequential:
    """Return a policy of several networks, each of which writes an output of its own.

    Args:
        names: of the networks.
        known: whether they have weights from the start.
    """
    modules: list[Any] = []
    for name in names:
        if name == "lazy gru":
            inputs = FEATURES if known else None
            gru = MultiAgentGRU(
                inputs, UNITS, AGENTS, centralised=False, share_params=True
            )
            modules.append(RecurrentModule(gru, "hunter", out_key=name))
        elif name == "make_policy on meta":
            device = None if known else "meta"
            modules.append(make_policy(hunters(), num_cells=(UNITS,), device=device))
        else:
            network = _networks(known=known)[name]()
            modules.append(TensorDictModule(network, [OBSERVATION], [("hunter", name)]))
    if "make_policy on meta" not in names:
        key = ("hunter", names[0])
        modules.append(TensorDictModule(digit, [key], [("hunter", "action")]))
    return TensorDictSequential(*modules)


def expected_policy(
    names: Sequence[str], passed: nn.Module | None = None, seed: int = SEED
) -> TensorDictSequential:
    """Return a policy with the weights that a seed gives to those of ``names``.

    Args:
        names: of the networks.
        passed: the policy as it was before it got its weights, some of which it had;
            None for one that a factory builds with this seed.
        seed: of the weights.
    """
    with torch.random.fork_rng():
        policy = weightless(names, known=True)
        torch.manual_seed(seed)
        if passed is None:
            passed = weightless(names)
        values = dict(passed.named_parameters())
        unset = [n for n, tensor in values.items() if is_lazy(tensor) or tensor.is_meta]
        if UNCOPYABLE in names:  # Its first call gives it its weights.
            assert list(names) == [UNCOPYABLE]
            with torch.no_grad():
                passed[0].module(torch.zeros(1, AGENTS, FEATURES))
            unset = []
        _reset(policy, "", unset)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name not in unset:
                parameter.copy_(values[name])
    return policy


def _reset(module: nn.Module, path: str, unset: Sequence[str]) -> None:
    if not any(name.startswith(path) for name in unset):
        return
    for name, child in module.named_children():
        _reset(child, f"{path}{name}.", unset)
    reset = getattr(type(module), "reset_parameters", None)
    if reset is not None:
        reset(module)


SEEDS_OF_LIST: Final = (SEED, 8003195879595699209)
"""The seed of the weights of each factory in a list."""


def check_acts_with(
    expected: nn.Module,
    names: Sequence[str],
    batch: TensorDictBase,
    agent: int | slice = slice(None),
) -> None:
    """Check that the outputs in a batch are those of a policy with these weights."""
    frames = batch.reshape(-1)
    inputs = frames.select(OBSERVATION, "is_init", strict=False)
    state = frames.get(("hunter", "recurrent_state"), None)
    if state is not None:
        inputs["hunter", "recurrent_state"] = state
    with torch.no_grad():
        outputs = expected(inputs)
    for name in names:
        key = ("hunter", "logits" if name == "make_policy on meta" else name)
        torch.testing.assert_close(
            frames[key][:, agent], outputs[key][:, agent], rtol=1e-4, atol=1e-4
        )


def check_module(module: Any, passed: Any, expected: nn.Module) -> None:
    """Check that a collector's own module has its weights, and the passed one none."""
    assert module is not passed
    weights = dict(module.named_parameters())
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(weights[name], weight)
    if passed is not None:
        unset = [is_lazy(weight) or weight.is_meta for weight in passed.parameters()]
        assert any(unset)
