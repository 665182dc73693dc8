"""Multi-agent PPO on simple_spread, with TorchRL and our collector.

    python examples/multi_agent_ppo.py --iterations 10

Three agents share one policy; a centralised critic sees all observations (MAPPO).
``multi_agent_ppo_torchrl.py`` is the same script with TorchRL alone.
"""

import argparse
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule

from marl_collect import MultiSyncCollector

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--frames", type=int, default=4000, help="per iteration")
parser.add_argument("--epochs", type=int, default=10, help="per iteration")
parser.add_argument("--minibatch", type=int, default=400, help="frames")
arguments = parser.parse_args()

try:
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.envs import check_env_specs
    from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
    from torchrl.objectives import ClipPPOLoss, ValueEstimators

    from marl_collect.envs import PettingZooEnv
    from marl_collect.interop.torchrl import to_torchrl
except ImportError as error:
    install = 'pip install "marl-collect[mpe,torchrl]"'
    raise SystemExit(f"{error}: {install}") from error

torch.manual_seed(0)


# The environment
def make_env():
    return PettingZooEnv(
        "simple_spread_v3", max_cycles=50, continuous_actions=True, episode_reward=True
    )


env = to_torchrl(make_env())
check_env_specs(env)
n_agents = len(env.group_map["agent"])
n_observations = env.observation_spec["agent", "observation"].shape[-1]
action_spec: Any = env.full_action_spec[env.action_key]
n_actions = action_spec.shape[-1]

# The policy
options: dict[str, Any] = {
    "n_agent_inputs": n_observations,
    "n_agents": n_agents,
    "share_params": True,
    "depth": 2,
    "num_cells": 128,
    "activation_class": torch.nn.Tanh,
}
network = torch.nn.Sequential(
    MultiAgentMLP(n_agent_outputs=2 * n_actions, centralised=False, **options),
    NormalParamExtractor(),
)
policy = ProbabilisticActor(
    TensorDictModule(
        network,
        in_keys=[("agent", "observation")],
        out_keys=[("agent", "loc"), ("agent", "scale")],
    ),
    spec=action_spec,
    in_keys=[("agent", "loc"), ("agent", "scale")],
    out_keys=[env.action_key],
    distribution_class=TanhNormal,
    distribution_kwargs={"low": action_spec.space.low, "high": action_spec.space.high},
    return_log_prob=True,
    log_prob_key=("agent", "sample_log_prob"),
)

# The critic
critic = TensorDictModule(
    MultiAgentMLP(n_agent_outputs=1, centralised=True, **options),
    in_keys=[("agent", "observation")],
    out_keys=[("agent", "state_value")],
)

# Data
collector = MultiSyncCollector(
    make_env,
    policy,
    num_workers=2,
    frames_per_batch=arguments.frames,
    total_frames=arguments.frames * arguments.iterations,
)
buffer = ReplayBuffer(
    storage=LazyTensorStorage(arguments.frames),
    sampler=SamplerWithoutReplacement(),
    batch_size=arguments.minibatch,
)

# The loss
loss_module = ClipPPOLoss(
    actor_network=policy,
    critic_network=critic,
    clip_epsilon=0.2,
    entropy_coeff=1e-4,
    normalize_advantage=False,
)
loss_module.set_keys(
    reward=env.reward_key,
    action=env.action_key,
    sample_log_prob=("agent", "sample_log_prob"),
    value=("agent", "state_value"),
    done=("agent", "done"),
    terminated=("agent", "terminated"),
)
loss_module.make_value_estimator(ValueEstimators.GAE, gamma=0.99, lmbda=0.9)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-4)

# Training
for iteration, batch in enumerate(collector):
    with torch.no_grad():
        loss_module.value_estimator(
            batch,
            params=loss_module.critic_network_params,
            target_params=loss_module.target_critic_network_params,
        )
    buffer.extend(batch.reshape(-1))
    for _ in range(arguments.epochs * (arguments.frames // arguments.minibatch)):
        terms = loss_module(buffer.sample())
        loss = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    collector.update_policy_weights_()
    dones = batch["next", "agent", "done"]
    returns = batch["next", "agent", "episode_reward"][dones]
    print(f"iteration {iteration}: mean return {returns.mean():.2f}")
collector.shutdown()

# The trained policy
with torch.no_grad():
    rollout = env.rollout(50, policy)
print(f"return of one episode: {rollout['next', 'agent', 'reward'].sum(0).mean():.2f}")
env.close()
