"""IPPO on multiwalker by several processes that learn together: torch's DDP.

    pip install "marl-collect[pettingzoo]"
    torchrun --nproc-per-node 2 examples/ddp_ppo.py

Each rank collects in worker processes of its own, and DDP averages the gradients. All
ranks together collect what one process with all workers would collect. Ctrl-C saves,
and ``--resume`` continues, both with the same number of ranks.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.envs import PettingZooEnv
from marl_collect.models import make_critic, make_policy
from marl_collect.training.checkpoint import Checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=500_000, help="of all ranks")
parser.add_argument("--batch", type=int, default=4_000, help="frames of all ranks")
parser.add_argument("--minibatches", type=int, default=4)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--lmbda", type=float, default=0.95)
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument("--workers", type=int, default=1, help="of each rank")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/ddp_ppo"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    from pettingzoo.sisl import multiwalker_v9  # noqa: F401 - before ranks connect
except ImportError as error:
    install = 'pip install "marl-collect[pettingzoo]"'
    raise SystemExit(f"{error}: {install}") from error

dist.init_process_group("gloo")  # "nccl" if each rank has a GPU.
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
torch.set_num_threads(1)

make_env = partial(PettingZooEnv, "multiwalker_v9", shared_reward=False)
description = describe(make_env)
(group,) = description.groups  # All walkers are in one group.
policy = make_policy(description, num_cells=(128, 128), agent_ids=True)
critic = make_critic(description, num_cells=(128, 128), agent_ids=True)


class Loss(torch.nn.Module):
    """The clipped policy loss plus the critic's squared error."""

    def __init__(self):
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(self, data):
        """Return the loss of some frames."""
        log_prob = self.policy.get_dist(data).log_prob(data[group, "action"])
        ratio = (log_prob - data[group, "action_log_prob"]).exp()
        advantage = data[group, "advantage"].squeeze(-1)
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        gain = torch.min(ratio * advantage, clipped * advantage).mean()
        value = self.critic(data)[group, "state_value"]
        return 0.5 * (value - data[group, "target"]).square().mean() - gain


loss = DistributedDataParallel(Loss())  # All ranks begin with the weights of rank 0.
optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5)


def estimate(data):
    """Write advantages and value targets, ``[B, T, n, 1]`` each.

    All walkers act in every frame, and the episode ends for all of them together.
    """
    with torch.no_grad():
        critic(data)
        critic(data["next"])
    after = data["next", group]
    goes_on = ~after["terminated"]  # After a time limit the value still counts.
    target = 0.1 * after["reward"] + args.gamma * after["state_value"] * goes_on
    error = target - data[group, "state_value"]
    advantage = torch.zeros_like(error)
    last = torch.zeros_like(error[:, 0])
    for t in reversed(range(error.shape[1])):
        last = error[:, t] + args.gamma * args.lmbda * last * ~after["done"][:, t]
        advantage[:, t] = last
    data[group, "target"] = advantage + data[group, "state_value"]
    data[group, "advantage"] = (advantage - advantage.mean()) / advantage.std()


if rank == 0:
    random = evaluate(None, make_env, episodes=16, seeds=1, num_workers=1)
    print(f"random actions: {random.mean_agent_return:.1f} per walker")
parts = {"loss": loss.module, "optimizer": optimizer}
with (
    MultiSyncCollector(
        make_env,
        policy,
        num_workers=args.workers,
        envs_per_worker=4,
        frames_per_batch=args.batch // ranks,
        total_frames=args.frames // ranks,  # So all ranks have as many batches.
        seed=args.seed,  # One for all: ranks have different environments.
    ) as collector,
    Checkpoint(
        args.out, parts | {"collector": collector}, resume=args.resume
    ) as checkpoint,
):
    for batch in collector:
        data = batch.clone()
        estimate(data)
        flat = data.exclude("next").reshape(-1)
        for _ in range(args.epochs):
            for index in torch.randperm(len(flat)).chunk(args.minibatches):
                optimizer.zero_grad()
                loss(flat[index]).backward()  # DDP averages over the ranks.
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        collector.update_policy_weights_()
        stats = collector.stats(all_ranks=True)
        if rank == 0:
            mean = stats.get("mean_agent_return", float("nan"))
            print(f"{stats['frames']:>9,} frames, return per walker {mean:8.2f}")
        checkpoint.batch_done()
dist.destroy_process_group()
