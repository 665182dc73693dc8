"""Imports the vaults of flashbax that OG-MARL publishes, without JAX.

A vault is a folder ``NAME/UID`` with ``metadata.json``, which names the arrays, and a
key-value store of tensorstore with the arrays themselves. Each is ``[B, 10**13, ...]``
in the layout of zarr 2, and ``vault_index`` says how many steps are written. Episodes
lie one after the other along the second dimension. ``docs/storage.md`` says what
becomes of their last steps, after which there is no observation.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.buffers.layout import TRAJ_IDS, batch_fields
from marl_collect.core.description import EnvDescription, Field, GroupDescription, Key
from marl_collect.core.signature import PolicySignature
from marl_collect.errors import DatasetError, imports_of
from marl_collect.files.folders import completed
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import Progress, no_progress
from marl_collect.storage.files import naming
from marl_collect.storage.writer import Writer

_METADATA: Final = "metadata.json"
_LAYOUT: Final = ("version", "structure_shape", "structure_dtype")
"""Entries of the metadata that do not describe the data."""
_INDEX: Final = "vault_index"
_NEEDED: Final = ("observations", "actions", "rewards", "terminals", "truncations")
_LEGALS, _STATE = "infos.legals", "infos.state"
_EXPECTED: Final = (
    "expected OG-MARL's arrays observations [B, T, N, ...], actions [B, T, N] or, as "
    "floats without infos.legals, [B, T, N, size], rewards, terminals and truncations "
    "[B, T, N]; with or without infos.legals [B, T, N, actions] and infos.state "
    "[B, T, ...]"
)
_CURE: Final = "copy or download the whole folder of the vault again"
_GROUP: Final = "agents"
_CACHE: Final = 2**26
"""Bytes of decoded chunks that are kept, because a chunk spans several episodes."""
_FRAMES: Final = 20_000
_BYTES: Final = 2**26
"""Frames of a batch, and bytes in memory; up to an episode more."""


class _Episode(NamedTuple):
    """Where an episode is in a vault.

    Attributes:
        row: of the vault.
        start: its first step.
        frames: number of its transitions. Unless all agents have terminated, one more
            step than transitions has the last observation.
        ends: ``[N]``, the frame in which each agent ends, -1 without a transition.
        terminated: ``[N]``, whether each agent terminated; the others are truncated.
    """

    row: int
    start: int
    frames: int
    ends: NDArray[np.int64]
    terminated: NDArray[np.bool_]


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
    folder, target = Path(source), Path(out)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist, or is not a folder.")
    vault = _Vault(folder)
    episodes = [*_episodes(vault)]
    if not episodes:
        raise DatasetError(
            f"{folder} has no transition: {vault.steps:,} steps are written."
        )
    description, run, fields = _describe(vault)
    ends = np.cumsum([episode.frames for episode in episodes])
    done, total = 0, int(ends[-1])
    progress(0, total, ())
    most = min(_FRAMES, _BYTES // sum(f.nbytes for f in fields.values())) or 1
    action = description.environment.groups[_GROUP].action
    with (
        completed(target, "import") as temporary,
        Writer(temporary, description, run) as writer,
    ):
        for _, numbers in groupby(range(len(ends)), lambda i: ends[i] // most):
            parts = [_frames(vault, episodes[i], action, i) for i in numbers]
            frames = {key: np.concatenate([f[key] for f in parts]) for key in fields}
            shape = [1, len(frames[TRAJ_IDS])]
            arrays = {
                key: frames[key].astype(field.dtype).reshape(*shape, *field.shape)
                for key, field in fields.items()
            }
            ended = writer.add(TensorDict(arrays, shape))
            done += shape[1]
            progress(done, total, ended)
    return open_dataset(target)


@final
class _Vault:
    """The arrays of a vault, which are read in parts."""

    def __init__(self, folder: Path) -> None:
        with imports_of("vault", "An import of a vault"):
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
        self.arrays = {
            name: self._open(name, f"{name}.")
            for name in (*_NEEDED, _LEGALS, _STATE)
            if name in names
        }
        if not (set(_NEEDED) <= self.arrays.keys() and self._is_regular()):
            shapes = {
                n: f" {self.dtype(n)} {[*a.shape]}" for n, a in self.arrays.items()
            }
            actual = ", ".join(f"{name}{shapes.get(name, '')}" for name in names)
            raise DatasetError(
                f"{folder} is another vault: {_EXPECTED}. It has {actual}."
            )
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
        with naming(f"The array {name} of the vault {self.folder}", _CURE):
            return future.result()

    def _is_regular(self) -> bool:
        """Return whether all arrays have the same rows, steps and agents."""
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        prefix = shapes["terminals"]
        n_dims = {"rewards": 3, "terminals": 3, "truncations": 3, _LEGALS: 4}
        if _LEGALS in shapes or self.dtype("actions").kind != "f":
            n_dims["actions"] = 3
        return len(prefix) == 3 and all(
            shape[: 2 if name == _STATE else 3] == prefix[: 2 if name == _STATE else 3]
            and len(shape) == n_dims.get(name, len(shape))
            for name, shape in shapes.items()
        )


def _names(structure: Any) -> Iterator[str]:
    """Yield the names of the arrays, such as ``infos.state``."""
    for name, inner in structure.items():
        if isinstance(inner, Mapping):
            yield from (f"{name}.{rest}" for rest in _names(inner))
        else:
            yield str(name)


def _episodes(vault: _Vault) -> Iterator[_Episode]:
    """Find the episodes with transitions.

    One ends when every agent has ended, or with its row. The flags of a row are in
    memory; other arrays are read episode by episode.
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
            if frames:
                yield _Episode(row, start, frames, last, terminated)
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
        signature = PolicySignature(environment.actions())
        fields = batch_fields(environment, signature, {TRAJ_IDS})
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


