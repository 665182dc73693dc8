"""Runs a policy by repeating its recorded operations.

The policy is called once under a recorder, on the memory that it acts on. After that a
frame costs only the recorded operations: no module, no TensorDict, no allocation.
Weights are read from the module's own memory. Before a recording is used, its outputs
are compared with the module's on random observations and equal noise, and now and then
while it acts (``SpotCheck``). If it cannot be used, the module is called, and
``FusedRunner.explain`` gives the reason.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from numpy.typing import NDArray
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from marl_collect.core.description import Row
from marl_collect.core.signature import PolicySignature
from marl_collect.policies.fused.elementary import (
    ElementaryOperations,
    without_branches,
)
from marl_collect.policies.fused.numpy_calls import (
    UnsuitableError,
    array,
    close,
    copying,
)
from marl_collect.policies.fused.program import Program, is_guard
from marl_collect.policies.fused.random_frames import RandomFrames
from marl_collect.policies.fused.record import NotRepeatableError, TensorOp, record
from marl_collect.policies.fused.recordable import why_not_recordable
from marl_collect.policies.fused.rewrite import with_dense_operands, with_log_softmax
from marl_collect.policies.fused.spot_check import NEVER, SpotCheck, outputs_agree
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.probe import undisturbed
from marl_collect.policies.runner import Generators, PolicyRunner
from marl_collect.weights.state import ModuleState
from marl_collect.weights.tensor_parts import version

_COPIED = 64
"""Maximum size per environment of strided operands that are copied."""

_COMPARISONS = 3
_FAILURES = 2
"""Number of recordings that turn out to be wrong before the module is called."""
_FREE_RECORDINGS = 10
"""Recordings that are always made, so that a few changes act at full speed at once."""


@final
class RecordingBudget:
    """Decides whether a policy is recorded again after its settings or tensors changed.

    A policy may be annealed for ever, with a change in every slot. So further
    recordings must pay: in the next slot, or, if nothing changes any more, as soon as
    the frames since the last change would have paid for it.
    """

    def __init__(self) -> None:
        """Begin without recordings."""
        self._made = 0
        self._called = 0
        self._seconds = self._saving = 0.0

    def change(self) -> None:
        """Note that settings or tensors have changed."""
        self._called = 0

    def allows(self, frames: int) -> bool:
        """Return whether a recording is worth it.

        Args:
            frames: of the next slot. If the answer is no, the policy is called in them.
        """
        self._called += frames
        pays = self._called * self._saving > self._seconds
        return pays or self._made < _FREE_RECORDINGS

    def record(self, seconds: float, saving: float) -> None:
        """Note a recording.

        Args:
            seconds: that it took.
            saving: seconds that it saves in each frame.
        """
        self._made += 1
        self._called = 0
        self._seconds = seconds
        # Other processes slow down measurements: the largest one is the most exact.
        self._saving = max(self._saving, saving)


@dataclass(frozen=True)
class _Compiled:
    """The recordings of a policy.

    Attributes:
        programs: one; or, if the policy asks in Python whether an environment begins
            an episode, one for each answer. In a frame the guards of all others fail.
    """

    programs: list[Program]

    def prepare(self) -> bool:
        """Run the operations that depend only on weights; False if a guard fails."""
        return all(program.prepare() for program in self.programs)

    def reads_anew(self) -> bool:
        """Return whether Python would read other values of weights than last time."""
        anew = [program.reads_anew() for program in self.programs]
        return any(anew)

    def run(self) -> bool:
        """Write the outputs to the memory; False if guards of all recordings fail."""
        for program in self.programs:
            state = torch.get_rng_state() if program.draws_before_guards else None
            if program.run():
                return True
            if state is not None:
                # Whoever acts now must draw the same numbers as the guard. Other ones
                # would bias the branch.
                torch.set_rng_state(state)
        return False


@dataclass(frozen=True)
class _Refused:
    """The reason to call the module instead.

    Attributes:
        reason: the end of a sentence.
        for_now: whether the next slot may be worth a recording.
        last: the recordings that are no longer valid, if they may become valid again.
    """

    reason: str
    for_now: bool = False
    last: _Compiled | None = None


@final
class FusedRunner(PolicyRunner):
    """Repeats the operations of a ``ModuleRunner``'s module, or calls the module.

    Attributes:
        module: calls the policy.
    """

    def __init__(self, module: ModuleRunner) -> None:
        """Run the policy of ``module``.

        It is recorded when bound if ``module.how`` is an interaction type; others are
        recorded when they occur.
        """
        self.module = module
        # By what it depends on outside the policy; valid for this state of the policy.
        self._compiled: dict[Any, _Compiled | _Refused] = {}
        self._state: ModuleState | None = None
        self._last_setting: Any = None
        self._current: _Compiled | None = None
        self._how: InteractionType | None = module.how
        self._missed = self._frames = 0
        self._budget = RecordingBudget()
        self._spot_check = SpotCheck()
        self._compared = NEVER  # The next frame in which the module is called too.
        self._differed = False
        self._failures = 0
        self._seconds_of_call = self._seconds_of_run = math.inf
        self._waits = False
        self._noise: list[tuple[NDArray[Any], NDArray[Any]]] = []

    @property
    def signature(self) -> PolicySignature:
        """Signature of the policy."""
        return self.module.signature

    def probe(self, memory: Row) -> None:
        """Probe the module."""
        self.module.probe(memory)

    @property
    def remembers(self) -> bool:
        """Whether the memory holds the policy's outputs of a previous frame."""
        return self.module.remembers

    @remembers.setter
    def remembers(self, remembers: bool) -> None:
        self.module.remembers = remembers

    def bind(self, memory: Row) -> None:
        """Act on ``memory``; record the policy on it."""
        self.module.bind(memory)
        self._memory = memory
        self._state = None
        self._budget = RecordingBudget()
        self._spot_check = SpotCheck()
        policy = self.module.policy
        self._weights: list[torch.Tensor] = []
        if isinstance(policy, nn.Module):
            self._weights = [*policy.parameters(), *policy.buffers()]
        if self.module.how is not None:
            with torch.no_grad(), set_interaction_type(self.module.how):
                self._how = self.module.how
                self._ready()

    def begin(self, frames: int, generators: Generators) -> None:
        """Run the operations that depend only on weights, and sample the noise."""
        self.start(frames)
        self.module.begin(frames, generators)
        self._noise = [
            (stream.array, stream.slot)
            for stream in self.module.noise.streams
            if stream.slot is not None
        ]

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Sample the noise of one environment anew; ``act`` reads the same arrays."""
        self.module.redraw(k, frame, generators)

    def start(self, frames: int) -> None:
        """Do the same as ``begin``, but leave the noise of each frame to the caller."""
        self._drop_what_fails()
        self._how = interaction_type()
        # A policy that reads what it wrote in the last frame may act in another way in
        # the very first one, in which there is nothing to read.
        self._waits = bool(self.signature.kept) and not self.remembers
        self._missed, self._frames = 0, frames
        self._current = None if self._waits else self._ready()
        versions = list(map(version, self._weights))
        compared = self._spot_check.choose(frames, versions)
        self._compared = 0 if self._differed else compared

    def act(self, frame: int) -> None:
        """Run the recorded operations; call the module if a guard fails."""
        compiled = self._current
        if compiled is None:
            self.module.act(frame)
            if self._waits:
                self._waits = False
                self._current = self._ready()
            return
        for target, noise in self._noise:
            target[...] = noise[frame]
        if frame == self._compared:
            self._compare_frame(compiled, frame)
        elif not compiled.run():
            self._missed += 1
            self.module.act(frame)

    def _compare_frame(self, compiled: _Compiled, frame: int) -> None:
        """Run the recorded operations and call the module too.

        If both agree, the outputs of the recording stand, like those of all other
        frames. If they differ in two frames in a row, the policy is recorded anew.
        """
        before = {key: array.copy() for key, array in self._memory.items()}
        generator = torch.get_rng_state()
        self._compared = NEVER
        if not compiled.run():
            self._missed += 1
            self.module.act(frame)
            return
        recorded = {key: array.copy() for key, array in self._memory.items()}
        drawn = torch.get_rng_state()
        self._write(before)
        torch.set_rng_state(generator)
        self.module.act(frame)
        assert self._state is not None
        self._state.changed()  # Counters and caches of the call are no new state.
        if torch.equal(torch.get_rng_state(), drawn) and outputs_agree(
            recorded, self._memory
        ):
            self._write(recorded)
            self._differed = False
            return
        # Rounding can change a single sampled action.
        self._compared = frame + 1
        if self._differed:
            self._record_anew()
        self._differed = not self._differed

    def _record_anew(self) -> None:
        """Record what the module computes now. The second time, call it instead."""
        self._failures += 1
        del self._compiled[self._last_setting]
        self._current = self._ready()

    def _write(self, arrays: Row) -> None:
        for key, values in arrays.items():
            self._memory[key][...] = values

    def explain(self) -> str:
        """Return whether the policy is fused, and if not, which part prevents it."""
        outcome = self._compiled.get(self._last_setting)
        if isinstance(outcome, _Compiled):
            size = max(program.size for program in outcome.programs)
            return f"Fused: the policy's {size} tensor operations run once per frame."
        reason = outcome.reason if outcome else "nothing has been recorded yet"
        return f"Not fused, because {reason}. {self.module.explain()}"

    def _setting(self) -> tuple[Any, ...]:
        """Return what a recording depends on outside the policy."""
        autocast = torch.is_autocast_enabled("cpu")
        return self._how, autocast, torch.get_default_dtype()

    def _ready(self) -> _Compiled | None:
        """Return the program of the current interaction type, recorded if needed."""
        if self._state is None or self._state.changed():
            if self._state is None:
                self._state = ModuleState(self.module.policy, of_recording=True)
            self._compiled.clear()
            self._budget.change()
        setting = self._last_setting = self._setting()
        outcome = self._compiled.get(setting)
        last = outcome.last if isinstance(outcome, _Refused) else outcome
        if last is not None:
            if last.prepare():
                self._compiled[setting] = last
                return last
            if last.reads_anew():
                self._budget.change()
        elif isinstance(outcome, _Refused) and not outcome.for_now:
            return None
        outcome = self._compiled[setting] = self._compile(self._state, last)
        return outcome if isinstance(outcome, _Compiled) else None

    def _drop_what_fails(self) -> None:
        """Call the module from now on if a guard fails in most frames."""
        if self._current is not None and 2 * self._missed > self._frames:
            reason = "it reads values in Python that change from frame to frame"
            self._compiled[self._last_setting] = _Refused(reason)

    def _compile(
        self, state: ModuleState, last: _Compiled | None
    ) -> _Compiled | _Refused:
        """Record the policy and compare; return the reason if that fails."""
        reason = why_not_recordable(self.module.policy, state)
        if torch.is_autocast_enabled("cpu"):
            reason = "autocast is on"
        if self._failures >= _FAILURES:
            reason = (
                "what it computes changes without a change of its weights and "
                "attributes: keep what its code reads in attributes"
            )
        if reason is not None:
            return _Refused(reason)
        if not self._budget.allows(self._frames):
            return _Refused(
                "its settings or its tensors change so often that recording it again "
                "would take longer than it saves",
                for_now=True,
                last=last,
            )
        saved = {key: values.copy() for key, values in self._memory.items()}
        remembers = self.module.remembers
        begin = time.perf_counter()
        try:
            self.module.remembers = True
            with undisturbed(self.module.policy):
                return self._record()
        except NotRepeatableError as error:
            return _Refused(str(error))
        finally:
            self.module.remembers = remembers
            self._write(saved)
            state.changed()  # Counters and caches of the calls are no new state.
            seconds = time.perf_counter() - begin
            self._budget.record(seconds, self._seconds_of_call - self._seconds_of_run)

    def _record(self) -> _Compiled:
        """Record the policy and compare the recordings with it."""
        frames = RandomFrames(self.module.description, self._memory)
        values, operations = self._operations(frames)
        if not self.signature.reads_is_init or not any(map(is_guard, operations)):
            return _Compiled([self._program(frames, values, operations)])
        programs: list[Program] = []
        answers: set[tuple[Any, ...]] = set()
        for begins in (False, True):
            frames.begins = begins
            values, operations = self._operations(frames)
            answer = tuple(one.result for one in operations if is_guard(one))
            if answer not in answers:
                answers.add(answer)
                programs.append(self._program(frames, values, operations))
        return _Compiled(programs)

    def _operations(
        self, frames: RandomFrames
    ) -> tuple[list[torch.Tensor], list[TensorOp]]:
        """Call the module on a random frame; return its outputs and operations."""
        frames.draw()
        with without_branches(), ElementaryOperations():
            return record(self._call)

    def _program(
        self,
        frames: RandomFrames,
        values: list[torch.Tensor],
        operations: Sequence[TensorOp],
    ) -> Program:
        """Compare the operations with the module, and make them ready to use."""
        module = self.module
        inputs = list(map(torch.from_numpy, self._memory.values()))
        inputs += [stream.tensor for stream in module.noise.streams]
        n_envs = len(next(iter(self._memory.values())))
        operations = with_log_softmax(operations)
        operations = with_dense_operands(operations, _COPIED * n_envs)
        try:
            program = Program(operations, inputs, values)
            self._compare(program, values, frames)
            program.use_numpy(n_envs, partial(self._draw, frames), _COMPARISONS)
            for _ in range(_COMPARISONS):
                begin = time.perf_counter()
                if program.run():
                    seconds = time.perf_counter() - begin
                    self._seconds_of_run = min(self._seconds_of_run, seconds)
        except RuntimeError as error:  # Torch raises it; our own errors are others.
            raise NotRepeatableError(
                f"an operation cannot be repeated ({error})"
            ) from error
        program.store(map(_storing, module.targets.values(), values))
        return program

    def _call(self) -> list[torch.Tensor]:
        """Call the module. What it raises here, it will raise again when it acts."""
        try:
            return self.module.call()
        except NotRepeatableError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise NotRepeatableError(f"recording it raised {kind}: {error}") from error

    def _draw(self, frames: RandomFrames) -> None:
        frames.draw()
        for stream in self.module.noise.streams:
            frames.fill_noise(stream)

    def _compare(
        self, program: Program, values: list[torch.Tensor], frames: RandomFrames
    ) -> None:
        """Compare the recording with the module on random observations.

        Raises:
            NotRepeatableError: if they differ, or could not be compared.
        """
        compared = 0
        keys = list(self.module.targets)
        finite = dict.fromkeys(keys, False)
        for _ in range(_COMPARISONS):
            self._draw(frames)
            before = torch.get_rng_state()
            begin = time.perf_counter()
            expected = [value.clone() for value in self._call()]
            seconds = time.perf_counter() - begin
            self._seconds_of_call = min(self._seconds_of_call, seconds)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            if not program.prepare() or not program.run():
                continue
            compared += 1
            if not torch.equal(torch.get_rng_state(), after):
                raise NotRepeatableError(
                    "repeating its operations draws other random numbers"
                )
            for key, a, b in zip(keys, expected, values, strict=True):
                if not close(b, a):
                    raise NotRepeatableError(
                        f"repeating its operations gives other values of "
                        f"{'/'.join(key)}"
                    )
                finite[key] |= not a.numel() or bool(a.isfinite().any())
        if not compared:
            raise NotRepeatableError(
                "it reads values in Python that differ from call to call"
            )
        for key in keys:
            if not finite[key]:
                raise NotRepeatableError(
                    f"{'/'.join(key)} is not finite for random observations, so a "
                    "recording cannot be compared with the policy"
                )


def _storing(target: torch.Tensor, value: torch.Tensor) -> Callable[[], Any]:
    """Return a call that copies an output to the memory."""
    try:
        return copying(target.numpy(), array(value))
    except UnsuitableError:  # numpy has no bfloat16, and no lazily conjugated memory.
        return partial(target.copy_, value)
