"""``Checkpoint``: saves a training loop, so that an interruption loses little of it."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from marl_collect.core.ranks import Ranks
from marl_collect.core.seeding import global_generators, set_global_generators
from marl_collect.files.log_file import LOG, add_line
from marl_collect.models.saved_policy import read_tensors, write_tensors
from marl_collect.programs.interruption import FINISHING, Interruption
from marl_collect.training.run_folder import LAST

_PREVIOUS = "previous.pt"
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

    Of a job with several ranks, such as torchrun's, each has a folder of its own,
    ``rank-K-of-N`` in ``folder``. If ``torch.distributed`` connects them, all of them
    save after the same batch, and resume from the same.

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
        self._ranks = Ranks.of(None, None)
        self._root = Path(folder)
        self._folder = _folder_of(self._root, self._ranks)
        self._parts = parts
        self._resume = resume
        self._interruption = Interruption()
        self._deferred = self._interruption.deferred(self._tell)
        self._saved = time.monotonic()
        self._saves = 0

    def batch_done(self) -> None:
        """Save if two minutes have passed, and end the program after a signal.

        Raises:
            SystemExit: after a signal, with the exit code that shells expect.
        """
        # Read once: a signal that arrives below is of the next batch.
        number = self._interruption.number
        due = time.monotonic() - self._saved > SAVE_SECONDS
        if self._ranks.connected:
            # Those that go on would wait forever for one that ends.
            of_all = self._ranks.gather((number, due), "batch_done()")
            number, due = map(max, zip(*of_all, strict=True))
        if number or due:
            self.save()
        if number:
            self._interruption.number = number
            self.print(
                f"Saved {self._folder / LAST}. To go on, begin with resume=True "
                "(--resume in the examples)."
            )
            raise SystemExit(self._interruption.exit_code)

    def save(self) -> None:
        """Write the checkpoint now, completely or not at all.

        Ranks that are connected must all call it, after the same batch.
        """
        state = {
            name: part if isinstance(part, (dict, list)) else part.state_dict()
            for name, part in self._parts.items()
        }
        self._saves += 1
        path = self._folder / LAST
        if self._ranks.world_size > 1 and path.exists():
            # Another rank may be killed before it has written this checkpoint.
            path.replace(path.with_name(_PREVIOUS))
        content = {
            "parts": state,
            "generators": global_generators(),
            "saves": self._saves,
        }
        write_tensors(path, content)
        self._saved = time.monotonic()

    def print(self, text: str) -> None:
        """Print a line, and append it to ``progress.log``."""
        add_line(self._folder / LOG, text)
        print(text, flush=True)  # noqa: T201 - what this is for

    def __enter__(self) -> Self:
        """Load the checkpoint if resuming, and handle signals from now on.

        Raises:
            ValueError: if the checkpoint is damaged, has other parts, or is that of
                another number of ranks.
        """
        if self._resume:
            _check_folders(self._root, self._folder, self._ranks)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._resume:
            self._load()
        self._interruption.__enter__()
        self._deferred.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._deferred.__exit__(*exc_info)
        self._interruption.__exit__(*exc_info)

    def _load(self) -> None:
        """Load the last checkpoint that all ranks have; none if there is none."""
        paths = [self._folder / LAST, (self._folder / LAST).with_name(_PREVIOUS)]
        states = {path: read_tensors(path) for path in paths if path.exists()}
        numbers = {state["saves"]: path for path, state in states.items()}
        of_all = [set(numbers)]
        if self._ranks.connected:
            of_all = self._ranks.gather(set(numbers), "Checkpoint(resume=True)")
        common = set.intersection(*of_all)
        if not common:
            if any(of_all):
                raise ValueError(
                    f"The ranks have no common checkpoint in {self._root}, only those "
                    f"numbered {of_all}. Delete their folders to begin again."
                )
            return
        self._saves = max(common)
        path = numbers[self._saves]
        state = states[path]
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


def _folder_of(root: Path, ranks: Ranks) -> Path:
    if ranks.world_size == 1:
        return root
    return root / f"rank-{ranks.rank}-of-{ranks.world_size}"


def _check_folders(root: Path, folder: Path, ranks: Ranks) -> None:
    """Check that nothing else was saved here than what this rank saves.

    Raises:
        ValueError: if there are checkpoints of another number of ranks only.
    """
    if (folder / LAST).exists():
        return
    others = [path.parents[1] for path in (root / LAST, *root.glob(f"rank-*/{LAST}"))]
    others = [path for path in others if (path / LAST).exists()]
    if any(not path.name.endswith(f"-of-{ranks.world_size}") for path in others):
        raise ValueError(
            f"{root} has the checkpoints {sorted(map(str, others))}, which another "
            f"number of ranks saved than {ranks.world_size}. Resume on as many ranks, "
            "or choose another folder."
        )
