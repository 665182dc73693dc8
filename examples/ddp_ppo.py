"""IPPO and MAPPO on multiwalker, in plain PyTorch, by one process or several with DDP.

    pip install "marl-collect[pettingzoo]"
    torchrun --nproc-per-node 2 examples/ddp_ppo.py  # ranks that learn together: DDP
    python examples/ddp_ppo.py                       # one process: IPPO
    python examples/ddp_ppo.py --critic central      # MAPPO
    python examples/ddp_ppo.py --actors 2            # on a local Ray: extra "ray"

Each rank collects in workers of its own, and torch's DDP averages the gradients. All
ranks together collect what one process with all workers would.
Writes ``progress.csv`` and ``policy.pt`` to ``--out``. For a video:
``marl-collect render multiwalker_v9 --policy FOLDER/policy.pt``.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from marl_collect import MultiSyncCollector, RayCollector, describe, evaluate
from marl_collect.models import make_critic, make_policy, save_policy
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--critic", choices=["own", "central"], default="own")
parser.add_argument("--frames", type=int, default=500_000, help="of all ranks")
parser.add_argument("--batch", type=int, default=4_000, help="frames of all ranks")
parser.add_argument("--minibatch", type=int, default=1_000, help="of all ranks")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--workers", type=int, default=2, help="of each actor with Ray")
parser.add_argument("--actors", type=int, default=0, help="of Ray; 0: no Ray")
parser.add_argument("--address", default=None, help="of a running cluster of Ray")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/ddp_ppo"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    from marl_collect.envs import PettingZooEnv
except ImportError as error:
    raise SystemExit(f'{error}: pip install "marl-collect[pettingzoo]"') from error

# torchrun sets both; nccl is the backend if each rank has a GPU.
rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(args.seed)
gamma, lmbda = 0.99, 0.95  # Of the rewards and of the advantages.
torch.set_num_threads(1)  # Small networks are no faster with more threads.

make_env = partial(PettingZooEnv, "multiwalker_v9", shared_reward=False)
description = describe(make_env)
(group,) = description.groups  # All walkers are in one group.
network = {"num_cells": (128, 128), "agent_ids": True}
policy = make_policy(description, **network)
critic = make_critic(description, centralised=args.critic == "central", **network)


def estimate(data):
    """Write advantages and targets ``[B, T, n, 1]``; episodes end for all walkers."""
    with torch.no_grad():
        critic(data)
        critic(data["next"])
    next_data = data["next", group]
    value = data[group, "state_value"]
    # A time limit is not a terminal state: the value after it still counts.
    next_value = next_data["state_value"] * ~next_data["terminated"]
    error = 0.1 * next_data["reward"] + gamma * next_value - value
    advantage = torch.zeros_like(error)
    last = torch.zeros_like(error[:, 0])
    for t in reversed(range(error.shape[1])):
        last = error[:, t] + gamma * lmbda * last * ~next_data["done"][:, t]
        advantage[:, t] = last
    data[group, "target"] = advantage + value
    data[group, "advantage"] = (advantage - advantage.mean()) / advantage.std()


class Loss(torch.nn.Module):
    """The clipped policy loss plus the critic's squared error."""

    def __init__(self):
        super().__init__()
        self.networks = torch.nn.ModuleList([policy, critic])

    def forward(self, minibatch):
        """Return the loss of some frames."""
        log_prob = policy.get_dist(minibatch).log_prob(minibatch[group, "action"])
        ratio = (log_prob - minibatch[group, "action_log_prob"]).exp()
        advantage = minibatch[group, "advantage"].squeeze(-1)
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.min(ratio * advantage, clipped * advantage).mean()
        value = critic(minibatch)[group, "state_value"]
        return 0.5 * (value - minibatch[group, "target"]).square().mean() - gain


loss_of = Loss() if ranks == 1 else DistributedDataParallel(Loss())
optimizer = torch.optim.Adam(loss_of.parameters(), lr=args.lr, eps=1e-5)
options: dict[str, Any] = {
    "frames_per_batch": args.batch // ranks,
    "total_frames": args.frames // ranks,  # So all ranks have as many batches.
    "envs_per_worker": 8,
    "seed": args.seed,  # One for all: ranks have different environments.
}
if args.actors:  # Without an address, the collector starts a Ray of its own.
    address = {"address": args.address} if args.address else None
    options |= {"num_collectors": args.actors, "ray_init_config": address, "sync": True}
    options["num_workers_per_collector"] = args.workers
else:
    options["num_workers"] = args.workers
random = None if rank else evaluate(None, make_env, episodes=32, seeds=1, num_workers=1)
rows: list[tuple[float, ...]] = []
parts = {"policy": policy, "critic": critic, "optimizer": optimizer, "rows": rows}
kind: Any = RayCollector if args.actors else MultiSyncCollector
parts["collector"] = collector = kind(make_env, policy, **options)
with collector, Checkpoint(args.out, parts, resume=args.resume) as checkpoint:
    for batch in collector:
        data = batch.clone()
        estimate(data)
        flat = data.exclude("next").reshape(-1)
        left = 1 - ranks * collector.frames / (args.frames + args.batch)
        optimizer.param_groups[0]["lr"] = args.lr * left
        for _ in range(args.epochs):
            for index in torch.randperm(len(flat)).split(args.minibatch // ranks):
                optimizer.zero_grad()
                loss_of(flat[index]).backward()  # DDP averages over the ranks.
                torch.nn.utils.clip_grad_norm_(loss_of.parameters(), 0.5)
                optimizer.step()
        collector.update_policy_weights_()
        stats = collector.stats(all_ranks=ranks > 1)
        mean = stats.get("mean_agent_return", float("nan"))
        if random is not None:  # On rank 0.
            rows.append((stats["frames"], mean, random.mean_agent_return))
            frames = f"{stats['frames']:>9,} frames"
            checkpoint.print(f"{frames}, return per walker {mean:8.2f}")
            write_table(args.out, [("frames", "return_per_agent", "random"), *rows])
        checkpoint.batch_done()

if ranks > 1:
    dist.destroy_process_group()
if rank == 0:
    save_policy(args.out / "policy.pt", policy, description, **network)
