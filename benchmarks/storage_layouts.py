"""Compares libraries for storing images: speed, size, kills and damage.

Every candidate stores the same batches of frames, each batch in a file or folder of its
own where its library allows that. Candidates whose library is missing are omitted. The
figures behind the choice in docs/storage.md come from::

    pip install blosc2 zarr tensorstore zstandard numcodecs h5py
    python benchmarks/storage_layouts.py coins
"""

import argparse
import functools
import importlib.util
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = 5
FRAMES = 2000
SAMPLE = 256
SEQUENCE = 50
FLIPS = 20


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

        array: Any = blosc2.open(str(path), mmap_mode="r")
        return lambda numbers: np.stack([array[n] for n in numbers.tolist()])


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

        array: Any = zarr.open_array(str(path), mode="r")
        return lambda numbers: array.oindex[numbers]


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

        file = h5py.File(path.parent / "all.h5")
        array = file[path.name]

        def read(numbers: np.ndarray) -> np.ndarray:
            found, places = np.unique(numbers, return_inverse=True)
            return array[found][places]

        return read


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


def measure(candidate: _Raw, frames: np.ndarray, folder: Path, count: int) -> list[str]:
    """Return one row of the table."""
    begin = time.perf_counter()
    for number in range(BATCHES):
        add(candidate, folder, number, frames)
    writing = BATCHES * frames.nbytes / (time.perf_counter() - begin)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / BATCHES
    shape = frames.shape[1:]
    readers = [candidate.read(folder / str(n), shape) for n in range(BATCHES)]
    rng = np.random.default_rng(0)

    def sample() -> None:  # Each transition reads its frame and the following one.
        first = rng.integers(0, FRAMES - 1, (BATCHES, SAMPLE // BATCHES + 1))
        for reader, numbers in zip(readers, first, strict=True):
            reader(np.unique(np.concatenate([numbers, numbers + 1])))

    def sequence() -> None:
        begin = int(rng.integers(0, FRAMES - SEQUENCE))
        readers[0](np.arange(begin, begin + SEQUENCE))

    random_ms = _median(sample) * 1e3
    sequence_rate = SEQUENCE * frames[0].nbytes / _median(sequence)
    wrong, raised = flips(candidate, frames, folder, count)
    return [
        f"{writing / 1e6:,.0f}",
        f"{random_ms:,.1f}",
        f"{sequence_rate / 1e6:,.0f}",
        f"{size / 1e6:,.1f}",
        f"{wrong} / {raised}",
    ]


def _median(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def flips(
    candidate: _Raw, frames: np.ndarray, folder: Path, count: int
) -> tuple[int, int]:
    """Flip single bits; count readings with wrong data and readings with an error."""
    path = folder / "0" if candidate.alone else folder / "all.h5"
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = largest.read_bytes()
    draw = random.Random(0)
    wrong = raised = 0
    for _ in range(count):
        damaged = bytearray(content)
        place = draw.randrange(len(content) if candidate.alone else len(content) // 8)
        damaged[place] ^= 1 << draw.randrange(8)
        largest.write_bytes(damaged)
        try:
            read = candidate.read(folder / "0", frames.shape[1:])
            found = read(np.arange(FRAMES))
            wrong += not np.array_equal(found, frames)
        except Exception:  # noqa: BLE001 - each library has its own
            raised += 1
    largest.write_bytes(content)
    return wrong, raised


def killed(name: str, frames: np.ndarray, folder: Path) -> str:
    """Kill a process while it writes; return how many reported batches are readable."""
    candidate = CANDIDATES[name]
    file = folder / "frames.npy"
    np.save(file, frames)
    target = folder / "killed"
    target.mkdir()
    readable = reported = 0
    command = [sys.executable, __file__, "--write", name, str(file), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            reported = int(line) + 1
            if reported == 3:
                # Inside the next batch. A plain pause: the moment is arbitrary.
                time.sleep(0.03)  # noqa: TID251
                process.send_signal(signal.SIGKILL)
        process.wait()
    for number in range(reported):
        try:
            read = candidate.read(target / str(number), frames.shape[1:])
            readable += np.array_equal(read(np.arange(FRAMES)), frames)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="coins")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES])
    parser.add_argument("--flips", type=int, default=FLIPS, help="damaged readings")
    parser.add_argument("--write", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.write:
        name, file, target = options.write
        frames = np.load(file)
        for number in range(1000):
            add(CANDIDATES[name], Path(target), number, frames)
            print(number, flush=True)
    frames = images(options.task)
    print(f"{FRAMES} frames of {options.task}: {frames.nbytes / 1e6:,.0f} MB, raw\n")
    print(
        "| layout | write, MB/s | 256 transitions, ms | sequences of 50, MB/s | MB |"
        " bit flips: wrong / error | readable after a kill |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.only:
        candidate = CANDIDATES[name]
        if any(importlib.util.find_spec(needed) is None for needed in candidate.needs):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measure(candidate, frames, Path(folder), options.flips)
        with tempfile.TemporaryDirectory() as folder:
            row.append(killed(name, frames, Path(folder)))
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
