"""The messages on the sockets of ParallelEnv: at its start, and on rare requests.

    trainer                                   worker
    EnvAssignment (at the start) ------------->  build the environments
                            <---------------  EnvDescription
    AttachMemory -------------------------------->  map memory and flags
                            <---------------  EnvsAttached
    AskSome ------------------------------->  (announced by EnvOperation.MESSAGE)
                            <---------------  EnvAnswer | Failure of the user's code
    Nudge --------------------------------->  (no reply: reading it is progress)

Steps and resets use no socket: see ``signals.py``.
"""

from dataclasses import dataclass, field
from typing import Any

from marl_collect.buffers.layout import Layout
from marl_collect.core.factories import Factory
from marl_collect.errors import Failure
from marl_collect.parallel_env.signals import SignalsShape
from marl_collect.processes.shared_memory import MemoryHandle


@dataclass(frozen=True)
class EnvAssignment:
    """The argument of a worker.

    Attributes:
        rows: the rows of each group that the worker steps.
        factories: the factories of these environments, in the order of the rows.
        num_sub_threads: number of torch threads, if an environment imports torch.
        pins: whether the worker is pinned to a processor if there is one for each.
    """

    rows: tuple[range, ...]
    factories: tuple[Factory, ...]
    num_sub_threads: int
    pins: bool


@dataclass(frozen=True)
class AttachMemory:
    """Request to map the memory of all environments, and the flags.

    Attributes:
        memory: the environments' memory.
        layout: layout of that memory, ``[N, 1]``.
        signals: the memory of the flags.
        shape: sizes of the flags.
    """

    memory: MemoryHandle
    layout: Layout
    signals: MemoryHandle
    shape: SignalsShape


@dataclass(frozen=True)
class EnvsAttached:
    """Reply to ``AttachMemory``: memory and flags are mapped."""


@dataclass(frozen=True)
class Ask:
    """Read an attribute of an environment, or call it.

    Attributes:
        name: name of the attribute.
        call: whether to call it. Without a call, a method is returned as ``IsMethod``.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """

    name: str
    call: bool = False
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AskSome:
    """A question to some environments of a worker, given by their indices."""

    environments: tuple[int, ...]
    question: Ask


@dataclass(frozen=True)
class IsMethod:
    """Replaces an attribute that can be called."""


@dataclass(frozen=True)
class EnvAnswer:
    """The pickled answers of the environments that were asked, or a failure."""

    values: bytes = b""
    failure: Failure | None = None


@dataclass(frozen=True)
class Nudge:
    """A message without content: a worker that does not read it is hung."""
