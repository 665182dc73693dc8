"""``Collector``: collects in this process; the reference for other collectors."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

import torch
from tensordict.nn import set_interaction_type
from torch import nn
from typing_extensions import override

from marl_collect.buffers.compact_observations import gather
from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import Slots
from marl_collect.collectors.checkpoint import note_resumed
from marl_collect.collectors.collector import CollectorBase
from marl_collect.collectors.delivery import FilledSlot
from marl_collect.collectors.initialization import (
    build_policy,
    check_can_be_copied,
    prepare,
)
from marl_collect.collectors.operations import Operations
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.publish import Publisher
from marl_collect.collectors.statistics import Statistics
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    chosen_policy,
    warn_if_uncopyable,
)
from marl_collect.core.factories import build, warn_if_pinned
from marl_collect.core.gradients import recording_writes, without_gradients
from marl_collect.core.random_actions import is_random
from marl_collect.core.seeding import (
    draw_seed,
    global_generators,
    set_global_generators,
)
from marl_collect.devices.choose import make_resident_runner, with_device
from marl_collect.devices.memory import DeviceSlots
from marl_collect.devices.rollout import DeviceRollout
from marl_collect.errors import counted
from marl_collect.options import method, refuse, values
from marl_collect.policies.choose import make_runner
from marl_collect.processes import cleanup
from marl_collect.rollout.alternating import AlternatingRollout, make_rollout
from marl_collect.rollout.env_calls import EnvCall
from marl_collect.rollout.loop import Rollout
from marl_collect.rollout.progress import ProgressReporter


@final
class Collector(CollectorBase):
    """Collects in this process.

    It acts with the trained module itself, so weights need no update.

    The arguments are the fields of ``CollectorOptions``.
    """

    @method(CollectorOptions)
    def __init__(self, parsed: CollectorOptions) -> None:
        """Build the environments and the memory for two batches."""
        refuse(parsed, "Collector")
        with recording_writes():
            source = OwnRollout(parsed)
        self._open(parsed, source)
        self._delivery.device = source.device

    @override
    def explain(self, *, frames: int = 0) -> list[str]:
        """Say which path the policy took in its last batch, and why.

        Before the first batch it says what the next one begins with.

        Args:
            frames: of each environment in which the operations of torch are counted; 0
                counts nothing. Environments and policy are built once more and step as
                many frames before. The collection itself does not change.

        Returns:
            One line about the policy. If operations are counted, further lines have the
            number of kernels in a step of all environments, and the places in the
            user's code at which the host would wait for a device: how often, why, file,
            line and function. There are none about a simulator without torch.

        Raises:
            ValueError: ``frames`` is negative.
        """
        if frames < 0:
            raise ValueError(f"frames must be at least 0, but is {frames}.")
        lines = super().explain()
        return [*lines, *self._count(frames)] if frames else lines

    def _count(self, frames: int) -> list[str]:
        rows = sum(self._source.sizes)
        arguments = values(CollectorOptions, self._options) | {
            "frames_per_batch": rows * frames,
            "total_frames": None,
            "init_random_frames": None,
            "replay_buffer": None,
            "postproc": None,
            "trajs_per_batch": None,
            "traj_format": "padded",
            "policies": None,  # The copy of the policy has them.
            "assign": None,
        }
        if isinstance(self.policy, nn.Module):
            arguments["policy"] = copy.deepcopy(self.policy)
        generators = global_generators()
        operations = Operations()
        try:
            with Collector(**arguments) as twin:
                twin.next()  # It compiles, and prepares memory.
                with operations:
                    twin.next()
        finally:
            set_global_generators(generators)
        return operations.lines(frames)


@final
class OwnRollout:
    """Environments and policy of this process.

    Attributes: see ``Source``; and

        device: of the slots.
    """

    works_in_forks = True  # Each process fills its own memory; see `Slots`.
    keeps_state = True  # Until a rollout is interrupted.
    equal_batches = True

    def __init__(self, parsed: CollectorOptions) -> None:
        """Build the environments and the memory for two batches."""
        self._options = parsed
        policy = chosen_policy(parsed.policy, parsed)
        check_can_be_copied(policy)
        factory = parsed.policy_factory
        if isinstance(factory, Sequence) and len(factory) != 1:
            raise ValueError(
                f"policy_factory has {len(factory)} entries, but a Collector acts with "
                "one policy: pass a single factory. In a MultiSyncCollector each "
                "worker acts with the policy of its own factory."
            )
        if len(devices := set(parsed.policy_devices)) > 1:
            raise ValueError(
                "A Collector acts with one policy, but policy_device names "
                f"{sorted(map(str, devices))}: pass a single device."
            )
        workers = parsed.factories(parsed.create_env_fn)
        if parsed.num_threads is not None:
            torch.set_num_threads(parsed.num_threads)
        if parsed.init_fn is not None:
            parsed.init_fn()
        self.statistics = Statistics()
        self._engine = build([factory for worker in workers for factory in worker])
        self.description = self._engine.description
        self.sizes = [self._engine.size]
        try:
            self._policy = self._prepare(parsed, policy)
        except BaseException:
            with suppress(Exception):  # It must not hide the first error.
                self._engine.close()
            raise
        self.weights = Publisher(self._policy)
        self._closed = False
        cleanup.register(self)

    def _prepare(self, options: CollectorOptions, policy: Any) -> TrainerPolicy:
        size = self._engine.size
        seed = draw_seed(options.seed)
        factory = options.policy_factory
        trust, parts = options.trust_policy, self._engine.parts()
        plan = options.plan(seed, options.environments_from(size))
        module = None
        if policy is None and factory is not None:
            one = factory[0] if isinstance(factory, Sequence) else factory
            built = build_policy(one, parts, plan, seed, trust=trust)
            module = None if is_random(built) else built
        elif not is_random(policy):
            module = prepare(policy, self.description, seed, trust=trust)
            if factory is None:
                warn_if_uncopyable(module)
        acting = options.acting(_home(module, options))
        warn_if_pinned(self.description, size)
        self._progress = ProgressReporter()
        frames = options.frames_of([size])[0]
        batch = size, frames
        self._rollout: Rollout | AlternatingRollout
        self._slots: Slots | DeviceSlots
        self.device = torch.device("cpu")
        simulator = with_device(self._engine)
        if simulator is not None:
            resident = make_resident_runner(module, simulator, acting, options)
            on_device = DeviceRollout(
                simulator,
                resident,
                plan,
                self._progress,
                random_frames=bool(options.init_random_frames),
            )
            layout = options.batch_layout(self.description, resident.signature, batch)
            self.device = simulator.env.simulator_device or self.device
            self._rollout, self._slots = on_device, on_device.slots(layout)
        else:
            runners = [make_runner(module, part, acting) for part in parts]
            self._rollout = make_rollout(
                parts,
                runners,
                plan,
                self._progress,
                check_actions=acting.check_actions,
            )
            layout = options.batch_layout(self.description, runners[0].signature, batch)
            # What whole trajectories are made of is copied at once.
            count = 2 if options.trajs_per_batch is None else 1
            self._slots = Slots(layout, count, shared=False)
        self.shape: tuple[Layout, list[int], list[int]] | None
        self.shape = layout, self.sizes, [frames]
        self.batch_frames = size * frames
        return TrainerPolicy(module, policy)

    def outline(self) -> str:
        """Describe environments and batch shape, for ``repr``."""
        rows, frames = self._slots.layout.batch
        return f"{counted(rows, 'environment')}, [{rows}, {frames}]"

    def fill(self, *, random: bool, delivered: int) -> FilledSlot:
        """Fill one slot; nothing is prefetched."""
        slots: Any = self._slots
        slot = slots.acquire()
        arrays = slots.arrays(slot)
        version = self.weights.version
        self.keeps_state = False
        if self._options.reset_at_each_iter:
            self._rollout.reset()
        how = set_interaction_type(self._options.exploration_type)
        with without_gradients(), how:
            collected = self._rollout.collect(arrays, version, random=random)
        self.statistics.rollouts += collected.seconds
        self.statistics.resets += collected.reset_seconds
        self.keeps_state = True
        return FilledSlot(
            slots.hand_out(slot),
            ends=[collected.frames] * self._engine.size,
            episodes=collected.episodes,
            sizes=self.sizes,
            last=gather(collected.last, delivered),
        )

    def steps(self) -> int:
        """Return the frames stepped so far, from any thread."""
        return self._progress.steps * self._engine.size

    def begin_episodes(
        self, workers: Sequence[int] | None = None, seed: int | None = None
    ) -> None:
        """Begin new episodes; see ``Source``."""
        if seed is not None:
            self._rollout.use_plan(self._rollout.plan.with_seed(seed))
        if workers is None or workers:
            self._rollout.reset()

    def states(self) -> list[Any]:
        """Return the rollout's state."""
        return [self._rollout.state()]

    def load(self, states: list[Any]) -> None:
        """Resume from this state."""
        rollout = self._rollout
        rollout.load(states[0])
        resumed = rollout.plan.environments, states[0], rollout.running
        note_resumed(self.statistics, self.description, [resumed])

    def set_level(self, level: int) -> None:
        """Set the curriculum's level; see ``Source``."""
        self._rollout.set_level(level)

    def explain(self) -> list[str]:
        """Describe how the policy runs, and why."""
        return [self._rollout.explain()]

    def attribute(self, owner: str, name: str) -> list[Any]:
        """Return an attribute of the environments or of the policy."""
        if owner == "policy":
            return [getattr(self._policy.module, name)]
        return self._engine.attribute(name)

    def call_env(self, call: EnvCall) -> list[Any]:
        """Call a method of environments; see ``Source``."""
        outcomes = self._rollout.call_env(call)
        for row, (_, error) in zip(call.rows, outcomes, strict=False):
            if error is not None:
                number = self._rollout.plan.environments[row]
                error.add_note(f"The error was raised by environment {number}.")
                raise error
        return [value for value, _ in outcomes]

    def metrics(self) -> dict[str, Any]:
        """Return entries of ``stats()`` in addition to ``statistics``."""
        return {"slots": len(self._slots)}

    def close(self, timeout: float = 0.0) -> None:
        """Close the environments and release the slots; may be called twice."""
        del timeout  # Closing does not wait.
        if not self._closed:
            self._closed = True  # Also if an environment raises.
            try:
                self._engine.close()
            finally:
                self._slots.close()


def _home(module: Any, options: CollectorOptions) -> torch.device:
    """Return the requested device, or the module's own."""
    if options.policy_device is not None or options.device is not None:
        return options.policy_devices[0]
    if isinstance(module, nn.Module):
        for tensor in module.parameters():
            return tensor.device
    return torch.device("cpu")


SyncDataCollector = Collector
"""TorchRL's older name."""
