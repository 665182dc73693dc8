"""A script that sets torch's default device or dtype gets the same data as without.

The device "meta", which has no values, stands in for a GPU: whatever we create there
instead of on the CPU fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    check_env,
    describe,
    evaluate,
)
from marl_collect.core.random_actions import RandomPolicy
from marl_collect.models import make_critic, make_policy
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.policies.pool import PolicyPool
from marl_collect.storage import DatasetDescription, Writer, open_dataset
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.trainer import make_learner

pytestmark = pytest.mark.processes

make_env: Final = partial(CountingEnv, action_mask=True)
hunters: Final = partial(CountingEnv, n_prey=0)
Values = dict[Any, Any]

DEFAULTS: Final = (torch.device("meta"), torch.float64, torch.bfloat16)


@contextmanager
def default(value: torch.device | torch.dtype) -> Iterator[None]:
    """Do what users do at the top of a script."""
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    else:
        torch.set_default_device(value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def policy_of(factory: Any = make_env, **options: Any) -> Any:
    """Return a policy with weights, which the script loads onto the CPU."""
    torch.manual_seed(0)
    return make_policy(factory().description, device="cpu", **options)


def values(data: TensorDictBase) -> Values:
    return {
        key: (str(value.dtype), value.tolist())
        for key, value in data.items(True, True)
        if isinstance(value, torch.Tensor)
    }


def batches(kind: Any, policy: Any, factory: Any = make_env, **options: Any) -> Any:
    with kind(
        [factory] * 2,
        policy,
        **{"frames_per_batch": 40, "total_frames": 80, "seed": 3} | options,
    ) as collector:
        return [values(collector.fake_tensordict()), *map(values, collector)]


def rollout() -> Any:
    with ParallelEnv(2, make_env) as env:
        env.set_seed(3)
        torch.default_generator.manual_seed(0)
        random = env.rand_step(env.reset())
        chosen = RandomPolicy(env)(env.reset())
        return values(env.rollout(9, policy_of())), values(random), values(chosen)


def learnt(algorithm: str, factory: Any, **settings: Any) -> Any:
    few = {"num_cells": (8,), "value.minibatch_frames": 16, "value.warm_up_frames": 0}
    few |= {"value.minibatch_episodes": 4}
    options = TrainingOptions(frames=60).with_settings(few | settings)
    learner = make_learner(describe(factory), Setup(algorithm), options, 0)
    with Collector(
        [factory] * 2, learner.policy, frames_per_batch=60, total_frames=60, seed=1
    ) as collector:
        metrics = learner.update(collector.next().clone(), progress=0.5)
    weights = [(str(p.dtype), p.tolist()) for p in learner.parameters()]
    learner.load_state_dict(learner.state_dict())
    return metrics, weights


def dataset(folder: Path) -> Any:
    path = folder / str(len(list(folder.iterdir())))
    with Collector(
        [make_env] * 2, policy_of(), frames_per_batch=80, total_frames=240, seed=3
    ) as collector:
        about = DatasetDescription("counting", collector.description)
        with Writer(path, about) as writer:
            for batch in collector:
                writer.add(batch)
    data = open_dataset(path)
    generator = torch.Generator("cpu").manual_seed(1)
    moments = data.transitions.moments(("hunter", "observation"))
    return (
        values(data.transitions[0]),
        values(next(iter(data.transitions.loader(16, seed=0)))),
        values(data.transitions.sample(16, generator=generator)),
        values(data.trajectories.sample(2, generator=generator)),
        {key: (m.mean.tolist(), m.std.tolist()) for key, m in moments.items()},
    )


def versions() -> Any:
    """Play against past versions, and count who wins."""
    pool = PolicyPool(policy_of(), size=2)
    pool.update()
    pool.played(0, 1.0)
    return {name: (str(b.dtype), b.tolist()) for name, b in pool.named_buffers()}


def in_torchrl() -> Any:
    pytest.importorskip("torchrl")
    from marl_collect.interop.torchrl import TorchRLWrapper, to_torchrl

    env = to_torchrl(make_env())
    env.set_seed(3)
    torch.default_generator.manual_seed(0)
    wrapped = TorchRLWrapper(to_torchrl(make_env()))
    wrapped.set_seed(3)
    return (
        values(env.rollout(9)),
        values(env.fake_tensordict()),
        values(wrapped.rollout(9, policy_of())),
    )


def networks() -> Any:
    """Networks of a description are float32; on the default device, as in torch."""
    torch.manual_seed(0)
    description = make_env().description
    dtypes = {p.dtype for p in make_policy(description).parameters()}
    return dtypes | {p.dtype for p in make_critic(description).parameters()}


RECURRENT_IQL: Final = {
    "recurrent": "gru",
    "standardise_rewards": True,
    "value.double_q": True,
}
PROGRAMS: Final[dict[str, Callable[..., Any]]] = {
    "Collector": lambda: batches(Collector, policy_of()),
    "MultiSyncCollector": lambda: batches(MultiSyncCollector, policy_of()),
    "prefetch": lambda: batches(MultiSyncCollector, policy_of(), prefetch=True),
    "random": lambda: batches(Collector, None),
    "recurrent": lambda: batches(Collector, policy_of(recurrent="gru")),
    "recurrent workers": lambda: batches(
        MultiSyncCollector, policy_of(recurrent="lstm")
    ),
    "trajectories": lambda: batches(Collector, policy_of(), trajs_per_batch=3),
    "compact": lambda: batches(Collector, policy_of(), compact_obs=True),
    "ParallelEnv": rollout,
    "evaluate": lambda: [
        evaluate(policy_of(), make_env, episodes=3, seeds=1).agent_returns
    ],
    "PPO": lambda: learnt("mappo", make_env),
    "recurrent PPO": lambda: learnt("mappo", make_env, recurrent="gru"),
    "QMIX": lambda: learnt("qmix", hunters),
    "recurrent IQL": lambda: learnt("iql", hunters, **RECURRENT_IQL),
    "dataset": dataset,
    "TorchRL": in_torchrl,
    "check_env": lambda: check_env(make_env),
    "pool": versions,
    "networks": networks,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_data_do_not_depend_on_torch_s_defaults(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    if name == "dataset":
        program = partial(program, tmp_path)
    expected = program()
    for value in DEFAULTS:
        with default(value):
            assert program() == expected, value


def test_asynchronous_workers_collect_with_a_default_device() -> None:
    with (
        default(torch.device("meta")),
        MultiAsyncCollector(
            [make_env] * 2, policy_of(), frames_per_batch=40, total_frames=80, seed=3
        ) as collector,
    ):
        for batch in collector:
            assert batch["next", "done"].device.type == "cpu"
            assert batch["hunter", "observation"].isfinite().all()


def test_a_network_without_a_description_follows_torch() -> None:
    with default(torch.float64):
        net = MultiAgentMLP(5, 2, 3, centralised=False, share_params=True)
    assert {weight.dtype for weight in net.parameters()} == {torch.float64}
