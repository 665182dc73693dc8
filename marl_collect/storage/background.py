"""Writes batches in a thread while the next one is collected."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import final

from tensordict import TensorDictBase

from marl_collect.core.closing import Closing
from marl_collect.errors import ClosedError
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.whole import EpisodeWriter
from marl_collect.storage.writer import Writer


@final
class BackgroundWriter(Closing):
    """Writes batches in a thread of its own, one at a time.

    It holds at most one batch, so a collector needs no memory beyond its two slots. An
    error in the thread is raised by the next call. Nothing is written after an error,
    because the dataset would lack a batch.
    """

    def __init__(
        self,
        writer: Writer | EpisodeWriter,
        on_episodes: Callable[[Sequence[EndedEpisode]], None] | None = None,
    ) -> None:
        """Start the thread; it owns ``writer``.

        Args:
            writer: closed by ``close``.
            on_episodes: called in the thread with the episodes of each batch that
                has been written.
        """
        self._writer = writer
        self._on_episodes = on_episodes
        self._error: BaseException | None = None
        self._raised = False
        self._batches: queue.Queue[TensorDictBase | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Return the writer that the thread owns."""
        return f"BackgroundWriter({self._writer!r})"

    def add(self, batch: TensorDictBase) -> None:
        """Write ``batch``, after waiting for the one before it.

        Raises:
            Exception: the error of an earlier batch, at every call.
            ClosedError: after ``close``, and in a fork of the process.
        """
        if not self._thread.is_alive():
            raise ClosedError(
                "This background writer is closed, or belongs to the process that this "
                "one was forked from: create a new one."
            )
        self._batches.join()
        if self._error is not None:
            self._raised = True
            raise self._error
        self._batches.put(batch)

    def close(self) -> None:
        """Wait for the last batch, and close the writer; may be called twice.

        Raises:
            Exception: the error of a batch, unless ``add`` has raised it.
        """
        if self._thread.is_alive():
            self._batches.put(None)
            self._thread.join()
        self._writer.close()
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def _run(self) -> None:
        while True:
            batch = self._batches.get()
            try:
                if batch is None:
                    return
                if self._error is None:
                    ended = self._writer.add(batch)
                    if self._on_episodes is not None:
                        self._on_episodes(ended)
            except BaseException as error:  # noqa: BLE001 - raised by the next call
                self._error = error
            finally:
                # Frees its slot now instead of when the next batch arrives.
                del batch
                self._batches.task_done()
