"""MAPPO with convolutions and a GRU, from the pixels of a MeltingPot substrate.

    pip install "marl-collect[meltingpot]"
    python examples/mappo_meltingpot.py --substrate coins

The critic sees the images of all players. Both networks are trained on sequences that
begin with the stored states. Players share one network, which gets their identities.
Evaluations score a visitor: one player acts with the policy, the others at random.
Writes ``progress.csv`` and ``policy.pt`` to ``--out``.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.models import (
    make_critic,
    make_policy,
    save_policy,
    set_recurrent_mode,
)
from marl_collect.training.allocator import keep_freed_memory
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--substrate", default="coins")
parser.add_argument("--observations", nargs="*", default=["RGB"], help="all if empty")
parser.add_argument("--frames", type=int, default=48_000)
parser.add_argument("--batch", type=int, default=1_600, help="frames per batch")
parser.add_argument("--sequence", type=int, default=25, help="frames per sequence")
parser.add_argument("--minibatch", type=int, default=16, help="sequences")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=7e-4)
parser.add_argument("--limit", type=int, default=500, help="frames per episode")
parser.add_argument("--every", type=int, default=10, help="batches per evaluation")
parser.add_argument("--games", type=int, default=16, help="per evaluation")
parser.add_argument("--conv-dtype", choices=["float32", "bfloat16"], default="float32")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--envs", type=int, default=8, help="per worker")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/mappo_meltingpot"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    import meltingpot  # noqa: F401 - MeltingpotEnv imports it when it is built.

    from marl_collect.envs import MeltingpotEnv
except ImportError as error:
    install = 'pip install "marl-collect[meltingpot]"'
    raise SystemExit(f"{error}: {install}") from error

if (size := -(-args.batch // (args.workers * args.envs))) % min(args.sequence, size):
    parser.error(f"--sequence must divide {size}, an environment's frames per batch")
torch.manual_seed(args.seed)
gamma, lmbda, entropy = 0.99, 0.95, 0.01  # Of rewards, advantages, and the bonus.
torch.set_num_threads(1)  # The workers need the other processors.
keep_freed_memory()  # Else each minibatch waits for fresh pages.

names = args.observations or None
make_env = partial(MeltingpotEnv, args.substrate, observations=names)
description = describe(make_env)
groups = list(description.groups)
dtype = {"dtype": getattr(torch, args.conv_dtype)}
network = {
    "agent_ids": True,
    "num_cells": (64,),
    "recurrent": "gru",
    "hidden_size": 64,
    # Sprites are 8 pixels wide, so the first layer sees one at a time.
    "conv": {"num_cells": (16, 32), "kernel_sizes": (8, 3), "strides": (8, 1)} | dtype,
}
policy = make_policy(description, **network)
critic = make_critic(description, centralised=True, **network)
parameters = [*policy.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=args.lr, eps=1e-5)
state = "critic_recurrent_state"
workers = {"num_workers": args.workers, "envs_per_worker": args.envs}


def actor(group):
    """Return the policy of a group: the whole policy if there is only one group."""
    return policy if len(groups) == 1 else policy[group]


def write_values(data, parts):
    """Write the critic's outputs, in parts because activations are large."""
    outputs = torch.cat([critic(p).select(*critic.out_keys) for p in parts])
    data.update(outputs.reshape(data.shape))


