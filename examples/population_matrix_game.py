"""A population of independent PPO learners on a matrix game of MeltingPot.

    pip install "marl-collect[meltingpot]"
    python examples/population_matrix_game.py --size 3

In each episode two members of the population, chosen by the episode's seed, meet in the
iterated prisoner's dilemma. Each member learns from its own frames only. Writes
``progress.csv`` and a file per member to ``--out``.
"""

import argparse
import random
from functools import partial
from pathlib import Path

import torch

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.models import make_critic, make_policy, save_policy
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--substrate", default="prisoners_dilemma_in_the_matrix__repeated")
parser.add_argument("--size", type=int, default=3, help="of the population")
parser.add_argument("--frames", type=int, default=400_000)
parser.add_argument("--batch", type=int, default=4_000, help="frames per batch")
parser.add_argument("--minibatch", type=int, default=500, help="frames")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--limit", type=int, default=500, help="frames per episode")
parser.add_argument("--every", type=int, default=10, help="batches per line")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--envs", type=int, default=4, help="per worker")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/population_matrix_game"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    import meltingpot  # noqa: F401 - MeltingpotEnv imports it when it is built.

    from marl_collect.envs import MeltingpotEnv
except ImportError as error:
    install = 'pip install "marl-collect[meltingpot]"'
    raise SystemExit(f"{error}: {install}") from error

torch.manual_seed(args.seed)
gamma, lmbda, entropy = 0.99, 0.95, 0.01  # Of rewards, advantages, and the bonus.


def assign(seed, agents):
    """Return which members of the population play the episode of this seed."""
    members = random.Random(seed).sample(range(args.size), len(agents))
    return {agent: f"m{m}" for agent, m in zip(agents, members, strict=True)}


# Scenarios of matrix games also provide these observations.
observations = ["RGB", "INVENTORY", "READY_TO_SHOOT"]
make_env = partial(MeltingpotEnv, args.substrate, observations=observations)
description = describe(make_env)
(group,) = description.groups
# MeltingPot renders each cell of its maps with 8 x 8 pixels.
conv = {"num_cells": (16, 32), "kernel_sizes": (8, 3), "strides": (8, 1)}
network = {"num_cells": (64,), "conv": conv}
names = [f"m{i}" for i in range(args.size)]
policies = {name: make_policy(description, **network) for name in names}
critics = {name: make_critic(description, **network) for name in names}
parameters = {n: [*policies[n].parameters(), *critics[n].parameters()] for n in names}
optimizers = {n: torch.optim.Adam(parameters[n], lr=args.lr, eps=1e-5) for n in names}


def estimate(data, critic):
    """Write advantages and value targets, ``[B, T, n, 1]``; all players always act."""
    with torch.no_grad():  # In parts, because activations are large.
        for steps in (data, data["next"]):
            chunks = steps.reshape(-1).split(500)
            values = [critic(chunk)[group, "state_value"] for chunk in chunks]
            shape = (*steps.shape, *values[0].shape[1:])
            steps[group, "state_value"] = torch.cat(values).reshape(shape)
    next_data = data["next", group]
    value = data[group, "state_value"]
    next_value = next_data["state_value"] * ~next_data["terminated"]
    error = next_data["reward"] + gamma * next_value - value
    advantage = torch.zeros_like(error)
    last = torch.zeros_like(error[:, 0])
    for t in reversed(range(error.shape[1])):
        last = error[:, t] + gamma * lmbda * last * ~next_data["done"][:, t]
        advantage[:, t] = last
    data[group, "target"] = advantage + value
    data[group, "advantage"] = advantage


def loss_of(minibatch, name):
    """Return PPO's loss over the rows in which a member acts."""
    rows = minibatch[group, "mask"]
    dist = policies[name].get_dist(minibatch)
    log_prob = dist.log_prob(minibatch[group, "action"])[rows]
    ratio = (log_prob - minibatch[group, "action_log_prob"][rows]).exp()
    advantage = minibatch[group, "advantage"].squeeze(-1)[rows]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value = critics[name](minibatch)[group, "state_value"][rows]
    error = value - minibatch[group, "target"][rows]
    bonus = entropy * dist.entropy()[rows].mean()
    return 0.5 * error.square().mean() - gain - bonus


def train(batch, name):
    """Train a member on its own frames; return its mean reward per frame."""
    data = batch.clone(recurse=False)  # Shares the images.
    acting = data[group, "mask"]
    if int(acting.sum()) < 2:
        return float("nan")  # It did not play.
    mean = float(data["next", group, "reward"].squeeze(-1)[acting].mean())
    estimate(data, critics[name])
    flat = data.exclude("next").reshape(-1)
    flat = flat[flat[group, "mask"].any(-1)]
    for _ in range(args.epochs):
        for index in torch.randperm(len(flat)).split(args.minibatch):
            if len(index) < 2:
                continue
            loss = loss_of(flat[index], name)
            optimizers[name].zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters[name], 0.5)
            optimizers[name].step()
    return mean


random_evaluation = evaluate(None, make_env, episodes=8, seeds=1, num_workers=1)
random_mean = sum(random_evaluation.agent_returns) / sum(random_evaluation.lengths)
print(f"reward per frame of random actions: {random_mean:.4f}")
rows: list[tuple[float, ...]] = []
window: list[list[float]] = []
parts = {
    "policies": torch.nn.ModuleDict(policies),
    "critics": torch.nn.ModuleDict(critics),
    "rows": rows,
    "window": window,
} | {f"optimizer of {name}": optimizers[name] for name in names}
parts["collector"] = collector = MultiSyncCollector(
    make_env,
    policies=policies,
    assign=assign,
    frames_per_batch=args.batch,
    total_frames=args.frames,
    num_workers=args.workers,
    envs_per_worker=args.envs,
    max_frames_per_traj=args.limit,
    seed=args.seed,
)
with collector, Checkpoint(args.out, parts, resume=args.resume) as checkpoint:
    for number, batch in enumerate(collector, collector.stats()["batches"] + 1):
        window.append([train(collector.policy.batch_of(batch, n), n) for n in names])
        collector.update_policy_weights_()
        if number % args.every == 0 or collector.frames >= args.frames:
            means = torch.tensor(window).nanmean(0).tolist()
            window.clear()
            rows.append((collector.frames, *means, random_mean))
            pairs = zip(names, means, strict=True)
            shown = "  ".join(f"{name} {mean:6.4f}" for name, mean in pairs)
            frames = f"{collector.frames:>9,} frames"
            checkpoint.print(f"{frames}, reward per frame: {shown}")
            write_table(args.out, [("frames", *names, "random"), *rows])
        checkpoint.batch_done()

for name, policy in policies.items():
    save_policy(args.out / f"{name}.pt", policy, description, **network)
