"""Tensors that do not consist of one piece of strided memory.

A sparse tensor, such as the adjacency matrix of a graph network, consists of strided
tensors: indices and values. The number of its values may change, so it is no part of a
weight vector.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_coo: ("_indices", "_values"),
}


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and not quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes are its values.

    Lazy tensors and those of the meta device count as plain.
    """
    if is_lazy(tensor):
        return True
    return is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def version(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written in place.

    Of tensors that were created in ``torch.inference_mode``, torch has none.
    """
    try:
        return tensor._version
    except RuntimeError:
        return 0


def copied_parts(module: Any) -> dict[int, Any]:
    """Return copies of the tensors of a module that ``copy.deepcopy`` may not know.

    They are by id, as in its second argument.
    """
    if not isinstance(module, nn.Module):
        return {}
    tensors = (*module.parameters(), *module.buffers())
    return {
        id(tensor): tensor.detach().clone()
        for tensor in tensors
        if not is_plain(tensor) and not isinstance(tensor, nn.Parameter)
    }


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that hold a tensor's values, perhaps only itself.

    It is empty for the layouts of other libraries, which hide their memory.
    """
    if tensor.layout == torch.strided:
        return (tensor,)
    methods = _COMPRESSED.get(tensor.layout, ())
    return tuple(getattr(tensor, method)() for method in methods)
