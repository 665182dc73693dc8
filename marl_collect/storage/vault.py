"""Imports the vaults of flashbax that OG-MARL publishes, without JAX.

A vault is a folder ``NAME/UID`` with ``metadata.json``, which names the arrays, and a
key-value store of tensorstore with the arrays themselves. Each is ``[B, 10**13, ...]``
in the layout of zarr 2, and ``vault_index`` says how many steps are written. Episodes
lie one after the other along the second dimension. ``docs/storage.md`` says what
becomes of their last steps, after which there is no observation.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.core.description import EnvDescription, Field, GroupDescription, Key
from marl_collect.core.tensordicts import assemble
from marl_collect.errors import DatasetError, imports_of
from marl_collect.files.folders import completed
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import Progress, no_progress
from marl_collect.storage.files import naming
from marl_collect.storage.frames import ranges
from marl_collect.storage.writer import Writer

_METADATA: Final = "metadata.json"
_LAYOUT: Final = ("version", "structure_shape", "structure_dtype")
"""Entries of the metadata that do not describe the data."""
_INDEX: Final = "vault_index"
_NEEDED: Final = ("observations", "actions", "rewards", "terminals", "truncations")
_LEGALS, _STATE = "infos.legals", "infos.state"
_EXPECTED: Final = (
    "expected OG-MARL's arrays observations [B, T, N, ...], actions [B, T, N] or "
    "[B, T, N, size], rewards, terminals and truncations [B, T, N]; with or without "
    "infos.legals [B, T, N, actions] and infos.state [B, T, ...]"
)
_CURE: Final = "copy or download the whole folder of the vault again"
_GROUP: Final = "agents"
_CACHE: Final = 2**26
"""Bytes of decoded chunks that are kept, because a chunk spans several batches."""
_FRAMES: Final = 20_000
_BYTES: Final = 2**26
"""Frames of a batch, and bytes in memory; up to an episode more."""

_Episodes = NDArray[np.void]
"""Episodes of a vault, each with

- ``row`` and ``start``: its row, and its first step in it,
- ``frames``: number of its transitions,
- ``stop``: the step after the last one that is read. Unless all agents have terminated,
  one more step than transitions has the last observation.
