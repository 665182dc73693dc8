"""Offline behaviour cloning: a network imitates a teacher's dataset on disk.

    pip install "marl-collect[mpe,datasets]"
    python examples/behaviour_cloning.py                        # a scripted teacher
    python examples/behaviour_cloning.py --teacher policy.pt    # of another example

The teacher of simple_spread sends agent i to landmark i. Writes the dataset, the losses
and returns (``progress.csv``) and ``policy.pt`` to ``--out``.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDictBase

from marl_collect import describe, evaluate
from marl_collect.models import load_policy, make_policy, save_policy
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--teacher", default=None, help="a policy file")
parser.add_argument("--episodes", type=int, default=1_000, help="in the dataset")
parser.add_argument("--steps", type=int, default=3_000, help="of the optimiser")
parser.add_argument("--minibatch", type=int, default=512, help="frames")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--every", type=int, default=500, help="steps per evaluation")
parser.add_argument("--games", type=int, default=100, help="per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/behaviour_cloning"))
args = parser.parse_args()

try:
    from marl_collect import record
    from marl_collect.envs import PettingZooEnv
except ImportError as error:
    install = 'pip install "marl-collect[mpe,datasets]"'
    raise SystemExit(f"{error}: {install}") from error

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # Small networks are no faster with more threads.

make_env = partial(PettingZooEnv, "simple_spread_v3")
description = describe(make_env)
(group,) = description.groups


def walk_to_own_landmark(data: TensorDictBase) -> TensorDictBase:
    """Write the action that brings agent i nearer to landmark i.

    An observation begins with the agent's velocity and position, followed by the
    relative positions of the landmarks. Actions: none, left, right, down, up.
    """
    observation = data[group, "observation"]
    agents = torch.arange(observation.shape[-2])
    displacement = torch.stack(
        [observation[..., agents, 4 + 2 * agents + k] for k in (0, 1)], -1
    )
    displacement = displacement - 0.5 * observation[..., :2]  # It already has momentum.
    x, y = displacement.unbind(-1)
    sideways, upwards = 1 + (x > 0).long(), 3 + (y > 0).long()
    action = torch.where(x.abs() > y.abs(), sideways, upwards)
    data[group, "action"] = torch.where(displacement.norm(dim=-1) < 0.05, 0, action)
    return data


teacher = walk_to_own_landmark
if args.teacher is not None:
    teacher = load_policy(args.teacher, description)
folder = args.out / "data"
if folder.exists():  # It may be from another teacher.
    raise SystemExit(f"{folder} exists: delete it, or choose another --out.")
dataset = record(
    folder,
    make_env,
    teacher,
    episodes=args.episodes,
    num_workers=args.workers,
    envs_per_worker=4,
    seed=args.seed,
)
print(dataset)

network = {"num_cells": (128, 128), "agent_ids": True}
student = make_policy(description, **network)
optimizer = torch.optim.Adam(student.parameters(), lr=args.lr)


def mean_return(policy):
    """Return the mean return of the team."""
    return evaluate(
        policy, make_env, episodes=args.games, num_workers=1, envs_per_worker=4, seeds=1
    ).mean_team_return


print(f"the teacher's return: {mean_return(teacher):.1f}")
rows = []
for step in range(1, args.steps + 1):
    frames = dataset.transitions.sample(args.minibatch)
    acts = frames[group, "mask"]
    log_prob = student.get_dist(frames).log_prob(frames[group, "action"])
    loss = -log_prob[acts].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % args.every == 0 or step == args.steps:
        rows.append((step, loss.item(), mean_return(student)))
        write_table(args.out, [("step", "loss", "return"), *rows])
        print(f"step {step:>6,}, loss {loss.item():.3f}, return {rows[-1][2]:.1f}")

save_policy(args.out / "policy.pt", student, description, **network)
