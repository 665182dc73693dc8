"""TorchRL's loss of QMIX accepts our batches; ``test_examples.py`` has that of PPO."""

from functools import partial

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
OBSERVATION, ACTION, VALUES, CHOSEN = (
    ("hunter", name)
    for name in ("observation", "action", "action_value", "chosen_action_value")
)


def test_qmix_trains_from_a_replay_buffer() -> None:
    torch.manual_seed(1)
    net = MultiAgentMLP(5, 4, 2, centralised=False, share_params=True)
    values = QValueModule(
        action_value_key=VALUES,
        out_keys=[ACTION, VALUES, CHOSEN],
        action_space="categorical",
    )
    policy = TensorDictSequential(
        TensorDictModule(net, [OBSERVATION], [VALUES]), values
    )
    mixer_net = QMixer(state_shape=(2,), mixing_embed_dim=8, n_agents=2)
    mixer = TensorDictModule(mixer_net, [CHOSEN, "state"], ["chosen_action_value"])
    loss = QMixerLoss(policy, mixer, delay_value=True, action_space="categorical")
    loss.set_keys(
        action=ACTION,
        action_value=VALUES,
        local_value=CHOSEN,
        global_value="chosen_action_value",
    )
    target = SoftUpdate(loss, tau=0.1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(60), batch_size=16)
    with Collector(
        HUNTERS, policy, frames_per_batch=30, total_frames=60, cat_results="stack"
    ) as collector:
        for batch in collector:
            flat = batch.reshape(-1)
            flat["next", "reward"] = flat["next", "hunter", "reward"].sum(-2)
            buffer.extend(flat)
    assert len(buffer) == 60
    modules = (net, mixer_net)
    before = [[p.clone() for p in module.parameters()] for module in modules]
    optimizer = torch.optim.Adam(
        [p for p in loss.parameters() if p.requires_grad], 1e-2
    )
    terms = loss(buffer.sample())
    total = sum(value for name, value in terms.items() if name.startswith("loss"))
    assert torch.isfinite(total)
    total.backward()
    optimizer.step()
    for module, old in zip(modules, before, strict=True):
        pairs = zip(module.parameters(), old, strict=True)
        assert any(not torch.equal(new.data, was.data) for new, was in pairs)
    target.step()
