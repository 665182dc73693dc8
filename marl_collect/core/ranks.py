"""``Ranks``: which of the processes of a distributed job this one is."""

import os
from dataclasses import dataclass
from typing import Any, Self, final

_VARIABLES = "RANK", "WORLD_SIZE"


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
            ValueError: if there is no such rank.
        """
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank} and world_size is {self.world_size}: ranks are "
                "numbered from 0 to world_size - 1."
            )

    @classmethod
    def of(cls, rank: int | None, world_size: int | None) -> Self:
        """Return what the user passes, by default that of the running job.

        That is ``torch.distributed``'s, if it is initialised, or else torchrun's, in
        the variables RANK and WORLD_SIZE. Without a job there is one process.

        Raises:
            ValueError: if one of both is missing, or if they fit no job.
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
        if not all(texts):
            return cls()
        if not all(text.isdecimal() for text in texts):
            raise ValueError(
                f"The variables RANK and WORLD_SIZE are {texts[0]!r} and {texts[1]!r}, "
                "but torchrun sets them to integers: correct them, or pass rank and "
                "world_size."
            )
        return cls(*map(int, texts))

    def gather(self, value: Any, caller: str) -> list[Any]:
        """Return the values of all ranks, in their order; all of them must call it.

        Raises:
            RuntimeError: if the processes are not connected.
        """
        if self.world_size == 1:
            return [value]
        if not _is_initialized():
            raise RuntimeError(
                f"{caller} needs the values of {self.world_size} ranks, but they are "
                "not connected: call torch.distributed.init_process_group() first."
            )
        import torch.distributed as dist

        if dist.get_world_size() != self.world_size:
            raise RuntimeError(
                f"{caller} needs the values of {self.world_size} ranks, but "
                f"torch.distributed connects {dist.get_world_size()}: pass rank and "
                "world_size of that group."
            )
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @property
    def connected(self) -> bool:
        """Whether there are several ranks, which ``gather`` reaches."""
        return self.world_size > 1 and _is_initialized()


def _is_initialized() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
