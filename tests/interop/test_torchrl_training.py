"""TorchRL's losses accept our batches; scripts change only their imports."""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

pytest.importorskip("torchrl")
pytest.importorskip("pettingzoo")
pytest.importorskip("Box2D")

from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import QValueModule
from torchrl.objectives import ClipPPOLoss, SoftUpdate, ValueEstimators
from torchrl.objectives.multiagent import QMixerLoss
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.models import MultiAgentMLP, QMixer, make_policy

pytestmark = pytest.mark.processes

HUNTERS = partial(CountingEnv, n_prey=0, state=True)


def test_ppo_trains_on_a_batch_of_workers() -> None:
    policy = make_policy(HUNTERS())
    net = MultiAgentMLP(5, 1, 2, centralised=True, share_params=True)
    critic = TensorDictModule(
        net, [("hunter", "observation")], [("hunter", "state_value")]
    )
    loss = ClipPPOLoss(policy, critic)
    loss.set_keys(
        reward=("hunter", "reward"),
        action=("hunter", "action"),
        sample_log_prob=("hunter", "action_log_prob"),
        value=("hunter", "state_value"),
        done=("hunter", "done"),
        terminated=("hunter", "terminated"),
    )
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    with MultiSyncCollector(
        [HUNTERS] * 2, policy, frames_per_batch=40, total_frames=40
    ) as collector:
        for batch in collector:
            loss.value_estimator(
                batch,
                params=loss.critic_network_params,
                target_params=loss.target_critic_network_params,
            )
            assert batch["advantage"].shape == (2, 20, 2, 1)
            buffer = TensorDictReplayBuffer(
                storage=LazyTensorStorage(40), batch_size=16
            )
            buffer.extend(batch.reshape(-1))
            _update(loss, buffer.sample(), [policy, net])


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
        mixer_net,
        [("hunter", "chosen_action_value"), "state"],
        ["chosen_action_value"],
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


class Recurrent(torch.nn.Module):
    """Writes its state under "next" without listing it, as BenchMARL's GRU does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.in_keys = [("hunter", "observation")]
        self.out_keys = [("hunter", "action")]
        self.key = ("hunter", name)

    def forward(self, tensordict: TensorDictBase) -> Any:
        action = tensordict["hunter", "observation"].sum(-1).long() % 4
        state = tensordict.get(self.key, None)
        if state is None:
            state = torch.zeros(*action.shape, 1)
        tensordict["hunter", "action"] = action
        tensordict["hunter", "age"] = state.clone()
        tensordict["next", *self.key] = state + 1
        return tensordict


@pytest.mark.parametrize("name", ["hidden", "_hidden"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_states_that_a_policy_does_not_list_are_carried(kind: Any, name: str) -> None:
    with kind(HUNTERS, Recurrent(name), frames_per_batch=30) as collector:
        batch = collector.next()
    age, expected = batch["hunter", "age"][0, :, 0, 0], 0.0
    done = batch["next", "done"].flatten()
    assert done.any()
    for frame in range(30):
        assert age[frame] == expected
        expected = 0.0 if done[frame] else expected + 1
    # As in TorchRL, private entries are not in batches.
    keys = batch.keys(include_nested=True, leaves_only=True)
    assert (("hunter", name) in keys) == (name == "hidden")


SCRIPT = """
{imports}
import torch
from tensordict.nn import TensorDictModule

GROUP = "walker"
torch.manual_seed(0)


def make_env():
    return PettingZooEnv("multiwalker_v9", parallel=True, use_mask=True, max_cycles=8)


network = torch.nn.Sequential(
    MultiAgentMLP(31, 4, 3, centralised=False, share_params=True, depth=1, num_cells=8),
    torch.nn.Tanh(),
)
policy = TensorDictModule(network, [(GROUP, "observation")], [(GROUP, "action")])
collector = Collector(
    create_env_fn=lambda: SerialEnv(2, make_env),
    policy=policy,
    frames_per_batch=32,
    total_frames=64,
)
shapes, returns = [], 0.0
for batch in collector:
    shapes.append(tuple(batch.shape))
    returns += float(batch["next", GROUP, "reward"].sum())
    ends = int(batch["next", "done"].sum())
    actions = batch[GROUP, "action"]
collector.shutdown()
"""

THEIRS = """
from torchrl.collectors import Collector
from torchrl.envs import PettingZooEnv, SerialEnv
from torchrl.modules import MultiAgentMLP
"""
OURS = """
from marl_collect import Collector, SerialEnv
from marl_collect.envs import PettingZooEnv
from marl_collect.models import MultiAgentMLP
"""


@pytest.mark.parametrize("imports", [OURS, THEIRS], ids=["ours", "torchrl"])
@pytest.mark.filterwarnings("ignore")  # TorchRL warns about PettingZoo's version.
def test_a_script_runs_with_either_library_s_imports(imports: Any) -> None:
    space: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT.format(imports=imports), space)
    assert space["shapes"] == [(2, 16), (2, 16)]
    assert space["ends"] == 4
    assert space["returns"] != 0
    assert space["actions"].shape == (2, 16, 3, 4)
    assert space["actions"].dtype == torch.float32
