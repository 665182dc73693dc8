"""Reads an environment's groups and spaces from a worker process."""

from marl_collect.core.description import EnvDescription
from marl_collect.core.env import require_factory
from marl_collect.core.factories import Factory, build
from marl_collect.processes.closing import close_after
from marl_collect.processes.context import WorkerContext
from marl_collect.processes.launcher import COLLECTOR_MODULES, StartMethod
from marl_collect.processes.options import ProcessOptions
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.status_board import Phase


def describe(
    create_env_fn: Factory,
    *,
    start_method: StartMethod | None = None,
    timeout: float | None = 300.0,
) -> EnvDescription:
    """Build one environment in a worker process, and return its description.

    Args:
        create_env_fn: the factory.
        start_method: ``"forkserver"`` or ``"spawn"``; None for the default of
            collectors, ``"forkserver"``.
        timeout: seconds without progress after which building counts as hung.

    Raises:
        TypeError: ``create_env_fn`` is not a factory.
        ValueError: there is no such start method, or the time is not positive.
        Exception: what building raised, as its own type.
    """
    require_factory(create_env_fn, "create_env_fn")
    checked = ProcessOptions(start_method=start_method, timeout=timeout)
    # The same fork server as collectors use, so that the next one starts quickly.
    options = checked.of_pool(*COLLECTOR_MODULES) | {"start_timeout": checked.timeout}
    with WorkerPool(_main, [create_env_fn], **options) as pool:
        try:
            return pool.receive()[1]
        except BaseException as error:
            close_after(error, pool.close)
            raise


def _main(context: WorkerContext, factory: Factory) -> None:
    context.line.enter(Phase.CREATE, 0)
    engine = build([factory])
    with context.closing(engine.close):
        context.send(engine.description)
