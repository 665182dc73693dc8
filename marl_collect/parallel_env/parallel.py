"""Several environments in other processes, with the policy in this one."""

from collections.abc import Sequence
from typing import Any, Unpack, final

from marl_collect.env import EnvBatch
from marl_collect.factories import Kwargs
from marl_collect.parallel_env.arguments import Factories, factories_of
from marl_collect.parallel_env.batch import ParallelBatch
from marl_collect.parallel_env.messages import Ask
from marl_collect.parallel_env.options import ParallelKeywords, ParallelOptions
from marl_collect.parallel_env.together import EnvsTogether


@final
class ParallelEnv(EnvsTogether):
    """N environments, stepped by other processes; equal to SerialEnv in its data."""

    _engine: ParallelBatch

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Factories,
        *,
        create_env_kwargs: Kwargs = None,
        **options: Unpack[ParallelKeywords],
    ) -> None:
        """Start the processes and wait until the environments are built.

        Args:
            num_workers: N, the number of environments, whatever the processes.
            create_env_fn: a factory, or a list with one per environment.
            create_env_kwargs: passed to every factory, or a list with one per
                environment.
            options: see :class:`~marl_collect.parallel_env.options.ParallelOptions`.

        Raises:
            TypeError: an argument is of the wrong type, or cannot be pickled.
            ValueError: an argument makes no sense.
            Exception: what a factory raised, from a `WorkerError`.
        """
        factories = factories_of(num_workers, create_env_fn, create_env_kwargs)
        parsed = ParallelOptions(**options)
        parsed.check(len(factories))
        if parsed.num_threads is not None:
            import torch

            torch.set_num_threads(parsed.num_threads)
        self._engine = ParallelBatch(factories, parsed)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called, or an error has closed it."""
        return self._engine.is_closed

    def engine(self) -> EnvBatch:
        """Return what the engine drives."""
        return self._engine

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._engine.close()

    def _ask(self, question: Ask, indices: Sequence[int]) -> list[Any]:
        return self._engine.ask(question, indices)
