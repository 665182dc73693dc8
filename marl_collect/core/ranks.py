"""``Ranks``: which of the processes of a distributed job this one is."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, final

from marl_collect.options import Option, require

_VARIABLES = "RANK", "WORLD_SIZE"
_group: tuple[Any, Any] | None = None
"""The default group of ``torch.distributed``, and a group of the same ranks on CPUs."""


@final
@dataclass(frozen=True)
class Ranks:
    """A process of a job in which several run the same program.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Check both numbers.

        Raises:
            TypeError: if one is no integer.
            ValueError: if there is no such rank.
        """
        require("rank", self.rank, int, Option("", at_least=0))
        require("world_size", self.world_size, int, Option("", at_least=1))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank} and world_size is {self.world_size}: ranks are "
                "numbered from 0 to world_size - 1."
            )

    @classmethod
    def of(cls, rank: int | None, world_size: int | None) -> Self:
        """Return what the user passes, by default the rank of the running job.

        That is ``torch.distributed``'s, if it is initialised, or else torchrun's, in
        the variables RANK and WORLD_SIZE. Without a job there is one process.

        Raises:
            ValueError: if one of both is missing, also of the variables, or if they
                fit no job.
        """
        if rank is not None and world_size is not None:
            return cls(rank, world_size)
        if rank is not None or world_size is not None:
            raise ValueError(
                f"rank is {rank} and world_size is {world_size}: pass both, or neither "
                "for those of torchrun."
            )
        if _is_initialized():
            import torch.distributed as dist

            return cls(dist.get_rank(), dist.get_world_size())
        texts = [os.environ.get(name, "") for name in _VARIABLES]
        if not any(texts):
            return cls()
        if not all(text.isdecimal() for text in texts):
            first, second = (repr(text) if text else "not set" for text in texts)
            raise ValueError(
                f"The variables RANK and WORLD_SIZE are {first} and {second}, but "
                "torchrun sets both to integers: set both, unset both, or pass rank "
                "and world_size."
            )
        return cls(*map(int, texts))

    def gather(self, value: Any, caller: str) -> list[Any]:
        """Return the values of all ranks, in their order; all of them must call it.

        They are exchanged in the memory of the CPU, also if the ranks are connected by
        NCCL, which would need each rank's own GPU to be torch's current one.

        Args:
            value: of this rank; is pickled.
            caller: what the user has called, for errors.

        Raises:
            RuntimeError: if the processes are not connected, if ``torch.distributed``
                numbers them differently, or if they have called different things; on
                all ranks, except that a wrong ``world_size`` is noticed by this one.
                Also if another rank has ended, or sends nothing in the time that
                ``init_process_group`` allows.
        """
        if not _is_initialized():
            if self.world_size == 1:
                return [value]
            raise RuntimeError(
                f"{caller} needs the values of {self.world_size} ranks, but they are "
                "not connected: call torch.distributed.init_process_group() first."
            )
        import torch.distributed as dist

        size = dist.get_world_size()
        if size != self.world_size:
            raise RuntimeError(
                f"{caller} needs the values of {self.world_size} ranks, but "
                f"torch.distributed connects {size}: call init_process_group() before "
                "the collector is built, or pass rank and world_size of that group."
            )
        entries: list[Any] = [None] * size
        try:
            dist.all_gather_object(entries, (self.rank, caller, value), _group_on_cpu())
        except RuntimeError as error:
            raise RuntimeError(
                f"{caller}: rank {self.rank} of {size} got no values of the others. "
                "One of them has ended or hangs: the rank that failed first has "
                f"printed the cause. The connection says: {error}"
            ) from error
        numbers, callers, values = map(list, zip(*entries, strict=True))
        if numbers != list(range(size)):
            raise RuntimeError(
                f"{caller}: torch.distributed numbers the ranks {list(range(size))}, "
                f"but they were built as ranks {numbers}: pass the rank of that group, "
                "or neither rank nor world_size."
            )
        if len(set(callers)) > 1:
            raise RuntimeError(
                f"The ranks exchange values in different calls, {callers}: all of them "
                "must make the same calls, after the same batch."
            )
        return values

    def together(self, act: Callable[[], Any], caller: str) -> list[Any]:
        """Return what a function returns on each rank; an error of one is one of all.

        Args:
            act: what this rank does.
            caller: what the user has called, for errors.

        Raises:
            Exception: what ``act`` raised on this rank.
            RuntimeError: if it raised on another rank.
        """
        result, error = None, None
        try:
            result = act()
        except Exception as raised:  # noqa: BLE001 - raised below, on all ranks
            error = raised
        text = None if error is None else f"{type(error).__name__}: {error}"
        outcomes = self.gather((text, result), caller)
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(outcomes):
            if failure is not None:
                raise RuntimeError(f"{caller} failed on rank {rank}. {failure}")
        return [other for _, other in outcomes]

    @property
    def connected(self) -> bool:
        """Whether there are several ranks, which ``gather`` reaches."""
        return self.world_size > 1 and _is_initialized()


def _is_initialized() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _group_on_cpu() -> Any:
    """Return a group of all ranks that exchanges values of the CPU; None for theirs.

    All ranks must call it together.
    """
    import torch.distributed as dist

    global _group
    if "cpu:" in dist.get_backend_config():
        return None
    world: Any = dist.group.WORLD
    if _group is None or _group[0] is not world:
        # A new group would wait for its own default of 30 minutes.
        (device, *_) = world._device_types  # noqa: SLF001 - torch says it nowhere else
        timeout = world._get_backend(device).options._timeout  # noqa: SLF001
        _group = world, dist.new_group(backend="gloo", timeout=timeout)
    return _group[1]
