"""Measures steps per second of each environment, with its library's loop and ours.

Both loops run in one process with the same actions, and alternate in rounds, so a busy
machine slows both. The table has steps/s between resets, steps/s including resets, and
seconds per reset. Ratios carry over to other machines; absolute numbers do not.

    python benchmarks/envs.py                       # all rows that are installed
    python benchmarks/envs.py --quick               # the same in minutes
    python benchmarks/envs.py simple_spread_v3 --seconds 5
    python benchmarks/envs.py imports               # seconds and memory of imports

A run counts at least one reset even if it is shorter than an episode. Steps/s including
resets therefore grow with ``--seconds`` for environments with long episodes.
"""

import argparse
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")

import numpy as np
from limits.loops import N_ACTIONS, Loop, MeltingpotLoop, OurLoop, PettingZooLoop

from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.seeding import episode_seed


@dataclass(frozen=True)
class Row:
    """One environment of the table.

    Attributes:
        name: as printed.
        ours: builds our environment.
        stock: builds the library's own loop from ``N_ACTIONS`` joint actions, each a
            dict of arrays by group, and from the agents of each group.
    """

    name: str
    ours: Callable[[], MultiAgentEnv]
    stock: Callable[[list[dict[str, Any]], dict[str, list[str]]], Loop]


def pettingzoo(task: str, **keywords: Any) -> Row:
    """Return the row of a task of PettingZoo."""

    def ours() -> MultiAgentEnv:
        from marl_collect.envs import PettingZooEnv

        return PettingZooEnv(task, **keywords)

    def stock(actions: list[dict[str, Any]], group_map: dict[str, list[str]]) -> Loop:
        from marl_collect.envs.pettingzoo.tasks import find_task

        env = find_task(task)(**keywords)
        return PettingZooLoop(env, actions, group_map, done_on_any=True)

    options = ", ".join(f"{key}={value}" for key, value in keywords.items())
    return Row(f"{task}({options})" if options else task, ours, stock)


def meltingpot(substrate: str, **keywords: Any) -> Row:
    """Return the row of a substrate; MeltingPot's loop computes all observations."""

    def ours() -> MultiAgentEnv:
        from marl_collect.envs import MeltingpotEnv

        return MeltingpotEnv(substrate, **keywords)

    def stock(actions: list[dict[str, Any]], group_map: dict[str, list[str]]) -> Loop:
        del group_map  # There is one group, in the order of the players.
        import meltingpot

        config = meltingpot.substrate.get_config(substrate)
        env = meltingpot.substrate.build(substrate, roles=config.default_player_roles)
        return MeltingpotLoop(env, actions)

    asked = ", ".join(keywords.get("observations") or ["all"])
    picture = " + world" if keywords.get("world_rgb") else ""
    return Row(f"{substrate} ({asked}{picture})", ours, stock)


ROWS = [
    pettingzoo("simple_spread_v3"),
    pettingzoo("simple_tag_v3"),
    pettingzoo("simple_world_comm_v3"),
    pettingzoo("simple_spread_v3", continuous_actions=True, N=6),
    pettingzoo("multiwalker_v9"),
    pettingzoo("pursuit_v5"),
    pettingzoo("knights_archers_zombies_v11"),
    pettingzoo("pistonball_v6", n_pistons=10),
    pettingzoo("cooperative_pong_v6"),
    meltingpot("commons_harvest__open", observations=["RGB"]),
    meltingpot("commons_harvest__open", world_rgb=True),
    meltingpot("clean_up", observations=["RGB"]),
    meltingpot("predator_prey__open", observations=["RGB"]),
    meltingpot("coins", observations=["RGB"]),
    meltingpot("collaborative_cooking__cramped", observations=["RGB"]),
    meltingpot("prisoners_dilemma_in_the_matrix__repeated", observations=["RGB"]),
]
"""The rows of the table. Rows whose library is not installed are left out."""


