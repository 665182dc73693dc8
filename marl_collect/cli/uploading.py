"""Copies a dataset to an object store while it is being written."""

import shlex
import threading
from pathlib import Path
from typing import final


@final
class Upload:
    """Copies the finished files of a folder to a URL, in a thread.

    Batches are in the folder first. An error of the store stops nothing: the next call
    copies what is missing.

    Attributes:
        folder: that is written to.
        url: where its files are copied to.
        error: why the last try failed; None if everything was copied.
    """

    def __init__(self, folder: Path, url: str) -> None:
        """Prepare copying; ``more`` starts it."""
        self.folder, self.url = folder, url
        self._new = threading.Event()
        self._closed = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    @property
    def command(self) -> str:
        """The command that copies what is missing."""
        return shlex.join(["marl-collect", "copy", str(self.folder), self.url])

    def more(self) -> None:
        """Copy new files soon."""
        if self._thread.ident is None:
            self._thread.start()
        self._new.set()

    def finish(self) -> None:
        """Copy the last files, and wait for that; Ctrl-C interrupts it.

        The requests of stores have time limits of their own.
        """
        self._closed = True
        self.more()
        self._thread.join()

    def _run(self) -> None:
        from marl_collect.storage import copy

        closed = False
        while not closed:
            self._new.wait()
            self._new.clear()
            closed = self._closed
            try:
                copy(self.folder, self.url)
                self.error = None
            except Exception as error:  # noqa: BLE001 - it is reported at the end
                self.error = error
