"""A curriculum of foraging levels against uniform sampling, with MAPPO.

    pip install "marl-collect[lbforaging]"
    python examples/lbforaging_curriculum.py

In episodes of level k, a share k/4 has food that only both players together can load.
``curriculum`` raises the level when the players do well, ``uniform`` draws it for each
episode, and ``hardest`` plays only the last one. All are evaluated on the same episodes
of the hardest level, and at the end on those of every level. Actions are sampled,
because the best moves of equal players often block each other.

The curriculum learns the hardest level a little sooner than uniform sampling does, and
both end equally well; see docs/examples.md.

Writes ``progress.csv`` and ``policy.pt`` of each run to ``--out``, and prints means
with 95 % intervals over the seeds.
"""

import argparse
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch

from marl_collect import Collector, describe, evaluate
from marl_collect.evaluation.intervals import bootstrap
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.options import PPOOptions, Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner
from marl_collect.training.run_folder import write_table

KINDS, HARDEST = ("curriculum", "uniform", "hardest"), 4
parser = argparse.ArgumentParser()
parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
parser.add_argument("--task", default="Foraging-6x6-2p-1f-v3")
parser.add_argument("--frames", type=int, default=80_000, help="per run")
parser.add_argument("--batch", type=int, default=2_000, help="frames per batch")
parser.add_argument("--good", type=float, default=0.6, help="return of the next level")
parser.add_argument("--every", type=int, default=5, help="batches per evaluation")
parser.add_argument("--games", type=int, default=100, help="per evaluation")
parser.add_argument("--out", type=Path, default=Path("runs/lbforaging_curriculum"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    from marl_collect.envs import LbForagingEnv
except ImportError as error:
    install = 'pip install "marl-collect[lbforaging]"'
    raise SystemExit(f"{error}: {install}") from error

torch.set_num_threads(1)  # Small networks are no faster with more threads.
make_env = partial(LbForagingEnv, args.task)
description = describe(make_env)
ppo = PPOOptions(lr=1e-3, epochs=4, minibatch_frames=500)
options = TrainingOptions(reward="team", ppo=ppo)


def by_level(seed, episode, level):
    """Return the task of an episode; equal arguments give an equal one."""
    del episode
    return {"force_coop": random.Random(seed).random() * HARDEST < level}


def any_level(seed, episode, level):
    """Return a task of a level that is drawn uniformly."""
    del level
    drawn = random.Random(seed + 1).randint(0, HARDEST)
    return by_level(seed, episode, drawn)


def played(policy, level):
    """Return the team's mean return on a level."""
    return evaluate(
        policy,
        make_env,
        episodes=args.games,
        envs_per_worker=10,
        deterministic=False,
        curriculum=by_level,
        level=level,
        seeds=1_000_000,  # Other episodes than in training.
    ).mean_team_return


def run(kind, seed):
    """Train once; return frames, level and return on the hardest level."""
    out = args.out / f"{kind}_{seed}"
    learner = PPOLearner(description, Setup("mappo"), options, seed=seed)
    rows: list[tuple[float, ...]] = []
    collector = Collector(
        make_env,
        learner.policy,
        envs_per_worker=8,
        frames_per_batch=args.batch,
        total_frames=args.frames,
        seed=seed,
        curriculum=any_level if kind == "uniform" else by_level,
        level=HARDEST if kind == "hardest" else 0,
    )
    parts = {"learner": learner, "collector": collector, "rows": rows}
    with collector, Checkpoint(out, parts, resume=args.resume) as checkpoint:
        for batch in collector:
            learner.update(batch, progress=collector.frames / args.frames)
            level = collector.level or 0
            ended = batch["next", "done"].sum()
            rewards = batch["next", "agent", "reward"].sum()
            if kind == "curriculum" and rewards > args.good * ended:
                collector.set_level(min(level + 1, HARDEST))
            batches = collector.stats()["batches"]
            if batches % args.every == 0 or collector.frames >= args.frames:
                returned = played(learner.policy, HARDEST)
                rows.append((collector.frames, collector.level or 0, returned))
                text = f"{kind} {seed}: %6d frames, level %d: %.2f" % rows[-1]
                checkpoint.print(text)
                write_table(out, [("frames", "level", "return_team"), *rows])
            checkpoint.batch_done()
    learner.save(out / "policy.pt")
    return rows, [played(learner.policy, level) for level in range(HARDEST + 1)]


for kind in args.kinds:
    curves, last = zip(*(run(kind, seed) for seed in args.seeds), strict=True)
    frames, _, returns = np.transpose(curves, (2, 1, 0))  # [points, seeds]
    for n, scores in zip(frames[:, 0], returns, strict=True):
        print(f"{kind}, {n:,.0f} frames: {bootstrap([scores], estimate=np.mean)}")
    for level, scores in enumerate(np.transpose(last)):
        print(f"{kind}, level {level}: {bootstrap([scores], estimate=np.mean)}")
