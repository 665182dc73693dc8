"""A format is one file and one line; errors come before anything is written."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.datasets import record_here
from support.scripts import run_mounted, run_python
from typer.testing import CliRunner
from workloads.counting import CountingEnv, CountingOptions

from marl_collect.cli.main import app
from marl_collect.storage import (
    Dataset,
    DatasetError,
    export_dataset,
    import_dataset,
)
from marl_collect.storage.files import LOCK, FolderLock
from marl_collect.storage.formats import FORMATS
from marl_collect.storage.formats.registry import Format, find_format


def export_lengths(
    path: Any, header: Any, blocks: Any, target: Any, *, indent: Any = None
) -> None:
    """Write the length of each episode as JSON."""
    lengths = [length for block in blocks for length in block.lengths]
    path.write_text(json.dumps(lengths, indent=indent))


FORMAT = Format("lengths as JSON", "hdf5", ("json",), export=export_lengths)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "lengths", __name__)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("registry") / "d"
    return record_here(path, CountingEnv, episodes=3)


@pytest.mark.usefixtures("lengths")
def test_a_new_format_is_available_to_python_and_the_command_line(
    dataset: Dataset, tmp_path: Path
) -> None:
    expected = dataset.trajectories.lengths.tolist()
    file = export_dataset(dataset.trajectories, tmp_path / "a", "lengths")
    assert json.loads(file.read_text()) == expected
    command = ["export", str(dataset.path), "--out", str(tmp_path / "b")]
    command += ["--format", "lengths", "--option", "indent=2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "b").read_text() == json.dumps(expected, indent=2)
    with pytest.raises(ValueError, match="can be exported, but not imported"):
        import_dataset(file, tmp_path / "c", "lengths")


@pytest.mark.usefixtures("lengths")
def test_unknown_formats_and_settings_are_named(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="'csv' is not a format: use one of hdf5, min"):
        export_dataset(dataset, tmp_path / "new" / "a", "csv")
    with pytest.raises(ValueError, match="'csv' is not a format: use one of hdf5, min"):
        import_dataset(tmp_path, tmp_path / "new" / "a", "csv")
    with pytest.raises(ValueError, match="lengths has no setting 'level': use indent"):
        export_dataset(dataset, tmp_path / "new" / "a", "lengths", level=3)
    with pytest.raises(ValueError, match="no complete episodes to export"):
        export_dataset(dataset.trajectories[:0], tmp_path / "new" / "a", "lengths")
    rewards = dataset.trajectories.select(("next", "prey"))
    with pytest.raises(KeyError, match="have no next/done, which says where they end"):
        export_dataset(rewards, tmp_path / "new" / "a", "lengths")
    other: Any = "gzip"
    with pytest.raises(ValueError, match="must be one of lz4, zstd, none"):
        import_dataset(tmp_path, tmp_path / "new" / "a", "hdf5", compression=other)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("lengths")
def test_existing_targets_are_not_touched(dataset: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    file = export_dataset(dataset, tmp_path / "x.hdf5")
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="x.hdf5 exists: export to a path that"):
        export_dataset(dataset, file, "lengths")
    assert file.read_bytes() == before
    with pytest.raises(FileExistsError, match="d exists: import to a path that does"):
        import_dataset(file, dataset.path, "hdf5")


def test_a_missing_package_is_named_with_its_extra(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    for write in (
        lambda: export_dataset(dataset, tmp_path / "new" / "x.hdf5"),
        lambda: import_dataset("x.hdf5", tmp_path / "new" / "x", "hdf5"),
    ):
        with pytest.raises(ImportError, match=r"marl-collect\[hdf5\]"):
            write()
    assert not (tmp_path / "new").exists()


def test_an_error_leaves_nothing_behind(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")

    def stop(done: Any, total: Any, ended: Any) -> None:
        assert total == sum(dataset.trajectories.lengths)
        if done:
            assert done == total
            assert len(ended) == 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dataset(dataset, tmp_path / "new" / "x.hdf5", progress=stop)
    assert not (tmp_path / "new").exists()
    file = export_dataset(dataset, tmp_path / "x.hdf5")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        import_dataset(file, tmp_path / "new" / "again", "hdf5", progress=stop)
    assert set(tmp_path.rglob("*")) == before


def test_a_killed_import_leaves_no_dataset_and_can_be_repeated(
    dataset: Dataset, tmp_path: Path
) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    file = export_dataset(dataset, tmp_path / "x.hdf5")
    code = (
        "import os, sys; from marl_collect.storage import import_dataset\n"
        "kill = lambda done, *_: done and os.kill(os.getpid(), 9)\n"
        "import_dataset(sys.argv[1], sys.argv[2], 'hdf5', progress=kill)"
    )
    killed = run_python("-c", code, file, tmp_path / "again")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    hidden = tmp_path / ".again.incomplete"
    assert hidden.exists()
    with FolderLock(hidden / LOCK), pytest.raises(BlockingIOError, match="again"):
        import_dataset(file, tmp_path / "again", "hdf5")  # Its writer is alive.
    assert hidden.exists()
    assert len(import_dataset(file, tmp_path / "again", "hdf5").trajectories) == 3
    assert not hidden.exists()


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(
    dataset: Dataset, tmp_path: Path
) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes").touch()
    (tmp_path / ".x.hdf5.incomplete").symlink_to(precious)
    export_dataset(dataset, tmp_path / "x.hdf5")
    assert (tmp_path / "x.hdf5").is_file()
    assert not (tmp_path / ".x.hdf5.incomplete").is_symlink()
    assert [path.name for path in precious.iterdir()] == ["notes"]


def test_sources_that_are_no_exports_are_errors(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        import_dataset(tmp_path / "nothing", tmp_path / "new", "hdf5")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="text is not an HDF5 file"):
        import_dataset(tmp_path / "text", tmp_path / "new", "hdf5")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["numbers"] = [1, 2]
    with pytest.raises(ValueError, match="but not of `marl-collect export --format"):
        import_dataset(tmp_path / "other.hdf5", tmp_path / "new", "hdf5")
    assert not (tmp_path / "new").exists()


def test_a_damaged_export_is_an_error(dataset: Dataset, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    file = export_dataset(dataset, tmp_path / "x.hdf5")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises((ValueError, OSError), match=r"x\.hdf5|truncated"):
        import_dataset(file, tmp_path / "new", "hdf5")
    file.unlink()
    export_dataset(dataset, file, compression="none")
    with h5py.File(file, "r+") as h5_file:
        h5_file["frames/done"][1] = True  # The next value of frame 0.
    with pytest.raises(ValueError, match="Episode 0 ends in its frame 0 of"):
        import_dataset(file, tmp_path / "new", "hdf5")
    with h5py.File(file, "r+") as h5_file:
        del h5_file["frames/prey/action"]
    with pytest.raises(ValueError, match=r"x\.hdf5: frames/prey/action is missing"):
        import_dataset(file, tmp_path / "new", "hdf5")
    assert not (tmp_path / "new").exists()


def test_the_blocks_of_a_source_are_read_one_by_one(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    file = export_dataset(dataset, tmp_path / "x.hdf5")
    monkeypatch.setattr("marl_collect.storage.formats.blocks._FRAMES", 1)
    opening = find_format("hdf5").open
    assert opening is not None
    _, blocks = opening(file)
    lengths = [block.lengths for block in blocks]
    assert lengths == [[n] for n in dataset.trajectories.lengths]


FULL = """
import sys
from marl_collect import open_dataset
from marl_collect.storage import export_dataset
data = open_dataset(sys.argv[1])
try:
    export_dataset(data, "small/x", "hdf5", compression="none")
