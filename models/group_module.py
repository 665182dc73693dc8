"""``GroupModule``: applies a network to TensorDict keys of one group."""

from collections.abc import Sequence
from typing import final

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from marl_collect.models.distributions.heads import show_keys

Key = tuple[str, ...]


@final
class GroupModule(TensorDictModuleBase):
    """Applies a network to TensorDict keys. Errors name the group and the keys.

    Args:
        module: takes the values of ``in_keys`` and returns the values of ``out_keys``.
        in_keys: keys of the inputs.
        out_keys: keys of the outputs.
        group: name of the group, for messages.
        check_finite: whether an output that is not finite is an error.
    """

    pure_forward = True
    by_row = True

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
        """Write the outputs to ``tensordict`` and return it.

        Raises:
            KeyError: if keys are missing; names them.
            ValueError: if the network does not accept its input, or if an output is
                not finite; names the group.
        """
        values = read(tensordict, self.in_keys, self.group)
        try:
            out = self.module(*values)
        except ValueError as error:
            where = f"Group {self.group!r}, input {show_keys(self.in_keys)}"
            raise ValueError(
                f"{where}: {error} A policy that was built for another environment "
                "does not fit: make_policy(make_env) builds one for this environment."
            ) from error
        outputs = out if isinstance(out, tuple) else (out,)
        for key, value in zip(self.out_keys, outputs, strict=True):
            if self.check_finite:
                check_numbers(key, value, self.group)
            tensordict.set(key, value)
        return tensordict


def read(tensordict: TensorDictBase, keys: Sequence[Key], group: str) -> list[Tensor]:
    """Return the values of ``keys``.

    Raises:
        KeyError: if keys are missing; names them and the group.
    """
    values = [tensordict.get(key, None) for key in keys]
    missing = [k for k, v in zip(keys, values, strict=True) if v is None]
    if missing:
        raise KeyError(
            f"The network of group {group!r} needs {show_keys(missing)}, but "
            f"found {show_keys(tensordict.keys(True, True))}. Change in_keys or the "
            "environment's observations."
        )
    return values


def check_numbers(key: Key, value: Tensor, group: str) -> None:
    """Raise a ValueError if an output is not finite."""
    if value.isfinite().all():
        return
    wrong = ~value.isfinite()
    index = wrong.nonzero()[0].tolist()
    raise ValueError(
        f"The network of group {group!r} must write finite numbers, but "
        f"{int(wrong.sum())} numbers in {show_keys([key])} are not finite; the first "
        f"is {value[tuple(index)].item()} at {index}. Check the observation at this "
        "index and the weights (the learning rate may be too high)."
    )
