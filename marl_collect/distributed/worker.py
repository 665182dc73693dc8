"""The main function of a worker in an actor: that of a local one, by way of a relay."""

from marl_collect.collectors import worker
from marl_collect.collectors.messages import Assignment
from marl_collect.processes import pickling
from marl_collect.processes.context import WorkerContext


def main(context: WorkerContext, assignment: Assignment) -> None:
    """Build the environments, then execute calls until the socket is closed."""
    send = context.send

    def send_pickled(message: object) -> None:
        send(pickling.dumps(message))  # The relay passes on bytes.

    context.send = send_pickled  # type: ignore[method-assign]
    worker.main(context, assignment)
