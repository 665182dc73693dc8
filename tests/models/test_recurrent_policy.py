"""``make_policy(recurrent=...)``: acting, carrying the state, training on sequences."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from model_tools import observe
from tensordict.nn import set_interaction_type
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, evaluate
from marl_collect.core.description import EnvDescription
from marl_collect.models import make_policy, set_recurrent_mode
from marl_collect.parallel_env.describe import describe
from marl_collect.weights.materialize import materialize, meta_tensors

pytestmark = pytest.mark.processes

factory = partial(CountingEnv, action_mask=True)
STATES = {
    "gru": ["recurrent_state"],
    "lstm": ["recurrent_state_h", "recurrent_state_c"],
}


@pytest.fixture(scope="module")
def description() -> EnvDescription:
    return describe(factory)


def small(environment: Any, recurrent: str = "gru", **options: Any) -> Any:
    keywords = {"num_cells": (8,), "hidden_size": 6} | options
    return make_policy(environment, recurrent=recurrent, **keywords)


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
@pytest.mark.parametrize("centralised", [False, True])
@pytest.mark.parametrize("share_params", [False, True])
@pytest.mark.parametrize("num_cells", [(), (8, 7)])
def test_a_policy_from_meta_acts_and_writes_its_state(
    description: EnvDescription,
    recurrent: str,
    centralised: bool,
    share_params: bool,
    num_cells: tuple[int, ...],
) -> None:
    meta = small(
        description,
        recurrent,
        centralised=centralised,
        share_params=share_params,
        num_cells=num_cells,
        num_layers=2,
        device="meta",
    )
    assert all(p.is_meta for p in meta.parameters())
    policy = materialize(meta, seed=0)
    assert not meta_tensors(policy)
    policy = pickle.loads(pickle.dumps(copy.deepcopy(policy)))

    with set_interaction_type("random"):
        out = policy(observe(description, 4))

    for group, n_agents in (("hunter", 2), ("prey", 3)):
        assert out[group, "action_log_prob"].shape == (4, n_agents)
        for name in STATES[recurrent]:
            assert out["next", group, name].shape == (4, n_agents, 2, 6)
            assert out["next", group, name].abs().max() > 0


def test_a_centralised_policy_depends_on_every_agent(
    description: EnvDescription,
) -> None:
    for num_cells in ((), (8,)):
        policy = small(description, centralised=True, num_cells=num_cells)
        frame = observe(description, 1)
        before = policy(frame.clone())["hunter", "logits"]
        frame["hunter", "observation"][:, 1] += 1
        after = policy(frame)["hunter", "logits"]
        assert not torch.equal(before[:, 0], after[:, 0])


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_collectors_carry_and_reset_the_state_and_losses_reproduce_it(
    description: EnvDescription, recurrent: str, kind: Any
) -> None:
    policy = small(description, recurrent)
    with kind([factory] * 2, policy, frames_per_batch=40, seed=0) as collector:
        first, second = (collector.next().clone() for _ in range(2))
        explained = collector.explain()
    assert all(text.startswith("Fused") for text in explained), explained
    batch = torch.cat([first, second], 1)
    is_init = batch["is_init"].squeeze(-1)
    assert is_init[:, 0].all()
    assert is_init[:, 1:].any()
    for group in ("hunter", "prey"):
        for name in STATES[recurrent]:
            carried, following = batch[group, name], batch["next", group, name]
            continues = ~is_init[:, 1:]
            assert torch.equal(carried[:, 1:][continues], following[:, :-1][continues])
            assert not carried[is_init].any()
            assert following.abs().amax() > 0

    # The second batch begins in the middle of episodes, from the stored state.
    with torch.no_grad(), set_recurrent_mode():
        for group, key in (("hunter", "logits"), ("prey", "loc")):
            actor = collector.policy[group]
            recomputed = actor[0](second.select(*actor.in_keys, strict=False))
            torch.testing.assert_close(recomputed[group, key], second[group, key])


def test_evaluation_and_rollouts_carry_the_state(description: EnvDescription) -> None:
    policy = small(description)
    evaluation = evaluate(policy, factory, episodes=4, num_workers=1)
    assert len(evaluation.lengths) == 4
    with_workers = evaluate(policy, factory, episodes=4, num_workers=2)
    assert evaluation.team_returns == with_workers.team_returns

    with torch.no_grad():
        rollout = factory().rollout(6, policy)
    state = rollout["hunter", "recurrent_state"]
    assert not state[0].any()
    assert torch.equal(state[1:], rollout["next", "hunter", "recurrent_state"][:-1])


def test_an_unknown_recurrent_network_is_an_error(description: EnvDescription) -> None:
    with pytest.raises(ValueError, match=r"one of \['gru', 'lstm'\], but is 'rnn'"):
        make_policy(description, recurrent="rnn")
