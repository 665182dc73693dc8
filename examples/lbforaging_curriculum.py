"""A curriculum of foraging levels against uniform sampling, with MAPPO.

    pip install "marl-collect[lbforaging,compare]"
    python examples/lbforaging_curriculum.py                       # five seeds each
    python examples/lbforaging_curriculum.py --seeds 0 --frames 100_000

In episodes of level k, a share k/4 has food that only both players together can load.
``curriculum`` raises the level when the players do well; ``uniform`` plays all levels
from the start; ``hardest`` plays the last one only. All are evaluated on the hardest.
Writes ``progress.csv``, ``returns.png`` and a policy of each run to ``--out``.
"""

import argparse
import random
from functools import partial
from pathlib import Path

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.envs import LbForagingEnv
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner
from marl_collect.training.run_folder import write_table

KINDS = ("curriculum", "uniform", "hardest")
parser = argparse.ArgumentParser()
parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
parser.add_argument("--task", default="Foraging-8x8-2p-2f-v3")
parser.add_argument("--frames", type=int, default=1_000_000, help="per run")
parser.add_argument("--batch", type=int, default=4_000, help="frames per batch")
parser.add_argument("--good", type=float, default=0.6, help="return of the next level")
parser.add_argument("--every", type=int, default=10, help="batches per evaluation")
parser.add_argument("--games", type=int, default=100, help="per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--out", type=Path, default=Path("runs/lbforaging_curriculum"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    import matplotlib.pyplot as plt
except ImportError as error:
    install = 'pip install "marl-collect[lbforaging,compare]"'
    raise SystemExit(f"{error}: {install}") from error

HARDEST = 4
make_env = partial(LbForagingEnv, args.task)
description = describe(make_env)


def by_level(seed, episode, level):
    """Return the task of an episode; equal arguments give an equal one."""
    del episode
    return {"force_coop": random.Random(seed).random() * HARDEST < level}


def any_level(seed, episode, level):
    """Return a task of a level that is drawn uniformly."""
    del level
    drawn = random.Random(seed + 1).randint(0, HARDEST)
    return by_level(seed, episode, drawn)


def run(kind, seed):
    """Train once; return frames, level and return on the hardest level."""
    out = args.out / f"{kind}_{seed}"
    learner = PPOLearner(description, Setup("mappo"), TrainingOptions(), seed=seed)
    rows = []
    collector = MultiSyncCollector(
        make_env,
        learner.policy,
        num_workers=args.workers,
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
            collector.update_policy_weights_()
            ended = batch["next", "done"].sum()
            rewards = batch["next", "agent", "reward"].sum()
            if kind == "curriculum" and rewards > args.good * ended:
                collector.set_level(min(collector.level + 1, HARDEST))
            batches = collector.stats()["batches"]
            if batches % args.every == 0 or collector.frames >= args.frames:
                hardest = {"curriculum": by_level, "level": HARDEST}
                played = evaluate(
                    learner.policy, make_env, episodes=args.games, **hardest
                )
                rows.append(
                    (collector.frames, collector.level, played.mean_team_return)
                )
                checkpoint.print(
                    f"{kind} {seed}: %9d frames, level %d: %.2f" % rows[-1]
                )
                write_table(out, [("frames", "level", "return_team"), *rows])
            checkpoint.batch_done()
    learner.save(out / "policy.pt")
    return rows


for color, kind in enumerate(args.kinds):
    for seed in args.seeds:
        frames, _, returns = zip(*run(kind, seed), strict=True)
        label = kind if seed == args.seeds[0] else None
        plt.plot(frames, returns, color=f"C{color}", label=label)
plt.legend()
plt.xlabel("frames")
plt.ylabel("team return on the hardest level")
plt.savefig(args.out / "returns.png", dpi=100)
