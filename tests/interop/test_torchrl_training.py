"""TorchRL's loss of QMIX accepts our batches; ``test_examples.py`` has that of PPO."""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import QValueModule
from torchrl.objectives import SoftUpdate
from torchrl.objectives.multiagent import QMixerLoss
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.models import MultiAgentMLP, QMixer

pytestmark = pytest.mark.processes

HUNTERS = partial(CountingEnv, n_prey=0, state=True)


def test_qmix_trains_from_a_replay_buffer() -> None:
    torch.manual_seed(1)
    net = MultiAgentMLP(5, 4, 2, centralised=False, share_params=True)
    network = TensorDictModule(
        net, [("hunter", "observation")], [("hunter", "action_value")]
    )
    values = QValueModule(
        action_value_key=("hunter", "action_value"),
        out_keys=[
            ("hunter", "action"),
            ("hunter", "action_value"),
            ("hunter", "chosen_action_value"),
        ],
        action_space="categorical",
    )
    policy = TensorDictSequential(network, values)
    mixer_net = QMixer(state_shape=(2,), mixing_embed_dim=8, n_agents=2)
    mixer = TensorDictModule(
        mixer_net, [("hunter", "chosen_action_value"), "state"], ["chosen_action_value"]
    )
    loss = QMixerLoss(policy, mixer, delay_value=True, action_space="categorical")
    loss.set_keys(
        action=("hunter", "action"),
        action_value=("hunter", "action_value"),
        local_value=("hunter", "chosen_action_value"),
        global_value="chosen_action_value",
    )
    target = SoftUpdate(loss, tau=0.1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(60), batch_size=16)
    with Collector(
        HUNTERS, policy, frames_per_batch=30, total_frames=60, cat_results="stack"
    ) as collector:
        for batch in collector:
            flat = batch.reshape(-1)
            team = flat["next", "hunter", "reward"].sum(-2)
            flat["next", "reward"] = team
            buffer.extend(flat)
    assert len(buffer) == 60
    _update(loss, buffer.sample(), [net, mixer_net])
    target.step()


def _update(loss: Any, batch: Any, modules: Any) -> None:
    """Take one optimiser step; the parameters of all ``modules`` must change."""
    before = [[p.clone() for p in module.parameters()] for module in modules]
    parameters = [p for p in loss.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    terms = loss(batch)
    total = sum(value for name, value in terms.items() if name.startswith("loss"))
    assert torch.isfinite(total)
    total.backward()
    optimizer.step()
    for module, old in zip(modules, before, strict=True):
        pairs = zip(module.parameters(), old, strict=True)
        assert any(not torch.equal(new.data, was.data) for new, was in pairs)
