"""A policy that computes every row alone runs on the rows of its agents only."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pure_modules import Computes
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from workloads.counting import CountingEnv, CountingOptions

from marl_collect.collectors import Collector
from marl_collect.models import MultiAgentMLP, make_policy
from marl_collect.policies import by_row
from marl_collect.policies.module import ModuleRunner

ALONE = "Runs on the rows of its agents only."
Agents = tuple[str, ...]

plain = partial(CountingEnv, CountingOptions(n_hunters=3))
masked = partial(CountingEnv, CountingOptions(action_mask=True))
one_hot = partial(CountingEnv, CountingOptions(categorical_actions=False, state=True))
images = partial(CountingEnv, CountingOptions(image=(40, 40, 3), n_prey=0))

BFLOAT16 = {"dtype": torch.bfloat16}


def by_seed(seed: int, agents: Agents) -> dict[str, str]:
    return {a: ("main", "rival")[(seed >> i) % 2] for i, a in enumerate(agents)}


def net(build: Any, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    small = {} if "network" in options else {"num_cells": (8,)}
    return make_policy(build(), **(small | options))


def two(build: Any, **options: Any) -> dict[str, Any]:
    return {"main": net(build, 0, **options), "rival": net(build, 1, **options)}


def start(
    build: Any, policies: Any, kind: Any = Collector, *, n_envs: int = 4, **options: Any
) -> Any:
    keywords = {"assign": by_seed, "seed": 3, "frames_per_batch": 10 * n_envs} | options
    return kind([build] * n_envs, policies=policies, **keywords)


def collect(collector: Any, batches: int = 4) -> TensorDict:
    with collector:
        return torch.cat([collector.next().clone() for _ in range(batches)], dim=1)


def same(td: TensorDictBase, other_td: TensorDictBase) -> None:
    assert set(td.keys(True, True)) == set(other_td.keys(True, True))
    for key in td.keys(True, True):
        torch.testing.assert_close(td[key], other_td[key], rtol=1e-4, atol=1e-5)


@pytest.fixture
def all_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a collector in this process that computes all rows of all policies."""

    def begin(*args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(by_row, "is_worth_it", lambda *_: False)
            collector = start(*args, **options)
        assert ALONE not in collector.explain()[0]
        return collector

    return begin


def alone(*args: Any, **options: Any) -> Any:
    collector = start(*args, **options)
    assert all(text.count(ALONE) == 2 for text in collector.explain())
    return collector


@pytest.fixture
def all_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_row, "is_worth_it", lambda *_: True)


class Adds(Computes):
    """Adds the agents' mean to every agent."""

    share = 1.0

    def __init__(self) -> None:
        super().__init__(lambda net, x: x + net.share * x.mean(-2, keepdim=True))


def after(layer: Callable[[int, int], nn.Module]) -> Callable[..., nn.Module]:
    """Build the usual network after a layer for so many agents and numbers."""

    def build(n_in: int, n_out: int, n: int, **_: Any) -> nn.Module:
        mlp = MultiAgentMLP(n_in, n_out, n, centralised=False, share_params=True)
        return nn.Sequential(layer(n, n_in), mlp)

    return build


def unusual(n_in: int, n_out: int, n: int, **_: Any) -> nn.Module:
    """Build networks with a layer that is applied with ``torch.vmap``."""
    return MultiAgentMLP(
        n_in,
        n_out,
        n,
        centralised=False,
        share_params=False,
        num_cells=(8,),
        norm_class=nn.LayerNorm,
        norm_kwargs={"normalized_shape": 8},
    )


class Offset(nn.Module):
    """Adds to each agent's numbers a parameter of its own."""

    pure_forward = True

    def __init__(self, n_agents: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.arange(float(n_agents)).unsqueeze(-1))
        self.by_row = False

    def keep_agent(self, agent: int) -> None:
        self.offset = nn.Parameter(self.offset.detach()[agent : agent + 1])
        self.by_row = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (plain, {}),
        (one_hot, {"activation_class": nn.ReLU, "check_finite": True}),
        (images, {}),
        (masked, {"recurrent": "lstm"}),
        (plain, {"share_params": False}),
        (masked, {"share_params": False, "recurrent": "gru"}),
        (one_hot, {"share_params": False, "network": unusual}),
        (plain, {"agent_ids": True}),
        (images, {"agent_ids": True, "share_params": False}),
        (images, {"agent_ids": True, "recurrent": "lstm"}),
        (masked, {"last_action": True, "recurrent": "gru"}),
        (plain, {"last_action": True, "share_params": False}),
        (images, {"conv": BFLOAT16}),
        (plain, {"network": after(lambda n, _: Offset(n))}),
        (plain, {"network": after(lambda _, size: nn.LayerNorm(size))}),
    ],
)
@pytest.mark.usefixtures("all_worth_it")
def test_rows_alone_equal_all_rows(all_rows: Any, build: Any, options: Any) -> None:
    expected = collect(all_rows(build, two(build, **options)), 2)
    same(collect(alone(build, two(build, **options)), 2), expected)


