"""Compares libraries for storing images: speed, size, kills and damage.

Every candidate stores the same batches of frames, each batch in a file or folder of its
own where its library allows that. Candidates whose library is missing are omitted. The
figures behind the choice in docs/storage.md come from::

    pip install blosc2 zarr tensorstore zstandard numcodecs h5py
    python benchmarks/storage_layouts.py coins

Each candidate runs in processes of its own, which get 8 GB of memory each. It has four
parts: writing, reading, flips and a kill. A part stops after the step that exceeds
``--seconds``. A candidate that takes five times as long, or more memory, is ended, and
its row says so. A run of all candidates takes at most 6 minutes.
"""

import argparse
import functools
import importlib.util
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = 5
FRAMES = 2000
SAMPLE = 256
SEQUENCE = 50
FLIPS = 20
SECONDS = 8.0
"""Of each part. With ``PARTS``, all candidates together take at most 320 s."""
PARTS = 5
"""A candidate has four; the fifth is for starts and for steps that exceed a part."""
GIGABYTES = 8
"""Address space of each process of a candidate."""
NO_MEMORY = 9
"""Exit status of a process that needs more."""
COLUMNS = (
    "write, MB/s",
    "MB",
    "256 transitions, ms",
    "sequences of 50, MB/s",
    "bit flips: wrong / error of all",
    "readable after a kill",
)


def read_slices(array: Any) -> Callable[[np.ndarray], Any]:
    """Return a reader of an array that is fast with slices only; numbers ascend."""

    def read(numbers: np.ndarray) -> Any:
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first + 1 == len(numbers):
            return array[first : last + 1]
        return np.stack([array[number] for number in numbers.tolist()])

    return read


def sync(path: Path) -> None:
    """Wait until a file, or every file of a folder, is on the disk."""
    for each in [path] if path.is_file() else path.rglob("*"):
        if each.is_file():
            descriptor = os.open(each, os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)


