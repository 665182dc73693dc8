"""Several environments in other processes, with the policy in this one."""

from typing import TYPE_CHECKING, Any, Unpack, final

from marl_collect.description import EnvDescription
from marl_collect.env import EnvBatch, TensorDictEnv
from marl_collect.factories import Kwargs
from marl_collect.parallel_env.arguments import Factories, factories_of
from marl_collect.parallel_env.attributes import dispatch
from marl_collect.parallel_env.batch import ParallelBatch
from marl_collect.parallel_env.messages import Ask
from marl_collect.parallel_env.options import ParallelKeywords, ParallelOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@final
class ParallelEnv(TensorDictEnv):
    """N environments, stepped by other processes; equal to SerialEnv in its data.

    Attributes and methods that it does not have itself are those of its
    environments, as lists: ``env.attr``, ``env.method(...)``.
    """

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
        self._engine = ParallelBatch(factories, parsed)

    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and promises of each environment."""
        return self._engine.description

    @property
    def batch_size(self) -> tuple[int, ...]:
        """``(N,)``."""
        return (self._engine.size,)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called, or an error has closed it."""
        return self._engine.is_closed

    def engine(self) -> EnvBatch:
        """Return what the engine drives."""
        return self._engine

    def render(self) -> "list[NDArray[np.uint8] | None]":
        """Return an image ``[height, width, 3]`` of each environment, if it has any."""
        return self._ask(Ask("render", call=True))

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._engine.close()

    def __len__(self) -> int:
        """How many environments there are."""
        return self._engine.size

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of every environment, or call it in each."""
        return dispatch(type(self).__name__, name, self._ask)

    def _ask(self, question: Ask) -> list[Any]:
        return self._engine.ask(question, range(self._engine.size))
