"""Splits rollouts into trajectories, and joins trajectories over batches."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, final

import torch
from tensordict import TensorDictBase, pad_sequence

TrajFormat = Literal["padded", "cat"]
_IDS = ("collector", "traj_ids")
_MASK = ("collector", "mask")


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: str | tuple[str, ...] | None = None,
    trajectory_key: str | tuple[str, ...] | None = None,
    done_key: str | tuple[str, ...] | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Split rollouts into trajectories and pad them with zeros.

    A trajectory that continues in another batch is cut at the end of this one. Invalid
    frames (id -1, or False in the mask) are dropped first.

    Args:
        rollout_tensordict: ``[*B, T]``.
        prefix: parent key of ``traj_ids`` and ``mask``; by default ``"collector"`` if
            present, else the root.
        trajectory_key: key of the ids; by default ``(prefix, "traj_ids")``.
        done_key: flag that ends a trajectory if there are no ids, with or without the
            leading ``"next"``; by default ``"done"``.
        as_nested: return nested tensors instead of padded ones: True as TorchRL does,
            with the batch size ``[n, -1]``; ``torch.jagged`` for that layout, with the
            batch size ``[n]``.

    Returns:
        ``[n, longest]``, with bool ``mask`` beside the ids, True where valid.

    Raises:
        ValueError: if ``as_nested`` is another layout.
    """
    if as_nested not in (False, True, torch.jagged, torch.strided):
        raise ValueError(
            "as_nested must be True, False, torch.jagged or torch.strided, but is "
            f"{as_nested!r}."
        )
    data = rollout_tensordict
    ids_key = _ids_key(data, prefix, trajectory_key)
    mask_key = (*ids_key[:-1], "mask")
    frames = data.shape[-1]
    flat = data.reshape(-1)
    starts = torch.zeros(flat.shape[0], dtype=torch.bool, device=flat.device)
    starts[::frames] = True
    ids = flat.get(ids_key, None)
    if ids is None:
        flag = _tuple(done_key or "done")
        ahead = flag if flag[0] == "next" else ("next", *flag)
        done = flat[ahead].reshape(-1)
        starts[1:] |= done[:-1]
    else:
        starts[1:] |= ids[1:] != ids[:-1]
        valid = ids != -1
        if mask_key in flat.keys(include_nested=True):
            valid &= flat.get(mask_key)
        # The first valid frame of a row begins a piece, even after invalid frames.
        pieces = starts.cumsum(0)[valid]
        flat = flat[valid]
        starts = torch.ones_like(pieces, dtype=torch.bool)
        starts[1:] = pieces[1:] != pieces[:-1]
    begins = starts.nonzero().flatten()
    ends = torch.cat([begins[1:], begins.new_tensor([flat.shape[0]])])
    if as_nested == torch.jagged:
        return _jagged(flat, begins)
    if as_nested:
        return _nested(flat, (ends - begins).tolist())
    return _padded(flat, begins, ends, mask_key)


def _ids_key(
    data: TensorDictBase,
    prefix: str | tuple[str, ...] | None,
    trajectory_key: str | tuple[str, ...] | None,
) -> tuple[str, ...]:
    if trajectory_key is not None:
        return _tuple(trajectory_key)
    if prefix is not None:
        return (*_tuple(prefix), "traj_ids")
    if "collector" in data.keys():
        return _IDS
    return ("traj_ids",)


