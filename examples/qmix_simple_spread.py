"""QMIX on simple_spread, in plain PyTorch, with double Q-learning.

    pip install "marl-collect[mpe,torchrl]"
    python examples/qmix_simple_spread.py

Writes ``progress.csv`` and ``policy.pt`` to ``--out``.

Sources:
    Rashid et al., "QMIX", arXiv 1803.11485.
    van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", arXiv
    1509.06461.
"""

import argparse
import copy
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from marl_collect import MultiSyncCollector, describe, evaluate
from marl_collect.models import QMixer, make_policy, save_policy
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import write_table

parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=150_000)
parser.add_argument("--batch", type=int, default=2_000, help="frames per batch")
parser.add_argument("--updates", type=int, default=125, help="per batch")
parser.add_argument("--minibatch", type=int, default=256, help="frames")
parser.add_argument("--warm-up", type=int, default=2_000, help="random frames")
parser.add_argument("--explore", type=int, default=50_000, help="frames of decay")
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--games", type=int, default=96, help="per evaluation")
parser.add_argument("--every", type=int, default=10, help="batches per evaluation")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/qmix_simple_spread"))
parser.add_argument("--resume", action="store_true", help="continue from --out")
args = parser.parse_args()

try:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    from marl_collect.envs import PettingZooEnv
except ImportError as error:
    install = 'pip install "marl-collect[mpe,torchrl]"'
    raise SystemExit(f"{error}: {install}") from error

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # Small networks are no faster with more threads.

make_env = partial(PettingZooEnv, "simple_spread_v3", agent_ids=True)
description = describe(make_env)
(name,) = description.groups
group = description.groups[name]
assert group.observation.shape is not None  # None for nested observations.
size = group.observation.shape[0]
options = {"num_cells": (128, 128), "activation_class": nn.ReLU, "epsilon": 1.0}
policy = make_policy(description, **options)
network, explore = policy[0].module, policy[1].module
mixer = QMixer((group.n_agents * size,), 32, group.n_agents)
with torch.no_grad():  # Small initial weights, or targets grow without bound.
    for layer in mixer.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.mul_(0.1)
target_network, target_mixer = copy.deepcopy(network), copy.deepcopy(mixer)
parameters = [*network.parameters(), *mixer.parameters()]
target_parameters = [*target_network.parameters(), *target_mixer.parameters()]
optimizer = torch.optim.Adam(parameters, lr=args.lr)


def mix(mixer, values, observation):
    """Return the team's value ``[S, 1]``.

    The mixing weights of both layers are linear in the mixer's input. Without the norm,
    weights of agents far from the others grow with the square of their distance, the
    targets spread the error, and returns fall after 60,000 frames.
    """
    state = observation.flatten(-2)
    return mixer(values, nn.functional.layer_norm(state, state.shape[-1:]))


def loss_of(minibatch):
    """Return the squared error of the team's value."""
    observation, following = minibatch["observation"], minibatch["next_observation"]
    value = network(observation).gather(-1, minibatch["action"].unsqueeze(-1))
    team = mix(mixer, value, observation)
    with torch.no_grad():
        # The network selects, the target network evaluates: less overestimation.
        best = network(following).argmax(-1, keepdim=True)
        value_after = target_network(following).gather(-1, best)
        ahead = mix(target_mixer, value_after, following) * ~minibatch["terminated"]
        target = minibatch["reward"] + 0.95 * ahead
    return (team - target).square().mean()


buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(100_000), batch_size=args.minibatch
)
rows: list[tuple[float, ...]] = []
collector = MultiSyncCollector(
    make_env,
    policy,
    frames_per_batch=args.batch,
    total_frames=args.frames,
    init_random_frames=args.warm_up,
    num_workers=args.workers,
    envs_per_worker=8,
    seed=args.seed,
)
parts = {
    "networks": nn.ModuleList([network, mixer, target_network, target_mixer, explore]),
    "optimizer": optimizer,
    "buffer": buffer,
    "rows": rows,
    "collector": collector,
}
with collector, Checkpoint(args.out, parts, resume=args.resume) as checkpoint:
    for number, batch in enumerate(collector, collector.stats()["batches"] + 1):
        flat = batch.reshape(-1)
        buffer.extend(
            TensorDict(
                {
                    "observation": flat[name, "observation"],
                    "action": flat[name, "action"],
                    "reward": 0.1 * flat["next", name, "reward"].sum(-2),
                    "next_observation": flat["next", name, "observation"],
                    "terminated": flat["next", "terminated"],
                },
                flat.batch_size,
            )
        )
        loss = torch.zeros(())
        for _ in range(args.updates):
            loss = loss_of(buffer.sample())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 10.0)
            optimizer.step()
            for old, new in zip(target_parameters, parameters, strict=True):
                old.data.lerp_(new.data, 0.005)
        explore.epsilon.fill_(max(0.05, 1 - 0.95 * collector.frames / args.explore))
        collector.update_policy_weights_()
        if number % args.every == 0 or collector.frames >= args.frames:
            games = evaluate(
                policy, make_env, episodes=args.games, num_workers=1, seeds=1
            )
            rows.append((collector.frames, games.mean_team_return))
            frames = f"{collector.frames:>9,} frames"
            shown = f"return of the team {rows[-1][1]:7.2f}, loss {loss.item():.4f}"
            checkpoint.print(f"{frames}, {shown}")
            write_table(args.out, [("frames", "return_team"), *rows])
        checkpoint.batch_done()

save_policy(args.out / "policy.pt", policy, description, **options)
