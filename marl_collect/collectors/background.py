"""Collecting in a thread, into a replay buffer, while the trainer does other things."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from marl_collect.errors import ClosedError


@final
class Background:
    """Owns the thread of ``start()``, and the lock that keeps it in step.

    Attributes:
        lock: held while a batch is made or weights change.
    """

    def __init__(self) -> None:
        """Run nothing yet."""
        self.lock = threading.RLock()
        # A caller that pauses has priority: the thread would retake the lock at once.
        self._turn = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, advance: Callable[[], bool]) -> None:
        """Begin.

        Args:
            advance: makes one batch; returns False when there is no more.

        Raises:
            RuntimeError: if it runs already.
        """
        if self.running:
            raise RuntimeError("This collector runs already.")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, args=(advance,), daemon=True)
        self._thread.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the thread from making batches inside this block."""
        # Who has the lock, as a `postproc` that asks the collector does, waits for no
        # turn: it may be that of somebody who waits for the lock.
        if not self.lock.acquire(blocking=False):
            with self._turn:
                self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def ask_to_stop(self) -> None:
        """Let the thread end after the batch that it is making."""
        self._stopping.set()

    def join(self, timeout: float) -> None:
        """Let the thread end, and wait for it at most ``timeout`` seconds."""
        self.ask_to_stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, advance: Callable[[], bool]) -> None:
        while not self._stopping.is_set():
            with self._turn:
                pass
            try:
                if not advance():
                    return
            except ClosedError:
                return
            except Exception:  # noqa: BLE001 - the collector keeps it and raises it
                return