def estimate(data, last_states):
    """Write advantages, targets and the critic's states; return the last of these."""
    for group in groups:
        size = (*data.shape, description.groups[group].n_agents, 1, 64)
        data[group, state] = torch.zeros(size)
        if last_states:
            data[group, state][:, 0] = last_states[group]
    with torch.no_grad(), set_recurrent_mode():
        write_values(data, [data[i : i + 1] for i in range(len(data))])
    for group in groups:
        data[group, state][:, 1:] = data["next", group, state][:, :-1]
    last_states = {g: data["next", g, state][:, -1].clone() for g in groups}
    with torch.no_grad():  # Single steps, each from the state before it.
        write_values(data["next"], data["next"].reshape(-1).split(100))
    for group in groups:
        after = data["next", group]
        value = data[group, "state_value"]
        follows = after["state_value"] * ~after["terminated"]
        error = after["reward"] + gamma * follows - value
        advantage, last = torch.zeros_like(error), torch.zeros_like(error[:, 0])
        for t in reversed(range(error.shape[1])):
            last = error[:, t] + gamma * lmbda * last * ~after["done"][:, t]
            advantage[:, t] = last
        data[group, "target"] = advantage + value
        deviation = advantage.std() + 1e-6
        data[group, "advantage"] = (advantage - advantage.mean()) / deviation
    return last_states


def loss_of(minibatch):
    """Return PPO's loss, summed over the groups, for sequences ``[S, T]``."""
    with set_recurrent_mode():
        critic(minibatch)
        loss = torch.zeros(())
        for group in groups:
            dist = actor(group).get_dist(minibatch)
            log_prob = dist.log_prob(minibatch[group, "action"])
            ratio = (log_prob - minibatch[group, "action_log_prob"]).exp()
            advantage = minibatch[group, "advantage"].squeeze(-1)
            clipped = ratio.clamp(0.8, 1.2) * advantage
            gain = torch.min(ratio * advantage, clipped).mean()
            error = minibatch[group, "state_value"] - minibatch[group, "target"]
            bonus = entropy * dist.entropy().mean()
            loss = loss - gain - bonus + 0.5 * error.square().mean()
    return loss


def assign(seed, agents):
    """Return who is the visitor in the episode of this seed."""
    visitor = agents[seed % len(agents)]
    return {agent: "main" if agent == visitor else "random" for agent in agents}


def visit(visitor):
    """Return the mean return of a visitor, and its standard error."""
    evaluation = evaluate(
        None,
        make_env,
        policies={"main": visitor, "random": None},
        assign=assign,
        episodes=args.games,
        seeds=args.seed,
        max_frames_per_traj=args.limit,
        deterministic=False,
        **workers,
    )
    focal_returns = [
        float(game.returns[group][list(ids).index(0)])  # 0 is "main".
        for game in evaluation.episodes
        for group, ids in game.policy_ids.items()
        if 0 in ids
    ]
    error = statistics.stdev(focal_returns) / len(focal_returns) ** 0.5
    return statistics.mean(focal_returns), error


HEADER = "frames", "visitor", "error", "random", "error_of_random"
rows: list[tuple[float, ...]] = []
states: dict[str, torch.Tensor] = {}
parts = {"policy": policy, "critic": critic, "optimizer": optimizer}
parts |= {"rows": rows, "states": states}
random = visit(None)
print("random actions: return {:.2f}, standard error {:.2f}".format(*random))
parts["collector"] = collector = MultiSyncCollector(
    make_env,
    policy,
    frames_per_batch=args.batch,
    total_frames=args.frames,
    **workers,
    max_frames_per_traj=args.limit,
    seed=args.seed,
)
with collector, Checkpoint(args.out, parts, resume=args.resume) as checkpoint:
    for number, batch in enumerate(collector, collector.stats()["batches"] + 1):
        data = batch.clone(recurse=False)  # Shares the images.
        states.update(estimate(data, states))
        data = data.exclude("next").reshape(-1, min(args.sequence, data.shape[1]))
        for _ in range(args.epochs):
            for index in torch.randperm(len(data)).split(args.minibatch):
                loss = loss_of(data[index])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        collector.update_policy_weights_()
        if number % args.every == 0 or collector.frames >= args.frames:
            rows.append((collector.frames, *visit(policy), *random))
            text = "{:,} frames, return {:.2f}, standard error {:.2f}"
            checkpoint.print(text.format(*rows[-1]))
            write_table(args.out, [HEADER, *rows])
        checkpoint.batch_done()

save_policy(args.out / "policy.pt", policy, description, **network)
