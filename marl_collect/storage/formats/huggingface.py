"""Exports episodes to a folder that Hugging Face's ``datasets`` opens, and imports it.

``data/*.parquet`` has one row per frame, ``README.md`` is the dataset card, and
``marl_collect.json`` is read by the import. A column under ``next`` that has a column
at the root too is null where the next value is the root value of the next row, so only
the last observation of each episode is stored twice. Pictures are PNG, without loss:
``datasets`` decodes them, and its viewer shows them. Other arrays are nested lists of
fixed length.
"""

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.card import groups_table
from marl_collect.storage.checks import DatasetError, naming
from marl_collect.storage.formats.blocks import (
    Block,
    Rows,
    cuts,
    header_from_json,
    header_to_json,
)
from marl_collect.storage.formats.registry import Format, Source
from marl_collect.storage.index import Index, KeyField

_HEADER: Final = "marl_collect.json"
_CARD: Final = "README.md"
_DATA: Final = "data"
_SHARD: Final = 2**28
"""Bytes after which another file is begun."""
_PICTURE: Final = 8
"""Height and width of the smallest picture."""
_EPISODE, _FRAME, _RUN = "episode", "frame", "run"


def _export(path: Path, contents: Index, blocks: Iterator[Block], target: Path) -> None:
    (path / _DATA).mkdir(parents=True)
    _write_shards(path / _DATA, contents, blocks)
    (path / _HEADER).write_text(json.dumps(header_to_json(contents)), encoding="utf-8")
    (path / _CARD).write_text(_card(contents, target.name), encoding="utf-8")


def _write_shards(folder: Path, contents: Index, blocks: Iterator[Block]) -> None:
    """Write Parquet files, with each block as one group of rows."""
    from pyarrow import parquet

    episodes = shards = 0
    file: Any = None
    with ExitStack() as stack:
        for block in blocks:
            table = _table(contents, block, episodes)
            columns = zip(table.column_names, table.schema.types, strict=True)
            features = {name: _feature(kind) for name, kind in columns}
            about = json.dumps({"info": {"features": features}})
            table = table.replace_schema_metadata({"huggingface": about})
            path = folder / f"train-{shards:05d}.parquet"
            if file is None:
                file = parquet.ParquetWriter(path, table.schema, compression="zstd")
                stack.callback(file.close)
            file.write_table(table, row_group_size=max(1, len(table)))
            episodes += len(block.lengths)
            if path.stat().st_size > _SHARD:
                stack.close()
                file, shards = None, shards + 1


def _table(contents: Index, block: Block, episodes: int) -> Any:
    """Return a block as a table; ``episodes`` are before it."""
    import pyarrow as pa

    lengths = np.array(block.lengths)
    numbers = np.arange(episodes, episodes + len(lengths))
    starts = np.cumsum(lengths) - lengths
    columns: dict[str, Any] = {
        _EPISODE: pa.array(np.repeat(numbers, lengths)),
        _FRAME: pa.array(np.arange(lengths.sum()) - np.repeat(starts, lengths)),
        _RUN: pa.array(np.full(lengths.sum(), block.run)),
    }
    for field, values, rows in block.stored(contents):
        columns[_name(field.key)] = _to_arrow(field, values, rows, lengths.sum())
    return pa.table(columns)


def _name(key: Key) -> str:
    """Return the column of a key."""
    return ".".join(part.replace("%", "%25").replace(".", "%2E") for part in key)


def _shape(field: KeyField) -> tuple[int, ...]:
    """Return the shape of a column's lists: without dimensions of one at the end."""
    shape = field.shape[:-3] if _is_picture(field) else field.shape
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _is_picture(field: KeyField) -> bool:
    shape = field.shape[-3:]
    return (
        field.dtype == "uint8"
        and len(shape) == 3
        and min(shape[:2]) >= _PICTURE
        and shape[2] in (1, 3)
    )


def _to_arrow(field: KeyField, values: NDArray[Any], rows: Rows, count: int) -> Any:
    """Return a column of ``count`` rows; others than ``rows`` are null, if given."""
    import pyarrow as pa

    if _is_picture(field):
        pictures = [_png(picture) for picture in values.reshape(-1, *field.shape[-3:])]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        column = pa.array([{"bytes": png, "path": None} for png in pictures], kind)
    else:
        column = pa.array(values.reshape(-1))
    for size in reversed(_shape(field)):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    if rows is None:
        return column
    positions = np.zeros(count, np.int64)
    positions[rows] = np.arange(len(rows))
    null = np.ones(count, bool)
    null[rows] = False
    return column.take(pa.array(positions, mask=null))


