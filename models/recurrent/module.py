"""``RecurrentModule``: applies a recurrent network to TensorDict keys of one group."""

from collections.abc import Sequence
from typing import final

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from marl_collect.models.group_module import check_numbers, read
from marl_collect.models.recurrent.networks import (
    MultiAgentGRU,
    MultiAgentLSTM,
    reads_sequences,
)

Key = tuple[str, ...]


@final
class RecurrentModule(TensorDictModuleBase):
    """Applies a recurrent network to TensorDict keys of one group.

    Reads ``(group, in_key)``, the group's state and ``"is_init"``. Writes
    ``(group, out_key)``, and the new state under ``("next", group, ...)``; collectors
    carry it into the next step. The state has TorchRL's names: ``recurrent_state``
    (GRU), ``recurrent_state_h`` and ``recurrent_state_c`` (LSTM).

    In a single step, a missing state is replaced by zeros, which are also written. A
    sequence (see ``set_recurrent_mode``) starts from the state of its first step, and
    from zeros wherever ``is_init`` is True.

    Args:
        network: a ``MultiAgentGRU`` or ``MultiAgentLSTM``.
        group: name of the group.
        in_key: inputs: a name within the group, or full keys.
        out_key: outputs: a name within the group, or one full key per output.
        encoder: maps the values of ``in_key`` to the network's input, for any batch
            dimensions.
        decoder: maps the network's output to the outputs, for any batch dimensions.
        check_finite: whether an output that is not finite is an error.
        state_prefix: of the names of the states, for a second network in a group.
    """

    pure_forward = True
    by_row = True

    def __init__(
        self,
        network: MultiAgentGRU | MultiAgentLSTM,
        group: str = "agents",
        in_key: str | Sequence[Key] = "observation",
        out_key: str | Sequence[Key] = "embedding",
        *,
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        check_finite: bool = False,
        state_prefix: str = "",
    ) -> None:
        super().__init__()
        self.encoder = nn.Identity() if encoder is None else encoder
        self.network = network
        self.decoder = nn.Identity() if decoder is None else decoder
        self.group = group
        self.check_finite = check_finite
        self.state_keys = [(group, state_prefix + name) for name in network.state_names]
        self.read_keys = _keys(in_key, group)
        self.in_keys = [*self.read_keys, *self.state_keys, "is_init"]
        self.write_keys = _keys(out_key, group)
        next_keys = [("next", *key) for key in self.state_keys]
        self.out_keys = [*self.write_keys, *next_keys]

    @property
    def state_shapes(self) -> dict[Key, tuple[int, int, int]]:
        """Shape of each state of one environment."""
        return dict.fromkeys(self.state_keys, self.network.state_shape)

    @dispatch(auto_batch_size=False)  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the outputs and the new state to ``tensordict`` and return it.

        Raises:
            KeyError: if keys are missing; names them.
            ValueError: if shapes are inconsistent, or if an output is not finite; names
                the group.
        """
        values = read(tensordict, self.read_keys, self.group)
        if reads_sequences():
            read(tensordict, [("is_init",)], self.group)
        is_init = tensordict.get("is_init", None)
        try:
            x = self.encoder(*values)
            states = self._states(tensordict, x)
            y, *after = self.network(x, *states, is_init)
            out = self.decoder(y)
        except ValueError as error:
            raise ValueError(f"Group {self.group!r}: {error}") from error
        outputs = out if isinstance(out, tuple) else (out,)
        for key, value in zip(self.write_keys, outputs, strict=True):
            if self.check_finite:
                check_numbers(key, value, self.group)
            tensordict.set(key, value)
        for key, value in zip(self.state_keys, after, strict=True):
            tensordict.set(("next", *key), value)
        return tensordict

    def _states(self, tensordict: TensorDictBase, x: Tensor) -> list[Tensor | None]:
        """Return the states before the first step; None stands for zeros."""
        states = [tensordict.get(key, None) for key in self.state_keys]
        if reads_sequences():
            return [s if s is None else s.select(x.ndim - 3, 0) for s in states]
        for index, key in enumerate(self.state_keys):
            if states[index] is None:
                # Every frame of the data contains the state, so the first must too.
                states[index] = x.new_zeros(*x.shape[:-2], *self.network.state_shape)
                tensordict.set(key, states[index])
        return states


def _keys(keys: str | Sequence[Key], group: str) -> list[Key]:
    return [(group, keys)] if isinstance(keys, str) else list(keys)
