"""Turns recorded operations into calls that write into the memory of the recording.

Each operation becomes one torch call with ``out=``: nothing is allocated, and results
equal those of the recording bit for bit. For small arrays, numpy calls may replace
torch calls after a comparison that allows for differences in the last bits. Operations
that depend only on weights run once per slot. A Python value that was read from a
tensor becomes a guard: if it differs, the module might do something else, so the run
stops.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch

from marl_collect.policies.fused.draws import drawing
from marl_collect.policies.fused.numpy_calls import (
    NumpyCalls,
    close,
    numpy_calls,
    run_quietly,
)
from marl_collect.policies.fused.record import (
    COPIES,
    NotRepeatableError,
    TensorOp,
    same,
    storages,
    tensors,
)

Call = Callable[[], Any]
Into = Callable[[Sequence[torch.Tensor]], Call | None]
"""From memory for an operation's results to a call that writes them there, if any."""

_ARITHMETIC = {"add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div"}
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_METHODS = ("normal_", "uniform_", "exponential_", "scatter_")


@final
class Program:
    """Repeats recorded operations.

    Attributes:
        size: number of operations in a run.
        draws_before_guards: whether a run may draw random numbers and then stop.
    """

    def __init__(
        self,
        operations: Sequence[TensorOp],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Keep the operations that ``outputs`` need.

        Args:
            operations: as recorded, with their tensors.
            inputs: tensors whose contents change from run to run.
            outputs: results of the operations; their memory never changes.

        Raises:
            NotRepeatableError: if random numbers are drawn that no output needs.
        """
        needed = _needed(operations, storages(outputs))
        for unused in set(operations) - set(needed):
            if unused.random:
                # Without this draw, all later ones would give other numbers.
                raise NotRepeatableError(
                    f"it draws random numbers that it does not use ({unused.name})"
                )
        varying = _varying(needed, storages(inputs))
        constant: list[TensorOp] = []
        changing: list[TensorOp] = []
        for operation in needed:
            depends = operation.random or varying & (
                operation.reads | operation.makes | operation.writes
            )
            (changing if depends else constant).append(operation)
        self._varying = varying
        self._constant_guards = list(filter(is_guard, constant))
        self._read = [guard.result for guard in self._constant_guards]
        self._constant = _segments((op, _calls(op)) for op in constant)
        self._setup: list[Call] = []
        self._steps = [(op, _calls(op)) for op in changing]
        self._changing = _segments(self._steps)
        self.size = sum(len(calls) for _, calls in self._steps)
        guards = [index for index, op in enumerate(changing) if is_guard(op)]
        self.draws_before_guards = any(
            op.random for op in changing[: max(guards, default=0)]
        )

    def prepare(self) -> bool:
        """Run the operations that depend only on weights; False if a guard fails."""
        if not _run(self._constant):
            return False
        for call in self._setup:
            call()
        return True

    def reads_anew(self) -> bool:
        """Return whether Python would read other values of weights than last time."""
        before = self._read
        self._read = list(map(_value, self._constant_guards))
        return self._read != before

    def run(self) -> bool:
        """Compute the outputs; False, with invalid outputs, if a guard fails."""
        return run_quietly(_run, self._changing)

    def store(self, copies: Iterable[Call]) -> None:
        """Make every complete run end with these calls, which copy its outputs."""
        self._changing[-1][0].extend(copies)

    def use_numpy(
        self, n_envs: int, draw: Callable[[], None], comparisons: int
    ) -> None:
        """Replace torch calls by numpy calls that give the same results.

        Args:
            n_envs: number of environments that act at once.
            draw: fills the inputs with random values.
            comparisons: number of random inputs on which operations are compared.
        """
        candidates: dict[int, NumpyCalls] = {}
        for index, (operation, calls) in enumerate(self._steps):
            if calls and not operation.random and not operation.writes:
                candidate = numpy_calls(operation, n_envs, self._is_constant)
                if candidate is not None:
                    candidates[index] = candidate
        compared: set[int] = set()
        for _ in range(comparisons):
            draw()
            if self.prepare():
                run_quietly(self._try, candidates, compared)
        for index in compared & candidates.keys():
            setup, calls = candidates[index]
            self._setup += setup
            self._steps[index] = (self._steps[index][0], calls)
        self._changing = _segments(self._steps)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return not self._varying & storages(tensor)

    def _try(self, candidates: dict[int, NumpyCalls], compared: set[int]) -> None:
        """Compare operations on the current inputs; drop those that differ."""
        for index, (operation, calls) in enumerate(self._steps):
            if is_guard(operation) and _differs(operation):
                return
            for call in calls:
                call()
            if index not in candidates:
                continue
            result = next(tensors(operation.result))
            expected = result.clone()
            try:
                for call in itertools.chain.from_iterable(candidates[index]):
                    call()
                agree = close(result, expected)
            except (TypeError, ValueError):
                agree = False
            result.copy_(expected)
            compared.add(index)
            if not agree:
                del candidates[index]


Segment = tuple[list[Call], Call | None]


def _run(segments: Sequence[Segment]) -> bool:
    for calls, differs in segments:
        for call in calls:
            call()
        if differs is not None and differs():
            return False
    return True


def _calls(operation: TensorOp) -> list[Call]:
    call = None if is_guard(operation) else repeat(operation)
    return [] if call is None else [call]


def _segments(steps: Iterable[tuple[TensorOp, list[Call]]]) -> list[Segment]:
    """Return calls, split at guards."""
    segments: list[Segment] = []
    collected: list[Call] = []
    for operation, calls in steps:
        collected += calls
        if is_guard(operation):
            segments.append((collected, _guard(operation)))
            collected = []
    return [*segments, (collected, None)]


def _needed(operations: Sequence[TensorOp], wanted: frozenset[int]) -> list[TensorOp]:
    needed: list[TensorOp] = []
    for operation in reversed(operations):
        if is_guard(operation) or wanted & (operation.makes | operation.writes):
            wanted |= operation.reads
            needed.append(operation)
    return needed[::-1]


def _varying(operations: Sequence[TensorOp], inputs: frozenset[int]) -> set[int]:
    """Return the storages whose contents differ between runs of a slot."""
    varying = set(inputs)
    for operation in operations:
        varying |= operation.writes
    for operation in operations:
        if operation.random or varying & operation.reads:
            varying |= operation.makes
    return varying


def is_guard(operation: TensorOp) -> bool:
    """Return whether the operation read a Python value from a tensor."""
    return operation.result is not None and not list(tensors(operation.result))


def _value(guard: TensorOp) -> Any:
    return guard.function(*guard.args, **guard.kwargs)


def _differs(guard: TensorOp) -> bool:
    return bool(_value(guard) != guard.result)


def _guard(operation: TensorOp) -> Call:
    """Return a call that returns whether the value differs from the recorded one."""
    if operation.name == "_local_scalar_dense":
        # torch takes microseconds per number. numpy cannot read some kinds of memory.
        with suppress(TypeError, RuntimeError):
            read, value = operation.args[0].detach().numpy().item, operation.result
            return lambda: read() != value
    return partial(_differs, operation)


def repeat(operation: TensorOp) -> Call | None:
    """Return a call that computes the operation's results again; None for a view."""
    if operation.writes:
        return _in_place(operation)
    is_view = not operation.makes - operation.reads
    if is_view or operation.name.startswith(("empty", "new_empty")):
        return None
    results = list(tensors(operation.result))
    if operation.name in COPIES:
        return partial(results[0].copy_, operation.args[0])
    if operation.name in _ZEROS:
        return _zeroing(results[0])
    return _fastest(operation, results)


def _zeroing(tensor: torch.Tensor) -> Call:
    with suppress(TypeError, RuntimeError):  # numpy cannot write some kinds of memory.
        return partial(tensor.detach().numpy().fill, 0)
    return tensor.zero_


def _in_place(operation: TensorOp) -> Call:
    """Return the operation, as a method of the tensor if that is the same.

    Among the work of a frame, whose caches it does not share, an operator of
    ``torch.ops`` takes three times as long as the method.
    """
    function, args = operation.function, operation.args
    if operation.name in _METHODS:
        function, args = getattr(args[0], operation.name), args[1:]
    return partial(function, *args, **operation.kwargs)


def _fastest(operation: TensorOp, results: list[torch.Tensor]) -> Call:
    """Return the fastest call that writes the operation's results to their memory."""
    for into in _candidates(operation, len(results)):
        call = into(results)
        if call is not None and _agrees(operation, into):
            return call
    return partial(_copy_results, operation, results)


def _copy_results(operation: TensorOp, results: Sequence[torch.Tensor]) -> None:
    new = tensors(operation.function(*operation.args, **operation.kwargs))
    for target, source in zip(results, new, strict=True):
        target.copy_(source)


def _candidates(operation: TensorOp, n_results: int) -> Iterator[Into]:
    """Yield what may compute the operation's results, fast calls first."""
    args, kwargs = operation.args, operation.kwargs
    if n_results == 1:
        if operation.random:
            yield lambda results: drawing(operation, results[0])
        # torch would convert a number to a tensor in every call, which is slow.
        number = args[1] if len(args) == 2 else None
        if operation.name in _ARITHMETIC and _fits(number, args[0].dtype):
            other = torch.tensor(number, dtype=args[0].dtype, device="cpu")
            pair = (other, args[0]) if operation.name == "rsub" else (args[0], other)
            function = getattr(torch, _ARITHMETIC[operation.name])
            yield _into(function, pair, kwargs)
        # These two have the functions that torch generates from its operators. They
        # parse their arguments faster than the operators do.
        for holder in (torch._C._VariableFunctions, torch._C._nn):  # noqa: SLF001
            function = getattr(holder, operation.name, None)
            if function is not None:
                yield _into(function, args, kwargs)
    packet = operation.function.overloadpacket
    for overload in packet.overloads():
        operator = getattr(packet, overload)
        names = tuple(a.name for a in operator._schema.arguments if a.is_out)  # noqa: SLF001
        if len(names) == n_results:
            yield _into(operator, args, kwargs, names)


def _fits(number: Any, dtype: torch.dtype) -> bool:
    """Return whether torch computes with a number as if it had this dtype.

    In 16 bits, it computes with the number itself. Of integers, numpy takes numbers.
    """
    if not (isinstance(number, (int, float)) and dtype.is_floating_point):
        return False
    return torch.tensor(number, dtype=dtype, device="cpu").item() == number


def _into(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out_names: tuple[str, ...] = ("out",),
) -> Into:
    """Return the calls of a function that takes memory for its results."""

    def into(results: Sequence[torch.Tensor]) -> Call:
        out = dict(zip(out_names, results, strict=True))
        return partial(function, *args, **kwargs, **out)

    return into


def _agrees(operation: TensorOp, into: Into) -> bool:
    """Return whether such a call gives the same results and draws the same numbers."""
    before = torch.get_rng_state()
    try:
        result = operation.function(*operation.args, **operation.kwargs)
        expected = list(tensors(result))
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        results = [torch.empty_like(tensor) for tensor in expected]
        call = into(results)
        if call is None:
            return False
        call()
        if not torch.equal(torch.get_rng_state(), after):
            return False
    except (TypeError, RuntimeError, ValueError, NotImplementedError):
        return False
    finally:
        torch.set_rng_state(before)
    return all(same(a, b) for a, b in zip(expected, results, strict=True))
