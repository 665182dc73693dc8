"""``explain(frames=...)`` counts kernels and waits, and names the lines that wait."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from workloads.counting import CountingEnv

from marl_collect import Collector, EnvDescription, GroupDescription, PolicyPool
from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.models import make_policy

WORLDS = 4
NAMES = ("observation", "action")
WAITS = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x.sum()),
    "nonzero": lambda x: torch.nonzero(x + 0),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "set": lambda x: x.clone().__setitem__(x > 9, torch.ones(0)),
    "select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x + 0),
    "equal": lambda x: torch.equal(x, x + 1),
    "close": lambda x: torch.allclose(x, x + 1),
    "inverse": lambda x: torch.linalg.inv(torch.eye(2) + x[0, 0] * 0),
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(2) + x[0, 0] * 0),
    "repeat": lambda x: torch.repeat_interleave(x, torch.ones(WORLDS).long(), 0),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x) + 0,
    "stack": lambda x: np.stack([x]),
    "cpu": lambda x: x.cpu(),
    "add": lambda x: x.clone().index_put_((x > 9,), torch.ones(0), accumulate=True),
    "two": lambda x: x.clone().__setitem__((x[:, 0] > 9, x[0] < -9), 0.0),
    "list": lambda x: x.tolist(),
    "format": lambda x: f"{x[0, 0]}",
    "tensor": lambda x: torch.tensor([x[0, 0], 1.0]),
}
GOES_ON = {
    "sum": lambda x: x.sum(),
    "where": lambda x: torch.where(x > 0, x, 0),
    "gather": lambda x: x[torch.zeros(2, dtype=torch.int64)],
    "views": lambda x: x[:, None].expand(-1, 3, -1).reshape(-1),
    "dtype": lambda x: x.to(torch.float64),
    "fill": lambda x: x.clone().masked_fill_(x > 0, 1.0),
    "number": lambda x: x.clone().__setitem__(x > 0, 1.0),
    "rows": lambda x: x.clone().__setitem__(x[:, 0] > 0, 1.0),
    "same device": lambda x: x.to(x.device),
    "repeat": lambda x: torch.repeat_interleave(
        x, torch.ones(WORLDS).long(), 0, output_size=WORLDS
    ),
    "inverse": lambda x: torch.linalg.inv_ex(torch.eye(2) + x[0, 0] * 0),
    "sample": lambda x: torch.multinomial(torch.ones(3), 1, replacement=True),
}


class Worlds(BatchedEnv):
    """Episodes of five frames in tensors; ``also`` runs in each step."""

    def __init__(self, also: Any = None) -> None:
        seen = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        group = GroupDescription(("a_0", "a_1"), seen, spaces.Discrete(2))
        super().__init__(EnvDescription("worlds", {"a": group}, time_limit=5), WORLDS)
        self.also = also
        self.at = torch.zeros(WORLDS, 2, 1)

    def begin(self, which: Any, seeds: Any) -> Any:
        del seeds
        self.at = self.at.clone()
        self.at[slice(None) if which is None else which.nonzero()[0]] = 0
        return {"a": self.at}

    def advance(self, actions: Any) -> Step:
        self.at = self.at + torch.from_numpy(actions["a"])[..., None]
        if self.also is not None:
            self.also(self.at.squeeze(-1))
        over = np.zeros(WORLDS, np.bool_)
        return Step({"a": self.at}, {"a": np.zeros((WORLDS, 2))}, over)


class Arrays(Worlds):
    """The same without torch."""

    def begin(self, which: Any, seeds: Any) -> Any:
        del which, seeds
        return {"a": np.zeros((WORLDS, 2, 1), np.float32)}

    def advance(self, actions: Any) -> Step:
        seen = actions["a"][..., None].astype(np.float32)
        return Step({"a": seen}, {"a": seen[..., 0]}, np.zeros(WORLDS, np.bool_))


def explained(make: Any, policy: Any = None, frames: int = 3, **options: Any) -> Any:
    with Collector(make, policy, frames_per_batch=40, **options) as collector:
        assert len(collector.explain()) == 1
        first, *rest = collector.explain(frames=frames)
        assert [first] == collector.explain()
        return rest


def place_of(function: Any) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_of_the_simulator_is_found_with_its_line(name: str) -> None:
    total, *waits = explained(lambda: Worlds(WAITS[name]))
    assert "and 1.0 waits for a device per step" in total
    (wait,) = waits
    assert wait.startswith(f"Simulator waits at {place_of(WAITS[name])} in <lambda>: ")
    assert wait.endswith(", 1.0 per step.")


@pytest.mark.parametrize("name", GOES_ON)
def test_operations_that_go_on_are_no_waits(name: str) -> None:
    (total,) = explained(lambda: Worlds(GOES_ON[name]))
    assert total.startswith("Simulator: ")
    assert "and 0.0 waits for a device per step" in total


def test_kernels_are_counted_without_views_and_allocations() -> None:
    def three(x: torch.Tensor) -> None:
        torch.empty(3)
        (x[:, 0] + 1).exp().view(-1).sum()

    (without,) = explained(Worlds)
    (with_three,) = explained(lambda: Worlds(three))
    kernels = [float(line.split()[1]) for line in (without, with_three)]
    assert kernels[1] - kernels[0] == 3


class Waiting(torch.nn.Module):
    """Acts at random, after it has looked at its input."""

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        self.shown = float(seen.sum())
        return torch.randint(2, seen.shape[:-1])


def test_a_wait_of_the_policy_is_found_where_environments_use_no_torch() -> None:
    lines, first = inspect.getsourcelines(Waiting.forward)
    (offset,) = (k for k, line in enumerate(lines) if "float(" in line)
    policy = TensorDictModule(Waiting(), *([("a", name)] for name in NAMES))
    total, wait = explained(Arrays, policy)
    assert total.startswith("Policy and collector: ")
    place = f"{Path(__file__)}:{first + offset} in forward"
    assert wait.startswith(f"Policy and collector waits at {place}: item")


def test_nothing_is_said_where_nothing_uses_torch() -> None:
    assert explained(CountingEnv) == []


def test_our_policies_do_not_wait() -> None:
    policy = make_policy(CountingEnv, num_cells=(4,))
    (total,) = explained(CountingEnv, policy)
    assert "and 0.0 waits" in total


@pytest.mark.parametrize(
    "options",
    [
        *({"total_frames": 40}, {"trajs_per_batch": 1}, {"init_random_frames": 99}),
        *({"replay_buffer": []}, {"trajs_per_batch": 1, "traj_format": "cat"}),
        {"postproc": lambda batch: batch[:, 99]},
    ],
    ids=" ".join,  # The values have no lasting names.
)
def test_what_is_counted_does_not_depend_on_batches(options: Any) -> None:
    policy = make_policy(CountingEnv, num_cells=(4,))
    expected = explained(CountingEnv, policy)
    assert explained(CountingEnv, policy, **options) == expected
    assert options.get("replay_buffer", []) == []


def test_operations_of_several_policies_are_counted() -> None:
    policy = make_policy(CountingEnv, num_cells=(4,))
    (total,) = explained(
        CountingEnv,
        policies={"main": policy, "past": PolicyPool(policy, size=1)},
        assign=lambda seed, agents: dict.fromkeys(agents, ("main", "past")[seed % 2]),
    )
    assert total.startswith("Policy and collector: ")


def test_counting_does_not_change_the_collection() -> None:
    batches = []
    for counts in (False, True):
        torch.manual_seed(3)
        policy = TensorDictModule(Waiting(), *([("a", name)] for name in NAMES))
        with Collector(Worlds, policy, frames_per_batch=40, seed=1) as collector:
            first = collector.next()
            assert first is not None
            if counts:
                collector.explain(frames=2)
            second = collector.next()
            assert second is not None
            assert collector.frames == 80
            batches.append(second.clone())
    assert (batches[0] == batches[1]).all()


def test_a_negative_number_of_frames_is_refused() -> None:
    negative = pytest.raises(ValueError, match="at least 0, but is -1")
    with Collector(CountingEnv, None, frames_per_batch=4) as collector, negative:
        collector.explain(frames=-1)
