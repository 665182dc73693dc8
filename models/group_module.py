"""A network on the keys of one group, as a module on TensorDicts."""

from collections.abc import Sequence
from typing import final

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from marl_collect.models.distributions.heads import show_keys

Key = tuple[str, ...]


@final
class GroupModule(TensorDictModuleBase):
    """A network on the keys of one group, whose errors name the group and the keys.

    Args:
        module: called with the values of ``in_keys``, returns those of ``out_keys``.
        in_keys: what to read.
        out_keys: where to write.
        group: for messages.
        check_finite: whether an output that is not finite is an error.
    """

    pure_forward = True

    def __init__(
        self,
        module: nn.Module,
        in_keys: Sequence[Key],
        out_keys: Sequence[Key],
        *,
        group: str,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.in_keys = list(in_keys)
        self.out_keys = list(out_keys)
        self.group = group
        self.check_finite = check_finite

    @dispatch(auto_batch_size=False)  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read, compute, write; returns ``tensordict``.

        Raises:
            KeyError: naming the keys that are missing.
            ValueError: what the network says about its input, or which output is not
                finite, with the group's name.
        """
        values = read(tensordict, self.in_keys, self.group)
        try:
            out = self.module(*values)
        except ValueError as error:
            where = f"Group {self.group!r}, input {show_keys(self.in_keys)}"
            raise ValueError(f"{where}: {error}") from error
        outputs = out if isinstance(out, tuple) else (out,)
        for key, value in zip(self.out_keys, outputs, strict=True):
            if self.check_finite:
                check_numbers(key, value, self.group)
            tensordict.set(key, value)
        return tensordict


def read(tensordict: TensorDictBase, keys: Sequence[Key], group: str) -> list[Tensor]:
    """Return the values of ``keys``.

    Raises:
        KeyError: naming the keys that are missing, and the group.
    """
    values = [tensordict.get(key, None) for key in keys]
    missing = [k for k, v in zip(keys, values, strict=True) if v is None]
    if missing:
        raise KeyError(
            f"The network of group {group!r} needs {show_keys(missing)}, but "
            f"found {show_keys(tensordict.keys(True, True))}. Change in_keys, or what "
            "the environment observes."
        )
    return values


def check_numbers(key: Key, value: Tensor, group: str) -> None:
    """Raise ValueError if what a network wrote is not finite."""
    if value.isfinite().all():
        return
    wrong = ~value.isfinite()
    index = wrong.nonzero()[0].tolist()
    raise ValueError(
        f"The network of group {group!r} wrote {int(wrong.sum())} numbers "
        f"that are not finite to {show_keys([key])}, the first of them "
        f"{value[tuple(index)].item()} at {index}: expected finite numbers. Look "
        "at the observation there and at the weights (a learning rate too high?)."
    )
