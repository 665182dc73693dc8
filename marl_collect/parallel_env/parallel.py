"""``ParallelEnv``: environments in other processes, with the policy in this one."""

from typing import TYPE_CHECKING, Any, NoReturn, final

from marl_collect.core.batch import EnvBatch
from marl_collect.options import method
from marl_collect.parallel_env.batch import ParallelBatch
from marl_collect.parallel_env.env_processes import EnvProcesses
from marl_collect.parallel_env.joint import JointEnvs, factories_of
from marl_collect.parallel_env.options import ParallelOptions
from marl_collect.parallel_env.serial import SerialEnv
from marl_collect.processes.closing import CLOSE_SECONDS, ERROR_CLOSE_SECONDS


@final
class ParallelEnv(JointEnvs):
    """N environments, stepped by other processes; same data as SerialEnv."""

    _engine: ParallelBatch

    # Type checkers read the arguments from __init__. pyright cannot tell the parameters
    # of a decorated __new__.
    if not TYPE_CHECKING:

        @method(ParallelOptions)
        def __new__(cls, options: ParallelOptions) -> Any:
            """Return a ``SerialEnv`` if ``serial_for_single`` asks for it."""
            if options.serial_for_single and options.num_workers == 1:
                options.check()
                env = SerialEnv(
                    options.num_workers,
                    options.create_env_fn,
                    create_env_kwargs=options.create_env_kwargs,
                )
                _set_threads(options.num_threads)
                return env
            return super().__new__(cls)

    @method(ParallelOptions)
    def __init__(self, options: ParallelOptions) -> None:
        """Start the processes and wait until the environments are built.

        The arguments are the fields of ``ParallelOptions``.

        Raises:
            TypeError: an argument has the wrong type, or cannot be pickled.
            ValueError: an argument has an invalid value.
            Exception: what a factory raised, from a ``WorkerError``.
        """
        factories = factories_of(
            options.num_workers, options.create_env_fn, options.create_env_kwargs
        )
        options.check()
        _set_threads(options.num_threads)
        processes = EnvProcesses(factories, options)
        self._engine = ParallelBatch(processes, range(options.groups))

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called, or an error has closed it."""
        return self._engine.is_closed

    def engine(self) -> EnvBatch:
        """Return the batch that collectors step."""
        return self._engine

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._engine.close()

    def __exit__(self, kind: object = None, *exc_info: object) -> None:
        """Close; soon if the block has raised an error."""
        self._engine.close(CLOSE_SECONDS if kind is None else ERROR_CLOSE_SECONDS)

    def __reduce__(self) -> NoReturn:
        """Raise an error: a copy would use the same processes."""
        raise TypeError(
            "A ParallelEnv cannot be copied or pickled: its processes belong to the "
            "process that started them. Build a new one with the same arguments, or "
            "pass a function that builds it to other processes."
        )


def _set_threads(number: int | None) -> None:
    if number is not None:
        import torch

        torch.set_num_threads(number)
