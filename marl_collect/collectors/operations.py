"""Counts the operations of torch, and those at which the host would wait for a device.

Nothing here needs a GPU: whether an operation waits follows from its name and its
arguments. ``Tensor.to`` and ``copy_`` count only if they leave another device: on the
CPU, they may name the simulator's own.
"""

import sys
import traceback
from collections import Counter
from typing import Any, Self, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from marl_collect.core.env import TensorDictEnv
from marl_collect.policies.fused.record import holds_tensors

_NO_KERNEL = frozenset(
    {
        *("_local_scalar_dense", "_unsafe_view", "alias", "detach", "empty"),
        *("empty_like", "empty_strided", "lift_fresh", "new_empty"),
        *("new_empty_strided", "resize_", "set_"),
    }
)
"""Operations that start no kernel and are no views."""

_READS_RESULTS = frozenset(
    {
        *("_linalg_check_errors", "_local_scalar_dense", "_unique2", "allclose"),
        *("bincount", "equal", "masked_select", "nonzero", "normal"),
        *("repeat_interleave", "unique_consecutive", "unique_dim"),
    }
)
"""Operations that need a value or a size from the device. ``normal`` checks scales."""

_INDEXES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
)
_TO_HOST = {
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "conversion to an array",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.__repr__: "text of a tensor",
    torch.Tensor.__format__: "text of a tensor",
}
_NAMES = {"_local_scalar_dense": "item, bool or number of a tensor"}
_LIBRARIES = frozenset({"numpy", "tensordict", "torch"})
"""They wait on behalf of their callers."""

_SIMULATOR, _OTHERS = "Simulator", "Policy and collector"
_Place = tuple[str, str, str]


@final
class Operations(TorchDispatchMode, TorchFunctionMode):
    """Counts what torch does in this thread within a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: Counter[str] = Counter()
        self._waits: dict[str, Counter[_Place]] = {
            part: Counter() for part in (_SIMULATOR, _OTHERS)
        }
        self._converting = False

    def __enter__(self) -> Self:
        TorchDispatchMode.__enter__(self)
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        TorchFunctionMode.__exit__(self, *exc_info)
        TorchDispatchMode.__exit__(self, *exc_info)

    def lines(self, steps: int) -> list[str]:
        """Say what one step of all environments took.

        Args:
            steps: number of steps counted.

        Returns:
            Lines about the simulator, if it used torch, and about the policy, if it
            did. A line per place that waits names the file, line and function.
        """
        text = []
        for part, waits in self._waits.items():
            if not self._kernels[part] and not waits:
                continue
            text.append(
                f"{part}: {self._kernels[part] / steps:.1f} kernels and "
                f"{waits.total() / steps:.1f} waits for a device per step of all "
                "environments."
            )
            text += [
                f"{part} waits at {place} in {function}: {what}, "
                f"{count / steps:.1f} per step."
                for (place, function, what), count in waits.most_common()
            ]
        return text

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operation that torch executes."""
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        reads = name in _READS_RESULTS and kwargs.get("output_size") is None
        wait = reads or (name in _INDEXES and _has_mask(*args[1:4]))
        if name in {"copy_", "_to_copy"}:
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device")
            leaves = source.device.type != "cpu" == getattr(target, "type", None)
            wait = leaves and not (kwargs.get("non_blocking") or args[2:3] == (True,))
        wait = wait and not self._converting
        runs = not func.is_view and name not in _NO_KERNEL
        if runs or wait:
            part, place = _caller()
            self._kernels[part] += runs
            if wait and place is not None:
                self._waits[part][*place, _NAMES.get(name, name)] += 1
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; count it if it copies a tensor to the host."""
        del types
        kwargs = kwargs or {}
        what = _TO_HOST.get(func)
        if func in (torch.tensor, torch.as_tensor) and holds_tensors(args[0]):
            what = "numbers of tensors in a list"
        if what is None or self._converting:
            return func(*args, **kwargs)
        part, place = _caller()
        if place is not None:
            self._waits[part][*place, what] += 1
        self._converting = True
        try:
            return func(*args, **kwargs)
        finally:
            self._converting = False


def _has_mask(
    indices: Any,
    value: torch.Tensor | None = None,
    accumulate: bool = False,  # noqa: FBT001, FBT002 - as torch passes it
) -> bool:
    """Whether an index is a mask, whose True entries must be counted.

    A number that is written where one mask is True is filled in without counting.
    """
    masks = (torch.bool, torch.uint8)
    tensors = [index for index in indices if index is not None]
    fills = value is not None and value.ndim == 0 and not accumulate
    if fills and len(tensors) == 1:
        return False
    return any(index.dtype in masks for index in tensors)


def _caller() -> tuple[str, tuple[str, str] | None]:
    """Return which part is running, and the line that called torch.

    The line is None in the rooms of this package that move data, because these copies
    are not the user's.
    """
    place: tuple[str, str] | None = None
    is_known = False
    here = sys._getframe()  # noqa: SLF001 - as inspect does
    for frame, line in traceback.walk_stack(here):
        name = str(frame.f_globals.get("__name__", ""))
        if name == __name__:
            continue
        if not is_known and name.partition(".")[0] not in _LIBRARIES:
            is_known = True
            if not name.startswith("marl_collect.") or ".models." in name:
                code = frame.f_code
                place = f"{code.co_filename}:{line}", code.co_name
        if isinstance(frame.f_locals.get("self"), TensorDictEnv):
            return _SIMULATOR, place
    return _OTHERS, place
