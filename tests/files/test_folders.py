"""New folders appear when they are complete; errors and kills leave nothing."""

import fcntl
import signal
from pathlib import Path

import pytest
from support.scripts import run_python

from marl_collect.files.folders import completed


def write(target: Path, error: BaseException | None = None) -> None:
    with completed(target, "write") as path:
        path.mkdir()
        (path / "a").touch()
        assert not target.exists()
        if error is not None:
            raise error


def test_an_error_leaves_nothing_and_what_exists_stays(tmp_path: Path) -> None:
    target = tmp_path / "new" / "d"
    with pytest.raises(KeyboardInterrupt):
        write(target, KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    write(target)
    with pytest.raises(FileExistsError, match="d exists: write to a path that does"):
        write(target)
    assert [path.name for path in target.iterdir()] == ["a"]


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes").touch()
    (tmp_path / ".d.incomplete").symlink_to(precious)
    write(tmp_path / "d")
    assert {path.name for path in tmp_path.iterdir()} == {"d", "precious"}
    assert [path.name for path in precious.iterdir()] == ["notes"]


@pytest.mark.processes
def test_what_a_killed_process_left_is_removed_unless_another_one_writes(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from marl_collect.files.folders import completed\n"
        "with completed(Path(sys.argv[1]), 'write') as path:\n"
        "    path.mkdir(); (path / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    target, hidden = tmp_path / "d", tmp_path / ".d.incomplete"
    killed = run_python("-c", code, target)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (hidden / "d" / "half").exists()
    with (hidden / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="is being written to by another"):
            write(target)
    assert not target.exists()
    write(target)
    assert [path.name for path in target.iterdir()] == ["a"]
    assert not hidden.exists()
