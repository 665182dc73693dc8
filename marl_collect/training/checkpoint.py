"""``Checkpoint``: saves a training loop, so that an interruption loses little of it."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from marl_collect.core.seeding import global_generators, set_global_generators
from marl_collect.files.log_file import LOG, add_line
from marl_collect.models.saved_policy import read_tensors, write_tensors
from marl_collect.programs.interruption import FINISHING, Interruption
from marl_collect.training.run_folder import LAST

SAVE_SECONDS = 120.0
"""A process that is killed loses at most this much work, and the batch in progress."""


@final
class Checkpoint:
    """Saves and resumes a training loop of your own.

    Call ``batch_done`` after each batch. It saves every two minutes. Ctrl-C and SIGTERM
    end the program at the next ``batch_done``, after saving; a second Ctrl-C ends it at
    once::

        parts = {"policy": policy, "optimizer": optimizer, "rows": rows}
        with (
            MultiSyncCollector(...) as collector,
            Checkpoint(
                folder, parts | {"collector": collector}, resume=args.resume
            ) as checkpoint,
        ):
            for batch in collector:
                train(batch)
                collector.update_policy_weights_()
                checkpoint.batch_done()

    The states of the global generators of torch and Python are saved too.

    Args:
        folder: for ``checkpoints/last.pt`` and ``progress.log``.
        parts: what is saved. A part has ``state_dict`` and ``load_state_dict``, or is a
            dict or list of tensors and plain data, which resuming changes in place.
        resume: load the last checkpoint when the ``with`` block begins. Without a
            checkpoint, training begins at the start.
    """

    def __init__(
        self, folder: str | Path, parts: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        self._folder = Path(folder)
        self._parts = parts
        self._resume = resume
        self._interruption = Interruption()
        self._deferred = self._interruption.deferred(self._tell)
        self._saved = time.monotonic()

    def batch_done(self) -> None:
        """Save if two minutes have passed, and end the program after a signal.

        Raises:
            SystemExit: after a signal, with the exit code that shells expect.
        """
        happened = self._interruption.happened
        if happened or time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()
        if happened:
            self.print(
                f"Saved {self._folder / LAST}. To go on, begin with resume=True "
                "(--resume in the examples)."
            )
            raise SystemExit(self._interruption.exit_code)

    def save(self) -> None:
        """Write the checkpoint now, completely or not at all."""
        state = {
            name: part if isinstance(part, (dict, list)) else part.state_dict()
            for name, part in self._parts.items()
        }
        generators = global_generators()
        write_tensors(self._folder / LAST, {"parts": state, "generators": generators})
        self._saved = time.monotonic()

    def print(self, text: str) -> None:
        """Print a line, and append it to ``progress.log``."""
        add_line(self._folder / LOG, text)
        print(text, flush=True)  # noqa: T201 - what this is for

    def __enter__(self) -> Self:
        """Load the checkpoint if resuming, and handle signals from now on.

        Raises:
            ValueError: if the checkpoint is damaged, or has other parts.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._resume and (self._folder / LAST).exists():
            self._load()
        self._interruption.__enter__()
        self._deferred.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._deferred.__exit__(*exc_info)
        self._interruption.__exit__(*exc_info)

    def _load(self) -> None:
        path = self._folder / LAST
        state = read_tensors(path)
        parts = state["parts"]
        if parts.keys() != self._parts.keys():
            raise ValueError(
                f"{path} has the parts {sorted(parts)}, but this program has "
                f"{sorted(self._parts)}. Delete it to begin again."
            )
        for name, part in self._parts.items():
            if isinstance(part, (dict, list)):
                part.clear()
                (part.update if isinstance(part, dict) else part.extend)(parts[name])
            else:
                part.load_state_dict(parts[name])
        set_global_generators(state["generators"])
        self.print(f"Resumed {path}.")

    def _tell(self) -> None:
        sys.stderr.write(f"{FINISHING}\n")
