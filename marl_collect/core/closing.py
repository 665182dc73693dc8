"""``Closing``: the base class of objects that a ``with`` block closes."""

import abc
from contextlib import suppress
from typing import Self
from warnings import warn


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
            if error is None:
                raise
            # It must not hide the first.
            error.add_note(f"While closing: {trouble}")
            if isinstance(error, SystemExit):  # Python does not show its notes.
                with suppress(Warning):
                    warn(f"While closing: {trouble}", RuntimeWarning, stacklevel=2)
