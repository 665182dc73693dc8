"""Where the time of a training run goes, and what each part would cost at its limit.

    python benchmarks/training_profile.py coins
    python benchmarks/training_profile.py multiwalker_v9 --set ppo.epochs=4

Runs the trainer of ``marl-collect compare`` with IPPO in one thread, under cProfile.
The environments step in this process instead of workers, so the table has the processor
time of both. The first batch, evaluations and checkpoints are left out; a frame of an
evaluation costs as much as a collected one. Parts of at least 3 % are printed.

The limit of an environment is a bare loop, over our adapter or the library's interface,
whichever takes less time. The limit of networks is their floating-point operations at
the speed of a large float32 matrix product; of storing and of minibatches, a copy; of
the optimiser, its reads and writes at the speed of a copy. The limit of other parts is
0: a faster program could do without them.

The profiler slows Python code, as the last line shows. It pauses while environments
step, because theirs would take twice as long.
"""

import argparse
import cProfile
import inspect
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import torch
from cases import envs
from harness.turns import Alternative, measure
from torch.utils.flop_counter import FlopCounterMode
from torchrl.objectives import ClipPPOLoss

from marl_collect import Collector, describe
from marl_collect.buffers.frame_writer import SlotWriter
from marl_collect.cli.tasks import find_factory, parse_settings
from marl_collect.core.batch import SerialBatch
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.training import ppo, trainer
from marl_collect.training.advantages import write_advantages
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.presets import preset, preset_env_kwargs

SETUP = Setup("ippo")
SMALLEST = 0.03
"""Share of the run's time below which a part is not printed."""
PARTS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "acting": (FusedRunner.act, FusedRunner.begin, ModuleRunner.act),
    "storing frames": (SlotWriter.stepped, SlotWriter.flush),
    "values before the update": (ppo.PPOLearner._write_values,),  # noqa: SLF001
    "advantages": (write_advantages,),
    "forward: policy": (ClipPPOLoss._log_weight,),  # noqa: SLF001
    "forward: critic": (ClipPPOLoss.loss_critic,),
    "backward": (torch.Tensor.backward,),
    "clipping the gradient": (torch.nn.utils.clip_grad_norm_,),
    "optimiser": (torch.optim.Adam.step,),
    "loss around the networks": (ppo.PPOLearner.loss,),
    "minibatches and metrics": (ppo.PPOLearner.update,),
}
"""Profiled functions by part."""
WITHIN: Mapping[str, tuple[str, ...]] = {
    "loss around the networks": ("forward: policy", "forward: critic"),
    "minibatches and metrics": tuple(PARTS)[2:-1],
}
"""Parts that other parts contain, and whose times are subtracted from them."""
STEPS, RESETS = "environment: steps", "environment: resets"


@final
class Profiler:
    """Profiles everything but environments, whose time it takes itself.

    Attributes:
        resets: number of episodes that began.
    """

    def __init__(self) -> None:
        self._profile = cProfile.Profile(time.process_time, builtins=False)
        self._times = {STEPS: 0.0, RESETS: 0.0}
        self._stack = ExitStack()
        self.resets = 0

    def __enter__(self) -> None:
        step, reset = SerialBatch._step, SerialBatch.reset  # noqa: SLF001
        patched: dict[str, Any] = {
            "_step": lambda batch, rows: self._paused(STEPS, step, batch, rows),
            "reset": lambda batch, *rows: self._paused(RESETS, reset, batch, *rows),
        }
        self._stack.enter_context(patch.multiple(SerialBatch, **patched))
        self._profile.enable()

    def __exit__(self, *_: object) -> None:
        self._profile.disable()
        self._stack.close()

    def _paused(self, part: str, call: Callable[..., Any], *args: Any) -> None:
        self._profile.disable()
        begin = time.process_time()
        call(*args)
        self._times[part] += time.process_time() - begin
        self.resets += len(args[1]) if part == RESETS else 0
        self._profile.enable()

    def seconds(self) -> dict[str, float]:
        """Return the times of the parts, which add up."""
        stats: Any = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]
        times = {(name, line): entry[3] for (name, line, _), entry in stats.items()}
        parts = {
            part: sum(times.get(_place(function), 0.0) for function in functions)
            for part, functions in PARTS.items()
        }
        for part, inner in WITHIN.items():
            parts[part] -= sum(parts[name] for name in inner)
        return self._times | parts


def train(task: trainer.Task, options: TrainingOptions, measured: Any) -> float:
    """Train; return the processor time of all batches but the first, in seconds.

    Args:
        task: to train on.
        options: of the run.
        measured: a context manager around each of these batches.
    """
    seconds: list[float] = []
    train_batch = trainer.Trainer._train  # noqa: SLF001

    def timed(*args: Any) -> None:
        with measured if seconds else ExitStack():
            begin = time.process_time()
            train_batch(*args)
            seconds.append(time.process_time() - begin)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(trainer, "MultiSyncCollector", in_process),
        patch.object(trainer.Trainer, "_train", timed),
    ):
        trainer.Trainer(task, SETUP, options, 0, Path(folder)).run()
    return sum(seconds[1:])


