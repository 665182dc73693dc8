"""Workers seed torch's, numpy's and Python's global generators; Collector does not."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect import Collector, EnvWrapper, MultiAsyncCollector, MultiSyncCollector
from marl_collect.core.seeding import global_generators, set_global_generators

WORKERS = [MultiSyncCollector, MultiAsyncCollector]


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    before = global_generators()
    yield
    set_global_generators(before)


def draws() -> list[float]:
    """Return a number of each generator, and one that numpy keeps for later."""
    numbers = [random.random(), random.gauss(0, 1)]
    numbers += [np.random.rand(), np.random.randn()]  # noqa: NPY002 - on purpose
    return [*numbers, float(torch.rand(()))]


class Drawing(EnvWrapper):
    """Adds numbers of the global generators to the rewards."""

    @property
    def drawn(self) -> list[float]:
        """One number of each library, all from a 53-bit double."""
        double = float(torch.rand((), dtype=torch.float64))
        number = float(np.random.rand())  # noqa: NPY002 - on purpose
        return [random.random(), number, double]

    def after_step(self) -> None:
        self.row["prey", "reward"][:, 0] += sum(draws())


def drawing() -> Drawing:
    return Drawing(CountingEnv())


def drawing_policy(td: TensorDictBase) -> TensorDictBase:
    shape = td["prey"].shape
    td["prey", "action"] = torch.full((*shape, 2), sum(draws()) / 10).clamp(-1, 1)
    td["hunter", "action"] = torch.zeros(td["hunter"].shape, dtype=torch.int64)
    return td


def test_workers_and_libraries_draw_different_numbers() -> None:
    def first_draws(seed: int) -> list[float]:
        with MultiSyncCollector(
            [drawing] * 2, frames_per_batch=4, seed=seed
        ) as collector:
            return [n for (numbers,) in collector.getattr_env("drawn") for n in numbers]

    numbers = [*first_draws(0), *first_draws(1)]
    assert len(numbers) == len(set(numbers)) == 2 * 2 * 3
    assert first_draws(0) == numbers[:6]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_new_seed_repeats_the_draws(replaced: bool) -> None:
    with MultiSyncCollector(
        [drawing] * 2, frames_per_batch=20, seed=0, on_worker_failure="restart"
    ) as collector:
        collector.set_seed(7)
        expected = [collector.next().clone() for _ in range(2)]
        if replaced:
            for pid in collector.worker_pids:
                os.kill(pid, signal.SIGKILL)
            collector.next()
            assert collector.stats()["restarts"] == 2
        collector.set_seed(7)
        for batch in expected:
            assert torch.equal(
                collector.next()["next", "prey", "reward"],
                batch["next", "prey", "reward"],
            )


@pytest.mark.parametrize("kind", [Collector, *WORKERS])
def test_a_resumed_policy_goes_on_with_its_draws(kind: Any) -> None:
    def make() -> Any:
        return kind(
            [CountingEnv] * 2,
            drawing_policy,
            num_workers=1,
            frames_per_batch=20,
            seed=0,
        )

    with make() as collector:
        collector.next()
        state = collector.state_dict()
        expected = [collector.next().clone() for _ in range(2)]
    draws()
    with make() as collector:
        collector.load_state_dict(state)
        for batch in expected:
            assert (collector.next() == batch).all()


def test_numpys_state_is_that_of_the_moment() -> None:
    """Also if only the spare normal number of an earlier draw was used."""
    np.random.seed(0)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002
    restore = partial(set_global_generators, global_generators())
    draws = [list, np.random.randn, list, np.random.randn, np.random.rand, list]
    for draw in [*draws, restore, np.random.randn, list, restore]:
        draw()
        actual: Any = global_generators()["numpy"]
        expected: Any = np.random.get_state(legacy=False)  # noqa: NPY002
        keys = actual["state"].pop("key"), expected["state"].pop("key")
        assert (np.asarray(keys[0]) == keys[1]).all()
        assert actual == expected


def unchanged(function: Callable[[], object]) -> bool:
    """Return whether a function leaves the generators of this process alone."""
    state = global_generators()
    function()
    actual = draws()
    set_global_generators(state)
    return draws() == actual


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_the_generators_of_the_program_are_left_alone(kind: Any) -> None:
    """In Collector, an environment or a policy may draw from them."""

    def collect() -> None:
        with kind(
            [CountingEnv], num_workers=1, frames_per_batch=20, seed=0
        ) as collector:
            collector.next()
            collector.set_seed(3)
            collector.next()
            collector.state_dict()

    assert unchanged(collect)


def test_states_of_earlier_versions_lack_some_generators() -> None:
    states = global_generators()
    before = draws()
    set_global_generators({"torch": states["torch"]})
    after = draws()
    assert after[-1] == before[-1]
    assert after[:-1] != before[:-1]
    set_global_generators(states)
    assert draws() == before


def test_torchs_seed_makes_an_unseeded_collector_repeat() -> None:
    def collect() -> torch.Tensor:
        torch.manual_seed(5)
        with Collector([CountingEnv] * 2, frames_per_batch=40) as collector:
            return collector.next()["hunter", "action"].clone()

    assert torch.equal(collect(), collect())
