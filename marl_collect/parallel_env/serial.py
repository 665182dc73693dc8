"""``SerialEnv``: environments in this process, the reference for ParallelEnv."""

from typing import final

from marl_collect.core.batch import EnvBatch, SerialBatch
from marl_collect.core.factories import Kwargs, build_singles
from marl_collect.errors import ClosedError
from marl_collect.parallel_env.joint import Factories, JointEnvs, factories_of


@final
class SerialEnv(JointEnvs):
    """N environments, stepped one after the other in this process."""

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
        self._engine = SerialBatch(build_singles(factories, range(len(factories))))

    def engine(self) -> EnvBatch:
        """Return the batch that collectors step."""
        if self._closed:
            raise ClosedError("This SerialEnv is closed: build a new one.")
        return self._engine

    def close(self) -> None:
        """Close every environment; may be called twice."""
        if not self._closed:
            self._closed = True
            self._engine.close()