@dataclass
class Clock:
    """Seconds and counts of steps and resets of one loop."""

    steps: int = 0
    step_seconds: float = 0.0
    resets: int = 0
    reset_seconds: float = 0.0

    def run(self, loop: Loop, seconds: float, episode: int) -> int:
        """Step for about ``seconds`` and return the number of the next episode."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if loop.over:
                begin = time.perf_counter()
                loop.reset(episode_seed(0, 0, episode))
                self.reset_seconds += time.perf_counter() - begin
                self.resets += 1
                episode += 1
            begin = time.perf_counter()
            count = 0
            while count < 32 and not loop.over:
                loop.step((self.steps + count) % N_ACTIONS)
                count += 1
            self.step_seconds += time.perf_counter() - begin
            self.steps += count
        return episode

    @property
    def between(self) -> float:
        """Steps per second between resets."""
        return self.steps / self.step_seconds

    @property
    def overall(self) -> float:
        """Steps per second, resets included."""
        return self.steps / (self.step_seconds + self.reset_seconds)

    @property
    def reset(self) -> float:
        """Seconds per reset."""
        return self.reset_seconds / self.resets


def measure(row: Row, seconds: float, rounds: int) -> str:
    """Return a line of the table."""
    from marl_collect.core.random_actions import samplers

    env = row.ours()
    random = np.random.default_rng(0)
    drawn = list(samplers(env.description))
    actions = [
        {s.key[0]: s.actions(random.random(s.noise_shape)) for s in drawn}
        for _ in range(N_ACTIONS)
    ]
    ours: Loop = OurLoop(env, actions)
    stock = row.stock(actions, env.group_map)
    ratios = []
    total = {"stock": Clock(), "ours": Clock()}
    episodes = {"stock": 0, "ours": 0}
    for _ in range(rounds):
        clocks = {}
        for name, loop in (("stock", stock), ("ours", ours)):
            clock = clocks[name] = Clock()
            episodes[name] = clock.run(loop, seconds / rounds, episodes[name])
            for field in vars(clock):
                summed = getattr(total[name], field) + getattr(clock, field)
                setattr(total[name], field, summed)
        ratios.append(clocks["ours"].between / clocks["stock"].between)
    ours.close()
    stock.close()
    a, b = total["stock"], total["ours"]
    return (
        f"| {row.name} | {a.between:,.0f} | {b.between:,.0f} "
        f"| {statistics.median(ratios):.2f} | {a.overall:,.0f} | {b.overall:,.0f} "
        f"| {b.overall / a.overall:.2f} | {a.reset:.4f} | {b.reset:.4f} |"
    )


IMPORTS = {
    "meltingpot.substrate": "import meltingpot.substrate",
    "marl_collect.envs, for a substrate": (
        "from marl_collect.envs import MeltingpotEnv; MeltingpotEnv('coins').close()"
    ),
}
"""Statements by name; each is run in a process of its own."""

_PAGES = "; print(open('/proc/self/statm').read().split()[1])"
"""Prints resident memory. The peak of ``resource`` would include the parent's."""


def measure_imports() -> None:
    """Print seconds and memory of processes that import MeltingPot."""
    print("| imported | seconds | MiB |\n|---|---:|---:|")
    for name, source in IMPORTS.items():
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            process = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", source + _PAGES],
                capture_output=True,
                text=True,
                check=False,
            )
            seconds.append(time.perf_counter() - begin)
        if process.returncode:
            print(f"| {name} | not installed | |")
            continue
        mebibytes = int(process.stdout.split()[-1]) * mmap.PAGESIZE / 2**20
        print(f"| {name} | {min(seconds):.2f} | {mebibytes:,.0f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of rows; default: all")
    parser.add_argument("--seconds", type=float, default=6.0, help="time per loop")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--quick", action="store_true", help="the same as --seconds 3 --rounds 5"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.rounds = 3.0, 5
    if arguments.names != ["imports"]:
        measure_steps(arguments)
    if not arguments.names or "imports" in arguments.names:
        measure_imports()


def measure_steps(arguments: argparse.Namespace) -> None:
    """Print steps per second of the named rows, or of all rows."""
    print(
        "| environment | steps/s between resets: stock | ours | ratio (median) "
        "| with resets: stock | ours | ratio | reset seconds: stock | ours |"
    )
    print("|---|" + "---:|" * 8)
    for row in ROWS:
        if arguments.names and row.name.split(" ")[0] not in arguments.names:
            continue
        try:
            print(measure(row, arguments.seconds, arguments.rounds), flush=True)
        except (ImportError, LookupError, ValueError) as error:
            print(f"| {row.name} | not installed: {error} |", flush=True)


if __name__ == "__main__":
    main()
