"""Checks of the soak test: every batch, and the resources left after a round."""

import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any, final

import psutil
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from marl_collect.core.seeding import episode_seed
from marl_collect.rollout.episodes import EPISODE_BITS

MODULUS = 1009  # CountingEnv observes its seed modulo this.
MAX_GROWTH = 5.0  # MiB per minute, after one round of each kind.
NOISE = 24.0  # MiB; less growth in total is not a leak.


class ViolationError(AssertionError):
    """A check failed."""


def require(condition: object, text: str) -> None:
    """Raise ViolationError unless the condition holds."""
    if not condition:
        raise ViolationError(text)


class Constant(nn.Module):
    """A policy whose weights all equal their version, and which writes them.

    It also writes the minimum and the maximum of a large parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(3, 2))
        self.large = nn.Parameter(torch.zeros(200_000))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return actions of prey and hunters, and minimum and maximum."""
        batch = observation.shape[0]
        extremes = torch.stack([self.large.min(), self.large.max()]).expand(batch, 2)
        hunters = torch.zeros(batch, 2, dtype=torch.int64)
        return self.level.expand(batch, 3, 2), hunters, extremes


def constant_policy() -> TensorDictModule:
    """Return a TensorDict module of `Constant`."""
    return TensorDictModule(
        Constant(),
        in_keys=[("prey", "observation")],
        out_keys=[("prey", "action"), ("hunter", "action"), "extremes"],
    )


