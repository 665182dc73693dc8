"""Collects into a replay buffer in a thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final


@final
class Background:
    """Owns the thread of ``start()`` and its lock.

    Attributes:
        lock: held while a batch is collected or weights change.
    """

    def __init__(self) -> None:
        """Create the lock; the thread is not started."""
        self.lock = threading.RLock()
        # Gives callers of ``pause`` priority over the thread, which would otherwise
        # take the lock again at once.
        self._turn = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def used(self) -> bool:
        """Whether the thread was ever started."""
        return self._thread is not None

    def start(self, advance: Callable[[], bool]) -> None:
        """Start the thread.

        Args:
            advance: collects one batch; returns False after the last one.

        Raises:
            RuntimeError: if the thread is already running.
        """
        if self.running:
            raise RuntimeError(
                "This collector is already running: call async_shutdown() first."
            )
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, args=(advance,), daemon=True)
        self._thread.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the thread from collecting inside this block."""
        # A thread that has the lock already (a `postproc` that calls the collector)
        # must not wait for `_turn`: its holder may be waiting for the lock.
        if not self.lock.acquire(blocking=False):
            with self._turn:
                self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def ask_to_stop(self) -> None:
        """Let the thread end after its current batch."""
        self._stopping.set()

    def join(self, timeout: float) -> None:
        """Let the thread end, and wait for at most ``timeout`` seconds."""
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
            except Exception:  # noqa: BLE001 - the collector stores and raises it
                return
