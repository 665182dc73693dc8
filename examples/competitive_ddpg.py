"""Competitive multi-agent DDPG on simple_tag, with TorchRL and our collector.

    python examples/competitive_ddpg.py --iterations 10

Adversaries chase one agent. Each team has its own actor, critic and replay buffer.
``competitive_ddpg_torchrl.py`` is the same script with TorchRL alone.
"""

import argparse
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

from marl_collect import MultiSyncCollector
from marl_collect.envs import PettingZooEnv

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--frames", type=int, default=1000, help="per iteration")
parser.add_argument("--updates", type=int, default=100, help="per iteration")
parser.add_argument("--minibatch", type=int, default=128, help="frames")
parser.add_argument("--seed", type=int, default=0)
out = Path("runs", Path(__file__).stem)
parser.add_argument("--out", type=Path, default=out)
arguments = parser.parse_args()

try:
    from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer
    from torchrl.envs import check_env_specs
    from torchrl.modules import (
        AdditiveGaussianModule,
        MultiAgentMLP,
        ProbabilisticActor,
        TanhDelta,
    )
    from torchrl.objectives import DDPGLoss, SoftUpdate, ValueEstimators

    from marl_collect.interop.torchrl import to_torchrl
except ImportError as error:
    install = 'pip install "marl-collect[mpe,torchrl]"'
    raise SystemExit(f"{error}: {install}") from error

total_frames = arguments.frames * arguments.iterations
torch.manual_seed(arguments.seed)


# The environment
def make_env():
    return PettingZooEnv(
        "simple_tag_v3",
        num_good=1,
        num_adversaries=2,
        num_obstacles=2,
        max_cycles=50,
        continuous_actions=True,
        episode_reward=True,
    )


env = to_torchrl(make_env())
check_env_specs(env)
groups = env.group_map
print("groups:", groups, "actions:", env.action_keys, "done:", env.done_keys)
print("a rollout:", env.rollout(5).batch_size)

# Actors, with noise for exploration
actors, explorers = {}, {}
for group, agents in groups.items():
    action_spec = env.full_action_spec[group, "action"]
    network = TensorDictModule(
        MultiAgentMLP(
            n_agent_inputs=env.observation_spec[group, "observation"].shape[-1],
            n_agent_outputs=action_spec.shape[-1],
            n_agents=len(agents),
            centralised=False,
            share_params=True,
            depth=2,
            num_cells=128,
            activation_class=torch.nn.Tanh,
        ),
        in_keys=[(group, "observation")],
        out_keys=[(group, "param")],
    )
    actors[group] = ProbabilisticActor(
        network,
        spec=action_spec,
        in_keys=[(group, "param")],
        out_keys=[(group, "action")],
        distribution_class=TanhDelta,
        distribution_kwargs={
            "low": action_spec.space.low,
            "high": action_spec.space.high,
        },
        return_log_prob=False,
    )
    noise = AdditiveGaussianModule(
        spec=action_spec,
        annealing_num_steps=total_frames // 2,
        sigma_init=0.9,
        sigma_end=0.1,
        action_key=(group, "action"),
    )
    explorers[group] = TensorDictSequential(actors[group], noise)

# Critics of observations and actions
critics = {}
for group, agents in groups.items():
    n_observations = env.observation_spec[group, "observation"].shape[-1]
    n_actions = env.full_action_spec[group, "action"].shape[-1]
    join = TensorDictModule(
        lambda observation, action: torch.cat([observation, action], dim=-1),
        in_keys=[(group, "observation"), (group, "action")],
        out_keys=[(group, "observation_and_action")],
    )
    value = TensorDictModule(
        MultiAgentMLP(
            n_agent_inputs=n_observations + n_actions,
            n_agent_outputs=1,
            n_agents=len(agents),
            centralised=True,
            share_params=True,
            depth=2,
            num_cells=128,
            activation_class=torch.nn.Tanh,
        ),
        in_keys=[(group, "observation_and_action")],
        out_keys=[(group, "state_action_value")],
    )
    critics[group] = TensorDictSequential(join, value)

# Data
collector = MultiSyncCollector(
    make_env,
    TensorDictSequential(*explorers.values()),
    num_workers=2,
    frames_per_batch=arguments.frames,
    total_frames=total_frames,
    seed=arguments.seed,
)
buffers = {
    group: ReplayBuffer(
        storage=LazyTensorStorage(100_000),
        sampler=RandomSampler(),
        batch_size=arguments.minibatch,
    )
    for group in groups
}

# Losses
losses, targets, optimizers = {}, {}, {}
for group in groups:
    loss_module = DDPGLoss(
        actor_network=actors[group],
        value_network=critics[group],
        delay_value=True,
        loss_function="l2",
    )
    loss_module.set_keys(
        state_action_value=(group, "state_action_value"),
        reward=(group, "reward"),
        done=(group, "done"),
        terminated=(group, "terminated"),
    )
    loss_module.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
    losses[group] = loss_module
    targets[group] = SoftUpdate(loss_module, tau=0.005)
    optimizers[group] = {
        "loss_actor": torch.optim.Adam(
            loss_module.actor_network_params.flatten_keys().values(), lr=3e-4
        ),
        "loss_value": torch.optim.Adam(
            loss_module.value_network_params.flatten_keys().values(), lr=3e-4
        ),
    }

# Training
arguments.out.mkdir(parents=True, exist_ok=True)
table = arguments.out / "progress.csv"  # for `marl-collect view`
table.write_text(",".join(["iteration", *groups]) + "\n")
for iteration, batch in enumerate(collector):
    trained = groups
    if iteration >= arguments.iterations // 2:
        trained = ["adversary"]  # The other team stops learning halfway.
    for group in trained:
        others = [other for other in groups if other != group]
        own = batch.exclude(*others, *(("next", other) for other in others))
        buffers[group].extend(own.reshape(-1))
        for _ in range(arguments.updates):
            terms = losses[group](buffers[group].sample())
            for name, optimizer in optimizers[group].items():
                terms[name].backward()
                parameters = optimizer.param_groups[0]["params"]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            targets[group].step()
    for explorer in explorers.values():
        explorer[-1].step(batch.numel())
    collector.update_policy_weights_()
    row = [str(iteration)]
    for group in groups:
        ended = batch["next", group, "done"]
        returns = batch["next", group, "episode_reward"][ended]
        print(f"iteration {iteration}: mean return of {group} {returns.mean():.2f}")
        row.append(str(returns.mean().item()))
    with table.open("a") as file:
        file.write(",".join(row) + "\n")
collector.shutdown()

# The trained policies
with torch.no_grad():
    rollout = env.rollout(50, TensorDictSequential(*actors.values()))
for group in groups:
    total = rollout["next", group, "reward"].sum(0).mean()
    print(f"return of one episode for {group}: {total:.2f}")
env.close()
