"""Lazy policies and policies on the meta device get the weights of the seed.

The table is policy x collector x ``policy``, ``policy_factory``, both, or a list of
factories. ``tests/distributed/test_ray_policies.py`` has the column of Ray. A
combination is run for each policy, or for all of them as parts of one policy.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.weightless import (
    COPYABLE,
    NAMES,
    OBSERVATION,
    REFUSED,
    SEED,
    SEEDS_OF_LIST,
    UNCOPYABLE,
    WAYS,
    arguments,
    check_acts_with,
    check_module,
    digit,
    expected_policy,
    hunters,
    weightless,
)
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from marl_collect import (
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    record,
)
from marl_collect.models import materialize, save_policy

WORKERS = 2
REFUSED_WAYS = ("policy", "both")
"""A module that cannot be copied cannot be passed as ``policy``."""
CELLS = [
    (name, way)
    for name in NAMES
    for way in WAYS
    if name != UNCOPYABLE or way not in REFUSED_WAYS
]
TOGETHER = [
    *((COPYABLE, way) for way in WAYS),
    *(([UNCOPYABLE], way) for way in WAYS if way not in REFUSED_WAYS),
]


def never() -> Any:
    raise AssertionError("An environment was built.")


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("way", REFUSED_WAYS)
def test_a_policy_that_cannot_be_copied_is_refused_before_anything_starts(
    kind: Any, way: str
) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        kind(never, frames_per_batch=8, **arguments([UNCOPYABLE], way, 1))


@pytest.mark.parametrize(
    ("kind", "names", "way"),
    [
        *((Collector, [name], way) for name, way in CELLS),
        *((MultiSyncCollector, names, way) for names, way in TOGETHER),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else None,
)
def test_a_policy_gets_the_weights_of_the_seed(
    kind: Any, names: Sequence[str], way: str
) -> None:
    """Each in one process, and all together in workers."""
    workers = 1 if kind is Collector else WORKERS
    chosen = arguments(names, way, workers)
    passed = chosen.get("policy")
    options: Any = {"frames_per_batch": 8, "seed": SEED}
    if kind is MultiSyncCollector:
        # Imported once, in the fork server, because that takes seconds.
        options |= {"preload": ["torchrl.modules"]}
    seeds = [SEEDS_OF_LIST[index if way == "list" else 0] for index in range(workers)]
    expected = [expected_policy(names, passed, seed) for seed in seeds]
    with kind([hunters] * WORKERS, **options, **chosen) as collector:
        batch = collector.next()
        for index, row in enumerate(batch):
            check_acts_with(expected[index % workers], names, row)
        if passed is None and kind is MultiSyncCollector:
            assert collector.policy is None
            keys = collector.getattr_policy("out_keys")
            assert ("hunter", "action") in keys
        else:
            check_module(collector.policy, passed, expected[0])


def by_index(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    del seed
    return dict(zip(agents, ("first", "second"), strict=True))


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_each_of_several_policies(kind: Any) -> None:
    names = {"first": "lazy linear", "second": "mlp on meta"}
    policies = {key: weightless([name]) for key, name in names.items()}
    options: dict[str, Any] = {"frames_per_batch": 8, "seed": SEED, "num_workers": 2}
    with kind(hunters, policies=policies, assign=by_index, **options) as collector:
        batch = collector.next()
        for agent, (key, name) in enumerate(names.items()):
            expected = expected_policy([name], policies[key])
            check_acts_with(expected, [name], batch, agent)
            check_module(collector.policy[key], policies[key], expected)
    refused = {"first": weightless([UNCOPYABLE]), "second": None}
    with pytest.raises(ValueError, match="input sizes to its constructor") as caught:
        kind(never, policies=refused, assign=by_index, **options)
    assert caught.value.__notes__ == ["The policy is policies['first']."]


@pytest.mark.parametrize("names", [["lazy linear"], ["make_policy on meta"]])
def test_evaluations_act_with_the_same_weights(names: Sequence[str]) -> None:
    returns = []
    for way in ("policy", "policy_factory"):
        chosen = {"policy": None} | arguments(names, way, 1)
        with Evaluator(create_env_fn=hunters, seeds=SEED, **chosen) as evaluator:
            returns.append(evaluator.evaluate(6).team_returns)
    with Evaluator(expected_policy(names), hunters, seeds=SEED) as evaluator:
        returns.append(evaluator.evaluate(6).team_returns)
    assert returns[0] == returns[1] == returns[2]
    assert len(set(returns[0])) > 1


@pytest.mark.parametrize("way", ["policy", "policy_factory"])
def test_a_recording_has_the_outputs_of_the_weights(way: str, tmp_path: Path) -> None:
    chosen = arguments(["lazy linear"], way, 1)
    expected = expected_policy(["lazy linear"], chosen.get("policy"))
    dataset = record(tmp_path, hunters, frames=20, seed=SEED, **chosen)
    episode = dataset.trajectories[0]
    check_acts_with(expected, ["lazy linear"], episode)


def test_a_policy_without_weights_is_not_saved(tmp_path: Path) -> None:
    policy = weightless(["make_policy on meta"])[0]
    with pytest.raises(ValueError, match=r"no values for .*: save collector\.policy"):
        save_policy(tmp_path / "policy.pt", policy, hunters(), num_cells=(3,))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_module_of_which_only_a_part_is_on_meta_is_refused(kind: Any) -> None:
    first, second = nn.Linear(5, 2), nn.Linear(2, 2, device="meta")
    module = nn.Sequential(first, second)
    policy = TensorDictModule(module, [OBSERVATION], [("hunter", "action")])
    with pytest.raises(ValueError, match=r"'module\.1\.weight'.*materialize"):
        kind(never, policy, frames_per_batch=8)
    assert second.weight.is_meta
    whole = materialize(policy, seed=0)
    assert torch.equal(whole.module[0].weight, first.weight)
    assert not whole.module[1].weight.is_meta


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_training_a_module_that_was_copied_causes_a_warning(kind: Any) -> None:
    policy = weightless(["lazy linear"])
    with kind([hunters] * 2, policy, frames_per_batch=8) as collector:
        assert collector.policy is not policy
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector.update_policy_weights_()
            batch = collector.next()
        policy(batch.clone())
        with pytest.warns(UserWarning, match=r"Train collector\.policy"):
            collector.update_policy_weights_()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_factory_runs_as_after_seeding_torch(kind: Any) -> None:
    factory = partial(weightless, ["lazy linear"], known=True)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        expected = factory()
    before = torch.get_rng_state()
    with kind(
        hunters, policy_factory=factory, num_workers=2, frames_per_batch=8, seed=SEED
    ) as collector:
        check_acts_with(expected, ["lazy linear"], collector.next())
    assert torch.equal(torch.get_rng_state(), before)


class Picky(nn.Module):
    """A lazy layer that counts its calls and does not accept zeros."""

    calls: Tensor

    def __init__(self, *, known: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2) if known else nn.LazyLinear(2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        if not observation.any():
            raise RuntimeError("only zeros")
        self.calls += 1
        output = self.layer(observation)
        return digit(output), output * 0 + self.calls


def picky(*, known: bool) -> TensorDictSequential:
    keys = [("hunter", "action"), ("hunter", "calls")]
    return TensorDictSequential(
        TensorDictModule(Picky(known=known), [OBSERVATION], keys)
    )


def parallel() -> Any:
    return ParallelEnv(2, hunters)


@pytest.mark.parametrize(
    ("kind", "create_env_fn"),
    [
        (Collector, [hunters] * 2),
        (Collector, parallel),
        (MultiSyncCollector, [hunters] * 2),
    ],
    ids=["Collector", "ParallelEnv", "MultiSyncCollector"],
)
def test_a_built_policy_that_needs_real_observations_gets_the_first(
    kind: Any, create_env_fn: Any
) -> None:
    """It is called once more, which shows neither in its buffers nor in the data."""
    options = {"frames_per_batch": 60, "seed": SEED}
    with pytest.raises(ValueError, match="only zeros.* pass policy_factory to the col"):
        kind(create_env_fn, picky(known=False), **options)
    batches = []
    for known in (True, False):
        factory = partial(picky, known=known)
        with kind(create_env_fn, policy_factory=factory, **options) as collector:
            batches.append(collector.next().clone())
    assert batches[0]["hunter", "calls"][0, :, 0, 0].tolist() == list(range(1, 31))
    assert (batches[0] == batches[1]).all()


class Unreached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.LazyLinear(2)

    def forward(self, observation: Tensor) -> Tensor:
        return digit(observation)


def unreached() -> TensorDictModule:
    return TensorDictModule(Unreached(), [OBSERVATION], [("hunter", "action")])


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_what_a_factory_leaves_without_weights_is_named(kind: Any) -> None:
    options = {"num_workers": 1, "frames_per_batch": 8}
    with pytest.raises(ValueError, match=r"did not reach .*'module\.unused\.weight'"):
        kind(hunters, policy_factory=unreached, **options)

    def without_initialiser() -> TensorDictModule:
        module: Any = TensorDictModule(digit, [OBSERVATION], [("hunter", "action")])
        module.table = nn.Parameter(torch.empty(3, device="meta"))
        return module

    with pytest.raises(ValueError, match=r"'table'.* build the module with its values"):
        kind(hunters, policy_factory=without_initialiser, **options)


@pytest.mark.parametrize("policy", [None, weightless(["lazy linear"])])
def test_a_collector_takes_a_list_of_one_factory_only(policy: Any) -> None:
    factory = partial(weightless, ["lazy linear"])
    for factories in ([factory, factory], []):
        with pytest.raises(ValueError, match=f"has {len(factories)} entries, but a Co"):
            Collector(never, policy, policy_factory=factories, frames_per_batch=8)
