"""ParallelEnv against TorchRL's: how fast, and what a step costs the trainer.

    python benchmarks/parallel_env.py                      # everything, two minutes
    python benchmarks/parallel_env.py --seconds 1 --repeats 1 --only free

Ours and TorchRL's take turns in the same run, each a collector over its ParallelEnv
with the same policy, an MLP that acts for all environments in the trainer; every
batch is read. Each side gets the best of its own configurations. Ratios carry over
to other machines, absolute numbers do not.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

FRAMES = 2000
WARM_UP = 2


@dataclass(frozen=True)
class Workload:
    """One environment: how to build it for us and for TorchRL."""

    name: str
    group: str
    sizes: tuple[int, int]
    ours: Callable[[], Any]
    theirs: Callable[[], Any]

    def policy(self) -> TensorDictModule:
        """Return the policy: a shared MLP with a deterministic action."""
        observation, action = self.sizes
        net = nn.Sequential(
            nn.Linear(observation, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, action),
            nn.Tanh(),
        )
        keys = [(self.group, "observation")], [(self.group, "action")]
        return TensorDictModule(net, in_keys=keys[0], out_keys=keys[1])


def our_free() -> Any:
    """Build the environment that costs nothing, for us."""
    from marl_collect.envs import PettingZooWrapper
    from marl_collect.testing.free import FreeEnv

    return PettingZooWrapper(FreeEnv())


def their_free() -> Any:
    """Build the environment that costs nothing, for TorchRL."""
    from torchrl.envs import PettingZooWrapper

    from marl_collect.testing.free import FreeEnv

    return PettingZooWrapper(FreeEnv())


def our_multiwalker() -> Any:
    """Build multiwalker for us."""
    from marl_collect.envs import PettingZooEnv

    return PettingZooEnv("sisl/multiwalker_v9")


def their_multiwalker() -> Any:
    """Build multiwalker for TorchRL."""
    from torchrl.envs import PettingZooEnv

    return PettingZooEnv(task="sisl/multiwalker_v9", parallel=True)


WORKLOADS = {
    "free": Workload("free", "agent", (31, 4), our_free, their_free),
    "multiwalker": Workload(
        "multiwalker", "walker", (31, 4), our_multiwalker, their_multiwalker
    ),
}


def our_collector(load: Workload, environments: int, options: dict[str, int]) -> Any:
    """Collect with our ParallelEnv."""
    from marl_collect.collectors import Collector
    from marl_collect.parallel_env import ParallelEnv

    return Collector(
        lambda: ParallelEnv(environments, load.ours, **options),  # type: ignore[arg-type]
        load.policy(),
        frames_per_batch=FRAMES,
    )


def their_collector(load: Workload, environments: int) -> Any:
    """Collect with TorchRL's ParallelEnv."""
    from torchrl.collectors import Collector
    from torchrl.envs import ParallelEnv

    return Collector(
        ParallelEnv(environments, load.theirs),
        load.policy(),
        frames_per_batch=FRAMES // 10,
        total_frames=-1,
        no_cuda_sync=True,
    )


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Return frames per second of reading batches for a while."""
    frames, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        batch = next(batches)
        for leaf in batch.values(include_nested=True, leaves_only=True):
            leaf.sum()
        frames += batch.numel()
    return frames / (time.perf_counter() - begin)


def compare(load: Workload, args: argparse.Namespace) -> None:
    """Print the rates of all configurations, by turns, and the best's ratio."""
    sides: dict[str, Any] = {}
    for n in args.environments:
        for processes in sorted({1, min(2, n)}):
            options = {"num_processes": processes}
            make = partial(our_collector, load, n, options)
            sides[f"ours, {n} environments in {processes}"] = make
        sides[f"torchrl, {n}"] = partial(their_collector, load, n)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, make in sides.items():
            collector = make()
            batches = iter(collector)
            for _ in range(WARM_UP):
                next(batches)
            rates[name].append(rate(batches, args.seconds))
            collector.shutdown()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, found in rates.items():
        low, high = min(found), max(found)
        print(
            f"| {load.name} | {name} | {medians[name]:,.0f} | {low:,.0f}-{high:,.0f} |"
        )
    ours = max(v for k, v in medians.items() if k.startswith("ours"))
    theirs = max(v for k, v in medians.items() if k.startswith("torchrl"))
    print(f"| {load.name} | **best against best** | {ours / theirs:.1f}x | |")


def cost(args: argparse.Namespace) -> None:
    """Print what a step costs the trainer, in processor time per process."""
    from marl_collect.parallel_env.batch import ParallelBatch
    from marl_collect.parallel_env.options import ParallelOptions

    for processes in (1, 2, 4, 8, 16):
        options = ParallelOptions(num_processes=processes)
        batch = ParallelBatch([our_free] * processes, options)
        batch.bind(batch.allocate())
        batch.reset(range(processes), range(processes))
        found: list[tuple[float, float]] = []
        for _ in range(args.repeats):
            steps, wall, own = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - wall < args.seconds / 2:
                batch.step()
                steps += 1
            spent = time.perf_counter() - wall, time.process_time() - own
            found.append((spent[1] / steps, spent[0] / steps))
        batch.close()
        own, wall = (
            statistics.median(column) * 1e6 for column in zip(*found, strict=True)
        )
        print(
            f"| trainer's cost, {processes} processes | {own / processes:.1f} us per "
            f"process and step | {wall:.0f} us per step of all | |"
        )


def main() -> None:
    """Read the command line and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window")
    parser.add_argument("--repeats", type=int, default=3, help="windows of each")
    parser.add_argument("--environments", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--only", choices=[*WORKLOADS, "cost"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| workload | who | frames/s (median) | range |\n|---|---|---|---|")
    if args.only in (None, "cost"):
        cost(args)
    for name, load in WORKLOADS.items():
        if args.only in (None, name):
            compare(load, args)


if __name__ == "__main__":
    main()
