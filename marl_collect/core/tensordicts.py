"""Converts flat mappings of tensors to nested TensorDicts and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from marl_collect.core.description import Key

Tree = dict[str, Any]
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Dtypes in which torch writes by no index, by those of their size in which it does."""


def assemble(
    tensors: Mapping[Key, torch.Tensor],
    batch_size: Sequence[int],
    n_agents: Mapping[str, int],
    *,
    time: bool = False,
) -> TensorDict:
    """Nest ``tensors`` by their keys, without copying any.

    Args:
        tensors: each ``[*batch_size, ...]``; those of a group
            ``[*batch_size, n_agents, ...]``.
        batch_size: batch size of the root and of everything that is not a group.
        n_agents: group name to number of agents. A group's TensorDict and its
            entries have batch size ``[*batch_size, n_agents]``.
        time: name the last batch dimension ``"time"``.
    """
    tree: Tree = {}
    for key, tensor in tensors.items():
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = tensor
    names = [None] * (len(batch_size) - 1) + ["time"] if time else None
    return _nest(tree, list(batch_size), n_agents, names)


def _nest(
    tree: Tree,
    batch_size: list[int],
    n_agents: Mapping[str, int],
    names: list[str | None] | None,
) -> TensorDict:
    content: Tree = {}
    for name, value in tree.items():
        if not isinstance(value, dict):
            content[name] = value
        elif name in n_agents:
            grouped = [*names, None] if names else None
            content[name] = _nest(value, [*batch_size, n_agents[name]], {}, grouped)
        else:
            content[name] = _nest(value, batch_size, n_agents, names)
    return TensorDict(content, batch_size=batch_size, names=names)


def key_path(key: str | tuple[str, ...]) -> Key:
    """Return a key of a TensorDict as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


def flatten(tensordict: Any) -> dict[Key, torch.Tensor]:
    """Return every tensor of a TensorDict under its key, as a tuple."""
    items = tensordict.items(include_nested=True, leaves_only=True)
    return {key_path(key): leaf for key, leaf in items}


def take_rows(data: TensorDictBase, rows: torch.Tensor) -> TensorDictBase:
    """Return ``data[rows]`` as a copy.

    Indexing takes two to three times as long for vectors, and eight times for pictures
    of uint8, because it copies them element by element.

    Args:
        data: batch size ``[N, ...]``.
        rows: indices of the rows, int64 ``[M]``, on the device of the data.
    """

    def take(value: Any) -> Any:
        if is_non_tensor(value):
            return value[rows]
        if isinstance(value, TensorDictBase):
            return take_rows(value, rows)
        return rows_of(value, rows)

    size = [len(rows), *data.shape[1:]]
    out: Any = data.apply(take, batch_size=size, names=data.names, call_on_nested=True)
    return out


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory in a dtype in which torch writes by masks and indices.

    Gradients do not pass a view as another dtype, so other tensors are returned as
    they are.
    """
    signed = _SIGNED.get(tensor.dtype)
    return tensor if signed is None else tensor.view(signed)


def rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``tensor[rows]`` as a copy; ``rows`` are int64 ``[M]``."""
    memory = indexable(tensor)
    taken = memory.index_select(0, rows)
    return taken if memory is tensor else taken.view(tensor.dtype)
