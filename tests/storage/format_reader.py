"""Reads every key of a dataset with NumPy alone, as ``[B * T, bytes]`` per batch."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import lz4, zstd  # type: ignore[import-untyped]

DECODE = {"lz4": lz4.decompress, "zstd": zstd.decompress, "copy": bytes}


def read_dataset(folder: Path) -> list[Any]:
    lines = (folder / "journal.jsonl").read_bytes().split(b"\n")[:-1]
    items = [next(iter(json.loads(line[9:]).items())) for line in lines]
    (keys,) = [data for kind, data in items if kind == "keys"]
    layouts = [data for kind, data in items if kind == "layout"]
    return [_batch(folder, b, keys, layouts) for kind, b in items if kind == "batch"]


def _batch(folder: Path, batch: Any, keys: Any, layouts: Any) -> Any:
    data = np.fromfile(folder / f"data-{batch['segment']:06d}", np.uint8)
    layout, n = layouts[batch["layout"]], batch["shape"][0] * batch["shape"][1]
    packed, follows = ([tuple(k) for k in layout[s]] for s in ("packed", "follows"))
    packed = [()] * layout["packs_records"] + packed
    stored, data = _rows(
        data[batch["offset"] :], layout["record"], n * (() not in packed)
    )
    tails, data = _rows(data, layout["tail"], batch["tails"])
    tables, data = np.split(data, [12 * n * len(packed)])
    out: Any = {}
    data = data[batch["notes"] :]
    for key, (codec, size) in zip(packed, batch["packed"], strict=True):
        ends, tables = tables[: 8 * n].view("<u8").astype(int), tables[12 * n :]
        frames, data = np.split(data[:size], ends[:-1]), data[size:]
        out[key] = [
            np.frombuffer(DECODE[codec](f) if f.size else b"", "u1") for f in frames
        ]
    for key in packed:  # Without bytes, the next frame has the value.
        rows = enumerate(out[key])
        out[key] = np.stack([f if f.size else out[key[1:]][i + 1] for i, f in rows])
    records = _unpack(out.pop((), stored), layout["record"])
    columns, tail = [records[:, 4:], _unpack(tails, layout["tail"])], records[:, :4]
    for key, shape, name in ((tuple(k["key"]), k["shape"], k["dtype"]) for k in keys):
        size = int(np.prod(shape)) * np.dtype(name.replace("bfloat", "uint")).itemsize
        if key not in packed:
            i = int(key in follows)
            out[key], columns[i] = np.split(columns[i], [size], 1)
    tail = tail.copy().view("<u4")[:, 0]
    for key in follows:  # Without a tail, the next record has the values.
        following = np.roll(out[key[1:]], -1, 0)
        following[tail > 0] = out[key][tail[tail > 0] - 1]
        out[key] = following
    return out


def _rows(data: Any, layout: Any, n: int) -> Any:
    kind = np.frombuffer(base64.b64decode(layout["kind"]), "u1")
    size = -(-(kind == 1).sum() // 8) + (kind == 2).sum()
    return data[: n * size].reshape(n, size), data[n * size :]


def _unpack(stored: Any, layout: Any) -> Any:
    kind, low, high = (np.array([*base64.b64decode(a)], "u1") for a in layout.values())
    two_valued, varies, out = kind == 1, kind == 2, np.tile(low, (len(stored), 1))
    bits = -(-two_valued.sum() // 8)
    ones = np.unpackbits(stored[:, :bits], axis=1, bitorder="little")[
        :, : two_valued.sum()
    ]
    out[:, two_valued], out[:, varies] = (
        np.where(ones, high[two_valued], low[two_valued]),
        stored[:, bits:],
    )
    return out
