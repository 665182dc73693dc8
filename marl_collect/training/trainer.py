"""One run: collects, trains, evaluates, saves, and resumes."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from marl_collect.collectors import MultiSyncCollector
from marl_collect.core.description import EnvDescription
from marl_collect.core.torch_defaults import torch_threads
from marl_collect.interop.loggers import RunLogger, check_logger
from marl_collect.models.saved_policy import BEST, CONFIG, policy_state
from marl_collect.processes.linux import cpu_seconds_of
from marl_collect.programs.interruption import Interruption
from marl_collect.training import checkpoint
from marl_collect.training.allocator import keep_freed_memory
from marl_collect.training.episode_batches import EpisodeBatches
from marl_collect.training.evaluating import (
    EvaluationRecord,
    evaluate_policy,
    evaluator_of,
)
from marl_collect.training.learner import Learner, learner_of
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.run_folder import (
    EVALUATIONS,
    LAST,
    LOGGER,
    RESULT,
    EventWriter,
    RunFolder,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """The environment of a run.

    Attributes:
        name: for folders and tables.
        factory: builds the environment.
        description: of the environment.
        env_kwargs: keyword arguments of the environment, for ``config.json``.
    """

    name: str
    factory: Callable[[], Any]
    description: EnvDescription
    env_kwargs: dict[str, Any]


class Watcher:
    """Is notified of a run's progress. This one does nothing."""

    def progress(self, frames: int, row: dict[str, float]) -> None:
        """Handle the metrics of a batch, after training on it."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """Handle an evaluation."""

    def interrupted(self) -> None:
        """Tell that a signal arrived, and that the batch is finished and saved."""

    def finished(self) -> None:
        """Handle the end of a run that has its result."""

    def failed(self, error: Exception) -> None:
        """Handle the end of a run that cannot go on."""


def make_learner(
    description: EnvDescription, setup: Setup, options: TrainingOptions, seed: int
) -> Learner:
    """Build the learner of a setup, with the weights of ``options.initial``, if any.

    Raises:
        TypeError: if the learner does not support the environment's spaces.
        ValueError: if it does not support an option, or if the initial weights do not
            fit.
        FileNotFoundError: if there are no initial weights at the path.
    """
    learner = learner_of(setup.algorithm)(description, setup, options, seed)
    learner.load_initial()  # For those of users, which need not do so.
    return learner


@final
class Trainer:
    """Trains one setup with one seed, in one folder.

    Args:
        task: environment to train on.
        setup: algorithm, sharing and centralisation.
        options: of the run.
        seed: of weights, episodes and minibatches.
        path: folder of the run; training resumes from its checkpoint, if any.
        watcher: is notified of the progress.
        interruption: of the command that runs this. A signal then ends the run after
            the batch in progress, which is saved; a second signal ends it at once.
            Without it, Ctrl-C ends the run at once.
        logger: name of one of TorchRL's loggers, which gets the metrics; see
            ``interop/loggers.py``. None: events for TensorBoard, if tensorboardX is
            installed.

    Raises:
        ValueError: if there is no such logger.
        MissingPackageError: if a package of the logger is missing.
    """

    def __init__(
        self,
        task: Task,
        setup: Setup,
        options: TrainingOptions,
        seed: int,
        path: Path,
        watcher: Watcher | None = None,
        interruption: Interruption | None = None,
        logger: str | None = None,
    ) -> None:
        if logger is not None:
            check_logger(logger)
        self._logger = logger
        self.task = task
        self.setup = setup
        self.options = options
        self.seed = seed
        self.folder = RunFolder(path)
        self._watcher = watcher or Watcher()
        self._interruption = interruption or Interruption()
        self._saved = time.monotonic()
        self._evaluations: list[EvaluationRecord] = []
        self._rows = 0
        self._seconds = {"collecting": 0.0, "training": 0.0, "evaluating": 0.0}
        self._cpu_seconds = 0.0

    @property
    def finished(self) -> bool:
        """Whether the folder has the result of a finished run."""
        return self.folder.read_json(RESULT) is not None

    def run(self) -> dict[str, Any]:
        """Train until all frames are collected, and return the result.

        The result of a finished run is read from its folder.

        Raises:
            ValueError: if the folder belongs to another run.
            NotFiniteError: if a reward or a gradient is NaN or infinite.
            BlockingIOError: if another process writes to the folder.
            KeyboardInterrupt: after a signal; the run can be resumed.
        """
        keep_freed_memory()
        with self.folder.lock():
            return self._run()

    def _run(self) -> dict[str, Any]:
        done = self.folder.read_json(RESULT)
        self._check_config()
        if done is not None:
            result: dict[str, Any] = done
            return result
        # This process may have trained other runs before; its workers are new.
        self._cpu_before = {os.getpid(): cpu_seconds_of(os.getpid())}
        with torch_threads(self.options.threads):
            options = self.options
            if self.folder.has_progress:  # The checkpoint has the weights.
                options = replace(options, initial=None)
            self._learner = make_learner(
                self.task.description, self.setup, options, self.seed
            )
            episodes = self._learner.episodes_per_batch
            with (
                self._open_log() as self._events,
                MultiSyncCollector(
                    self.task.factory,
                    self._learner.policy,
                    frames_per_batch=self._frames_at_once(),
                    total_frames=options.frames if episodes is None else None,
                    num_workers=options.workers,
                    envs_per_worker=options.envs_per_worker,
                    max_frames_per_traj=options.max_frames_per_traj,
                    init_random_frames=self._learner.warm_up_frames,
                    prefetch=self._learner.prefetch,
                    seed=self.seed,
                    # A run is of one process, also if torchrun has started it.
                    rank=0,
                    world_size=1,
                ) as collector,
                evaluator_of(
                    self._learner.policy, self.task.factory, options
                ) as self._evaluator,
            ):
                self._processes = collector, self._evaluator
                self._collector: MultiSyncCollector | EpisodeBatches = collector
                if episodes is not None:
                    self._collector = EpisodeBatches(collector, episodes)
                self._restore()
                self._loop()
                return self._finish()

    def _frames_at_once(self) -> int:
        """Return how many frames are collected at a time.

        No more than the episodes of a batch can have.
        """
        options = self.options
        limit = options.max_frames_per_traj or self.task.description.time_limit
        if self._learner.episodes_per_batch is None or limit is None:
            return options.frames_per_batch
        most = self._learner.episodes_per_batch * limit
        return min(options.frames_per_batch, most)

    def _open_log(self) -> EventWriter | RunLogger:
        """Open the log of the metrics; that of a resumed run continues."""
        if self._logger is None:
            return EventWriter(self.folder.path)
        state = self.folder.read_json(LOGGER) if self.folder.has_progress else None
        if state is not None and state["logger"] != self._logger:
            state = None
        run = f"{self.setup.name}/seed_{self.seed}"
        log = RunLogger(self._logger, self.folder.path, run, self.task.name, state)
        if state is None:
            log.settings(self._config())
            self.folder.write_json(LOGGER, log.state_dict())
        return log

    def _loop(self) -> None:
        self._evaluate_if_due()
        while self._collector.frames < self.options.frames:
            with self._interruption.deferred(self._watcher.interrupted):
                self._train()
                late = time.monotonic() - self._saved > checkpoint.SAVE_SECONDS
                if late or self._interruption.happened:
                    self._save()
            self._interruption.raise_if_happened()
            self._evaluate_if_due()

    def _train(self) -> None:
        """Collect a batch and train on it."""
        learner, collector = self._learner, self._collector
        before = time.perf_counter()
        batch = collector.next()
        assert batch is not None  # There are frames left.
        self._seconds["collecting"] += time.perf_counter() - before
        before = time.perf_counter()
        metrics = learner.update(batch, collector.frames / self.options.frames)
        self._seconds["training"] += time.perf_counter() - before
        del batch
        collector.update_policy_weights_()
        self._log(metrics)

    def _evaluate_if_due(self) -> None:
        frames = self._collector.frames
        if self._evaluations:
            last = self._evaluations[-1].frames
            ended = frames >= self.options.frames
            if last == frames or (frames < self._due(last) and not ended):
                return
            self._save()  # An evaluation can take long.
        self._evaluate(frames)
        if frames:  # Without a checkpoint a run begins again.
            self._save()

    def _due(self, frames: int) -> int:
        """Return the first multiple of the interval after ``frames``."""
        interval = self.options.eval_interval
        return (frames // interval + 1) * interval

    def _log(self, metrics: dict[str, float]) -> None:
        frames, stats = self._collector.frames, self._collector.stats()
        row: dict[str, float] = {
            "frames": frames,
            "episodes": stats["episodes"],
            "return_team": stats.get("mean_team_return", float("nan")),
            "return_agent": stats.get("mean_agent_return", float("nan")),
            "episode_length": stats.get("mean_length", float("nan")),
            **{f"seconds_{name}": round(s, 3) for name, s in self._seconds.items()},
            **metrics,
        }
        self.folder.add_row(row)
        self._rows += 1
        self._events.add(row, frames)
        self._watcher.progress(frames, row)

    def _evaluate(self, frames: int) -> None:
        before = time.perf_counter()
        record = self._evaluated(frames)
        self._seconds["evaluating"] += time.perf_counter() - before
        # Loggers have queues, whose locks an exception at any time would break.
        with self._interruption.deferred():
            self._note(record)
        self._interruption.raise_if_happened()

    def _note(self, record: EvaluationRecord) -> None:
        """Write an evaluation down, and the weights if they are the best so far."""
        # Untrained weights are the best as long as there are no others.
        trained = [w.team for w in self._evaluations if w.frames]
        best = max(trained, default=float("-inf"))
        self._evaluations.append(record)
        # Of equal returns the newest weights: in a zero-sum game all are equal.
        if record.team >= best:
            self.folder.write_checkpoint(
                BEST,
                self._described()
                | {
                    "frames": record.frames,
                    "networks": self._learner.state_dict()["networks"],
                },
            )
        self._write_evaluations()
        self._events.add(
            {
                "evaluation/return_team": record.team,
                "evaluation/return_agent": record.agent,
                "evaluation/episode_length": record.length,
            },
            record.frames,
        )
        self._watcher.evaluated(record)

    def _evaluated(self, frames: int, *, final: bool = False) -> EvaluationRecord:
        return evaluate_policy(
            self._evaluator,
            self.options,
            self.folder,
            self._config(),
            frames=frames,
            final=final,
        )

    def _write_evaluations(self) -> None:
        self.folder.write_json(EVALUATIONS, [asdict(w) for w in self._evaluations])

    def _best(self) -> Any:
        """Return the checkpoint of the best evaluation.

        Raises:
            ValueError: if it is missing or damaged.
        """
        saved = self.folder.read_checkpoint(BEST)
        if saved is None:
            raise ValueError(
                f"{self.folder.path / BEST} is missing. Delete the folder to train "
                "this run again."
            )
        return saved

    def _described(self) -> dict[str, Any]:
        return policy_state(self.task.description, self._learner.policy_options)

    def _count_cpu_seconds(self) -> None:
        """Add the CPU time of this process and of its workers since the last call."""
        pids = (os.getpid(), *(p for of in self._processes for p in of.worker_pids))
        spent = {pid: cpu_seconds_of(pid) for pid in pids}
        before, self._cpu_before = self._cpu_before, spent
        self._cpu_seconds += sum(s - before.get(pid, 0.0) for pid, s in spent.items())

    def _save(self) -> None:
        self._count_cpu_seconds()
        trained = self._learner.state_dict()
        state = self._described() | {
            "networks": trained["networks"],  # For load_policy; saved once.
            "learner": trained,
            "collector": self._collector.state_dict(),
            "rows": self._rows,
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "windows": [asdict(w) for w in self._evaluations],
        }
        self.folder.write_checkpoint(LAST, state)
        if isinstance(self._events, RunLogger):
            self._events.write()
        self._saved = time.monotonic()

    def _restore(self) -> None:
        state = self.folder.read_checkpoint(LAST)
        if state is None:
            self.folder.keep_rows(0)
            return
        try:
            self._learner.load_state_dict(state["learner"])
            # Last, because it notes that the workers have these weights.
            self._collector.load_state_dict(state["collector"])
            self._rows = state["rows"]
            self._seconds = state["seconds"]
            self._cpu_seconds = state["cpu_seconds"]
            self._evaluations = [EvaluationRecord(**w) for w in state["windows"]]
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{self.folder.path / LAST} is damaged, or of another version "
                f"({type(error).__name__}: {error}). Delete the folder to train this "
                "run again."
            ) from error
        self.folder.keep_rows(self._rows)
        self._best()  # Training takes long: a missing file is reported before it.
        self._write_evaluations()
        _LOG.info("Resumed %s at %d frames.", self.folder.path, self._collector.frames)

    def _finish(self) -> dict[str, Any]:
        """Evaluate the best and the last weights on new episodes; write the result."""
        frames = self._evaluations[-1].frames
        last = self._evaluated(frames, final=True)
        best, saved = last, self._best()
        if saved["frames"] != frames:
            self._learner.policy.load_state_dict(saved["networks"]["policy"])
            best = self._evaluated(saved["frames"], final=True)
        self._count_cpu_seconds()
        known = math.isfinite(self._cpu_seconds)
        parameters = sum(p.numel() for p in self._learner.policy.parameters())
        row = self.folder.rows()[-1]
        names = ("return_team", "return_agent", "episode_length")
        result = {
            "frames": frames,
            "best": asdict(best),
            "last": asdict(last),
            # Means of the last hundred training episodes, with sampled actions.
            "training": {name: row[name] for name in names if math.isfinite(row[name])},
            "seconds": {name: round(s, 3) for name, s in self._seconds.items()},
            "cpu_seconds": round(self._cpu_seconds, 2) if known else None,
            "policy_parameters": parameters,
            "updates": self._learner.updates,
        }
        self.folder.write_json(RESULT, result)
        return result

    def _config(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "env_kwargs": self.task.env_kwargs,
            "setup": self.setup.name,
            "seed": self.seed,
            "options": asdict(self.options),
        }

    def _check_config(self) -> None:
        config = self._config()
        if not self.folder.has_progress:
            self.folder.write_json(CONFIG, config)
            return
        before = self.folder.read_json(CONFIG)
        if before is None:
            raise ValueError(
                f"{self.folder.path / CONFIG} is missing, so the settings of this run "
                "are unknown. Delete the folder to train it again."
            )
        plain = json.loads(json.dumps(config))
        if not isinstance(before, dict):
            raise ValueError(  # noqa: TRY004 - the file is wrong, not an argument
                f"{self.folder.path / CONFIG} is damaged: it holds {before!r}."
            )
        before["options"] = _with_defaults(before.get("options"))
        different = list(differences(before, plain))
        if different:
            raise ValueError(
                f"{self.folder.path} has a run with other settings: "
                f"{'; '.join(different)}. Choose another folder, or pass the same "
                "arguments to resume that run."
            )


def _with_defaults(saved: Any) -> Any:
    """Return the options of a run, with the defaults of those that are newer than it.

    So a new option needs a default that changes nothing.
    """
    defaults = json.loads(json.dumps(asdict(TrainingOptions())))
    if not isinstance(saved, dict):
        return saved
    parts = {
        name: part | saved[name]
        for name, part in defaults.items()
        if isinstance(part, dict) and isinstance(saved.get(name), dict)
    }
    return defaults | saved | parts


def differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Yield each setting that differs between two configurations, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            inner = f"{name}.{key}".lstrip(".")
            yield from differences(there.get(key), here.get(key), inner)
    elif there != here:
        yield f"{name} is {there!r} there and {here!r} here"
