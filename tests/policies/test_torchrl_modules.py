"""TorchRL's modules behave in our collectors as in TorchRL's."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl_envs import ACTION, OBSERVATION, Noughts, discrete

from marl_collect import Collector, MultiSyncCollector

torchrl = pytest.importorskip("torchrl")
from torchrl.data import Categorical, Composite  # noqa: E402

pytestmark = pytest.mark.processes


def batch_of(collector: Any) -> TensorDict:
    with collector:
        batch: TensorDict = collector.next().clone()
    return batch


KINDS: Any = pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])


def test_a_compiled_policy_that_overwrites_its_observation_acts_like_the_original() -> (
    None
):
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    policy = TensorDictSequential(
        TensorDictModule(net, [OBSERVATION], [OBSERVATION]),
        TensorDictModule(nn.Tanh(), [OBSERVATION], [ACTION]),
    )
    batch = batch_of(
        Collector(
            [Noughts] * 2,
            policy,
            frames_per_batch=40,
            seed=0,
            compile_policy={"backend": "eager"},
        )
    )
    ahead = batch["next", *OBSERVATION][:, :-1]
    follows = ~batch["next", "done"][:, :-1, 0]
    with torch.no_grad():
        expected = net(ahead)
    torch.testing.assert_close(batch[OBSERVATION][:, 1:][follows], expected[follows])
    torch.testing.assert_close(batch[ACTION], batch[OBSERVATION].tanh())


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_torchrls_random_policy_takes_random_actions(kind: Any) -> None:
    spec = Composite(a=Composite(action=Categorical(4, (2,)), shape=(2,)))
    batches = []
    for policy in (torchrl.modules.RandomPolicy(spec), None):
        with kind(discrete, policy, frames_per_batch=20, seed=0) as collector:
            batches.append(collector.next())
    assert (batches[0] == batches[1]).all()