- ``ends`` ``[N]``: the frame in which each agent ends, -1 without a transition,
- ``terminated`` ``[N]``: whether each agent terminated; the others are truncated.
"""


def import_vault(
    source: str | Path, out: str | Path, *, progress: Progress = no_progress
) -> Dataset:
    """Write the episodes of a vault to a new dataset.

    The folder gets its name when the dataset is complete. An error leaves nothing
    behind.

    Args:
        source: the folder ``NAME/UID`` with ``metadata.json``.
        out: a folder that does not exist.
        progress: called after every batch; see ``Progress``.

    Returns:
        The dataset, opened.

    Raises:
        DatasetError: if the source is no vault with OG-MARL's arrays, or is damaged.
        ImportError: if a package is missing. The message says what to install.
        FileNotFoundError: if there is no such source.
        FileExistsError: if the folder exists.
        BlockingIOError: if another process imports to it.
    """
    with imports_of("vault", "An import of a vault"):
        import tensorstore  # noqa: F401 - it is missing now, not inside the vault
    folder, target = Path(source), Path(out)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist, or is not a folder.")
    vault = _Vault(folder)
    kind = [
        *((name, np.int64) for name in ("row", "start", "frames", "stop")),
        *(("ends", np.int64, vault.agents), ("terminated", np.bool_, vault.agents)),
    ]
    episodes: _Episodes = np.array(list(_episodes(vault)), kind)
    episodes = episodes[episodes["frames"] > 0]
    if not len(episodes):
        raise DatasetError(
            f"{folder} has no transition: {vault.steps:,} steps are written."
        )
    description, run, fields = _describe(vault)
    groups = {_GROUP: vault.agents}
    done, total = 0, int(episodes["frames"].sum())
    progress(0, total, ())
    with (
        completed(target, "import") as temporary,
        Writer(temporary, description, run) as writer,
    ):
        most = min(_FRAMES, _BYTES // sum(f.nbytes for f in fields.values())) or 1
        parts = np.cumsum(episodes["frames"]) // most
        is_cut = np.diff(parts).astype(np.bool_) | (np.diff(episodes["row"]) != 0)
        for ids in np.split(np.arange(len(episodes)), np.flatnonzero(is_cut) + 1):
            chosen = episodes[ids]
            arrays = _join(vault, description.environment.groups[_GROUP].action, chosen)
            arrays[TRAJ_IDS] = np.repeat(ids, chosen["frames"])
            shape = [1, int(chosen["frames"].sum())]
            tensors = {
                key: torch.from_numpy(
                    arrays[key].astype(field.dtype).reshape(*shape, *field.shape)
                )
                for key, field in fields.items()
            }
            ended = writer.add(assemble(tensors, shape, groups, time=True))
            done += shape[1]
            progress(done, total, ended)
    return open_dataset(target)


@final
class _Vault:
    """The arrays of a vault, which are read in parts."""

    def __init__(self, folder: Path) -> None:
        import tensorstore

        self.folder = folder
        self._context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": _CACHE}}
        )
        file = folder / _METADATA
        if not file.is_file():
            inner = sorted(path.parent.name for path in folder.glob(f"*/{_METADATA}"))
            hint = f" Its folders {', '.join(inner)} have one." if inner else ""
            raise DatasetError(
                f"{folder} has no {_METADATA}, so it is not a vault: expected the "
                f"folder NAME/UID that flashbax has written.{hint}"
            )
        with naming(file, _CURE):
            self.metadata = json.loads(file.read_text(encoding="utf-8"))
            version = self.metadata["version"]
            if int(version) != 1:
                raise DatasetError(
                    f"the vault has version {version}, but 1.x can be read."
                )
            names = list(_names(self.metadata["structure_shape"]))
        missing = [name for name in _NEEDED if name not in names]
        if missing:
            raise DatasetError(
                f"{folder} is a vault without {', '.join(missing)}: {_EXPECTED}. It "
                f"has {', '.join(names)}."
            )
        self.arrays = {
            name: self._open(name, f"{name}.")
            for name in (*_NEEDED, _LEGALS, _STATE)
            if name in names
        }
        self._check_shapes()
        index = self._result(_INDEX, self._open(_INDEX, _INDEX).read())
        self.steps = int(index.reshape(-1)[0])
        self.rows, most, self.agents = self.arrays["terminals"].shape
        if not 0 <= self.steps <= most:
            raise DatasetError(
                f"{folder}: {_INDEX} is {self.steps}, but must be the number of steps, "
                f"from 0 to {most}."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one step; of one agent if the array has agents."""
        return tuple(self.arrays[name].shape[2 if name == _STATE else 3 :])

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an array, in native byte order."""
        return np.dtype(self.arrays[name].dtype.numpy_dtype).newbyteorder("=")

    def read(
        self, name: str, row: int, start: int = 0, stop: int | None = None
    ) -> NDArray[Any]:
        """Read the steps ``[start, stop)`` of a row, ``[steps, ...]``."""
        stop = self.steps if stop is None else stop
        return np.asarray(self._result(name, self.arrays[name][row, start:stop].read()))

    def _open(self, name: str, path: str) -> Any:
        import tensorstore

        base = {"driver": "file", "path": f"{self.folder.absolute()}/"}
        store = {"driver": "ocdbt", "base": base, "path": path}
        opened = tensorstore.open(
            {"driver": "zarr", "kvstore": store},
            open=True,
            read=True,
            context=self._context,
        )
        return self._result(name, opened)

    def _result(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            reason = str(error).partition(" [")[0]
            raise DatasetError(
                f"{self.folder}: the array {name} of the vault is missing or damaged. "
                f"Copy or download the whole folder again. {reason}."
            ) from error

    def _check_shapes(self) -> None:
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        prefix, n_dims = shapes["terminals"], len(shapes["actions"])
        exact = {shapes[name] for name in ("rewards", "terminals", "truncations")}
        known = {name: 2 if name == _STATE else 3 for name in shapes}
        right = len(prefix) == 3 and exact == {prefix}
        right &= all(shapes[name][:n] == prefix[:n] for name, n in known.items())
        if _LEGALS in shapes:
            right &= n_dims == 3 and len(shapes[_LEGALS]) == 4
        elif n_dims != 3:
            right &= self.dtype("actions").kind == "f"
        if not right:
            actual = ", ".join(
                f"{name} {self.dtype(name)} {[shape[0], 'T', *shape[2:]]}"
                for name, shape in shapes.items()
            )
            raise DatasetError(
                f"{self.folder} is a vault of other shapes: {_EXPECTED}; actions with "
                f"a size are floats without infos.legals. It has {actual}."
            )


def _names(structure: Any) -> Iterator[str]:
    """Yield the names of the arrays, such as ``infos.state``."""
    for name, inner in structure.items():
        if isinstance(inner, Mapping):
            yield from (f"{name}.{rest}" for rest in _names(inner))
        else:
            yield str(name)


def _episodes(vault: _Vault) -> Iterator[tuple[Any, ...]]:
    """Find the ``_Episodes``; one ends when every agent has ended, or with its row.

    The flags of a row are in memory; other arrays are read in batches.
    """
    for row in range(vault.rows):
        terminals = vault.read("terminals", row) != 0
        flagged = terminals | (vault.read("truncations", row) != 0)
        flagged_steps = np.flatnonzero(flagged.any(1)).tolist()
        start, ends = 0, np.full(vault.agents, -1)
        for step in sorted({*flagged_steps, *range(vault.steps)[-1:]}):
            ends = np.where(flagged[step] & (ends < 0), step, ends)
            if step < vault.steps - 1 and (ends < 0).any():
                continue
            by_terminal = (ends >= 0) & terminals[ends, np.arange(vault.agents)]
            frames = step - start + bool(by_terminal.all())
            terminated = by_terminal & (ends < start + frames)
            # The observation after a truncation is unknown, so the agent ends a frame
            # earlier.
            is_truncated = (ends >= 0) & ~by_terminal
            last = np.where(is_truncated, ends - start - 1, frames - 1)
            last = np.where(terminated, ends - start, last)
            stop = start + frames + (not terminated.all())
            yield row, start, frames, stop, last, terminated
            start, ends = step + 1, np.full(vault.agents, -1)


def _describe(
    vault: _Vault,
) -> tuple[DatasetDescription, RunDescription, dict[Key, Field]]:
    """Describe a vault: one group, and spaces that follow from the arrays."""
    folder = vault.folder.absolute()
    task = folder.parent.name.removesuffix(".vlt")
    with naming(folder, _CURE):
        group = GroupDescription(
            tuple(f"agent_{i}" for i in range(vault.agents)),
            _box(vault, "observations"),
            _action_space(vault),
            action_mask=_LEGALS in vault.arrays,
        )
        root = {"state": _box(vault, _STATE)} if _STATE in vault.arrays else {}
        environment = EnvDescription(task, {_GROUP: group}, root)
        description = DatasetDescription(task, environment)
        description.to_json()  # Raises an error if a space cannot be stored.
        fields = environment.observed() | environment.actions()
        after = environment.observed() | environment.outcome()
    fields |= {("next", *key): field for key, field in after.items()}
    fields[TRAJ_IDS] = Field((), np.dtype(np.int64))
    about = {k: v for k, v in vault.metadata.items() if k not in _LAYOUT}
    run = RunDescription(
        policy={"kind": "unknown"},
        options={"vault": f"{folder.parent.name}/{folder.name}", **about},
        versions={"vault": str(vault.metadata["version"])},
    )
    return description, run, fields


def _box(vault: _Vault, name: str) -> spaces.Box:
    """Return the space of all values of an array."""
    dtype = vault.dtype(name)
    low, high = -np.inf, np.inf
    if dtype.kind in "biu":
        info = np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
        low, high = info.min, 1 if dtype.kind == "b" else info.max
    return spaces.Box(low, high, vault.shape(name), dtype.type)


def _action_space(vault: _Vault) -> spaces.Space[Any]:
    if _LEGALS in vault.arrays:
        return spaces.Discrete(vault.shape(_LEGALS)[0])
    if vault.dtype("actions").kind == "f":
        return _box(vault, "actions")
    rows = (vault.read("actions", row) for row in range(vault.rows))
    return spaces.Discrete(max(int(actions.max(initial=0)) for actions in rows) + 1)


def _join(
    vault: _Vault, action: spaces.Space[Any], some: _Episodes
) -> dict[Key, NDArray[Any]]:
    """Return the frames of episodes of one row, back to back."""
    row, start, stop = (
        int(some[at][name]) for at, name in ((0, "row"), (0, "start"), (-1, "stop"))
    )
    lengths = some["frames"]
    frame = ranges(np.zeros_like(lengths), lengths)
    ends, terminated, count, begin = (
        np.repeat(values, lengths, 0)
        for values in (some["ends"], some["terminated"], lengths, some["start"])
    )
    now = begin - start + frame
    final = terminated.all(1)
    unknown = (frame == count - 1) & final
    steps = {(): now, ("next",): np.where(unknown, now, now + 1)}

    frames: dict[Key, NDArray[Any]] = {}
    arrays = {
        name: vault.read(name, row, start, stop)
        for name in vault.arrays
        if name not in ("terminals", "truncations")
    }
    rewards, actions = arrays["rewards"][now], arrays["actions"][now]
    if isinstance(action, spaces.Discrete):
        wrong = (actions < 0) | (actions >= action.n) | (actions != np.floor(actions))
        if wrong.any():
            raise DatasetError(
                f"{vault.folder}: the array actions has the action "
                f"{actions[wrong][0]}, but actions are integers from 0 to "
                f"{action.n - 1}."
            )
    frames[_GROUP, "action"], frames["next", _GROUP, "reward"] = actions, rewards
    for prefix, chosen in steps.items():
        frames[*prefix, _GROUP, "observation"] = arrays["observations"][chosen]
        if _STATE in arrays:
            frames[*prefix, "state"] = arrays[_STATE][chosen]
        done = frame[:, None] >= ends if prefix else frame[:, None] > ends
        every = np.asarray(done.all(1))
        frames[*prefix, "done"] = every
        frames[*prefix, "terminated"] = every & final
        frames[*prefix, "truncated"] = every & ~final
        frames[*prefix, _GROUP, "done"] = done
        frames[*prefix, _GROUP, "terminated"] = done & terminated
        frames[*prefix, _GROUP, "truncated"] = done & ~terminated
        frames[*prefix, _GROUP, "mask"] = ~done
        if _LEGALS in arrays:
            # As in collected data, every action is legal for a row that does not act.
            legal = arrays[_LEGALS][chosen] != 0
            frames[*prefix, _GROUP, "action_mask"] = legal | done[..., None]
    for key in (("next", _GROUP, "observation"), ("next", "state")):
        if key in frames:
            frames[key][unknown] = 0
    return frames
