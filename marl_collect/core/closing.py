"""``Closing``: the base class of objects that a ``with`` block closes."""

import abc
from typing import Self


class Closing(abc.ABC):
    """Has a ``close`` that the end of a ``with`` block calls."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        try:
            self.close()
        except Exception as trouble:
            if not isinstance(error, Exception):  # None, or an interruption.
                raise
            error.add_note(f"While closing: {trouble}")  # It must not hide the first.