def _tuple(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _padded(
    flat: TensorDictBase,
    begins: torch.Tensor,
    ends: torch.Tensor,
    mask_key: tuple[str, ...],
) -> TensorDictBase:
    lengths = ends - begins
    offsets = torch.arange(int(lengths.max()), device=flat.device)
    mask = offsets < lengths[:, None]
    index = torch.where(mask, begins[:, None] + offsets, begins[:, None])
    out = flat[index]
    invalid = ~mask
    if bool(invalid.any()):
        for leaf in out.values(include_nested=True, leaves_only=True):
            leaf[invalid] = 0
    out.set(mask_key, mask)
    out.names = [None, "time"]
    return out


def _nested(flat: TensorDictBase, lengths: list[int]) -> TensorDictBase:
    def nested(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(leaf.split(lengths)))

    out = flat.apply(nested, batch_size=[len(lengths), -1])
    assert out is not None
    return out


def _jagged(flat: TensorDictBase, begins: torch.Tensor) -> TensorDictBase:
    end = begins.new_tensor([flat.shape[0]])
    offsets = torch.cat([begins, end])

    def jagged(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(leaf, offsets)

    out = flat.apply(jagged, batch_size=[begins.shape[0]])
    assert out is not None
    return out


@final
class TrajectoryAssembler:
    """Joins the pieces of trajectories over batches until they are complete."""

    def __init__(self, wanted: Callable[[int], bool] | None = None) -> None:
        """Start empty.

        Args:
            wanted: returns whether to keep the trajectory with this id. None keeps
                all.
        """
        self._wanted = wanted
        self._open: dict[int, list[TensorDictBase]] = {}
        self._latest: dict[int, int] = {}  # Id by environment.
        self._complete: list[TensorDictBase] = []

    def __len__(self) -> int:
        """Number of complete trajectories that were not taken yet."""
        return len(self._complete)

    def add(self, batch: TensorDictBase) -> None:
        """Add the frames of a batch ``[B, T]``, which are copied."""
        for row in batch.unbind(0):
            for piece in _pieces(row):
                number = int(piece.get(_IDS)[0])
                before = self._latest.get(number >> 32, number)
                self._latest[number >> 32] = number
                if before != number:
                    self._open.pop(before, None)  # It was cut and will not continue.
                if self._wanted is not None and not self._wanted(number):
                    continue
                self._open.setdefault(number, []).append(piece.clone())
                if bool(piece.get(("next", "done"))[-1].any()):
                    whole = torch.cat(self._open.pop(number), 0)
                    self._complete.append(whole)

    def take(self, most: int | None = None) -> list[TensorDictBase]:
        """Return complete trajectories ``[T]``, in the order of their ends."""
        most = len(self._complete) if most is None else most
        taken, self._complete = self._complete[:most], self._complete[most:]
        return taken

    def drop_open(self) -> None:
        """Drop incomplete trajectories, after a reset of the environments."""
        self._open.clear()

    def held(self) -> tuple[list[TensorDictBase], list[TensorDictBase]]:
        """Return the incomplete and the complete trajectories that are held."""
        return [torch.cat(pieces, 0) for pieces in self._open.values()], self._complete

    def hold(
        self, unfinished: Sequence[TensorDictBase], complete: Sequence[TensorDictBase]
    ) -> None:
        """Restore what ``held`` returned."""
        self._open = {int(piece.get(_IDS)[0]): [piece] for piece in unfinished}
        self._latest = {number >> 32: number for number in self._open}
        self._complete = list(complete)


def join(trajectories: list[TensorDictBase], form: TrajFormat) -> TensorDictBase:
    """Join complete trajectories to one batch.

    Args:
        trajectories: each ``[T]``.
        form: ``"padded"`` returns ``[k, longest]`` with ``("collector", "mask")``,
            ``"cat"`` returns ``[sum of T]``.
    """
    if form == "cat":
        return torch.cat(trajectories, 0)
    lengths = torch.tensor([len(t) for t in trajectories])
    out: Any = pad_sequence([t.clone(recurse=False) for t in trajectories])
    out.set(_MASK, torch.arange(out.shape[1]) < lengths[:, None])
    out.names = [None, "time"]
    return out


def _pieces(row: TensorDictBase) -> Iterator[TensorDictBase]:
    ids = row.get(_IDS)
    borders = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    edges = [0, *borders.tolist(), len(ids)]
    for begin, end in pairwise(edges):
        if int(ids[begin]) != -1:
            yield row[begin:end]
