"""Converts Ray results to values or errors."""

from typing import Any, NoReturn, final

from marl_collect.distributed.messages import ActorAnswer, Failed
from marl_collect.errors import WorkerError, raise_failure

FETCH_SECONDS = 60.0
"""Timeout for an object that Ray reports as available."""


@final
class Lost(Exception):  # noqa: N818 - the actor is replaced
    """An actor is gone, or an object that it had sent."""

    def __init__(self, index: int, why: str) -> None:
        """Name the actor and the reason."""
        super().__init__(f"actor {index}: {why}")
        self.index = index
        self.why = why


@final
class Raised(Exception):  # noqa: N818 - see Lost
    """An exception was raised in an actor."""

    def __init__(self, index: int, failed: Failed) -> None:
        """Name the actor and the exception."""
        super().__init__(failed.failure.summary)
        self.index = index
        self.failed = failed
        self.why = f"raised {failed.failure.summary}"

    def reraise(self) -> NoReturn:
        """Raise the exception here, with its own type."""
        raise_failure(self.failed.failure, self.failed.worker)


def fetch(ray: Any, index: int, reference: Any) -> Any:
    """Return the result of a call of an actor.

    Raises:
        Lost: if the actor or the object is gone.
        Raised: if the call failed.
    """
    try:
        reply = ray.get(reference, timeout=FETCH_SECONDS)
    except ray.exceptions.RayError as error:
        raise Lost(index, why(error)) from None
    if isinstance(reply, Failed):
        raise Raised(index, reply)
    return reply.value if isinstance(reply, ActorAnswer) else reply


def why(error: Exception) -> str:
    """Return Ray's error message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    return f"{kind}: {' '.join(lines)}" if lines else kind


def lost_error(worker: int, who: str, lost: Lost, rest: str) -> WorkerError:
    """Return the error of an actor that cannot be replaced."""
    return WorkerError(worker, f"was lost with {who}", f"{lost.why}. {rest}")
