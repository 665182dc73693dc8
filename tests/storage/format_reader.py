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
    records, data = _unpack(data[batch["offset"] :], layout["record"], n)
    tails, data = _unpack(data, layout["tail"], batch["tails"])
    out: Any = {}
    parts, tail = [records[:, 4:], tails], records[:, :4].copy().view("<u4")[:, 0]
    for key, shape, name in ((tuple(k["key"]), k["shape"], k["dtype"]) for k in keys):
        size = int(np.prod(shape)) * np.dtype(name.replace("bfloat", "uint")).itemsize
        if key not in packed:
            i = int(key in follows)
            out[key], parts[i] = np.split(parts[i], [size], 1)
    for key in follows:  # Without a tail, the next record has the values.
        following = np.roll(out[key[1:]], -1, 0)
        following[tail > 0] = out[key][tail[tail > 0] - 1]
        out[key] = following
    tables, data = np.split(data, [12 * n * len(packed)])
    agents = sum(map(len, batch["return_sums"].values()))
    data = data[batch["episodes"] * (17 + 8 * agents) + batch["ranges"] :]
    for i, (codec, size) in enumerate(batch["packed"]):
        ends = tables[12 * n * i :][: 8 * n].view("<u8").astype(int)
        frames, data = np.split(data[:size], ends[:-1]), data[size:]
        decoded = [DECODE[codec](frame) if frame.size else b"" for frame in frames]
        out[packed[i]] = [np.frombuffer(frame, "u1") for frame in decoded]
    for key in packed:  # Without bytes, the next frame has the value.
        rows = enumerate(out[key])
        out[key] = np.stack([f if f.size else out[key[1:]][i + 1] for i, f in rows])
    return out


def _unpack(data: Any, layout: Any, n: int) -> Any:
    kind, low, high = (np.array([*base64.b64decode(a)], "u1") for a in layout.values())
    two, varies, out = kind == 1, kind == 2, np.tile(low, (n, 1))
    bits = -(-two.sum() // 8)
    size = bits + varies.sum()
    stored = data[: n * size].reshape(n, size)
    ones = np.unpackbits(stored[:, :bits], axis=1, bitorder="little")[:, : two.sum()]
    out[:, two], out[:, varies] = np.where(ones, high[two], low[two]), stored[:, bits:]
    return out, data[n * size :]