@final
class Checks:
    """Checks every environment of a collector frame by frame.

    Attributes:
        counts: number of batches, frames, episodes and published versions.
    """

    def __init__(
        self, collector: Any, seed: int, *, sync: bool, prefetch: bool
    ) -> None:
        """Check batches of ``collector``, from the first one on."""
        self.counts: Counter[str] = Counter()
        self._collector = collector
        self._seed, self._sync, self._prefetch = seed, sync, prefetch
        # Last frame of each environment: trajectory, step, whether it ended, version.
        self._last: dict[int, tuple[int, int, bool, int]] = {}
        self._open: set[int] = set()  # Trajectories whose end was never delivered.
        self._newest = 0  # Current version when the last batch was requested.

    def publish(self) -> None:
        """Set every weight to the next version and publish it."""
        collector = self._collector
        version = collector.policy_version + 1
        with torch.no_grad():
            for parameter in collector.policy.parameters():
                parameter.fill_(version)
        collector.update_policy_weights_()
        require(collector.policy_version == version, "a version was skipped")
        self.counts["published"] += 1

    def batch(self, batch: Any) -> set[int]:
        """Check a batch and return the workers that it came from."""
        self.counts["batches"] += 1
        self.counts["frames"] += batch.numel()
        ids = batch["collector", "traj_ids"]
        environments = ids >> EPISODE_BITS
        require((environments == environments[:, :1]).all(), "environments mixed")
        rows = environments[:, 0].tolist()
        per_worker = batch.shape[0]
        if self._sync:
            require(rows == list(range(len(rows))), f"rows of environments {rows}")
            per_worker //= len(self._collector.worker_pids)
        else:
            require(rows == list(range(rows[0], rows[0] + len(rows))), f"rows {rows}")
        self._versions(batch)
        for row, environment in enumerate(rows):
            self._row(batch, row, environment)
        return {environment // per_worker for environment in rows}

    def end(self, pids: tuple[int, ...]) -> None:
        """Check processes and counts after the shutdown of the collector."""
        require(
            not any(map(psutil.pid_exists, pids)), "a worker outlived its collector"
        )
        stats = self._collector.stats()
        require(
            self.counts["frames"] == self._collector.frames == stats["frames"],
            f"{self.counts['frames']} frames arrived, but the collector counted "
            f"{self._collector.frames}",
        )
        missing = self._open - set(stats["cut_trajectories"])
        require(not missing, f"not in cut_trajectories: {sorted(missing)}")

    def _versions(self, batch: Any) -> None:
        versions = batch["policy_version"]
        require((versions == versions[0, 0]).all(), "several versions in one rollout")
        version = int(versions[0, 0])
        current = self._collector.policy_version
        require(version <= current, f"version {version} is not published yet")
        if self._sync:
            expected = self._newest if self._prefetch else current
            require(version == expected, f"version {version}, expected {expected}")
        # With prefetch, the next batch was requested before this one was returned.
        self._newest = current
        torn = (batch["extremes"] != version).any()
        torn |= (batch["prey", "action"] != version).any()
        require(not torn, f"weights are not those of version {version}")

    def _row(self, batch: Any, row: int, environment: int) -> None:
        numbers = batch["hunter", "observation"][row, :, 0]
        ids = batch["collector", "traj_ids"][row].tolist()
        steps = numbers[:, 1].long().tolist()
        seeds = numbers[:, 3].long().tolist()
        dones = batch["next", "done"][row, :, 0].tolist()
        version = int(batch["policy_version"][row, 0])
        last = self._last.get(environment)
        if last is not None:
            require(version >= last[3], f"version {version} after {last[3]}")
        for k, trajectory in enumerate(ids):
            before = None if last is None else last[:3]
            self._frame(environment, before, trajectory, steps[k])
            number = trajectory & ((1 << EPISODE_BITS) - 1)
            expected = episode_seed(self._seed, environment, number) % MODULUS
            require(seeds[k] == expected, f"{trajectory} has another episode's frames")
            last = (trajectory, steps[k], dones[k], version)
            self.counts["episodes"] += dones[k]
        assert last is not None
        self._last[environment] = last

    def _frame(
        self,
        environment: int,
        before: tuple[int, int, bool] | None,
        trajectory: int,
        step: int,
    ) -> None:
        location = f"environment {environment}, trajectory {trajectory}, step {step}"
        if before is None:
            require(step == 0, f"{location}: the first frame does not begin an episode")
            return
        former, former_step, ended = before
        if trajectory == former:
            require(step == former_step + 1, f"{location}: follows step {former_step}")
            require(not ended, f"{location}: continues after its end")
            return
        require(trajectory > former, f"{location}: follows trajectory {former}")
        require(step == 0, f"{location}: does not begin at step 0")
        if not ended:
            self._open.add(former)


@final
class Leaks:
    """Compares processes, open files and memory of the trainer between rounds."""

    def __init__(self) -> None:
        """Start the clock."""
        self._begin = time.monotonic()
        self._seen: list[tuple[float, int, int, float]] = []

    def look(self, *, warm: bool) -> None:
        """Check that no worker is left after a round, and measure if ``warm``.

        Args:
            warm: whether one round of each kind was run before.
        """
        gc.collect()
        process = psutil.Process()
        workers = [p for p in process.children(recursive=True) if _is_worker(p)]
        require(not workers, f"workers are left: {workers}")
        if warm:
            minutes = (time.monotonic() - self._begin) / 60
            memory = process.memory_info().rss / 2**20
            children = len(process.children(recursive=True))
            self._seen.append((minutes, children, process.num_fds(), memory))

    def judge(self) -> list[str]:
        """Return a sentence for each resource that has grown."""
        if len(self._seen) < 2:
            return []
        leaks: list[str] = []
        _, children, files, memory = self._seen[0]
        if self._seen[-1][1] > children:
            leaks.append(f"processes grew from {children} to {self._seen[-1][1]}")
        if self._seen[-1][2] > files + 2:
            leaks.append(f"open files grew from {files} to {self._seen[-1][2]}")
        growth = self._seen[-1][3] - memory
        if growth > NOISE and self._slope() > MAX_GROWTH:
            leaks.append(f"memory grows by {self._slope():.1f} MiB per minute")
        return leaks

    def describe(self) -> str:
        """Return the measurements of the first and the last warm round."""
        if len(self._seen) < 2:
            return "Too few rounds to tell whether processes, files or memory grow."
        first, last = self._seen[0], self._seen[-1]
        return (
            f"processes {first[1]} -> {last[1]}, open files {first[2]} -> {last[2]}, "
            f"memory {first[3]:.0f} -> {last[3]:.0f} MiB "
            f"({self._slope():+.1f} MiB per minute) over {len(self._seen)} rounds"
        )

    def _slope(self) -> float:
        """Return MiB per minute, from a linear fit over all rounds."""
        times = torch.tensor([sample[0] for sample in self._seen])
        memory = torch.tensor([sample[3] for sample in self._seen])
        spread = times - times.mean()
        return float((spread * memory).sum() / (spread * spread).sum())


def _is_worker(process: psutil.Process) -> bool:
    try:
        name = Path(f"/proc/{process.pid}/comm").read_text()
    except OSError:
        return False
    return name.startswith("marl-worker") and process.status() != psutil.STATUS_ZOMBIE
