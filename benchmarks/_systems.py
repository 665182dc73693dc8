"""One system under measurement, in a process of its own, commanded line by line.

    python benchmarks/_systems.py '{"system": "ours", "task": "free", ...}'

A line on stdin holds seconds; the answer is a line with frames and seconds. Systems so
live side by side and are measured in turn, which a busy or throttled machine slows
alike, and none shares its modules, threads or settings with another.
"""

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GROUPS = {"multiwalker_v9": "walker", "free": "agent"}
_ACTIONS = 256
_CHECK = 16
"""Steps of a bare loop between two looks at the clock."""


@dataclass(frozen=True)
class System:
    """What to run.

    Attributes:
        system: ``"bare"``, ``"torchrl"`` or ``"ours"``.
        task: one of ``GROUPS``.
        policy: ``"mlp"`` or ``"random"``.
        workers: processes; a bare loop is one of them.
        frames_per_batch: of the collectors.
        options: further ones of TorchRL's collector.
    """

    system: str
    task: str
    policy: str
    workers: int
    frames_per_batch: int
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the command line's argument."""
        return json.dumps(dataclasses.asdict(self))


Measure = Callable[[float], tuple[int, float]]
"""Run for so many seconds; return frames and seconds."""


def bare(system: System) -> Measure:
    """Loop over the stock environment: nothing is stored, nothing is exchanged."""
    env = _stock(system.task)
    env.reset(seed=0)
    agents = list(env.possible_agents)
    generator = np.random.default_rng(0)
    joint = generator.uniform(-1, 1, (_ACTIONS, len(agents), 4)).astype(np.float32)
    drawn = [dict(zip(agents, row, strict=True)) for row in joint]
    act = _network_act(agents) if system.policy == "mlp" else None

    def measure(seconds: float) -> tuple[int, float]:
        frames = 0
        observations, _ = env.reset()
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(_CHECK):
                actions = drawn[frames % _ACTIONS] if act is None else act(observations)
                observations = env.step(actions)[0]
                frames += 1
                if not env.agents:
                    observations, _ = env.reset()
        return frames, time.perf_counter() - begin

    return measure


def ours(system: System) -> Measure:
    """Collect with MultiSyncCollector of this package."""
    from marl_collect import MultiSyncCollector

    collector = MultiSyncCollector(
        _our_factory(system.task),
        _policy(system),
        num_workers=system.workers,
        frames_per_batch=system.frames_per_batch,
        seed=0,
    )
    return _over_batches(iter(collector))


def torchrl(system: System) -> Measure:
    """Collect with TorchRL's MultiSyncCollector."""
    from torchrl.collectors import MultiSyncCollector

    collector = MultiSyncCollector(
        [_torchrl_factory(system.task)] * system.workers,
        _policy(system),
        frames_per_batch=system.frames_per_batch,
        total_frames=-1,
        **system.options,
    )
    return _over_batches(iter(collector))


def _over_batches(batches: Iterator[Any]) -> Measure:
    next(batches)  # What is allocated or imported late is not measured.
    next(batches)

    def measure(seconds: float) -> tuple[int, float]:
        frames = 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            batch = next(batches)
            frames += batch.numel()
            _read(batch)
        return frames, time.perf_counter() - begin

    return measure


def _read(batch: Any) -> None:
    """Read every byte, as a learner would: what is lazy is done inside the timing."""
    for tensor in batch.values(include_nested=True, leaves_only=True):
        tensor.sum()


def _network() -> Any:
    """Build the one network, with the same weights everywhere, shared by agents."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(31, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 4),
        nn.Tanh(),
    )


def _policy(system: System) -> Any:
    if system.policy == "random":
        return None
    from tensordict.nn import TensorDictModule

    group = GROUPS[system.task]
    return TensorDictModule(_network(), [(group, "observation")], [(group, "action")])


def _network_act(agents: list[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import torch

    network = _network()
    torch.set_grad_enabled(False)

    def act(observations: dict[str, Any]) -> dict[str, Any]:
        stacked = torch.from_numpy(np.stack(list(observations.values())))
        return dict(zip(agents, network(stacked).numpy(), strict=True))

    return act


def _stock(task: str) -> Any:
    if task == "free":
        from marl_collect.testing.free import FreeEnv

        return FreeEnv()
    from pettingzoo.sisl import multiwalker_v9

    return multiwalker_v9.parallel_env()


def _our_factory(task: str) -> Callable[[], Any]:
    from marl_collect.envs import PettingZooEnv, PettingZooWrapper

    if task == "free":
        return lambda: PettingZooWrapper(_stock(task))
    return lambda: PettingZooEnv(task)


def _torchrl_factory(task: str) -> Callable[[], Any]:
    def make() -> Any:
        from torchrl.envs import PettingZooEnv, PettingZooWrapper

        if task == "free":
            return PettingZooWrapper(_stock(task))
        return PettingZooEnv(task, parallel=True)

    return make


def main() -> None:
    """Build the system, then answer one line for each line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries print to stdout.
    system = System(**json.loads(sys.argv[1]))
    try:
        measure = {"bare": bare, "ours": ours, "torchrl": torchrl}[system.system](
            system
        )
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            print(*measure(float(line)), file=answers, flush=True)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if system.system == "torchrl":
            # Its workers do not always end when they are asked to.
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