except OSError as error:
    import os
    print(error, os.listdir("small"))
"""


@pytest.mark.mounts
def test_an_export_to_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """HDF5 would end the process with a signal."""
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    options = CountingOptions(image=(40, 44, 3))
    record_here(tmp_path / "d", lambda: CountingEnv(options), episodes=200)
    (tmp_path / "small").mkdir()
    process = run_mounted("small", FULL, "d", mebibytes=18, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "The disk is full: the next episodes have up to" in process.stdout
    assert process.stdout.endswith("[]\n")


@pytest.mark.parametrize("kind", ["link", "external", "virtual"])
def test_an_import_reads_no_other_file(
    dataset: Dataset, tmp_path: Path, kind: str
) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    file = export_dataset(dataset, tmp_path / "out.hdf5", "hdf5")
    name = "frames/next/hunter/reward"
    other = export_dataset(dataset, tmp_path / "other.hdf5", "hdf5")
    with h5py.File(file, "a") as h5_file:
        shape, dtype = h5_file[name].shape, h5_file[name].dtype
        del h5_file[name]
        if kind == "link":
            h5_file[name] = h5py.ExternalLink(str(other), name)
        elif kind == "external":
            sources = [(str(other), 0, h5py.h5f.UNLIMITED)]
            h5_file.create_dataset(name, shape, dtype, external=sources)
        else:
            layout = h5py.VirtualLayout(shape, dtype)
            layout[...] = h5py.VirtualSource(str(other), name, shape)
            h5_file.create_virtual_dataset(name, layout)
    with pytest.raises(DatasetError, match="reward (is missing, or a link|has its)"):
        import_dataset(file, tmp_path / "again", "hdf5")
