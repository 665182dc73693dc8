"""From what an actor returned, or did not return, to a value or an error."""

from typing import Any, NoReturn, final

from marl_collect.distributed.messages import Answer, Failed
from marl_collect.errors import WorkerError, raise_failure

FETCH_SECONDS = 60.0
"""For an object that Ray says is there."""


@final
class Lost(Exception):  # noqa: N818 - mended, where a restart is left
    """An actor is gone, or what it had sent."""

    def __init__(self, index: int, why: str) -> None:
        """Say which, and why."""
        super().__init__(f"actor {index}: {why}")
        self.index = index
        self.why = why


@final
class Raised(Exception):  # noqa: N818 - see Lost
    """Something was raised in an actor."""

    def __init__(self, index: int, failed: Failed) -> None:
        """Say in which actor, and what."""
        super().__init__(failed.failure.summary)
        self.index = index
        self.failed = failed
        self.why = f"raised {failed.failure.summary}"

    def again(self) -> NoReturn:
        """Raise it here, as its own type."""
        raise_failure(self.failed.failure, self.failed.worker)


def fetch(ray: Any, index: int, reference: Any) -> Any:
    """Return what an actor's call gave.

    Raises:
        Lost: if the actor is gone, or the object.
        Raised: if the call failed.
    """
    try:
        reply = ray.get(reference, timeout=FETCH_SECONDS)
    except ray.exceptions.RayError as error:
        raise Lost(index, why(error)) from None
    if isinstance(reply, Failed):
        raise Raised(index, reply)
    return reply.value if isinstance(reply, Answer) else reply


def why(error: Exception) -> str:
    """Say in one line what Ray reports."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    return f"{kind}: {' '.join(lines)}" if lines else kind


def lost_error(worker: int, who: str, lost: Lost, rest: str) -> WorkerError:
    """Return the error of an actor that cannot be replaced."""
    return WorkerError(worker, f"was lost with {who}", f"{lost.why}. {rest}")