def _from_arrow(field: KeyField, column: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values that are not null, and their rows."""
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    values = column.drop_null()
    for _ in _shape(field):
        values = values.flatten()
    if _is_picture(field):
        pictures = values.field("bytes").to_pylist()
        array = np.stack([_pixels(png) for png in pictures])
    else:
        array = values.to_numpy(zero_copy_only=False)
    return array.astype(field.dtype).reshape(len(rows), *field.shape), rows


def _png(picture: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = picture[..., 0] if picture.shape[-1] == 1 else picture
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _pixels(png: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)))


def _feature(kind: Any) -> dict[str, Any]:
    """Return the description of a type in the metadata of ``datasets``."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return {"_type": "Image"}
    if pa.types.is_fixed_size_list(kind):
        inner = _feature(kind.value_type)
        return {"feature": inner, "length": kind.list_size, "_type": "List"}
    name = (
        "bool" if pa.types.is_boolean(kind) else np.dtype(kind.to_pandas_dtype()).name
    )
    return {"dtype": name, "_type": "Value"}


def _card(contents: Index, name: str) -> str:
    """Return the dataset card: YAML for the Hub, and a text."""
    about, totals = contents.description, contents.totals
    labels = contents.metadata
    named = f"license: {json.dumps(labels.license)}\n" if labels.license else ""
    tags = "".join(f"- {json.dumps(tag)}\n" for tag in labels.tags)
    texts = [labels.description, labels.author and f"Author: {labels.author}."]
    written = "".join(f"{text}\n\n" for text in texts if text)
    return f"""---
{named}configs:
- config_name: default
  data_files:
  - split: train
    path: {_DATA}/*.parquet
task_categories:
- reinforcement-learning
tags:
- multi-agent
- marl_collect
{tags}---

# {name}

{written}{totals.episodes:,} complete episodes of `{about.task}`, {totals.frames:,}
frames.

{groups_table(about.environment)}

A row is one frame; `{_EPISODE}` and `{_FRAME}` count from 0. Columns are named after
keys, such as `{_name(contents.keys[0].key)}`. What a step returns is under `next`. If a
column exists without `next` too, its values under `next` are null unless they differ
from the next row: they are stored at the end of episodes.

```python
from datasets import load_dataset

frames = load_dataset("parquet", data_dir="{name}/{_DATA}", split="train")
```

`marl-collect import {name} --format huggingface --out data` makes a dataset of
`marl_collect` from this folder.
"""


def _open(folder: Path) -> Source:
    file = folder / _HEADER
    if not file.is_file():
        raise DatasetError(
            f"{folder} has no {_HEADER}, so it is not of `marl-collect export --format "
            "huggingface`: other datasets do not say which columns are observations."
        )
    with naming(file, "the header of an export"):
        contents = header_from_json(json.loads(file.read_text(encoding="utf-8")))
    return contents, _read(folder, contents)


def _read(folder: Path, contents: Index) -> Iterator[Block]:
    import pyarrow as pa
    from pyarrow import parquet

    rest: Any = None
    for path in sorted((folder / _DATA).glob("*.parquet")):
        with naming(path, "a complete export"), parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                if rest is not None:
                    table = pa.concat_tables([rest, table.cast(rest.schema)])
                episode = table[_EPISODE].to_numpy()
                # The last episode may continue in the next group of rows.
                cut = int(np.searchsorted(episode, episode[-1]))
                rest = table.slice(cut)
                if cut:
                    yield from _blocks(contents, table.slice(0, cut))
    if rest is not None:
        with naming(folder, "a complete export"):
            yield from _blocks(contents, rest)


def _blocks(contents: Index, table: Any) -> Iterator[Block]:
    episode, frame = (table[name].to_numpy() for name in (_EPISODE, _FRAME))
    _, starts, lengths = np.unique(episode, return_index=True, return_counts=True)
    expected = np.arange(len(episode)) - np.repeat(starts, lengths)
    if (np.diff(episode) < 0).any() or not np.array_equal(frame, expected):
        raise DatasetError("its rows are not the frames of whole episodes in order.")
    runs = table[_RUN].to_numpy()[starts]
    ends = np.append(starts, len(episode))
    for first, last in cuts(contents, lengths.tolist(), runs.tolist()):
        rows = table.slice(ends[first], ends[last] - ends[first]).combine_chunks()
        stored = {
            field.key: _from_arrow(field, rows[_name(field.key)].combine_chunks())
            for field in contents.keys
        }
        lengths_of_block = lengths[first:last].tolist()
        yield Block.restored(contents, stored, lengths_of_block, int(runs[first]))


FORMAT: Final = Format(
    summary="a folder of Parquet files with a dataset card, for Hugging Face's Hub",
    extra="huggingface",
    packages=("pyarrow", "PIL"),
    export=_export,
    open=_open,
)
