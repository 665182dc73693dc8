"""What crosses the sockets of ParallelEnv: at its start, and on rare requests.

    trainer                                   worker
    EnvAssignment (at the start) ------------->  build the environments
                            <---------------  EnvsReady
    AttachMemory -------------------------------->  map memory and flags
                            <---------------  EnvsAttached
    AskSome ------------------------------->  (announced by EnvOperation.MESSAGE)
                            <---------------  EnvAnswer | Failure of the user's code
    Nudge --------------------------------->  (nothing: who reads it is well)

Steps and resets cross no socket: see ``signals.py``.
"""

from dataclasses import dataclass, field
from typing import Any

from marl_collect.buffers.layout import Layout
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory
from marl_collect.errors import Failure
from marl_collect.parallel_env.signals import SignalsShape
from marl_collect.processes.shared_memory import MemoryHandle


@dataclass(frozen=True)
class EnvAssignment:
    """What a worker is started with.

    Attributes:
        rows: of each group, those that the worker steps.
        factories: of these environments, in the order of the rows.
        num_sub_threads: threads of torch, if an environment imports it.
        pins: whether the worker keeps to a processor if there is one for each.
    """

    rows: tuple[range, ...]
    factories: tuple[Factory, ...]
    num_sub_threads: int
    pins: bool


@dataclass(frozen=True)
class EnvsReady:
    """The environments are built."""

    description: EnvDescription


@dataclass(frozen=True)
class AttachMemory:
    """Map the memory of all environments, and the flags.

    Attributes:
        memory: the environments' memory.
        layout: of that memory, ``[N, 1]``.
        signals: the memory of the flags.
        shape: of the flags.
    """

    memory: MemoryHandle
    layout: Layout
    signals: MemoryHandle
    shape: SignalsShape


@dataclass(frozen=True)
class EnvsAttached:
    """Memory and flags are mapped."""


@dataclass(frozen=True)
class Ask:
    """Read an attribute of an environment, or call it.

    Attributes:
        name: of the attribute.
        call: call it, or else return it; for a method that is ``IsMethod``.
        args: of the call.
        kwargs: of the call.
    """

    name: str
    call: bool = False
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AskSome:
    """Ask some environments of a worker, given by their indices."""

    environments: tuple[int, ...]
    question: Ask


@dataclass(frozen=True)
class IsMethod:
    """Stands for an attribute that can be called."""


@dataclass(frozen=True)
class EnvAnswer:
    """What each of the asked environments said, pickled, or how one failed."""

    values: bytes = b""
    failure: Failure | None = None


@dataclass(frozen=True)
class Nudge:
    """Read this: whoever does not for ``timeout`` seconds hangs."""
