"""PPO against earlier versions of itself on connect four: turns and action masks.

    pip install "marl-collect[pettingzoo]"
    python examples/self_play_connect_four.py

The policy ``main`` is trained. It plays a quarter of the games against itself, a
quarter against ``rival`` (a past version, sampled anew for each batch), and half
against random actions. Each move is also learned on the mirrored board. At the end,
the last version plays against all evaluated versions. Writes ``progress.csv`` and
``policy.pt`` to ``--out``.
"""

import argparse
import copy
import random
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.models import make_critic, make_policy, save_policy
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=300_000)
parser.add_argument("--batch", type=int, default=4_000, help="frames per batch")
parser.add_argument("--minibatch", type=int, default=250, help="pairs of moves")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--keep", type=int, default=2, help="batches between past versions")
parser.add_argument("--evaluate", type=int, default=25, help="batches in between")
parser.add_argument("--games", type=int, default=400, help="per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/self_play_connect_four"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    from marl_collect.envs import PettingZooEnv
except ImportError as error:
    install = 'pip install "marl-collect[pettingzoo]"'
    raise SystemExit(f"{error}: {install}") from error

torch.manual_seed(args.seed)
random.seed(args.seed)
gamma, lmbda = 0.92, 0.95  # Of the rewards and of the advantages.
torch.set_num_threads(1)  # Small networks are no faster with more threads.


def assign(seed, agents):
    """Return the policy of each seat: half of the games are against random actions."""
    return versus(seed, agents, ("main", "rival", "random", "random")[seed // 2 % 4])


def versus(seed, agents, opponent="rival"):
    """Return the seats of "main" and its opponent in the game of this seed."""
    first = seed % 2
    return {agents[first]: "main", agents[1 - first]: opponent}


group = "player"
seats = {group: ["player_0", "player_1"]}
make_env = partial(PettingZooEnv, "connect_four_v3", parallel=False, group_map=seats)
description = describe(make_env)
network = {"num_cells": (256, 256), "activation_class": torch.nn.ReLU}
policy = make_policy(description, **network)
rival = make_policy(description, **network)
critic = make_critic(description, **network)
parameters = [*policy.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=args.lr, eps=1e-5)


def estimate(data):
    """Write advantages over a player's own moves, and which moves are trained.

    A move's return contains the rewards up to the player's next move. Moves at the end
    of the batch without a next move are left out: waiting players have no value.
    """
    with torch.no_grad():
        critic(data)
    value = data[group, "state_value"].squeeze(-1)
    reward = data["next", group, "reward"].squeeze(-1)
    done = data["next", "done"].expand_as(value)  # Games end only by their rules.
    acts = data[group, "mask"]
    data[group, "advantage"] = torch.zeros_like(value)
    data[group, "trained"] = torch.zeros_like(acts)
    ahead = later = torch.zeros_like(value[:, 0])
    outcome_known = torch.zeros_like(acts[:, 0])
    for t in reversed(range(value.shape[1])):
        outcome_known = outcome_known | done[:, t]
        ahead = reward[:, t] + gamma * torch.where(done[:, t], 0.0, ahead)
        later = gamma * torch.where(done[:, t], 0.0, later)
        advantage = torch.where(outcome_known, ahead + lmbda * later - value[:, t], 0.0)
        data[group, "advantage"][:, t] = advantage
        data[group, "trained"][:, t] = acts[:, t] & outcome_known
        ahead = torch.where(acts[:, t], value[:, t], ahead)
        later = torch.where(acts[:, t], advantage, later)
        outcome_known = outcome_known | acts[:, t]
    data[group, "target"] = data[group, "advantage"] + value


def moves_of(data):
    """Return the trained moves, and the same moves mirrored, ``[S, 2]``.

    Both players share one network, so any move may be in any column.
    """
    moves = data[group][data[group, "trained"]]
    moves = moves[: len(moves) // 2 * 2].reshape(-1, 2)
    mirrored = moves.clone()
    mirrored["observation"] = moves["observation"].flip(-2)  # From left to right.
    mirrored["action_mask"] = moves["action_mask"].flip(-1)
    mirrored["action"] = 6 - moves["action"]
    with torch.no_grad():
        dist = policy.get_dist(TensorDict({group: mirrored}, len(mirrored)))
    mirrored["action_log_prob"] = dist.log_prob(mirrored["action"])
    return TensorDict({group: torch.cat([moves, mirrored])}, 2 * len(moves))


def loss_of(minibatch):
    """Return PPO's loss over moves ``[S, 2]``."""
    dist = policy.get_dist(minibatch)
    log_prob = dist.log_prob(minibatch[group, "action"])
    ratio = (log_prob - minibatch[group, "action_log_prob"]).exp()
    advantage = minibatch[group, "advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value = critic(minibatch)[group, "state_value"].squeeze(-1)
    error = value - minibatch[group, "target"]
    bonus = 0.01 * dist.entropy().mean()
    return 0.5 * error.square().mean() - gain - bonus


def win_rate(opponent, seed):
    """Return the share of games won against ``opponent``; a draw counts half."""
    evaluation = evaluate(
        None,
        make_env,
        policies={"main": policy, "rival": opponent},
        assign=versus,
        episodes=args.games,
        seeds=seed,
        # With the best moves, two versions always play the same game.
        deterministic=opponent is None,
        num_workers=args.workers,
        envs_per_worker=4,
    )
    main_returns = [
        e.returns[group][e.policy_ids[group].index(0)] for e in evaluation.episodes
    ]
    return 0.5 + 0.5 * sum(main_returns) / len(main_returns)  # The policy 0 is "main".


rows: list[tuple[float, ...]] = [(0, win_rate(None, 0))]
versions = [copy.deepcopy(policy.state_dict())]
past = [copy.deepcopy(policy.state_dict())]
collector = MultiSyncCollector(
    make_env,
    policies={"main": policy, "rival": rival, "random": None},
    assign=assign,
    frames_per_batch=args.batch,
    total_frames=args.frames,
    num_workers=args.workers,
    envs_per_worker=8,
    seed=args.seed,
)
parts = {
    "networks": torch.nn.ModuleList([policy, rival, critic]),
    "optimizer": optimizer,
    "rows": rows,
    "versions": versions,
    "past": past,
    "collector": collector,
}
with collector, Checkpoint(args.out, parts, resume=args.resume) as checkpoint:
    for number, batch in enumerate(collector, collector.stats()["batches"] + 1):
        data = collector.policy.batch_of(batch, "main").clone()
        estimate(data)
        moves = moves_of(data)
        left = 1 - collector.frames / (args.frames + args.batch)
        optimizer.param_groups[0]["lr"] = args.lr * left
        for _ in range(args.epochs):
            for index in torch.randperm(len(moves)).split(args.minibatch):
                optimizer.zero_grad()
                loss_of(moves[index]).backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        if number % args.keep == 0:
            past.append(copy.deepcopy(policy.state_dict()))
        rival.load_state_dict(random.choice(past))
        collector.update_policy_weights_()
        if number % args.evaluate == 0 or collector.frames >= args.frames:
            rows.append((collector.frames, win_rate(None, number)))
            versions.append(copy.deepcopy(policy.state_dict()))
            text = "{:>9,} frames, {:.1%} won against random actions"
            checkpoint.print(text.format(*rows[-1]))
            write_table(args.out, [("frames", "random"), *rows])
        checkpoint.batch_done()

for index, version in enumerate(versions):
    rival.load_state_dict(version)
    rows[index] = (*rows[index], win_rate(rival, 0))
for row in rows[:-1]:
    print(f"wins against the version of {row[0]:,} frames: {row[2]:.1%}")

write_table(args.out, [("frames", "random", "version"), *rows])
save_policy(args.out / "policy.pt", policy, description, **network)