def in_process(factory: Any, policy: Any, **options: Any) -> Collector:
    """Return a collector whose environments step in this process."""
    count = options.pop("num_workers") * options.pop("envs_per_worker")
    del options["prefetch"]
    return Collector([factory] * count, policy, **options)


def _place(function: Callable[..., Any]) -> tuple[str, int]:
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno


def limits(
    task: trainer.Task, options: TrainingOptions, resets: float
) -> dict[str, float]:
    """Return the seconds per frame that parts take at their limits.

    Args:
        task: to train on.
        options: of the run.
        resets: episodes per frame.
    """
    learner: Any = trainer.make_learner(task.description, SETUP, options, 0)
    count = options.workers * options.envs_per_worker
    frames = options.frames_per_batch
    with Collector(
        [task.factory] * count, learner.policy, frames_per_batch=frames, seed=0
    ) as collector:
        batch = collector.next()
        assert batch is not None
        batch = batch.clone()
    epochs, size = options.ppo.epochs, options.ppo.minibatch_frames
    minibatch = learner.prepare(batch)[:size]
    matrix = torch.rand(2048, 2048)
    speed = 2 * 2048**3 / _seconds(lambda: matrix @ matrix)
    some = batch.reshape(-1)[:100]
    policy, critic = (
        _flops(partial(net, some.clone())) / (speed * some.numel())
        for net in (learner.policy, learner.critic)
    )
    loss = learner.loss(minibatch)[0]
    backward = _flops(loss.backward) / (speed * minibatch.numel())
    weights = torch.cat([p.detach().flatten() for p in learner.parameters()])
    return {
        STEPS: environment(task, envs.step),
        RESETS: resets * environment(task, envs.reset),
        "acting": policy,
        "storing frames": _seconds(batch.clone) / batch.numel(),
        "values before the update": 2 * critic,
        "forward: policy": epochs * policy,
        "forward: critic": epochs * critic,
        "backward": epochs * backward,
        "minibatches and metrics": epochs
        * _seconds(minibatch.clone)
        / minibatch.numel(),
        # Adam reads weights, gradients and two moments, and writes all but gradients.
        "optimiser": 7 / 2 * _seconds(weights.clone) * epochs / size,
    }


def _flops(call: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _seconds(call: Callable[[], object]) -> float:
    (times,) = measure({"": Alternative.once(call)}, 5).values()
    return min(times)


def environment(task: trainer.Task, call: Callable[..., Any]) -> float:
    """Return the seconds of a step or a reset, in the faster bare loop."""
    name = task.name.partition("_v")[0]
    row = next(row for row in envs.ROWS if row.name.startswith(name))
    with ExitStack() as stack:
        times = measure(envs.build(stack, row, call), 5, seconds=0.5)
    return min(statistics.median(values) for values in times.values())


def table(
    parts: Mapping[str, float], total: float, ideal: Mapping[str, float], frames: int
) -> list[str]:
    """Return the lines of the table, largest parts first."""
    rest = {"collecting around these, logs": total - sum(parts.values())}
    lines = [
        "| part | us per frame | share | at its limit, us |",
        "|---|---:|---:|---:|",
    ]
    for part, seconds in sorted({**parts, **rest}.items(), key=lambda item: -item[1]):
        if seconds >= SMALLEST * total or part in rest:
            limit = ideal.get(part, 0.0) * 1e6
            lines.append(
                f"| {part} | {seconds / frames * 1e6:,.1f} | {seconds / total:.0%} | "
                f"{limit:,.1f} |"
            )
    limit = sum(ideal.values()) * 1e6
    return [*lines, f"| all | {total / frames * 1e6:,.1f} | 100% | {limit:,.1f} |"]


def main() -> None:
    """Print the table of a task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=["coins", "multiwalker_v9"])
    parser.add_argument("--batches", type=int, default=3, help="that are profiled")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name = arguments.task
    keywords = dict(preset_env_kwargs(name))
    if name == "coins":
        keywords["observations"] = ["RGB"]
    factory = find_factory(name, keywords)
    task = trainer.Task(name, factory, describe(factory), keywords)
    settings = dict(preset(name)) | parse_settings(arguments.set, option="--set")
    frames_per_batch = TrainingOptions().with_settings(settings).frames_per_batch
    frames = arguments.batches * frames_per_batch
    settings["frames"] = settings["eval_interval"] = frames + frames_per_batch
    settings |= {"eval_episodes": 1, "final_episodes": 1}
    options = TrainingOptions().with_settings(settings)
    profiler = Profiler()
    total = train(task, options, profiler)
    ideal = limits(task, options, profiler.resets / frames)
    print("\n".join(table(profiler.seconds(), total, ideal, frames)))
    plain = train(task, options, ExitStack())
    print(f"\nWithout the profiler: {plain / frames * 1e6:,.1f} us per frame.")


if __name__ == "__main__":
    main()
