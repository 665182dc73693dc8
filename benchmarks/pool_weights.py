"""Measures what an update costs while a pool keeps past versions of the policy.

The policy has 76,040 parameters, which change before every update; a version is kept
every ten updates. Prints the bytes that the trainer publishes and a worker pulls per
update, and the median time of both. In the lines "all" the versions are not frozen, so
all of them travel with every update.

    python benchmarks/pool_weights.py
    python benchmarks/pool_weights.py --members 1 100 --updates 500
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.pool import PolicyPool
from marl_collect.weights.shared import PLACES, WeightLayout, WeightPublisher
from marl_collect.weights.skeleton import weight_tensors

EVERY = 10


def measure(members: int, updates: int, *, frozen: bool) -> list[str]:
    """Return bytes published and pulled per update, and microseconds of both."""
    policy = nn.Sequential(nn.Linear(31, 256), nn.Linear(256, 256), nn.Linear(256, 8))
    pool = PolicyPool(policy, size=members, every=EVERY)
    pool.members.requires_grad_(not frozen)
    every = AssignedPolicies({"main": policy, "past": pool}, lambda *_: {})
    tensors = list(weight_tensors(every).values())
    layout = WeightLayout.of(every)
    publisher = WeightPublisher(layout)
    reader = publisher.handle.attach(torch.zeros(layout.nbytes, dtype=torch.uint8))
    moved = [0, 0]
    seconds: list[list[float]] = [[], []]
    for number in range(PLACES + updates):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1e-3)
        pool.update()
        place = number % PLACES
        times = [time.perf_counter()]
        written = publisher.write(place, tensors)
        times.append(time.perf_counter())
        pulled = reader.pull(place)
        times.append(time.perf_counter())
        if number < PLACES:  # Everything travels to each place once.
            continue
        for index, copied in enumerate((written, pulled)):
            moved[index] += sum(tensors[i].nbytes for i in copied)
            seconds[index].append(times[index + 1] - times[index])
    publisher.close()
    each = [f"{total // updates:,}" for total in moved]
    return [*each, *(f"{statistics.median(found) * 1e6:,.0f}" for found in seconds)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--updates", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("members", "travel", "published", "pulled", "publish, us", "pull, us")
    for members in asked.members:
        for frozen in (False, True):
            found = measure(members, asked.updates, frozen=frozen)
            table.add_row(str(members), "changed" if frozen else "all", *found)
    Console().print(table)


if __name__ == "__main__":
    main()
