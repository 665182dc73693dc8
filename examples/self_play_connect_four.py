"""PPO against earlier versions of itself on connect four: turns and action masks.

    pip install "marl-collect[pettingzoo,compare]"
    python examples/self_play_connect_four.py

The policy ``main`` is trained. It plays half of the games against itself, a quarter
against ``rival``, in each batch a version that is sampled from all past ones, and a
quarter against random actions. Without these, each version learns to beat the last one
only, and never learns to block. At the end, the last version plays against all versions
that were evaluated. Writes ``wins.csv``, ``wins.png`` and ``policy.pt`` to ``--out``.
"""

import argparse
import copy
import csv
import random
from functools import partial
from pathlib import Path

import torch

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.envs import PettingZooEnv
from marl_collect.models import make_critic, make_policy, save_policy

parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=300_000)
parser.add_argument("--batch", type=int, default=2_000, help="frames per batch")
parser.add_argument("--minibatch", type=int, default=250, help="frames")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--gamma", type=float, default=0.92)
parser.add_argument("--lmbda", type=float, default=0.95)
parser.add_argument("--entropy", type=float, default=0.01)
parser.add_argument("--keep", type=int, default=4, help="batches between past versions")
parser.add_argument("--evaluate", type=int, default=30, help="batches in between")
parser.add_argument("--games", type=int, default=400, help="per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/self_play_connect_four"))
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(args.seed)
random.seed(args.seed)
torch.set_num_threads(1)  # Small networks gain nothing from more threads.


def assign(seed, agents):
    """Return who plays for whom: two games of four are "main" against itself."""
    game = seed // 2 % 4
    if game < 2:
        return dict.fromkeys(agents, "main")
    return versus(seed, agents, "rival" if game == 2 else "random")


def versus(seed, agents, opponent="rival"):
    """Return the seats of "main" and its opponent in the game of this seed."""
    first = seed % 2
    return {agents[first]: "main", agents[1 - first]: opponent}


group = "player"
make_env = partial(
    PettingZooEnv,
    "connect_four_v3",
    parallel=False,
    group_map={group: ["player_0", "player_1"]},
)
description = describe(make_env)
network = {"num_cells": (256, 256), "activation_class": torch.nn.ReLU}
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
        assign=versus,
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


rows: list[tuple[float, ...]] = [(0, win_rate(None, 0))]
versions = [copy.deepcopy(policy)]
past = [copy.deepcopy(policy.state_dict())]
with MultiSyncCollector(
    make_env,
    policies={"main": policy, "rival": rival, "random": None},
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
        left = 1 - collector.frames / (args.frames + args.batch)
        optimizer.param_groups[0]["lr"] = args.lr * left
        for _ in range(args.epochs):
            for index in torch.randperm(len(flat)).split(args.minibatch):
                loss = loss_of(flat[index])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        if number % args.keep == 0:
            past.append(copy.deepcopy(policy.state_dict()))
        rival.load_state_dict(random.choice(past))
        collector.update_policy_weights_()
        if number % args.evaluate == 0 or collector.frames >= args.frames:
            rows.append((collector.frames, win_rate(None, number)))
            versions.append(copy.deepcopy(policy))
            print(
                f"{collector.frames:>9,} frames, wins against random actions "
                f"{rows[-1][1]:.1%}"
            )

rows = [(*row, win_rate(v, 0)) for row, v in zip(rows, versions, strict=True)]
for row in rows[:-1]:
    print(f"wins against the version of {row[0]:,} frames: {row[2]:.1%}")

with (args.out / "wins.csv").open("w", newline="") as file:
    csv.writer(file).writerows([("frames", "random", "version"), *rows])
save_policy(args.out / "policy.pt", policy, description, **network)

import matplotlib.pyplot as plt  # noqa: E402 - only needed here

frames, *curves = zip(*rows, strict=True)
plt.plot(frames, curves[0], label="against random actions")
plt.plot(frames, curves[1], label="of the last version against this one")
plt.xlabel("frames")
plt.ylabel("share of games won")
plt.legend()
plt.savefig(args.out / "wins.png", dpi=100)
