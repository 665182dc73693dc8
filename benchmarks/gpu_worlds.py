"""Frames per second of VMAS on a device: a bare torch loop, and ``Collector``.

    python benchmarks/gpu_worlds.py --device cuda

Both draw random actions. The bare loop stores observations, rewards and ends on the
device, and begins episodes in the same way; it knows neither trajectories nor returns.
Episodes of balance end one by one. The sides take turns; the ratio is that of their
medians. It takes less than ten minutes.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import vmas

from marl_collect import Collector, RandomPolicy
from marl_collect.envs import VmasEnv
from marl_collect.envs.vmas.env import renew

FRAMES = 50
"""Frames of each world in a batch."""


def bare(scenario: str, worlds: int, device: str) -> Callable[[], None]:
    """Return what collects one batch, and stores it on the device."""
    make = partial(vmas.make_env, scenario, worlds, device=device, seed=0)
    env, twin = make(), make()
    observed = torch.stack(env.reset(), 1)
    shape = (FRAMES, *observed.shape)
    observations = torch.empty(shape, device=device)
    rewards = torch.empty(shape[:3], device=device)
    ends = torch.empty((FRAMES, worlds), dtype=torch.bool, device=device)
    frames = torch.zeros(worlds, device=device)

    def collect() -> None:
        nonlocal frames
        for t in range(FRAMES):
            with torch.inference_mode():
                seen, reward, done, _ = env.step(env.get_random_actions())
                torch.stack(seen, 1, out=observations[t])
                torch.stack(reward, 1, out=rewards[t])
                frames += 1
                done = done | (frames >= 100)
                ends[t] = done
                if done.any():
                    twin.reset(return_observations=False)
                    renew(env, twin, done)
                    frames = frames.masked_fill(done, 0)
        if device != "cpu":
            torch.cuda.synchronize()

    return collect


def ours(scenario: str, worlds: int, device: str) -> Callable[[], object]:
    """Return what collects one batch with a ``Collector``."""
    collector = Collector(
        partial(VmasEnv, scenario, worlds, device=device, max_steps=100),
        RandomPolicy(),
        frames_per_batch=worlds * FRAMES,
    )
    return collector.next


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worlds", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    name = args.device
    if name != "cpu":
        name = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {name}")
    print("| scenario | worlds | bare, frames/s | Collector, frames/s | ratio |")
    print("|---|--:|--:|--:|--:|")
    for scenario in ("navigation", "balance"):
        for worlds in args.worlds:
            sides = [side(scenario, worlds, args.device) for side in (bare, ours)]
            seconds: list[list[float]] = [[], []]
            for step in range(args.rounds + 1):
                for side, times in zip(sides, seconds, strict=True):
                    started = time.perf_counter()
                    side()
                    if step:
                        times.append(time.perf_counter() - started)
            rates = [worlds * FRAMES / median(times) for times in seconds]
            print(
                f"| {scenario} | {worlds:,} | {rates[0]:,.0f} | {rates[1]:,.0f} "
                f"| {rates[1] / rates[0]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
