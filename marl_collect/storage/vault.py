"""Imports the vaults of flashbax that OG-MARL publishes, without JAX.

A vault is a folder ``NAME/UID`` with ``metadata.json``, which names the arrays, and a
key-value store of tensorstore with the arrays themselves. Each is ``[B, 10**13, ...]``
in the layout of zarr 2, and ``vault_index`` says how many steps are written. Episodes
lie one after the other along the second dimension. A step has the observation before an
action, and what the action led to, but not the observation after it:

- If every agent has terminated, the next observation and state of the last step are
  zeros. The transition is terminated, so no value is read there.
- Otherwise the last step only gives the last observation. Its action and reward are
  left out, and the frame before it is truncated. So is an agent that is truncated
  before the others, and an episode that the end of the vault cuts.
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
from marl_collect.core.description import (
    EnvDescription,
    Field,
    GroupDescription,
    Key,
)
from marl_collect.core.tensordicts import assemble
from marl_collect.errors import imports_of
from marl_collect.files.folders import completed
from marl_collect.storage.checks import DatasetError, naming
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import Progress, no_progress
from marl_collect.storage.frames import ranges
from marl_collect.storage.writer import Writer

_METADATA: Final = "metadata.json"
_SHAPES: Final = "structure_shape"
_DTYPES: Final = "structure_dtype"
_VERSION: Final = 1
"""Major version of the layout."""
_INDEX: Final = "vault_index"
_OBSERVATIONS, _ACTIONS, _REWARDS = "observations", "actions", "rewards"
_TERMINALS, _TRUNCATIONS = "terminals", "truncations"
_NEEDED: Final = (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINALS, _TRUNCATIONS)
_LEGALS: Final = "infos.legals"
_STATE: Final = "infos.state"
_PER_AGENT: Final = (*_NEEDED, _LEGALS)
_EXPECTED: Final = (
    "expected OG-MARL's arrays observations [B, T, N, ...], actions [B, T, N] or "
    "[B, T, N, size], rewards, terminals and truncations [B, T, N]; with or without "
    "infos.legals [B, T, N, actions] and infos.state [B, T, ...]"
)
_GROUP: Final = "agents"
_ROOT: Final = "state"
_CACHE: Final = 2**26
"""Bytes of decoded chunks that are kept, because a chunk spans several batches."""
_FRAMES: Final = 20_000
_BYTES: Final = 2**26
"""Most frames of a batch, and bytes in memory, unless a single episode has more."""

Arrays = dict[Key, NDArray[Any]]
Fields = dict[Key, Field]

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
    episodes = _table(vault)
    description, run, fields = _describe(vault)
    group = description.environment.groups[_GROUP]
    frame_bytes = sum(field.nbytes for field in fields.values())
    done, total = 0, int(episodes["frames"].sum())
    progress(0, total, ())
    with (
        completed(target, "import") as temporary,
        Writer(temporary, description, run) as writer,
    ):
        for first, last in _cuts(episodes, frame_bytes):
            chosen = episodes[first:last]
            arrays = _join(vault, group.action, chosen)
            arrays[TRAJ_IDS] = np.repeat(np.arange(first, last), chosen["frames"])
            frames = int(chosen["frames"].sum())
            tensors = {
                key: torch.from_numpy(
                    arrays[key].astype(field.dtype).reshape(1, frames, *field.shape)
                )
                for key, field in fields.items()
            }
            groups = {_GROUP: group.n_agents}
            ended = writer.add(assemble(tensors, [1, frames], groups, time=True))
            done += frames
            progress(done, total, ended)
    return open_dataset(target)


@final
class _Vault:
    """Reads the arrays of a vault in parts."""

    def __init__(self, folder: Path) -> None:
        """Open the arrays; no step is read.

        Raises:
            DatasetError: if this is not a vault with OG-MARL's arrays.
        """
        import tensorstore

        self.folder = folder
        self._tensorstore = tensorstore
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
        with naming(file, "the metadata of a vault"):
            self.metadata = json.loads(file.read_text(encoding="utf-8"))
            version = self.metadata["version"]
            if int(version) != _VERSION:
                raise DatasetError(
                    f"the vault has version {version}, but {_VERSION}.x can be read."
                )
            names = list(_names(self.metadata[_SHAPES]))
        missing = [name for name in _NEEDED if name not in names]
        if missing:
            raise DatasetError(
                f"{folder} is a vault without {', '.join(missing)}: {_EXPECTED}. It "
                f"has {', '.join(names)}."
            )
        used = [name for name in (*_PER_AGENT, _STATE) if name in names]
        self._leaves = {name: self._open(name, f"{name}.") for name in used}
        self._check_shapes()
        index = self._read(_INDEX, self._open(_INDEX, _INDEX))
        self.steps = int(index.reshape(-1)[0])
        self.rows, most, self.agents = self._leaves[_TERMINALS].shape
        if not 0 <= self.steps <= most:
            raise DatasetError(
                f"{folder}: {_INDEX} is {self.steps}, but must be the number of steps, "
                f"from 0 to {most}."
            )

    def has(self, name: str) -> bool:
        """Whether the vault has an array."""
        return name in self._leaves

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one step of an array; of one agent if it has agents."""
        return tuple(self._leaves[name].shape[3 if name in _PER_AGENT else 2 :])

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an array, in native byte order."""
        return np.dtype(self._leaves[name].dtype.numpy_dtype).newbyteorder("=")

    def read(self, name: str, row: int, start: int, stop: int) -> NDArray[Any]:
        """Read the steps ``[start, stop)`` of a row, ``[steps, ...]``."""
        return self._read(name, self._leaves[name][row, start:stop])

    def _read(self, name: str, part: Any) -> NDArray[Any]:
        try:
            return np.asarray(part.read().result())
        except ValueError as error:
            raise self._damaged(name, error) from error

    def _open(self, name: str, path: str) -> Any:
        base = {"driver": "file", "path": f"{self.folder.absolute()}/"}
        store = {"driver": "ocdbt", "base": base, "path": path}
        try:
            return self._tensorstore.open(
                {"driver": "zarr", "kvstore": store},
                open=True,
                read=True,
                context=self._context,
            ).result()
        except ValueError as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, error: ValueError) -> DatasetError:
        reason = str(error).partition(" [")[0]
        return DatasetError(
            f"{self.folder}: the array {name} of the vault is missing or damaged. Copy "
            f"or download the whole folder again. {reason}."
        )

    def _check_shapes(self) -> None:
        shapes = {name: tuple(leaf.shape) for name, leaf in self._leaves.items()}
        prefix = shapes[_TERMINALS]
        right = len(prefix) == 3 and all(
            prefix == shapes[name] for name in (_REWARDS, _TRUNCATIONS)
        )
        for name, shape in shapes.items():
            known = prefix if name in _PER_AGENT else prefix[:2]
            right = right and shape[: len(known)] == known
        discrete = len(shapes[_ACTIONS]) == 3
        if _LEGALS in shapes:
            right = right and discrete and len(shapes[_LEGALS]) == 4
        elif not discrete:
            right = right and self.dtype(_ACTIONS).kind == "f"
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


def _table(vault: _Vault) -> _Episodes:
    """Find the episodes that have transitions.

    Raises:
        DatasetError: if there are none.
    """
    kind = np.dtype(
        [
            *((name, np.int64) for name in ("row", "start", "frames", "stop")),
            ("ends", np.int64, (vault.agents,)),
            ("terminated", np.bool_, (vault.agents,)),
        ]
    )
    episodes: _Episodes = np.array(list(_episodes(vault)), kind)
    episodes = episodes[episodes["frames"] > 0]
    if not len(episodes):
        raise DatasetError(
            f"{vault.folder} has no transition: {vault.steps:,} steps are written."
        )
    return episodes


def _episodes(vault: _Vault) -> Iterator[tuple[Any, ...]]:
    """Find the ``_Episodes``; one ends when every agent has ended.

    The flags of a row are in memory; other arrays are read in batches.
    """
    none = np.full(vault.agents, -1)
    for row in range(vault.rows):
        terminals = vault.read(_TERMINALS, row, 0, vault.steps) != 0
        flagged = terminals | (vault.read(_TRUNCATIONS, row, 0, vault.steps) != 0)
        begin, ends = 0, none
        for step in np.flatnonzero(flagged.any(1)).tolist():
            ends = np.where(flagged[step] & (ends < 0), step, ends)
            if (ends >= 0).all():
                yield _episode(row, begin, step + 1, ends, terminals)
                begin, ends = step + 1, none
        if begin < vault.steps:
            yield _episode(row, begin, vault.steps, ends, terminals)


def _episode(
    row: int,
    start: int,
    stop: int,
    ends: NDArray[np.int64],
    terminals: NDArray[np.bool_],
) -> tuple[Any, ...]:
    """Return the episode of the steps ``[start, stop)``.

    Args:
        row: its row.
        start: its first step.
        stop: the step after its last one.
        ends: ``[N]``, the step in which each agent ended, -1 if it did not.
        terminals: ``[T, N]``, of the row.
    """
    by_terminal = (ends >= 0) & terminals[ends, np.arange(len(ends))]
    frames = stop - start if by_terminal.all() else stop - start - 1
    terminated = by_terminal & (ends < start + frames)
    # The observation after a truncation is unknown, so the agent ends a frame earlier.
    is_truncated = (ends >= 0) & ~by_terminal
    last = np.where(is_truncated, ends - start - 1, frames - 1)
    last = np.where(terminated, ends - start, last)
    read = start + frames + (not terminated.all())
    return row, start, frames, read, last, terminated


def _describe(vault: _Vault) -> tuple[DatasetDescription, RunDescription, Fields]:
    """Describe a vault: one group, and spaces that follow from the arrays."""
    folder = vault.folder.absolute()
    task = folder.parent.name.removesuffix(".vlt")
    with naming(folder, "a vault whose arrays can be stored"):
        group = GroupDescription(
            tuple(f"agent_{i}" for i in range(vault.agents)),
            _box(vault, _OBSERVATIONS),
            _action_space(vault),
            action_mask=vault.has(_LEGALS),
        )
        root = {_ROOT: _box(vault, _STATE)} if vault.has(_STATE) else {}
        environment = EnvDescription(task, {_GROUP: group}, root)
        description = DatasetDescription(task, environment)
        description.to_json()  # Raises an error if a space cannot be stored.
        fields = environment.observed() | environment.actions()
        after = environment.observed() | environment.outcome()
    fields |= {("next", *key): field for key, field in after.items()}
    fields[TRAJ_IDS] = Field((), np.dtype(np.int64))
    layout = ("version", _SHAPES, _DTYPES)
    about = {k: v for k, v in vault.metadata.items() if k not in layout}
    run = RunDescription(
        policy={"kind": "unknown"},
        options={"vault": f"{folder.parent.name}/{folder.name}", **about},
        versions={"vault": str(vault.metadata["version"])},
    )
    return description, run, dict(sorted(fields.items()))


def _box(vault: _Vault, name: str) -> spaces.Box:
    """Return the space of all values of an array."""
    shape, dtype = vault.shape(name), vault.dtype(name)
    if dtype.kind == "b":
        low, high = 0.0, 1.0
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        low, high = -np.inf, np.inf
    return spaces.Box(low, high, shape, dtype.type)


def _action_space(vault: _Vault) -> spaces.Space[Any]:
    if vault.has(_LEGALS):
        return spaces.Discrete(vault.shape(_LEGALS)[0])
    if vault.dtype(_ACTIONS).kind == "f":
        return _box(vault, _ACTIONS)
    rows = (vault.read(_ACTIONS, row, 0, vault.steps) for row in range(vault.rows))
    return spaces.Discrete(max(int(actions.max(initial=0)) for actions in rows) + 1)


def _cuts(episodes: _Episodes, frame_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first episode of each batch, and the one after its last.

    A batch is part of one row.
    """
    most = max(1, min(_FRAMES, _BYTES // max(1, frame_bytes)))
    rows, lengths = episodes["row"].tolist(), episodes["frames"].tolist()
    begin = frames = 0
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if i > begin and (row != rows[begin] or frames + length > most):
            yield begin, i
            begin, frames = i, 0
        frames += length
    yield begin, len(episodes)


def _join(vault: _Vault, action: spaces.Space[Any], some: _Episodes) -> Arrays:
    """Return the frames of episodes of one row, back to back."""
    row, start, stop = (
        int(some[at][name]) for at, name in ((0, "row"), (0, "start"), (-1, "stop"))
    )
    lengths = some["frames"]
    frame = ranges(np.zeros_like(lengths), lengths)
    now = np.repeat(some["start"] - start, lengths) + frame
    over = some["terminated"].all(1)
    unknown = (frame == np.repeat(lengths, lengths) - 1) & np.repeat(over, lengths)
    after = np.where(unknown, now, now + 1)

    frames: Arrays = {}
    observed: list[tuple[Key, str]] = [((_GROUP, "observation"), _OBSERVATIONS)]
    if vault.has(_STATE):
        observed.append(((_ROOT,), _STATE))
    for key, name in observed:
        values = vault.read(name, row, start, stop)
        frames[key], frames["next", *key] = values[now], values[after]
        frames["next", *key][unknown] = 0
    frames["next", _GROUP, "reward"] = vault.read(_REWARDS, row, start, stop)[now]
    actions = vault.read(_ACTIONS, row, start, stop)[now]
    if isinstance(action, spaces.Discrete):
        _check_actions(vault, actions, int(action.n))
    frames[_GROUP, "action"] = actions

    ends = np.repeat(some["ends"], lengths, axis=0)
    terminated = np.repeat(some["terminated"], lengths, axis=0)
    for prefix, done in (
        ((), frame[:, None] > ends),
        (("next",), frame[:, None] >= ends),
    ):
        every = np.asarray(done.all(1))
        final = np.asarray(terminated.all(1))
        frames[*prefix, "done"] = every
        frames[*prefix, "terminated"] = every & final
        frames[*prefix, "truncated"] = every & ~final
        frames[*prefix, _GROUP, "done"] = done
        frames[*prefix, _GROUP, "terminated"] = done & terminated
        frames[*prefix, _GROUP, "truncated"] = done & ~terminated
        frames[*prefix, _GROUP, "mask"] = ~done
    if vault.has(_LEGALS):
        legals = vault.read(_LEGALS, row, start, stop) != 0
        for prefix, steps in (((), now), (("next",), after)):
            acts = frames[*prefix, _GROUP, "mask"]
            # As in collected data, every action is legal for a row that does not act.
            frames[*prefix, _GROUP, "action_mask"] = legals[steps] | ~acts[..., None]
    return frames


def _check_actions(vault: _Vault, actions: NDArray[Any], n: int) -> None:
    wrong = (actions < 0) | (actions >= n) | (actions != np.floor(actions))
    if wrong.any():
        raise DatasetError(
            f"{vault.folder}: the array {_ACTIONS} has the action {actions[wrong][0]}, "
            f"but actions are integers from 0 to {n - 1}."
        )
