"""Collects and compares one combination of world, policy, collector and options."""

import copy
import io
import os
import signal
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from oracle_delivery import IDS, MASK, Delivery
from oracle_policies import KINDS, WithSettings
from oracle_reference import Ended, Frame, Key, ReferenceWorker
from oracle_worlds import Plain, World, curriculum
from support.internals import pool_of
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn

from marl_collect.buffers.compact_observations import restore_next
from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.errors import PolicyError
from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.policies.pool import PolicyPool

TRAINER = ("Collector", "serial", "parallel", "halves")
"""Collectors whose policy acts in this process."""
WORKERS = ("sync", "nested", "async", "ray")
"""Those whose policy acts in workers."""
_SECONDS = 60.0
"""Without progress, after which a process counts as hung."""
Table = dict[Key, torch.Tensor]


class MismatchError(AssertionError):
    """A collector's data differ from the reference's."""


@dataclass(frozen=True, repr=False)
class Case(Plain):
    """What is collected. Its repr is the code that makes it again.

    Attributes:
        world: the environments.
        policy: name of a kind in ``oracle_policies.KINDS``.
        source: ``"policy"``, if the collector gets it; ``"factory"`` or ``"list"``, if
            workers build it. With a list each has weights of its own.
        collector: ``"Collector"``; a Collector over ``"serial"`` or ``"parallel"``
            environments (``"halves"``: in two groups); ``"sync"`` (``"nested"``: with
            parallel environments in each worker), ``"async"`` or ``"ray"``.
        workers: how many; of a Collector's environments, how many times ``each``.
        each: environments per worker.
        frames: of each environment in a batch.
        seed: the collector's.
        events: what happens after each batch; one more batch follows the last.
        options: of the collector.
        fewer: by so many frames the last worker's rows are shorter than the others'.
        deterministic: ``exploration_type=DETERMINISTIC``.
        hold: whether batches are held, and compared with copies in the end.
        bounded: whether ``total_frames`` ends it with the last batch.
        ranks: number of processes of the job.
        rank: which of them this is: earlier ranks have the first environments.
        level: of the curriculum at the start; None without a curriculum.
    """

    world: World = field(default_factory=World)
    policy: str = "function"
    source: str = "policy"
    collector: str = "Collector"
    workers: int = 1
    each: int = 1
    frames: int = 4
    seed: int = 0
    events: tuple[tuple[Any, ...], ...] = ((),)
    options: Mapping[str, Any] = field(default_factory=dict)
    fewer: int = 0
    deterministic: bool = False
    hold: bool = False
    bounded: bool = False
    ranks: int = 1
    rank: int = 0
    level: int | None = None


def check(case: Case) -> int:
    """Collect, and compare every key of every frame with the reference.

    Returns:
        How many frames were compared.

    Raises:
        MismatchError: saying which key of which frame differs.
    """
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(case.seed)
        run = _Run(case)
        try:
            return run.all()
        except PolicyError:
            if not run.kind.refused:
                raise
            return run.compared
        finally:
            run.close()


