"""Converts lists of frames to the shapes of batches, one frame at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from oracle_reference import Frame, Key

Row = list[Frame]
Table = dict[Key, torch.Tensor]
IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
ENDS = ("next", "done")


def stacked(row: Row) -> Table:
    """Return frames as ``[T]``."""
    return {key: torch.stack([frame[key] for frame in row]) for key in row[0]}


def padded(rows: Sequence[Row]) -> Table:
    """Return rows of different lengths as ``[n, longest]``, with a mask."""
    longest = max(map(len, rows))
    tables = []
    for row in rows:
        blank = {key: torch.zeros_like(value) for key, value in row[0].items()}
        table = stacked(row + [blank] * (longest - len(row)))
        table[MASK] = torch.arange(longest) < len(row)
        tables.append(table)
    return {key: torch.stack([table[key] for table in tables]) for key in tables[0]}


def rectangle(rows: Sequence[Row]) -> Table:
    """Return rows as ``[n, T]``. Frames that a shorter row lacks have no trajectory."""
    if len(set(map(len, rows))) > 1:
        table = padded(rows)
        table[IDS][~table[MASK]] = -1
        return table
    tables = [stacked(row) for row in rows]
    return {key: torch.stack([table[key] for table in tables]) for key in tables[0]}


def pieces(rows: Sequence[Row]) -> list[Row]:
    """Cut rows where the trajectory changes."""
    segments: list[Row] = []
    for row in rows:
        before = None
        for frame in row:
            if before != int(frame[IDS]):
                segments.append([])
            before = int(frame[IDS])
            segments[-1].append(frame)
    return segments


class Delivery:
    """Applies the options about shapes to collected frames."""

    def __init__(self, options: Mapping[str, Any], workers: int) -> None:
        self.options, self.workers = options, workers
        self.unfinished: dict[int, Row] = {}
        self.complete: list[Row] = []

    def lacks(self) -> bool:
        """Whether more frames are needed for the next batch."""
        return len(self.complete) < self.options["trajs_per_batch"]

    def add(self, rows: Sequence[Row]) -> None:
        """Join pieces of trajectories until they are complete."""
        for piece in pieces(rows):
            number = int(piece[0][IDS])
            for other in [n for n in self.unfinished if n >> 32 == number >> 32]:
                if other != number:
                    del self.unfinished[other]
            trajectory = self.unfinished.setdefault(number, [])
            trajectory += piece
            if piece[-1][ENDS]:
                self.complete.append(self.unfinished.pop(number))

    def take(self) -> Table:
        """Return the next batch of whole trajectories."""
        count = self.options["trajs_per_batch"]
        trajectories, self.complete = self.complete[:count], self.complete[count:]
        cat = self.options.get("traj_format") == "cat"
        if cat or "replay_buffer" in self.options:
            return stacked(
                [frame for trajectory in trajectories for frame in trajectory]
            )
        return padded(trajectories)

    def shaped(self, rows: Sequence[Row]) -> Table:
        """Return the batch of these frames, for options without whole trajectories."""
        options = self.options
        if options.get("split_trajs"):
            table = padded(pieces(rows))
        else:
            table = rectangle(rows)
            table = {k: self._arranged(v) for k, v in table.items()}
        if "replay_buffer" in options:
            dims = table["done",].ndim - 1
            table = {k: v.reshape(-1, *v.shape[dims:]) for k, v in table.items()}
        if MASK in table and table[MASK].ndim == 1:
            table = {k: v[table[MASK]] for k, v in table.items()}
        return table

    def _arranged(self, value: torch.Tensor) -> torch.Tensor:
        cat_results = self.options.get("cat_results")
        b, t, *trailing = value.shape
        envs_per_worker = b // self.workers
        if (
            cat_results is None
            or (cat_results == "stack" and envs_per_worker == 1)
            or (cat_results == 0 and envs_per_worker > 1)
        ):
            return value
        if cat_results == "stack":
            return value.reshape(self.workers, envs_per_worker, t, *trailing)
        if envs_per_worker == 1:
            return value.reshape(b * t, *trailing)
        return torch.cat(
            list(value.reshape(self.workers, envs_per_worker, t, *trailing)), 1
        )