def _frames(
    vault: _Vault, episode: _Episode, action: spaces.Space[Any], number: int
) -> dict[Key, NDArray[Any]]:
    """Return the frames of an episode."""
    row, start, count, ends, terminated = episode
    stop = start + count + (not terminated.all())
    names = vault.arrays.keys() - {"terminals", "truncations"}
    arrays = {name: vault.read(name, row, start, stop) for name in names}
    actions = arrays["actions"][:count]
    if isinstance(action, spaces.Discrete):
        wrong = actions[~np.isin(actions, range(action.n))]
        if wrong.size:
            raise DatasetError(
                f"{vault.folder}: the array actions has the action {wrong[0]}, but "
                f"actions are integers from 0 to {action.n - 1}."
            )
    if terminated.all():  # What follows is unknown.
        arrays = {n: np.append(a, np.zeros_like(a[:1]), 0) for n, a in arrays.items()}
    done = np.arange(count + 1)[:, None] > ends
    both: dict[Key, NDArray[Any]] = {
        (_GROUP, "mask"): ~done,
        (_GROUP, "observation"): arrays["observations"],
    }
    of_all: Any = (), done.all(1), terminated.all()
    for path, after, ended in (of_all, ((_GROUP,), done, terminated)):
        both[*path, "done"] = after
        both[*path, "terminated"] = after & ended
        both[*path, "truncated"] = after & ~ended
    if _STATE in arrays:
        both["state",] = arrays[_STATE]
    if _LEGALS in arrays:
        # As in collected data, every action is legal for a row that does not act.
        both[_GROUP, "action_mask"] = (arrays[_LEGALS] != 0) | done[..., None]
    return {
        TRAJ_IDS: np.full(count, number),
        (_GROUP, "action"): actions,
        ("next", _GROUP, "reward"): arrays["rewards"][:count],
        **{key: values[:-1] for key, values in both.items()},
        **{("next", *key): values[1:] for key, values in both.items()},
    }
