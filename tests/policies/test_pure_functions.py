"""Functions whose code proves that they compute from their arguments are fused."""

import math
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensordict.nn import TensorDictModule
from torch import nn

from marl_collect.policies.fused.pure_functions import why_not_pure
from marl_collect.policies.fused.recordable import state_of, why_not_recordable

SCALE = 2.0
BIAS = torch.ones(3)
COUNTS = [0]
NET = nn.Linear(3, 3)


def closing_over(value: Any) -> Any:
    return lambda x: x * value


def helper(x: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    return torch.clamp(x, min=floor)


def several(x: torch.Tensor, *, power: Any = 2) -> Any:
    """Use what functions of torch usually contain."""
    if x.shape[-1] != 3:
        raise ValueError(f"three numbers, not {x.shape[-1]}")
    parts = [part**power for part in x.unbind(-1)]
    total = sum(parts)
    out = torch.zeros_like(x)
    out[..., 0] = total
    for i, part in enumerate(parts[1:], 1):
        out[..., i] = part / (1 + math.sqrt(SCALE))
    mean, scale = torch.chunk(torch.cat([out, x], dim=-1), 2, dim=-1)
    return mean, F.softplus(scale) + 1e-4 if scale.ndim else scale


def inner(x: torch.Tensor) -> torch.Tensor:
    offset = x.mean()

    def shifted(y):
        return y - offset

    return shifted(x)


PURE: dict[str, Any] = {
    "methods": lambda x: x.unflatten(-1, (1, 3)).flatten(-2).clamp(-1, 1),
    "operations": lambda x: torch.tanh(x) * 2 + F.relu(x),
    "names": lambda x: torch.nn.functional.softplus(x).to(torch.float32),
    "a number outside": lambda x: x * SCALE,
    "a tensor outside": lambda x: x + BIAS,
    "math": lambda x: x * math.pi + math.sqrt(2),
    "a helper": lambda x: helper(x, floor=-1.0),
    "several lines": several,
    "an inner function": inner,
    "a partial": partial(helper, floor=-1.0),
    "a closure": closing_over(3.0),
    "a comprehension": lambda x: torch.stack([x[..., i] for i in range(3)], -1),
    "a function of torch": torch.tanh,
    "another": F.softplus,
}


@pytest.mark.parametrize("name", PURE)
def test_functions_of_arguments_alone_are_pure(name: str) -> None:
    assert why_not_pure(PURE[name]) is None


def counts(x: torch.Tensor) -> torch.Tensor:
    COUNTS[0] += 1
    return x + COUNTS[0]


def assigns(x: torch.Tensor) -> torch.Tensor:
    global SCALE
    SCALE = 3.0
    return x


def cell() -> Any:
    number = 0

    def counting(x: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return x + number

    return counting


def imports(x: torch.Tensor) -> torch.Tensor:
    import random

    return x * random.random()


def keeps(x: torch.Tensor, kept: list[Any] = []) -> torch.Tensor:  # noqa: B006
    kept.append(x)
    return x


def yields(x: torch.Tensor) -> Any:
    yield x


class Calls:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def sets(x: Any) -> Any:
    x.note = 1
    return x


IMPURE: dict[str, tuple[Any, str]] = {
    "a clock": (lambda x: x + time.time(), "uses time.time"),
    "a list": (counts, "uses COUNTS"),
    "a global": (assigns, "does more than compute"),
    "a variable around it": (cell(), "assigns to number"),
    "an import": (imports, "does more than compute"),
    "a default": (keeps, "has an argument of type list"),
    "a generator": (yields, "does not return"),
    "an object": (Calls(), "is of type Calls"),
    "an attribute": (sets, "does more than compute"),
    "numpy": (lambda x: torch.as_tensor(x.numpy()), "uses the attribute numpy"),
    "a list of it": (lambda x: torch.tensor(x.tolist()), "uses the attribute tolist"),
    "a seed": (lambda x: x + torch.manual_seed(0).seed(), "uses torch.manual_seed"),
    "a module": (lambda x: NET(x) + 1, "uses NET"),
    "a closed-over module": (closing_over(NET), "uses value"),
    "a question": (lambda x: input(x) or x, "uses input"),
    "an impure helper": (lambda x: counts(x) + 1, "uses counts"),
    "an argument": (partial(several, power=COUNTS), "has an argument of type list"),
    "a comprehension": (lambda x: sum(x * time.time() for _ in range(2)), "time"),
    "the backward pass": (lambda x: x.backward() or x, "uses the attribute backward"),
}


def test_a_name_that_does_not_exist_is_no_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = PURE["a number outside"]
    monkeypatch.delitem(globals(), "SCALE")
    assert why_not_pure(function) == "uses SCALE, which does not exist"


@pytest.mark.parametrize("name", IMPURE)
def test_other_functions_are_not_and_the_reason_is_named(name: str) -> None:
    function, reason = IMPURE[name]
    assert reason in str(why_not_pure(function))
    module = TensorDictModule(function, ["x"], ["y"])
    explained = str(why_not_recordable(module))
    assert reason in explained
    assert "set pure_forward = True" in explained


def test_what_a_function_takes_from_outside_is_part_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = TensorDictModule(lambda x: helper(x) * SCALE + BIAS, ["x"], ["y"])
    before = state_of(module)
    assert state_of(module) == before
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    scaled = state_of(module)
    assert scaled != before
    monkeypatch.setitem(globals(), "BIAS", torch.zeros(3))
    assert state_of(module) != scaled


def test_a_value_around_a_function_is_part_of_the_state() -> None:
    value = 1.0
    module = TensorDictModule(lambda x: x * value, ["x"], ["y"])
    before = state_of(module)
    value = 2.0
    assert state_of(module) != before
