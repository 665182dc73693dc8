"""Vaults of flashbax, written with tensorstore as flashbax does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
N = 2


def open_array(folder: Path, name: str, **settings: Any) -> Any:
    store = {"driver": "ocdbt", "base": f"file://{folder}", "path": name}
    spec = {"driver": "zarr", "kvstore": store, **settings.pop("spec", {})}
    return ts.open(spec, **settings).result()


def write_vault(folder: Path, arrays: Arrays, **metadata: Any) -> Path:
    """Write arrays ``[B, T, ...]``; a dot in a name separates the levels."""
    folder.mkdir(parents=True)
    shapes: dict[str, Any] = {}
    dtypes: dict[str, Any] = {}
    for name, values in arrays.items():
        *path, last = name.split(".")
        for tree, text in ((shapes, str(values.shape)), (dtypes, values.dtype.name)):
            for component in path:
                tree = tree.setdefault(component, {})
            tree[last] = text
        array = open_array(
            folder,
            f"{name}.",
            spec={"metadata": {"compressor": {"id": "gzip", "level": 5}}},
            shape=(values.shape[0], int(10e12), *values.shape[2:]),
            dtype=values.dtype.name,
            create=True,
        )
        array[:, : values.shape[1]].write(values).result()
    index = open_array(folder, "vault_index", dtype="int32", shape=(1,), create=True)
    index.write(arrays["rewards"].shape[1]).result()
    about = {"version": 1.2, "structure_shape": shapes, "structure_dtype": dtypes}
    (folder / "metadata.json").write_text(json.dumps(about | metadata))
    return folder


def make_arrays(rows: int, steps: int, n: int = N) -> Arrays:
    """Return arrays of SMAC's kind: random values, and no flags."""
    rng = np.random.default_rng(steps)
    shape = rows, steps, n
    legals = rng.integers(0, 2, (*shape, 4))
    legals[..., 0] = 1
    return {
        "observations": rng.normal(size=(*shape, 3)).astype(np.float32),
        "actions": rng.integers(0, 4, shape, np.int32),
        "rewards": rng.normal(size=shape).astype(np.float32),
        "terminals": np.zeros(shape, bool),
        "truncations": np.zeros(shape, bool),
        "infos.legals": legals.astype(np.float32),
        "infos.state": rng.normal(size=(rows, steps, 5)).astype(np.float32),
    }