class _Raw:
    """Raw numbers, mapped: the layout without compression."""

    needs: tuple[str, ...] = ()
    alone = True
    """Whether a batch is a file of its own, which a rename can publish."""

    def write(self, path: Path, frames: np.ndarray) -> None:
        frames.tofile(path)

    def read(self, path: Path, shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
        mapped = np.memmap(path, np.uint8, "r", shape=(FRAMES, *shape))
        return lambda numbers: mapped[numbers]


class _Packed(_Raw):
    """Each frame compressed on its own behind the present layout, with a CRC-32."""

    def codec(self) -> tuple[Callable[[Any], bytes], Callable[[Any], bytes]]:
        raise NotImplementedError

    def write(self, path: Path, frames: np.ndarray) -> None:
        compress, _ = self.codec()
        packed = [compress(np.ascontiguousarray(frame)) for frame in frames]
        ends = np.cumsum([len(p) for p in packed])
        sums = np.array([zlib.crc32(p) for p in packed])
        with path.open("wb") as file:
            file.write(ends.astype(np.int64).tobytes() + sums.astype("<u4").tobytes())
            file.writelines(packed)

    def read(self, path: Path, shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
        _, decompress = self.codec()
        content: Any = np.memmap(path, np.uint8, "r")
        mapped = memoryview(content)
        ends = np.frombuffer(mapped[: 8 * FRAMES], np.int64)
        sums = np.frombuffer(mapped[8 * FRAMES : 12 * FRAMES], "<u4")
        body = mapped[12 * FRAMES :]

        def read(numbers: np.ndarray) -> np.ndarray:
            out = np.empty((len(numbers), *shape), np.uint8)
            for place, number in enumerate(numbers.tolist()):
                packed = body[(ends[number - 1] if number else 0) : ends[number]]
                if zlib.crc32(packed) != sums[number]:
                    raise ValueError("checksum")
                frame = np.frombuffer(decompress(packed), np.uint8)
                out[place] = frame.reshape(shape)
            return out

        return read


class _Zstandard(_Packed):
    needs = ("zstandard",)

    def codec(self) -> Any:
        import zstandard

        return zstandard.ZstdCompressor(1).compress, (
            zstandard.ZstdDecompressor().decompress
        )


class _NumcodecsZstd(_Packed):
    needs = ("numcodecs",)

    def codec(self) -> Any:
        from numcodecs import zstd

        return functools.partial(zstd.compress, level=1), zstd.decompress


class _NumcodecsLz4(_Packed):
    needs = ("numcodecs",)

    def codec(self) -> Any:
        from numcodecs import lz4

        return lz4.compress, lz4.decompress


class _Blosc2(_Raw):
    """A chunk has 64 frames, a block one."""

    needs = ("blosc2",)

    def write(self, path: Path, frames: np.ndarray) -> None:
        import blosc2

        cparams = blosc2.CParams(
            codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.NOFILTER]
        )
        blosc2.asarray(
            frames,
            chunks=(64, *frames.shape[1:]),
            blocks=(1, *frames.shape[1:]),
            cparams=cparams,
            urlpath=str(path),
            contiguous=True,
        )

    def read(self, path: Path, _shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
        import blosc2

        return read_slices(blosc2.open(str(path), mmap_mode="r"))


class _Zarr(_Raw):
    """A shard per batch, a chunk per frame, zstd and CRC-32C."""

    needs = ("zarr",)

    def write(self, path: Path, frames: np.ndarray) -> None:
        import zarr

        codecs = zarr.codecs
        array = zarr.create_array(
            str(path),
            shape=frames.shape,
            dtype="uint8",
            chunks=(1, *frames.shape[1:]),
            shards=frames.shape,
            compressors=[codecs.ZstdCodec(level=1), codecs.Crc32cCodec()],
        )
        array[:] = frames

    def read(self, path: Path, _shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
        import zarr

        # Its oindex takes gigabytes for a shard of many chunks.
        return read_slices(zarr.open_array(str(path), mode="r"))


class _TensorStore(_Raw):
    """The files of ``_Zarr``, written and read by tensorstore."""

    needs = ("tensorstore",)

    def write(self, path: Path, frames: np.ndarray) -> None:
        import tensorstore

        inner = [
            {"name": "bytes"},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ]
        shard = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [1, *frames.shape[1:]],
                "codecs": inner,
                "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
            },
        }
        grid = {
            "name": "regular",
            "configuration": {"chunk_shape": list(frames.shape)},
        }
        store = tensorstore.open(
            self._spec(path) | {"metadata": {"codecs": [shard], "chunk_grid": grid}},
            create=True,
            dtype=tensorstore.uint8,
            shape=frames.shape,
        ).result()
        store.write(frames).result()

    def read(self, path: Path, _shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
        import tensorstore

        store: Any = tensorstore.open(self._spec(path), read=True).result()
        return lambda numbers: store[numbers].read().result()

    @staticmethod
    def _spec(path: Path) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}


class _Hdf5(_Raw):
    """One file that grows, gzip and Fletcher-32, a chunk per frame."""

    needs = ("h5py",)
    alone = False

    def write(self, path: Path, frames: np.ndarray) -> None:
        import h5py

        with h5py.File(path.parent / "all.h5", "a") as file:
            file.create_dataset(
                path.name,
                data=frames,
                chunks=(1, *frames.shape[1:]),
                compression="gzip",
                compression_opts=1,
                fletcher32=True,
            )

    def read(self, path: Path, _shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
        import h5py

        return read_slices(h5py.File(path.parent / "all.h5")[path.name])


CANDIDATES: dict[str, _Raw] = {
    "raw, mapped": _Raw(),
    "zstandard": _Zstandard(),
    "numcodecs zstd": _NumcodecsZstd(),
    "numcodecs lz4": _NumcodecsLz4(),
    "blosc2": _Blosc2(),
    "zarr 3": _Zarr(),
    "tensorstore": _TensorStore(),
    "HDF5": _Hdf5(),
}


def add(candidate: _Raw, folder: Path, number: int, frames: np.ndarray) -> None:
    """Write a batch as durably as the candidate can."""
    if not candidate.alone:
        candidate.write(folder / str(number), frames)
        sync(folder / "all.h5")
        return
    temporary = folder / ".incomplete"
    if temporary.is_dir():
        shutil.rmtree(temporary)
    candidate.write(temporary, frames)
    sync(temporary)
    temporary.rename(folder / str(number))


def measure(
    name: str, frames: np.ndarray, folder: Path, count: int, seconds: float
) -> Iterator[str]:
    """Yield the cells of a row of the table, each when it is known."""
    candidate = CANDIDATES[name]
    begin = time.perf_counter()
    batches, taken = 0, 0.0
    while batches < BATCHES and taken < seconds:
        add(candidate, folder, batches, frames)
        batches, taken = batches + 1, time.perf_counter() - begin
    writing = batches * frames.nbytes / taken
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / batches
    shape = frames.shape[1:]
    readers = [candidate.read(folder / str(n), shape) for n in range(batches)]
    rng = np.random.default_rng(0)

    def sample() -> None:  # Each transition reads its frame and the following one.
        first = rng.integers(0, FRAMES - 1, (batches, SAMPLE // batches + 1))
        for reader, numbers in zip(readers, first, strict=True):
            reader(np.unique(np.concatenate([numbers, numbers + 1])))

    def sequence() -> None:
        begin = int(rng.integers(0, FRAMES - SEQUENCE))
        readers[0](np.arange(begin, begin + SEQUENCE))

    yield f"{writing / 1e6:,.0f}"
    yield f"{size / 1e6:,.1f}"
    yield f"{_median(sample, seconds / 2) * 1e3:,.1f}"
    rate = SEQUENCE * frames[0].nbytes / _median(sequence, seconds / 2)
    yield f"{rate / 1e6:,.0f}"
    wrong, raised, tried = flips(candidate, frames, folder, count, seconds)
    yield f"{wrong} / {raised} of {tried}"
    yield killed(name, frames, folder / "killed", seconds)


def _median(call: Callable[[], None], seconds: float) -> float:
    """Return the median of up to ten calls, after one that is not counted."""
    end = time.perf_counter() + seconds
    call()
    times: list[float] = []
    while not times or (len(times) < 10 and time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def flips(
    candidate: _Raw, frames: np.ndarray, folder: Path, count: int, seconds: float
) -> tuple[int, int, int]:
    """Flip single bits; count readings with wrong data, with an error, and all."""
    end = time.perf_counter() + seconds
    path = folder / "0" if candidate.alone else folder / "all.h5"
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = largest.read_bytes()
    draw = random.Random(0)
    wrong = raised = tried = 0
    while tried < count and time.perf_counter() < end:
        tried += 1
        damaged = bytearray(content)
        place = draw.randrange(len(content) if candidate.alone else len(content) // 8)
        damaged[place] ^= 1 << draw.randrange(8)
        largest.write_bytes(damaged)
        try:
            read = candidate.read(folder / "0", frames.shape[1:])
            found = read(np.arange(FRAMES))
            wrong += not np.array_equal(found, frames)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - each library has its own
            raised += 1
    largest.write_bytes(content)
    return wrong, raised, tried


def killed(name: str, frames: np.ndarray, folder: Path, seconds: float) -> str:
    """Kill a process while it writes; return how many reported batches are readable.

    It is killed inside the fourth batch, or when the seconds are over.
    """
    candidate = CANDIDATES[name]
    folder.mkdir()
    file = folder / "frames.npy"
    np.save(file, frames)
    readable = reported = 0
    command = [sys.executable, __file__, "--write", name, str(file), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        late = threading.Timer(seconds, process.kill)
        late.start()
        for line in process.stdout:
            reported = int(line) + 1
            if reported == 3:
                # Inside the next batch. A plain pause: the moment is arbitrary.
                time.sleep(0.03)  # noqa: TID251
                process.kill()
        late.cancel()
    for number in range(reported):
        try:
            read = candidate.read(folder / str(number), frames.shape[1:])
            readable += np.array_equal(read(np.arange(FRAMES)), frames)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - each library has its own
            continue
    return f"{readable} of {reported}"


def images(task: str) -> np.ndarray:
    """Collect the images of ``FRAMES`` frames, ``[FRAMES, ...]``."""
    from marl_collect import MultiSyncCollector
    from marl_collect.cli.tasks import find_factory
    from marl_collect.core.tensordicts import flatten

    with MultiSyncCollector(
        find_factory(task, {}), frames_per_batch=FRAMES, total_frames=FRAMES, seed=0
    ) as collector:
        largest = max(flatten(collector.next()).items(), key=lambda i: i[1].nbytes)
        return largest[1].flatten(0, 1).numpy().copy()


def row(name: str, file: Path, count: int, seconds: float) -> list[str]:
    """Measure a candidate in a process of its own; return its cells of the table.

    Cells that it did not measure say why.
    """
    limit = PARTS * seconds
    command = [sys.executable, __file__, f"--flips={count}", f"--seconds={seconds}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, "--measure", name, str(file), folder],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=limit)
            reason = (
                f"over {GIGABYTES} GB" if process.returncode == NO_MEMORY else "failed"
            )
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # With the process that it kills.
            output, _ = process.communicate()
            reason = f"over {limit:.0f} s"
    cells = output.splitlines()
    return cells + [reason] * (len(COLUMNS) - len(cells))


def run_part(options: argparse.Namespace) -> None:
    """Run in a process of a candidate: measure, or write until it is killed."""
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2**30,) * 2)
    name, file, folder = options.measure or options.write
    frames = np.load(file)
    if options.write:
        for number in range(1000):
            add(CANDIDATES[name], Path(folder), number, frames)
            print(number, flush=True)
        return
    try:
        cells = measure(name, frames, Path(folder), options.flips, options.seconds)
        for cell in cells:
            print(cell, flush=True)
    except MemoryError:
        sys.exit(NO_MEMORY)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="coins")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES])
    parser.add_argument("--flips", type=int, default=FLIPS, help="damaged readings")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of each part of a candidate"
    )
    parser.add_argument("--write", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.write or options.measure:
        run_part(options)
        return
    frames = images(options.task)
    print(f"{FRAMES} frames of {options.task}: {frames.nbytes / 1e6:,.0f} MB, raw\n")
    print(f"| layout | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "frames.npy"
        np.save(file, frames)
        for name in options.only:
            needs = CANDIDATES[name].needs
            if all(importlib.util.find_spec(needed) for needed in needs):
                cells = row(name, file, options.flips, options.seconds)
                print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
