"""Updates of all workers, of some workers, and of submodules."""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests_policies import level_policy
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.weights.shared import SharedMemoryWeights


def test_weights_are_received_from_a_source() -> None:
    class Source:
        def receive(self) -> Any:
            return {"module.level": torch.tensor(5.0)}

    with MultiSyncCollector(
        [CountingEnv] * 2,
        level_policy(),
        frames_per_batch=8,
        weight_sync_schemes={"policy": SharedMemoryWeights()},
        weight_recv_schemes={"policy": Source()},
    ) as collector:
        collector.next()
        collector.receive_weights()
        assert (collector.next()["prey", "action"] == 5.0).all()


def test_weights_that_only_workers_have_are_not_published_before_each_batch() -> None:
    with (
        MultiSyncCollector(
            CountingEnv,
            frames_per_batch=8,
            policy_factory=level_policy,
            update_at_each_batch=True,
        ) as collector,
        pytest.raises(RuntimeError, match="this process has no weights of it"),
    ):
        collector.next()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_worker_ids_are_indices(kind: Any) -> None:
    wrong: Any
    with kind([CountingEnv] * 2, level_policy(), frames_per_batch=8) as collector:
        for wrong in (True, [False, True], "0", 1.0, [0.0], object()):
            with pytest.raises(TypeError, match=r"indices of workers, such as \[0, 2"):
                collector.update_policy_weights_(worker_ids=wrong)
        collector.update_policy_weights_(worker_ids=0)


@pytest.mark.torchrl_defect("D12")
def test_weights_of_some_workers_and_of_submodules() -> None:
    policy = level_policy()
    with MultiSyncCollector([CountingEnv] * 3, policy, frames_per_batch=9) as collector:

        def levels() -> list[float]:
            actions = collector.next()["prey", "action"]
            return [float(row.flatten()[0]) for row in actions]

        collector.update_policy_weights_(
            {"module.level": torch.tensor(2.0)}, worker_ids=[1]
        )
        assert levels() == [0.0, 2.0, 0.0]
        collector.update_policy_weights_(
            weights_dict={"module": {"level": torch.tensor(7.0)}}
        )
        assert levels() == [7.0, 7.0, 7.0]
        collector.update_policy_weights_(
            model_id="module", weights={"level": torch.tensor(8.0)}, worker_ids=2
        )
        assert levels() == [7.0, 7.0, 8.0]
        for index in (3, -1):
            with pytest.raises(ValueError, match=f"worker {index} of 3"):
                collector.update_policy_weights_(worker_ids=index)
        with pytest.raises(KeyError, match="no submodule 'critic'"):
            collector.update_policy_weights_(weights_dict={"critic": {}})
        with pytest.raises(ValueError, match="only one"):
            collector.update_policy_weights_(policy, weights=policy)
        with pytest.raises(ValueError, match="model_id='module' .* omit model_id"):
            collector.update_policy_weights_(
                model_id="module", weights_dict={"policy": policy}
            )


class Wrapped(nn.Module):
    """A module on tensors, which collectors wrap; a buffer is in no state_dict."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        level = self.level * self.scale
        return (torch.zeros_like(observation[..., 0]) + level).long()


SOURCES = {
    "module": lambda module: module,
    "state_dict": lambda module: module.state_dict(),
    "TensorDict": TensorDict.from_module,
}


def trained() -> Wrapped:
    module = Wrapped()
    with torch.no_grad():
        module.level.fill_(2)
    return module


def actions_of(collector: Any) -> torch.Tensor:
    actions: torch.Tensor = collector.next()["hunter", "action"].unique()
    return actions


@pytest.mark.parametrize(
    ("source", "model_id"),
    [("module", None), ("state_dict", "policy"), ("TensorDict", None)],
)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_weights_have_the_names_of_the_module_that_was_passed(
    kind: Any, source: str, model_id: str | None
) -> None:
    policy, other = Wrapped(), trained()
    with kind(
        [partial(CountingEnv, n_prey=0)] * 2, policy, frames_per_batch=8
    ) as collector:
        with torch.no_grad():
            policy.scale.fill_(1.5)
        collector.update_policy_weights_(SOURCES[source](other), model_id=model_id)
        # A state_dict has no scale, so the present one is published.
        assert actions_of(collector).tolist() == [3 if source == "state_dict" else 2]
        larger = {"level": other.level, "more": torch.ones(())}
        with pytest.raises(KeyError, match="surplus .'module.more'"):
            collector.update_policy_weights_(larger, model_id=model_id)


@pytest.mark.parametrize("source", ["module", "TensorDict"])
def test_weights_of_a_factory_have_the_names_of_its_module(source: str) -> None:
    envs = [partial(CountingEnv, n_prey=0)] * 2
    with MultiSyncCollector(
        envs, policy_factory=Wrapped, frames_per_batch=8
    ) as collector:
        # The trainer has no module, so it does not know the buffer.
        with pytest.raises(KeyError, match="missing .'module.scale'.*pass the module"):
            collector.update_policy_weights_(trained().state_dict())
        collector.update_policy_weights_(SOURCES[source](trained()))
        assert actions_of(collector).tolist() == [2]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("replaced", [False, True])
def test_weights_that_are_loaded_before_the_first_batch_act_in_it(
    kind: Any, replaced: bool
) -> None:
    policy = level_policy()
    with kind(
        CountingEnv, policy, frames_per_batch=8, update_at_each_batch=True
    ) as collector:
        if replaced:
            policy.module.level = nn.Parameter(torch.tensor(5.0))
        else:
            policy.load_state_dict({"module.level": torch.tensor(5.0)})
        assert (collector.next()["prey", "action"] == 5.0).all()
        assert collector.policy_version == 1