class _Run:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.kind = KINDS[case.policy]
        self.world = case.world
        if ("crash",) in [event for events in case.events for event in events]:
            self.folder = TemporaryDirectory()
            self.world = replace(case.world, crash=f"{self.folder.name}/crash")
        self.policy = self.kind.build(case.world)
        pristine = copy.deepcopy(self.policy)
        self.built = [copy.deepcopy(pristine) for _ in range(case.workers)]
        if case.source == "list":
            for index, policy in enumerate(self.built):
                for _ in range(index):
                    change(policy)
        self.version, self.level = 0, case.level
        self.levels = {case.level}
        self.compared = 0
        self.held: list[tuple[Any, Table]] = []
        self.buffer: list[Any] = []
        self.collector = self.start(case.seed)
        model = None if case.policy.startswith("random") else pristine
        total = case.workers * case.each
        size = case.each if case.collector in WORKERS else total
        self.begin = case.rank * total
        self.workers = [
            ReferenceWorker(
                case.world,
                model if case.source == "policy" else self.built[first // size],
                range(self.begin + first, self.begin + first + size),
                case.seed,
                limit=case.options.get("max_frames_per_traj"),
                reads_init=self.kind.reads_init,
                lingers=self.kind.lingers,
            )
            for first in range(0, total, size)
        ]
        workers = case.workers if case.collector in WORKERS else 1
        self.delivery = Delivery(case.options, workers)
        self.published = [0] * len(self.workers)
        self.acting = [0] * len(self.workers)
        self.ahead: list[tuple[int, int | None] | None] = [None] * len(self.workers)
        # A batch that is being collected sees no calls.
        self.collecting = False
        self.calls: list[tuple[int, Sequence[int]]] = []
        self.loaded: dict[int, int] = {}  # What calls have done before a state.
        self.resumed = 0
        self.weights = {0: self.parameters()}
        self.collected = 0
        # Each with the frame of its batch in which it ended.
        self.ended: list[tuple[int, Ended]] = []
        self.uncertain = False
        self.killed: set[int] = set()
        self.restarts = 0

    # The collector

    def start(self, seed: int) -> Any:
        case = self.case
        total = case.workers * case.each
        environments = case.each if case.collector == "async" else total
        frames = case.frames * environments
        per_batch: int | list[int] = frames - (environments > 1)
        if case.fewer:
            per_batch = [
                self.frames_of(worker) * case.each for worker in range(case.workers)
            ]
            frames = sum(per_batch)
        options: dict[str, Any] = dict(case.options) | {
            # Rounded up, so every environment contributes the same number of frames.
            "frames_per_batch": per_batch,
            "seed": seed,
        }
        if case.bounded:
            # Reached by the last frame of the last batch.
            options["total_frames"] = frames * (len(case.events) + 1) - (frames > 1)
        options |= self.more_options()
        one_process = case.collector not in WORKERS
        factory = self.world.factory(total if one_process else case.each)
        # A simulator has several worlds.
        copies = 1 if case.world.batched else case.each
        if case.collector == "nested":
            factory, copies = partial(ParallelEnv, copies, factory), 1
        if case.collector == "Collector":
            factories = [factory] * (case.workers * copies)
            return Collector(factories, self.policy, **options)
        several: dict[str, Any] = {"num_processes": case.workers, "timeout": _SECONDS}
        batches: dict[str, Any] = {
            "serial": partial(SerialEnv, total, factory),
            "parallel": partial(ParallelEnv, total, factory, **several),
            "halves": partial(ParallelEnv, total, factory, groups=2, **several),
        }
        if case.collector in batches:
            return Collector(batches[case.collector], self.policy, **options)
        options["timeout"] = _SECONDS
        if case.collector == "ray":
            from marl_collect import RayCollector

            team = case.options.get("num_workers_per_collector", 1)
            options |= {"num_collectors": case.workers // team, "sync": True}
            collector_class: Any = RayCollector
        else:
            options |= {"num_workers": case.workers}
            asynchronous = case.collector == "async"
            collector_class = (
                MultiAsyncCollector if asynchronous else MultiSyncCollector
            )
        options["envs_per_worker"] = copies
        if case.source == "policy":
            return collector_class(factory, self.policy, **options)
        build = [partial(copy.deepcopy, policy) for policy in self.built]
        options["policy_factory"] = build if case.source == "list" else build[0]
        return collector_class(factory, **options)

    def more_options(self) -> dict[str, Any]:
        """Return options of which the case has the essence only."""
        case = self.case
        options: dict[str, Any] = {}
        if case.ranks > 1:
            options |= {"rank": case.rank, "world_size": case.ranks}
        if case.level is not None:
            options |= {"curriculum": curriculum, "level": case.level}
        if "replay_buffer" in case.options:
            options["replay_buffer"] = self
        if case.deterministic:
            options["exploration_type"] = InteractionType.DETERMINISTIC
        return options

    def frames_of(self, worker: int) -> int:
        """Return the number of frames in a batch of each environment of a worker."""
        shorter = worker == self.case.workers - 1
        return self.case.frames - self.case.fewer * shorter

    def extend(self, batch: Any) -> None:
        """Receive a batch as the replay buffer."""
        self.buffer.append(batch.clone())

    def close(self) -> None:
        if hasattr(self, "collector"):
            self.collector.shutdown()
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def parameters(self) -> Any:
        if not self.kind.weights:
            return None
        return copy.deepcopy((self.policy.state_dict(), settings_of(self.policy)))

    # Batches

    def all(self) -> int:
        for number in range(len(self.case.events) + 1):
            if number:
                for event in self.case.events[number - 1]:
                    getattr(self, f"do_{event[0]}")(*event[1:])
            self.batch(number)
        if self.case.bounded:
            self.require(self.collector.next() is None, "a batch after the last")
        for batch, copied in self.held:
            for key, expected in copied.items():
                self.require(
                    same(flat(batch)[key], expected), f"a held batch changed at {key}"
                )
        return self.compared

    def batch(self, number: int) -> None:
        """Collect a batch, and compare it."""
        options, location = self.case.options, f"batch {number}"
        collects = "trajs_per_batch" not in options or self.delivery.lacks()
        has_module = isinstance(self.policy, nn.Module) and self.case.source == "policy"
        updates = has_module and options.get("update_at_each_batch")
        if number and collects and updates:
            self.publish()
        batch = self.fetch(number)
        self.seed_torch(number)
        if options.get("compact_obs"):
            batch = restore_next(batch.copy())  # A held batch stays as it is.
        table = flat(batch)
        if self.case.collector == "async":
            worker = self.sender(table)
            rows = self.rows(worker, table)
            self.collected += sum(map(len, rows))
            self.compare(table, rows, location)
        elif options.get("trajs_per_batch"):
            while self.delivery.lacks():
                self.delivery.add(self.slot(None))
            self.compare_table(table, self.delivery.take(), location)
        elif DELIVERIES & set(options):
            self.compare_table(table, self.delivery.shaped(self.slot(None)), location)
        else:
            self.compare(table, self.slot(table), location)
        self.uncertain, self.loaded = False, {}
        self.compare_statistics(location)

    def fetch(self, number: int) -> Any:
        """Return the collector's next batch."""
        self.seed_torch(number)
        before = pool_of(self.collector).pids if self.uncertain else ()
        batch = self.collector.next()
        after = pool_of(self.collector).pids if self.uncertain else ()
        for index, (pid, newest) in enumerate(zip(before, after, strict=True)):
            if pid != newest:
                self.workers[index].restart()
                self.restarts += 1
        if "replay_buffer" in self.case.options:
            self.require(batch is None, "the iterator yields None with a buffer")
            return self.buffer.pop(0)
        if self.case.hold:
            self.held.append((batch, {k: v.clone() for k, v in flat(batch).items()}))
        return batch

    def seed_torch(self, number: int) -> None:
        """Make collector and reference draw the same random numbers."""
        if self.kind.draws == "torch":
            torch.manual_seed(number)

    def sender(self, table: Table) -> ReferenceWorker:
        """Return the worker that an asynchronous batch comes from."""
        environment = int(table["collector", "traj_ids"][0, 0]) >> 32
        index = (environment - self.begin) // self.case.each
        if ("policy_version",) in table:
            # Which weights act depends on timing; their actions do not.
            version = int(table["policy_version",][0, 0])
            in_order = self.acting[index] <= version <= self.version
            self.require(in_order, "versions go back")
            self.published[index] = version
        return self.workers[index]

    def slot(self, table: Table | None) -> list[list[Frame]]:
        """Return the next frames of all environments."""
        # With `init_random_frames` all rows of a batch are random, or none.
        before = len(self.ended)
        rows_by_worker = [self.rows(worker, table) for worker in self.workers]
        rows = [row for rows in rows_by_worker for row in rows]
        # Frame by frame, like one worker with all environments.
        self.ended[before:] = sorted(self.ended[before:], key=lambda pair: pair[0])
        self.collected += sum(map(len, rows))
        self.make_calls()
        self.collecting = "prefetch" in self.case.options
        return rows

    def rows(self, worker: ReferenceWorker, table: Table | None) -> list[list[Frame]]:
        """Return the next frames of a worker's environments."""
        case, options = self.case, self.case.options
        random = self.collected < (options.get("init_random_frames") or 0)
        self.load_weights(worker)
        first = 0 if case.collector == "async" else worker.indices[0] - self.begin
        if options.get("reset_at_each_iter"):
            for k in range(len(worker.envs)):
                worker.begin(k)
        if self.uncertain or not case.world.repeats:
            self.follow(worker, table, first)
        rows: list[list[Frame]] = [[] for _ in worker.indices]
        depends = case.collector == "async" and case.level is not None
        explore = InteractionType.RANDOM
        if case.deterministic:
            explore = InteractionType.DETERMINISTIC
        with torch.no_grad(), set_interaction_type(explore):
            for t in range(self.frames_of(self.workers.index(worker))):
                at = _At(table, first, t, self.noisy)
                corrects = table is not None and not random and self.uncertain_bits
                frames = worker.frames(
                    random=random,
                    recorded=None if case.world.repeats else at,
                    leveled=partial(self.level_in, at) if depends else None,
                    corrected=at.correct if corrects else None,
                )
                for row, frame in zip(rows, frames, strict=True):
                    self.label(frame, self.workers.index(worker))
                    row.append(frame)
                self.ended += [(t, episode) for episode in worker.ended]
                worker.ended = []
        if options.get("set_truncated"):
            for row in rows:
                truncate(row[-1], [g.name for g in case.world.groups])
        return rows

    def level_in(self, at: "_At", k: int) -> int:
        """Return the recorded level of environment k's episode, which was told."""
        level = int(at(k)["collector", "level"])
        self.require(level in self.levels, f"level {level} was never set")
        return level

    @property
    def noisy(self) -> bool:
        """Whether data depend on torch's generator, unknown to the reference."""
        return self.kind.draws == "torch" and not self.acts_itself

    @property
    def uncertain_bits(self) -> bool:
        """Whether uncertain outputs are taken from the recorded frames."""
        return not self.kind.exact or self.noisy

    def label(self, frame: Frame, worker: int) -> None:
        """Add and remove the keys of the collector's ``track_*`` options."""
        if self.case.options.get("track_policy_version"):
            version = torch.tensor(self.acting[worker])
            frame["policy_version",] = version
            frame["next", "policy_version"] = version.clone()
        if self.case.fewer:
            frame[MASK] = torch.tensor(data=True)
        if self.case.options.get("track_traj_ids") is False:
            del frame["collector", "traj_ids"]

    def follow(self, worker: ReferenceWorker, table: Any, first: int) -> None:
        """Begin new episodes where the collector could not resume one."""
        for k, running in enumerate(worker.episodes):
            number = int(table["collector", "traj_ids"][first + k, 0]) & 0xFFFFFFFF
            if number != running:
                self.require(number > running, "an episode's number comes back")
                worker.episodes[k] = number - 1
                worker.begin(k)
                worker.winds[k] = self.loaded.get(first + k, worker.winds[k])

    def compare(self, table: Table, rows: Sequence[list[Frame]], location: str) -> None:
        for b, row in enumerate(rows):
            for t, frame in enumerate(row):
                frame_location = f"{location}, environment {b}, frame {t}"
                actual = {key: value[b, t] for key, value in table.items()}
                self.compare_frame(actual, frame, frame_location)
            padding = {key: value[b, len(row) :] for key, value in table.items()}
            self.compare_padding(padding, f"{location}, environment {b}")

    def compare_padding(self, padding: Table, location: str) -> None:
        """Frames that a shorter row lacks are zeros of no trajectory."""
        for key, value in padding.items():
            blank = -1 if key == IDS else 0
            self.require(bool((value == blank).all()), f"{location}: padding at {key}")

    def compare_statistics(self, location: str) -> None:
        """Compare the counters, and the means over the last hundred episodes."""
        stats = self.collector.stats()
        last = [episode for _, episode in self.ended[-100:]]
        expected: dict[str, Any] = {
            "frames": self.collected,
            "episodes": len(self.ended),
            "policy_version": self.version,
        }
        if self.case.collector in WORKERS and not self.resumed:
            # On Ray, restarts are those of actors.
            name = "worker_restarts" if self.case.collector == "ray" else "restarts"
            expected[name] = self.restarts
        if last:
            count, groups = len(last), self.world.group_map
            means = {
                name: sum(episode.returns[name] for episode in last) / count
                for name in self.world.agents
            }
            expected |= {
                "mean_length": sum(episode.length for episode in last) / count,
                "mean_team_return": sum(means.values()),
                "mean_agent_return": sum(means.values()) / len(means),
            }
            for group, names in groups.items():
                for i, name in enumerate(names):
                    expected[f"{group} {i}"] = means[name]
                returns = [means[name] for name in names]
                expected[f"{group} all"] = sum(returns) / len(returns)
        actual = {name: stats.get(name) for name in expected}
        for group, returns in stats.get("mean_returns", {}).items():
            actual |= {f"{group} {i}": value for i, value in enumerate(returns)}
            actual[f"{group} all"] = stats["mean_group_returns"][group]
        self.require(
            actual == pytest.approx(expected),
            f"{location}: stats() has {actual}, but should have {expected}",
        )

    def compare_table(self, actual: Table, expected: Table, location: str) -> None:
        self.compare_frame(actual, expected, location)
        self.compared += expected["done",].shape[0] - 1

    def compare_frame(self, actual: Frame, expected: Frame, location: str) -> None:
        missing, surplus = (
            expected.keys() - actual.keys(),
            actual.keys() - expected.keys(),
        )
        self.require(not missing, f"{location}: keys missing: {sorted(missing)}")
        self.require(not surplus, f"{location}: keys too many: {sorted(surplus)}")
        for key, value in expected.items():
            other = actual[key]
            if key[-1].endswith("log_prob"):
                other, value = away_from_bounds(expected, key, other, value)
            if not alike(other, value, key, exact=self.kind.exact):
                raise MismatchError(
                    f"{location}: {'/'.join(key)} is\n{show(other)}\nbut should be\n"
                    f"{show(value)}\n{self.case}"
                )
        self.compared += 1

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise MismatchError(f"{message}\n{self.case}")

    # Events

    def do_reset(self, *mask: bool) -> None:
        """Begin new episodes, in all workers or in those chosen."""
        self.collector.reset(list(mask) or None)
        self.drop_batch()
        reset_mask = mask or [True] * len(self.workers)
        for worker, is_meant in zip(self.workers, reset_mask, strict=True):
            worker.level = self.level
            for k in range(len(worker.envs)) if is_meant else ():
                worker.begin(k)
        if not mask:
            self.delivery.unfinished.clear()

    def do_seed(self, seed: int) -> None:
        self.collector.set_seed(seed)
        self.drop_batch()
        for worker in self.workers:
            worker.reseed(seed)
            worker.level = self.level
            for k in range(len(worker.envs)):
                worker.begin(k)
        self.delivery.unfinished.clear()
        self.delivery.complete.clear()

    def drop_batch(self) -> None:
        """Drop a prefetched batch. Nothing undoes calls."""
        self.ahead = [None] * len(self.workers)
        self.make_calls()
        self.collecting = False

    def do_level(self, level: int) -> None:
        self.level = level
        self.levels.add(level)
        self.collector.set_level(level)

    def do_call(self, wind: int, *environments: int) -> None:
        """Call a method of environments, all or some."""
        self.collector.call_env("blow", wind, environments=list(environments) or None)
        total = self.case.workers * self.case.each
        self.calls.append((wind, environments or range(total)))
        if not self.collecting:
            self.make_calls()

    def make_calls(self) -> None:
        """Let the calls act that were made."""
        for wind, environments in self.calls:
            for k in environments:
                worker, row = divmod(k, len(self.workers[0].envs))
                self.workers[worker].envs[row].raw.blow(wind)
        self.calls = []

    def do_train(self) -> None:
        """Change the weights of the module that is trained."""
        change(self.policy)
        if self.acts_itself:
            change(self.workers[0].policy)

    def do_keep(self) -> None:
        """Keep the weights of the trainer's policy as a past version of it."""
        acting = [worker.policy for worker in self.workers if self.acts_itself]
        for policy in (self.policy, *acting):
            for module in policy.modules():
                if isinstance(module, PolicyPool):
                    module.update()

    def do_update(self, *worker_ids: int) -> None:
        """Train, and publish the weights, to all workers or to some."""
        self.do_train()
        self.do_publish(*worker_ids)

    def do_publish(self, *worker_ids: int) -> None:
        self.collector.update_policy_weights_(
            None if self.case.source == "policy" else self.policy,
            worker_ids=list(worker_ids) or None,
        )
        self.publish(*worker_ids)

    def publish(self, *worker_ids: int) -> None:
        """Note that the current weights were published."""
        self.version += 1
        self.weights[self.version] = self.parameters()
        for index in worker_ids or range(len(self.workers)):
            self.published[index] = self.version

    def load_weights(self, worker: ReferenceWorker) -> None:
        """Give a worker the weights that it has to act with now."""
        index = self.workers.index(worker)
        before = self.acting[index]
        newest, pending = (self.published[index], self.level), self.ahead[index]
        # With prefetch the command was sent while the previous batch was delivered.
        self.acting[index], worker.level = newest if pending is None else pending
        if self.case.options.get("prefetch"):
            self.ahead[index] = newest
        weights = self.weights[self.acting[index]]
        if before != self.acting[index] and weights and not self.acts_itself:
            worker.policy.load_state_dict(weights[0])
            for module, values in zip(
                with_settings(worker.policy), weights[1], strict=True
            ):
                module.restore(copy.deepcopy(values))

    @property
    def acts_itself(self) -> bool:
        """Whether the module that is trained is the one that acts."""
        return self.case.collector in TRAINER

    def do_crash(self) -> None:
        """Let the first environment that steps end its worker, within the batch."""
        Path(self.world.crash).touch()
        self.uncertain = True

    def do_kill(self, index: int) -> None:
        """Kill a worker between two batches."""
        pid = pool_of(self.collector).pids[index]
        if pid in self.killed:
            return  # The collector replaces it in the next batch.
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        self.workers[index].restart()
        self.restarts += 1

    def do_resume(self) -> None:
        """Continue in another collector, through the file of a checkpoint.

        It has collected before, with other weights of the same or a later version, and
        of that nothing may be left.
        """
        file = io.BytesIO()
        if self.case.collector == "Collector":
            self.collector.shutdown()  # It gives its state afterwards too.
        torch.save(self.collector.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
        self.collector.shutdown()
        self.collector = self.start(self.case.seed + 1)
        if self.kind.weights and not self.kind.keeps:
            other = copy.deepcopy(self.policy)
            for _ in range(self.version + self.resumed):
                change(other)
                self.collector.update_policy_weights_(other)
        if not self.case.options.get("replay_buffer"):
            self.collector.next()
        self.collector.reset()
        self.collector.load_state_dict(state)
        self.resumed += 1
        # A prefetched batch is collected again, with the newest weights.
        self.ahead = [None] * len(self.workers)
        self.collecting = False
        winds = [env.raw.wind for worker in self.workers for env in worker.envs]
        self.loaded = dict(enumerate(winds))


def change(policy: Any) -> None:
    """Change the weights like a training step, and the settings of the oracle's own."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.25)
    for module in with_settings(policy):
        module.change()


def with_settings(policy: Any) -> list[Any]:
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return [module for module in modules if isinstance(module, WithSettings)]


def settings_of(policy: Any) -> list[Any]:
    return [module.settings() for module in with_settings(policy)]


@dataclass
class _At:
    """A recorded frame of a worker's environments."""

    table: Any
    first: int
    frame: int
    noisy: bool = False

    def __call__(self, k: int) -> Frame:
        """Return the frame of environment k."""
        return {key: v[self.first + k, self.frame] for key, v in self.table.items()}

    def correct(self, k: int, frame: Frame) -> None:
        """Take last bits and values that depend on noise from the recorded frames."""
        for key, value in frame.items():
            if key not in self.table:
                continue
            if self.noisy and key[-1] in NOISY:
                frame[key] = self.table[key][self.first + k, self.frame].clone()
            elif value.is_floating_point():
                recorded = self.table[key][self.first + k, self.frame]
                if alike(recorded, value, key, exact=False):
                    frame[key] = recorded.clone()


NOISY = ("action", "dropped", "log_prob")
"""Outputs that depend on numbers from torch's generator."""
DELIVERIES = {"split_trajs", "trajs_per_batch", "cat_results", "replay_buffer"}


def truncate(frame: Frame, groups: list[str]) -> None:
    """Flag a frame as ``set_truncated`` does."""
    for at in [(), *((group,) for group in groups)]:
        done = frame["next", *at, "done"]
        frame["next", *at, "truncated"] |= ~done
        done[:] = True


def flat(batch: Any) -> Table:
    """Return every tensor of a batch."""
    items = batch.items(include_nested=True, leaves_only=True)
    return {(key,) if isinstance(key, str) else tuple(key): v for key, v in items}


def alike(
    actual: torch.Tensor, expected: torch.Tensor, key: Key, *, exact: bool
) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if exact or not expected.is_floating_point():
        return same(actual, expected)
    # The log density of a squashed distribution is steep at the bounds of an action.
    tolerance = 1e-2 if key[-1].endswith("log_prob") else 1e-5
    return bool(
        torch.isclose(
            actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True
        ).all()
    )


def away_from_bounds(
    frame: Frame, key: Key, actual: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Omit the densities of actions at a bound, where a last bit has a large effect."""
    action = frame[key[0], "action"]
    if not action.is_floating_point() or actual.shape != expected.shape:
        return actual, expected
    near = action.abs().amax(-1) > 0.999
    return actual.masked_fill(near, 0), expected.masked_fill(near, 0)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def show(value: torch.Tensor) -> str:
    return f"{value.tolist()} ({value.dtype}, {list(value.shape)})"
