"""Files of a training run: rows, checkpoints, the lock."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import run_python

from marl_collect.training.run_folder import RunFolder, read_json, read_rows


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for frames in (10, 20, 30):
        folder.add_row({"frames": frames, "loss": 0.5})
    folder.keep_rows(2)
    folder.add_row({"frames": 31, "loss": 1.0})
    assert [row["frames"] for row in folder.rows()] == [10, 20, 31]
    with pytest.raises(ValueError, match=r"progress.csv is damaged: .* 4 rows, .* 3\."):
        folder.keep_rows(4)
    folder.keep_rows(0)
    folder.add_row({"loss": 1.0})  # A run that begins again may have other columns.
    assert folder.rows() == [{"loss": 1.0}]


def test_an_incomplete_last_row_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_row({"frames": 10, "loss": 0.5})
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("20")
    assert folder.rows() == [{"frames": 10, "loss": 0.5}]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_row({"frames": 10})
    with pytest.raises(ValueError, match="has the columns"):
        folder.add_row({"frames": 10, "loss": 0.5})


def test_an_interrupted_write_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_checkpoint("checkpoints/last.pt", {"a": torch.ones(2), "b": {"c": 1}})
    leftover = tmp_path / "checkpoints" / ".last.pt.0123abcd.new"
    leftover.write_bytes(b"half")  # Killed here.
    state = folder.read_checkpoint("checkpoints/last.pt")
    assert torch.equal(state["a"], torch.ones(2))
    assert state["b"] == {"c": 1}
    assert folder.read_checkpoint("checkpoints/best.pt") is None


@pytest.mark.processes
def test_a_folder_is_locked_against_other_processes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        code = (
            "import sys; from pathlib import Path\n"
            "from marl_collect.training.run_folder import RunFolder\n"
            "RunFolder(Path(sys.argv[1])).lock()"
        )
        other = run_python("-c", code, folder.path)
    assert other.returncode == 1
    assert "run is being written to by another process" in other.stderr
    folder.lock().close()


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


def test_reading_a_checkpoint_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"collector": Trap()}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="last.pt is damaged, or holds no tensors"):
        RunFolder(tmp_path).read_checkpoint("last.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)]
)
@pytest.mark.parametrize("read", [read_json, read_rows])
def test_no_link_or_pipe_of_a_run_is_read(read: Any, make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=r"(link|not a regular file).*a'"):
        read(tmp_path / "a")
