"""Prove, task by task, that the fast path gives PettingZoo's own data.

Steps each task twice with the same actions, through PettingZoo and through
``marl_collect.envs.pettingzoo.fast_path``, compares every bit, and writes the
versions to ``scripts/equality.json``. Add these versions to ``PROVEN``.

    python scripts/equality.py                       # everything: hours
    python scripts/equality.py mpe/simple_spread_v3  # one task
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

from same_steps import Tally, compare

from marl_collect.envs.pettingzoo.fast_path import (
    installed_versions,
    raw_environment,
    world_of,
)
from marl_collect.envs.pettingzoo.tasks import available_envs, find_task

RESULTS = Path(__file__).with_suffix(".json")

_PARTICLES: list[dict[str, Any]] = [{}, {"continuous_actions": True, "max_cycles": 7}]

TASKS: dict[str, list[dict[str, Any]]] = {
    # PettingZoo flags its limit of frames as terminated: nobody is truncated.
    "sisl/multiwalker_v9": [
        {},
        {"terminate_on_fall": False, "shared_reward": False},
        {"terminate_on_fall": False, "remove_on_fall": False, "max_cycles": 40},
        {"n_walkers": 1, "max_cycles": 30},
    ],
    "sisl/pursuit_v5": [{"max_cycles": 100}],
    "butterfly/pistonball_v6": [{"n_pistons": 8, "max_cycles": 60}],
    "butterfly/cooperative_pong_v6": [{"max_cycles": 100}],
    "butterfly/knights_archers_zombies_v11": [{}, {"spawn_delay": 5, "max_cycles": 90}],
    "classic/rps_v2": [{}],
    **{t: _PARTICLES for t in available_envs() if t.startswith("mpe/")},
    "mpe/simple_spread_v3": [*_PARTICLES, {"N": 5, "terminate_on_success": True}],
}
"""Task to the keywords with which it is tried: deaths and truncations among them."""


def prove(task: str, steps: int, seeds: int) -> dict[str, Any]:
    """Compare one task; return the record of what was compared."""
    variants = TASKS[task]
    total = Tally()
    module = ""
    for keywords in variants:
        for seed in range(seeds):
            stock = find_task(task)(**keywords)
            twin = find_task(task)(**keywords)
            raw = raw_environment(twin)
            world = world_of(twin)
            if raw is None or world is None:
                raise SystemExit(f"{task} has no AEC-to-parallel conversion.")
            module = type(raw).__module__
            spaces = {name: stock.action_space(name) for name in stock.possible_agents}
            steps_per_seed = -(-steps // (seeds * len(variants)))
            total.update(compare(stock, world, spaces, steps=steps_per_seed, seed=seed))
            stock.close()
            twin.close()
    return {
        "task": task,
        "module": module,
        "versions": list(installed_versions(module)),
        "arguments": variants,
        "seeds": seeds,
        "found": dict(total),
    }


def main() -> None:
    """Compare the tasks that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], metavar="TASK")
    parser.add_argument("--steps", type=int, default=10_000, help="of each task")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for task in arguments.tasks or TASKS:
        begin = time.perf_counter()
        record = prove(task, arguments.steps, arguments.seeds)
        records = {
            (entry["task"], *entry["versions"]): entry
            for entry in [*json.loads(RESULTS.read_text()), record]
        }
        results = [records[key] for key in sorted(records)]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        seconds = time.perf_counter() - begin
        print(f"{task}: equal, {record['found']}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