@pytest.mark.usefixtures("all_worth_it")
def test_actions_without_noise_are_the_same(all_rows: Any) -> None:
    options: dict[str, Any] = {"exploration_type": InteractionType.DETERMINISTIC}
    expected = collect(all_rows(plain, two(plain), **options))
    same(collect(alone(plain, two(plain), **options)), expected)


class Alone(Adds):
    """By row only if there is one agent, for which it has no weights to keep."""

    def __init__(self, n_agents: int) -> None:
        super().__init__()
        self.n_agents = n_agents

    @property
    def by_row(self) -> bool:
        return self.n_agents == 1


MIXING: list[tuple[str, dict[str, Any]]] = [
    ("centralised", {"centralised": True}),
    ("centralised networks", {"centralised": True, "share_params": False}),
    ("a network that says nothing", {"network": after(lambda *_: Adds())}),
    ("a network by row for one agent", {"network": after(lambda n, _: Alone(n))}),
    ("another random generator", {"network": after(lambda *_: nn.Dropout())}),
    ("a layer with agents", {"network": after(lambda *sizes: nn.LayerNorm(sizes))}),
]


@pytest.mark.usefixtures("all_worth_it")
@pytest.mark.parametrize(("name", "options"), MIXING)
def test_other_policies_compute_all_rows(name: str, options: Any) -> None:
    with start(plain, two(plain, **options)) as collector:
        assert ALONE not in collector.explain()[0], name


def test_small_networks_compute_all_rows() -> None:
    with start(plain, two(plain)) as collector:
        assert ALONE not in collector.explain()[0]


@pytest.mark.parametrize("flops", [1e6, 1e7, 1e8])
def test_runs_compute_enough_rows(flops: float) -> None:
    for rows in range(40):
        sizes = by_row.sizes_of_runs(rows, flops)
        assert rows <= sum(sizes) < rows + max(sizes, default=1)
    assert by_row.sizes_of_runs(15, 1e8) == [8, 4, 2, 1]
    assert by_row.sizes_of_runs(15, 1e6) == [8, 8]


@pytest.mark.usefixtures("all_worth_it")
def test_a_policy_is_probed_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    probed, sizes = [], set()
    probe = ModuleRunner.probe

    def counting(runner: ModuleRunner, memory: Any) -> None:
        probed.append(runner.policy)
        probe(runner, memory)

    bind = ModuleRunner.bind

    def noting(runner: ModuleRunner, memory: Any) -> None:
        sizes.add(runner.size)
        bind(runner, memory)

    monkeypatch.setattr(ModuleRunner, "probe", counting)
    monkeypatch.setattr(ModuleRunner, "bind", noting)
    with alone(plain, two(plain)) as collector:
        collector.next()
    assert len(sizes) > 2
    assert len({id(policy) for policy in probed}) == len(probed)


@pytest.mark.usefixtures("all_worth_it")
def test_hooks_see_all_rows() -> None:
    policies = two(plain)
    shapes = []
    policies["main"].register_forward_hook(
        lambda _, args, out: shapes.append(out.shape)
    )
    with start(plain, policies) as collector:
        collector.next()
    assert set(shapes) == {torch.Size([4])}


@pytest.mark.usefixtures("all_worth_it")
def test_a_policy_for_one_group_shares_rows_with_random_actions() -> None:
    policies = {"main": net(plain, 0)["hunter"], "rival": net(plain, 1)}

    def assign(seed: int, agents: Agents) -> dict[str, str]:
        hunters = "main" if seed % 2 else "rival"
        return {a: hunters if a.startswith("hunter") else "rival" for a in agents}

    with alone(plain, policies, assign=assign) as collector:
        batch = collector.next()
        assert set(batch["hunter", "policy_id"].unique().tolist()) == {0, 1}
        assert (batch["prey", "policy_id"] == 1).all()


