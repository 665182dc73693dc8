"""Several environments in this process: the specification of ParallelEnv."""

from typing import TYPE_CHECKING, Any, final

from marl_collect.description import EnvDescription
from marl_collect.env import EnvBatch, Serial, TensorDictEnv
from marl_collect.errors import ClosedError
from marl_collect.factories import Kwargs, build_singles
from marl_collect.parallel_env.arguments import Factories, factories_of
from marl_collect.parallel_env.attributes import ask, dispatch
from marl_collect.parallel_env.messages import Ask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@final
class SerialEnv(TensorDictEnv):
    """N environments, stepped one after the other in this process.

    Attributes and methods that it does not have itself are those of its
    environments, as lists: ``env.attr``, ``env.method(...)``.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Factories,
        *,
        create_env_kwargs: Kwargs = None,
    ) -> None:
        """Build the environments.

        Args:
            num_workers: N, the number of environments.
            create_env_fn: a factory, or a list with one per environment.
            create_env_kwargs: passed to every factory, or a list with one per
                environment.
        """
        factories = factories_of(num_workers, create_env_fn, create_env_kwargs)
        self._envs = build_singles(factories, range(len(factories)))
        self._engine = Serial(self._envs)
        self._closed = False

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
        """Whether ``close`` has been called."""
        return self._closed

    def engine(self) -> EnvBatch:
        """Return what the engine drives."""
        self._check_open()
        return self._engine

    def render(self) -> "list[NDArray[np.uint8] | None]":
        """Return an image ``[height, width, 3]`` of each environment, if it has any."""
        self._check_open()
        return [env.render() for env in self._envs]

    def close(self) -> None:
        """Close every environment; may be called twice."""
        if not self._closed:
            self._closed = True
            # Made anew when it is next used, it finds out that we are closed.
            self.__dict__.pop("_face", None)
            self._engine.close()

    def __len__(self) -> int:
        """How many environments there are."""
        return self._engine.size

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of every environment, or call it in each."""
        return dispatch(type(self).__name__, name, self._ask)

    def _ask(self, question: Ask) -> list[Any]:
        self._check_open()
        return [ask(env, question) for env in self._envs]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This SerialEnv is closed. Build a new one.")
