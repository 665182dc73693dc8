"""``Checkpoint``: saves a training loop, so that an interruption loses little of it."""

import sys
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Self, TypeAlias, final

from marl_collect.collectors.collector import CollectorBase
from marl_collect.core.ranks import Ranks
from marl_collect.core.seeding import global_generators, set_global_generators
from marl_collect.errors import ClosedError
from marl_collect.files.log_file import LOG, add_line
from marl_collect.models.saved_policy import read_tensors, write_tensors
from marl_collect.programs.interruption import FINISHING, Interruption
from marl_collect.training.run_folder import LAST

_NEW: Final = "new.pt"
"""What a rank has written, until all ranks have; then it becomes the last one."""
_Moment: TypeAlias = tuple[str, int]
"""A run, which is one start of the program, and the number of its checkpoint."""
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
    save after the same batch, and resume from the newest checkpoint that all of them
    have. An error of one of them in saving or loading is raised on all. Ranks that are
    not connected save and resume each for itself.

    Args:
        folder: for ``checkpoints/last.pt`` and ``progress.log``.
        parts: what is saved. A part has ``state_dict`` and ``load_state_dict``, or is a
            dict or list of tensors and plain data, which resuming changes in place.
        resume: load the last checkpoint when the ``with`` block begins. Without a
            checkpoint, training begins at the start.
        rank: number of this process; as for collectors.
        world_size: number of processes; as for collectors.

    Raises:
        TypeError: if a part cannot be saved, or ``rank`` or ``world_size`` is no
            integer.
        ValueError: if one of both is missing, or they fit no job.
    """

    def __init__(
        self,
        folder: str | Path,
        parts: Mapping[str, Any],
        *,
        resume: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, part in parts.items():
            restored = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
            if not restored and not isinstance(part, (dict, list)):
                raise TypeError(
                    f"The part {name!r} cannot be saved and restored, because "
                    f"{part!r:.100} has no state_dict and load_state_dict, and is no "
                    "dict or list, which resuming changes in place: put it into one."
                )
        self._rank_arguments = rank, world_size
        self._ranks = Ranks.of(rank, world_size)
        self._connected = self._ranks.connected
        self._root = Path(folder).absolute()
        self._folder = self._root
        if self._ranks.world_size > 1:
            self._folder /= f"rank-{self._ranks.rank}-of-{self._ranks.world_size}"
        self._parts = parts
        self._resume = resume
        self._interruption = Interruption()
        self._deferred = self._interruption.deferred(self._tell)
        self._saved = time.monotonic()
        self._run = ""  # Of all ranks; they agree on it when they first meet.
        self._number = 0

    def batch_done(self) -> None:
        """Save if two minutes have passed, and end the program after a signal.

        It also saves after a collector's last batch: the workers, which have the state
        of their environments, end with the loop.

        Raises:
            SystemExit: after a signal, with the exit code that shells expect.
            RuntimeError: as ``save``.
        """
        self._check_job()
        # Read once: a signal that arrives below is of the next batch.
        number = self._interruption.number
        due = time.monotonic() - self._saved > SAVE_SECONDS or any(
            0 <= part.total_frames <= part.frames
            for part in self._parts.values()
            if isinstance(part, CollectorBase)
        )
        if self._connected:
            # Those that go on would wait forever for one that ends.
            of_ranks = self._ranks.gather((number, due), "Checkpoint.batch_done()")
            number, due = map(max, zip(*of_ranks, strict=True))
        if number or due:
            self.save()
        if number:
            self._interruption.number = number
            self._end(self._folder / LAST)

    def _end(self, path: Path) -> None:
        """End the program after a signal and a save."""
        self.print(
            f"The state is in {path}. To go on, begin with resume=True "
            "(--resume in the examples)."
        )
        raise SystemExit(self._interruption.exit_code)

    def save(self) -> None:
        """Write the checkpoint now, completely or not at all.

        Ranks that are connected must all call it, after the same batch.

        Raises:
            OSError: if it cannot be written; the last checkpoint stays.
            RuntimeError: if another rank could not save, or the ranks were connected
                or disconnected since this object was built.
        """
        self._check_job()
        self._number += 1  # Also if this fails: a number is never of two moments.
        path = self._folder / LAST
        if not self._connected:
            self._write(path)
        else:
            # The last one stays until all ranks have the new one: a rank may be killed
            # at any time, and all of them must resume from the same.
            call = "Checkpoint.save()"
            new = path.with_name(_NEW)
            self._run = self._run or self._ranks.gather(token_hex(4), call)[0]
            self._ranks.together(lambda: self._write(new), call)
            new.replace(path)
        self._saved = time.monotonic()

    def _write(self, path: Path) -> None:
        state = {
            name: part if isinstance(part, (dict, list)) else part.state_dict()
            for name, part in self._parts.items()
        }
        content = {
            "parts": state,
            "generators": global_generators(),
            "run": self._run,
            "number": self._number,
        }
        write_tensors(path, content)

    def print(self, text: str) -> None:
        """Print a line, and append it to ``progress.log``."""
        add_line(self._folder / LOG, text)
        print(text, flush=True)  # noqa: T201 - what this is for

    def __enter__(self) -> Self:
        """Load the checkpoint if resuming, and handle signals from now on.

        Raises:
            ValueError: if the checkpoint is damaged, has other parts, or is that of
                another number of ranks.
            RuntimeError: if that is so on another rank, if the ranks have no checkpoint
                in common, or if not all of them resume.
        """
        self._check_job()
        if self._connected:
            self._load_with_all()
        elif self._resume:
            for path, state in self._checkpoints().values():
                self._load(path, state)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._interruption.__enter__()
        self._deferred.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._deferred.__exit__(*exc_info)
        self._interruption.__exit__(*exc_info)
        if self._interruption.happened and exc_info[0] is None:
            # It came after the last batch_done(), so other ranks may not save. Until
            # all of them have, the last checkpoint that they have in common stays.
            self._number += 1
            path = _files(self._folder)[0 if self._connected else 1]
            try:
                self._write(path)
            except ClosedError:  # What batch_done() saved stays.
                path = self._folder / LAST
            self._end(path)

    def _checkpoints(self) -> dict[_Moment, tuple[Path, Any]]:
        """Return the checkpoints of this rank, the newest first, with their contents.

        Raises:
            ValueError: if one is damaged, or there are those of another number of ranks
                only.
        """
        _check_folders(self._root, self._folder, self._ranks)
        checkpoints = {}
        paths = _files(self._folder) if self._connected else [self._folder / LAST]
        for path in paths:
            if path.exists():
                state = read_tensors(path)
                if not {"parts", "run", "number"} <= state.keys():
                    raise ValueError(
                        f"{path} is not of a Checkpoint: choose another folder."
                    )
                checkpoints[state["run"], state["number"]] = path, state
        return checkpoints

    def _load_with_all(self) -> None:
        """Agree on a run with all ranks, and load the newest checkpoint that all have.

        Its number alone does not say that all ranks wrote it at the same time: it may
        be of a run that went on from an earlier checkpoint on one of them.
        """
        checkpoints: dict[_Moment, tuple[Path, Any]] = {}

        def look() -> tuple[str, bool, list[_Moment]]:
            if self._resume:
                checkpoints.update(self._checkpoints())
            return token_hex(4), self._resume, list(checkpoints)

        looks = self._ranks.together(look, "Checkpoint()")
        runs, resuming, of_ranks = zip(*looks, strict=True)
        self._run = runs[0]
        if len(set(resuming)) > 1:
            raise RuntimeError(
                f"resume is {list(resuming)} on ranks 0 to {len(resuming) - 1}: all "
                "ranks must resume, or none."
            )
        # Ranks that were not connected saved without a run, each after its own batch.
        of_all = set.intersection(*map(set, of_ranks))
        common = {(run, number) for run, number in of_all if run}
        if common:
            newest = next(moment for moment in of_ranks[0] if moment in common)
            load = partial(self._load, *checkpoints[newest])
            self._ranks.together(load, "Checkpoint(resume=True)")
        elif any(of_ranks):
            lists = "; ".join(
                f"rank {rank} has {_described(moments)}"
                for rank, moments in enumerate(of_ranks)
            )
            raise RuntimeError(
                f"The ranks have no common checkpoint in {self._root}: {lists}. Delete "
                "their folders to begin again."
            )

    def _load(self, path: Path, state: Any) -> None:
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
        # It must stay when the next one is written.
        path.replace(self._folder / LAST)
        self.print(f"Resumed {self._folder / LAST}.")

    def _check_job(self) -> None:
        """Check that the ranks are those that this object was built for.

        Raises:
            RuntimeError: if they were connected or disconnected since then.
        """
        ranks = Ranks.of(*self._rank_arguments)
        if (ranks, ranks.connected) != (self._ranks, self._connected):
            raise RuntimeError(
                "torch.distributed has connected or disconnected the ranks since this "
                "Checkpoint was built, so they would not save together: build it after "
                "init_process_group(), and use it before destroy_process_group()."
            )

    def _tell(self) -> None:
        sys.stderr.write(f"{FINISHING}\n")


def _files(folder: Path) -> list[Path]:
    """Return where a rank's checkpoints may be, the newest first."""
    return [(folder / LAST).with_name(_NEW), folder / LAST]


def _described(moments: Collection[_Moment]) -> str:
    return ", ".join(f"number {n} of run {run}" for run, n in moments) or "none"


def _check_folders(root: Path, folder: Path, ranks: Ranks) -> None:
    """Check that nothing else was saved here than what this rank saves.

    Raises:
        ValueError: if there are checkpoints of another number of ranks only.
    """
    if any(path.exists() for path in _files(folder)):
        return
    others = [path.parents[1] for path in (root / LAST, *root.glob(f"rank-*/{LAST}"))]
    others = [path for path in others if (path / LAST).exists()]
    if any(not path.name.endswith(f"-of-{ranks.world_size}") for path in others):
        raise ValueError(
            f"{root} has the checkpoints {sorted(map(str, others))}, which another "
            f"number of ranks saved than {ranks.world_size}. Resume on as many ranks, "
            "or choose another folder."
        )