@pytest.mark.usefixtures("all_worth_it")
def test_an_error_names_the_index_in_the_batch(all_rows: Any) -> None:
    texts = []
    for begin in (all_rows, alone):
        policies = two(plain, check_finite=True)
        with begin(plain, policies) as collector:
            collector.next()
            with torch.no_grad():
                next(policies["rival"].parameters()).fill_(torch.nan)
            with pytest.raises(ValueError, match="must write finite number") as excinfo:
                collector.next()
        texts.append(str(excinfo.value))
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("all_worth_it")
@pytest.mark.parametrize("options", [{"agent_ids": True}, {"share_params": False}])
def test_changed_weights_and_settings_act_at_once(all_rows: Any, options: Any) -> None:
    batches = []
    for begin in (all_rows, alone):
        policies = two(plain, **options)
        with begin(plain, policies) as collector:
            actual = [collector.next().clone()]
            with torch.no_grad():
                next(policies["main"].parameters()).mul_(2)
            actual.append(collector.next().clone())
            hunter = policies["main"]["hunter"][0].module
            hunter = hunter.mlp.net if "agent_ids" in options else hunter.net
            hunter[0].weight = nn.Parameter(hunter[0].weight.detach() * 2)
            actual.append(collector.next().clone())
            hunter[1] = nn.ReLU()
            actual.append(collector.next().clone())
            hunter[1] = nn.Dropout(0.0)
            actual.append(collector.next().clone())
            hunter[1] = nn.Tanh()
            actual.append(collector.next().clone())
        batches.append(torch.cat(actual, 1))
    same(*batches)


@pytest.mark.usefixtures("all_worth_it")
def test_a_policy_whose_settings_always_change_computes_all_rows() -> None:
    policies = two(plain)
    with alone(plain, policies) as collector:
        for number in range(12):
            policies["main"].train(number % 2 == 0)
            collector.next()
        assert collector.explain()[0].count(ALONE) == 1


def test_policies_built_by_hand(all_rows: Any) -> None:
    def by_hand(seed: int) -> Any:
        module, head = policy = net(images, seed, num_cells=(8,))
        keys = module.in_keys, module.out_keys
        return type(policy)(TensorDictModule(module.module, *keys), head)

    def build() -> Any:
        return {"main": by_hand(0), "rival": by_hand(1)}

    same(collect(alone(images, build()), 1), collect(all_rows(images, build()), 1))


class Half(Adds):
    """Says that it treats rows alike, but mixes agents."""

    by_row = True
    share = 0.0


def test_copies_of_lying_policies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every change of settings, the copies are compared again."""
    locs = []
    for worth in (True, False):
        monkeypatch.setattr(by_row, "is_worth_it", lambda *_, w=worth: w)
        policies = two(plain, network=after(lambda *_: Half()))
        halves = [m for net in policies.values() for m in net.modules()]
        is_alone = []
        with start(plain, policies) as collector:
            for share in (0.0, 1.0):
                for half in halves:
                    if isinstance(half, Half):
                        half.share = share
                batch = collector.next()
                is_alone.append(ALONE in collector.explain()[0])
            locs.append(batch["prey", "loc"].clone())
        assert is_alone == [worth, False]
    torch.testing.assert_close(*locs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("all_worth_it")
def test_mistakes_of_our_own_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(by_row, "sizes_of_runs", mistaken)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        start(plain, two(plain))


def test_a_policy_s_own_rows_are_compared_with_all_rows() -> None:
    seven = {"g": np.eye(7, dtype=np.bool_)}
    all_of_it = {"g": np.ones((4, 7), np.bool_)}
    alike = {"g": True}
    for flops, worth in ((0.0, False), (1e5, True), (1e7, True)):
        assert by_row.is_worth_it(seven, alike, 8, flops) == worth
        assert not by_row.is_worth_it(all_of_it, alike, 8, flops)
    # A copy for each agent needs seven runs, which pays for large networks only.
    assert not by_row.is_worth_it(seven, {"g": False}, 8, 1e5)
    assert by_row.is_worth_it(seven, {"g": False}, 8, 1e7)
