"""MADDPG on simple_tag, in plain PyTorch: three adversaries chase one agent.

    pip install "marl-collect[mpe,torchrl]"
    python examples/maddpg_simple_tag.py

Both groups learn. An actor sees one agent's observation, a critic the observations and
actions of all agents. In evaluations one group plays against random actions. Writes
``progress.csv`` and ``policy.pt`` to ``--out``.

Source:
    Lowe et al., "Multi-Agent Actor-Critic for Mixed Cooperative-Competitive
    Environments", arXiv 1706.02275. Here, agents of a group share an actor.
"""

import argparse
import copy
from functools import partial
from pathlib import Path

import torch
from torch import nn

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.models import make_policy, save_policy
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=100_000)
parser.add_argument("--batch", type=int, default=1_000, help="frames per batch")
parser.add_argument("--updates", type=int, default=50, help="per batch")
parser.add_argument("--minibatch", type=int, default=256, help="frames")
parser.add_argument("--warm-up", type=int, default=5_000, help="random frames")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--games", type=int, default=200, help="per evaluation")
parser.add_argument("--every", type=int, default=20, help="batches per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/maddpg_simple_tag"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    from marl_collect.envs import PettingZooEnv
except ImportError as error:
    install = 'pip install "marl-collect[mpe,torchrl]"'
    raise SystemExit(f"{error}: {install}") from error

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # Small networks are no faster with more threads.

make_env = partial(PettingZooEnv, "simple_tag_v3", continuous_actions=True)
description = describe(make_env)
groups = description.groups
header = ["frames", *groups, *(f"random_{name}" for name in groups)]
network = {"num_cells": (64, 64), "activation_class": nn.ReLU}
# The actor: the action without noise. Samples of the policy explore.
policy = make_policy(description, **network)
joint = 0  # Input size of a critic.
for group in groups.values():
    assert group.observation.shape  # Only nested spaces have none.
    assert group.action.shape
    joint += group.n_agents * (group.observation.shape[0] + group.action.shape[0])
critics = nn.ModuleDict(
    {
        name: nn.Sequential(
            nn.Linear(joint, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, group.n_agents),
        )
        for name, group in groups.items()
    }
)
target_policy, target_critics = copy.deepcopy(policy), copy.deepcopy(critics)
actor_optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
critic_optimizer = torch.optim.Adam(critics.parameters(), lr=args.lr)


def act(policy, data):
    """Return the actors' actions ``[S, n, 5]`` by group, with their gradients."""
    return {name: policy[name].get_dist(data).deterministic_sample for name in groups}


def value(critics, name, data, actions):
    """Return the values ``[S, n]`` of a group's agents, given the actions of all."""
    parts = [data[other_name, "observation"].flatten(-2) for other_name in groups]
    parts += [actions[other_name].flatten(-2) for other_name in groups]
    return critics[name](torch.cat(parts, -1))


def update(data):
    """Make a gradient step of all critics, then one of all actors."""
    actions = {name: data[name, "action"] for name in groups}
    with torch.no_grad():
        next_actions = act(target_policy, data["next"])
    critic_loss = 0
    for name in groups:
        with torch.no_grad():
            next_value = value(target_critics, name, data["next"], next_actions)
            reward = data["next", name, "reward"].squeeze(-1)
            goes_on = ~data["next", name, "terminated"].squeeze(-1)
            target = reward + 0.95 * next_value * goes_on
        error = value(critics, name, data, actions) - target
        critic_loss = critic_loss + error.square().mean()
    step(critic_optimizer, critics, critic_loss)
    policy_actions = act(policy, data)
    # A group's own actions come from its policy, the other group's from the data.
    actor_loss = -sum(
        value(critics, name, data, actions | {name: policy_actions[name]}).mean()
        for name in groups
    )
    # Saturated actions have no gradient.
    size = sum(policy[name].get_dist(data).loc.square().mean() for name in groups)
    step(actor_optimizer, policy, actor_loss + 1e-3 * size)
    for target, source in ((target_policy, policy), (target_critics, critics)):
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.data.lerp_(new.data, 0.01)


def step(optimizer, module, loss):
    """Make one gradient step."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()


def assign(trained_group, _seed, agents):
    """Return who acts: the policy for ``trained_group``, random actions if not."""
    trained_agents = groups[trained_group].agents if trained_group else ()
    return {agent: "main" if agent in trained_agents else "random" for agent in agents}


def mean_returns(trained_group):
    """Return the groups' mean returns; only ``trained_group`` uses the policy."""
    return evaluate(
        None,
        make_env,
        policies={"main": policy, "random": None},
        assign=partial(assign, trained_group),
        episodes=args.games,
        seeds=1,
        num_workers=1,
    ).mean_group_returns


buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(100_000), batch_size=args.minibatch
)
random = list(mean_returns(None).values())
rows: list[tuple[float, ...]] = []
collector = MultiSyncCollector(
    make_env,
    policy,
    frames_per_batch=args.batch,
    total_frames=args.frames,
    init_random_frames=args.warm_up,
    num_workers=args.workers,
    envs_per_worker=8,
    seed=args.seed,
)
parts = {
    "networks": nn.ModuleList([policy, critics, target_policy, target_critics]),
    "actor_optimizer": actor_optimizer,
    "critic_optimizer": critic_optimizer,
    "buffer": buffer,
    "rows": rows,
    "collector": collector,
}
with collector, Checkpoint(args.out, parts, resume=args.resume) as checkpoint:
    before = [(name, key) for name in groups for key in ("observation", "action")]
    outcome = ("observation", "reward", "terminated")
    after = [("next", name, key) for name in groups for key in outcome]
    for number, batch in enumerate(collector, collector.stats()["batches"] + 1):
        buffer.extend(batch.reshape(-1).select(*before, *after))
        left = 1 - collector.frames / (args.frames + args.batch)
        for optimizer in (actor_optimizer, critic_optimizer):
            optimizer.param_groups[0]["lr"] = args.lr * left
        for _ in range(args.updates if collector.frames >= args.warm_up else 0):
            update(buffer.sample())
        collector.update_policy_weights_()
        if number % args.every == 0 or collector.frames >= args.frames:
            means = [mean_returns(name)[name] for name in groups]
            rows.append((collector.frames, *means, *random))
            results = zip(groups, means, random, strict=True)
            shown = ", ".join(f"{n} {m:.1f} (random {r:.1f})" for n, m, r in results)
            frames = f"{collector.frames:>9,} frames"
            checkpoint.print(f"{frames}, return against random actions: {shown}")
            write_table(args.out, [header, *rows])
        checkpoint.batch_done()

save_policy(args.out / "policy.pt", policy, description, **network)
