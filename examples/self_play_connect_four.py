"""PPO against earlier versions of itself on connect four: turns and action masks.

    pip install "marl-collect[pettingzoo,compare]"
    python examples/self_play_connect_four.py

The policy ``main`` is trained. It plays half of the games as the first player, against
``rival``, which is replaced by the newest ``main`` every few batches. Writes
``wins.csv``, ``wins.png`` and ``policy.pt`` to ``--out``.
"""

import argparse
import csv
from functools import partial
from pathlib import Path

import torch

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.envs import PettingZooEnv
from marl_collect.models import make_critic, make_policy
from marl_collect.training import save_policy

parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=400_000)
parser.add_argument("--batch", type=int, default=4_000, help="frames per batch")
parser.add_argument("--minibatch", type=int, default=500, help="frames")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--lmbda", type=float, default=0.95)
parser.add_argument("--entropy", type=float, default=0.02)
parser.add_argument("--replace", type=int, default=5, help="batches of a rival")
parser.add_argument("--evaluate", type=int, default=10, help="batches in between")
parser.add_argument("--games", type=int, default=200, help="per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/self_play_connect_four"))
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # Small networks gain nothing from more threads.


def assign(seed, agents):
    """Return who plays for whom in the game of this seed."""
    first = seed % 2
    return {agents[first]: "main", agents[1 - first]: "rival"}


group = "player"
make_env = partial(
    PettingZooEnv,
    "connect_four_v3",
    parallel=False,
    group_map={group: ["player_0", "player_1"]},
)
description = describe(make_env)
network = {"num_cells": (128, 128)}
policy = make_policy(description, **network)
rival = make_policy(description, **network)
critic = make_critic(description, **network)
parameters = [*policy.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=args.lr, eps=1e-5)


def estimate(data):
    """Write advantages over a player's own moves, and which moves are trained.

    A move's return contains the rewards up to the player's next move. The critic is not
    trained for a player that waits, so moves at the end of the batch without a next
    move are left out.
    """
    with torch.no_grad():
        critic(data)
    value = data[group, "state_value"].squeeze(-1)
    reward = data["next", group, "reward"].squeeze(-1)
    ended = data["next", "done"].expand_as(value)  # Games end by their rules only.
    acts = data[group, "mask"]
    data[group, "advantage"] = torch.zeros_like(value)
    data[group, "trained"] = torch.zeros_like(acts)
    ahead = later = torch.zeros_like(value[:, 0])
    known = torch.zeros_like(acts[:, 0])
    for t in reversed(range(value.shape[1])):
        known = known | ended[:, t]
        ahead = reward[:, t] + args.gamma * torch.where(ended[:, t], 0.0, ahead)
        later = args.gamma * torch.where(ended[:, t], 0.0, later)
        advantage = torch.where(known, ahead + args.lmbda * later - value[:, t], 0.0)
        data[group, "advantage"][:, t] = advantage
        data[group, "trained"][:, t] = acts[:, t] & known
        ahead = torch.where(acts[:, t], value[:, t], ahead)
        later = torch.where(acts[:, t], advantage, later)
        known = known | acts[:, t]
    data[group, "target"] = data[group, "advantage"] + value


def loss_of(data):
    """Return PPO's loss over the moves of ``main``."""
    rows = data[group, "trained"]
    dist = policy.get_dist(data)
    log_prob = dist.log_prob(data[group, "action"])[rows]
    ratio = (log_prob - data[group, "action_log_prob"][rows]).exp()
    advantage = data[group, "advantage"][rows]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value = critic(data)[group, "state_value"].squeeze(-1)[rows]
    error = value - data[group, "target"][rows]
    bonus = args.entropy * dist.entropy()[rows].mean()
    return 0.5 * error.square().mean() - gain - bonus


def win_rate(opponent, seed):
    """Return the share of games won against ``opponent``; a draw counts half."""
    found = evaluate(
        None,
        make_env,
        policies={"main": policy, "rival": opponent},
        assign=assign,
        episodes=args.games,
        seeds=seed,
        deterministic=False,
        num_workers=args.workers,
        envs_per_worker=4,
    )
    won = 0.0
    for game in found.episodes:
        ids = game.policy_ids[group]
        own = game.returns[group][list(ids).index(0)]  # 0 is "main".
        won += 0.5 + 0.5 * own
    return won / len(found.episodes)


rows = []
first = make_policy(description, **network)
first.load_state_dict(policy.state_dict())
rival.load_state_dict(policy.state_dict())
with MultiSyncCollector(
    make_env,
    policies={"main": policy, "rival": rival},
    assign=assign,
    frames_per_batch=args.batch,
    total_frames=args.frames,
    num_workers=args.workers,
    envs_per_worker=8,
    seed=args.seed,
) as collector:
    for number, batch in enumerate(collector, 1):
        data = collector.policy.batch_of(batch, "main").clone()
        estimate(data)
        flat = data.exclude("next").reshape(-1)
        for _ in range(args.epochs):
            for index in torch.randperm(len(flat)).split(args.minibatch):
                loss = loss_of(flat[index])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        if number % args.replace == 0:
            rival.load_state_dict(policy.state_dict())
        collector.update_policy_weights_()
        if number % args.evaluate == 0 or collector.frames >= args.frames:
            rates = win_rate(None, number), win_rate(first, number)
            rows.append((collector.frames, *rates))
            print(
                f"{collector.frames:>9,} frames, wins against random actions "
                f"{rates[0]:.1%}, against the first version {rates[1]:.1%}"
            )

with (args.out / "wins.csv").open("w", newline="") as file:
    csv.writer(file).writerows([("frames", "random", "first_version"), *rows])
save_policy(args.out / "policy.pt", policy, description, **network)

import matplotlib.pyplot as plt  # noqa: E402 - only needed here

frames, *curves = zip(*rows, strict=True)
for label, curve in zip(("random actions", "first version"), curves, strict=True):
    plt.plot(frames, curve, label=label)
plt.xlabel("frames")
plt.ylabel("share of games won")
plt.legend()
plt.savefig(args.out / "wins.png", dpi=100)
