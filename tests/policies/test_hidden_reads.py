"""A policy that branches on values acts as when it is called, however it reads them."""

import array
import ctypes
import io
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pure_modules import Called, Computes, collected
from tensordict import TensorDict
from torch import Tensor, nn
from workloads.counting import CountingEnv

from marl_collect import Collector


class Numbers(list[Any]): ...


LIMIT = 5.5
"""Observations count the frames of an episode, from 0 to 10. Random frames, on which a
recording is compared with its module, are never beyond this limit."""
SEEN: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.max().item() > LIMIT,
    "bool": lambda x: bool(x.max() > LIMIT),
    "if": lambda x: 1 if x.max() > LIMIT else 0,
    "not": lambda x: not x.max() <= LIMIT,
    "and": lambda x: x.max() > LIMIT and x.min() >= 0,
    "int": lambda x: int(x.max()) > LIMIT,
    "float": lambda x: float(x.max()) > LIMIT,
    "complex": lambda x: complex(x.max()).real > LIMIT,
    "round": lambda x: round(float(x.max())) > LIMIT,
    "math": lambda x: math.floor(x.max()) > LIMIT,
    "an index of a list": lambda x: ([0] * 6 + [1] * 9)[x.max().long()],
    "the end of a range": lambda x: len(range(x.max().long())) > LIMIT,
    "a tensor's slice": lambda x: torch.zeros(99)[: x.max().long()].numel() > LIMIT,
    "a shape": lambda x: len(torch.zeros(12).view(1 + x.max().long() // 6, -1)) > 1,
    "repeat": lambda x: len(torch.zeros(1).repeat(x.max().long())) > LIMIT,
    "arange": lambda x: len(torch.arange(x.max().long())) > LIMIT,
    "full": lambda x: bool(torch.full((2,), x.max()).sum() > 2 * LIMIT),
    "tolist": lambda x: max(x.flatten().tolist()) > LIMIT,
    "tolist of one": lambda x: x.max().tolist() > LIMIT,
    "tolist of flags": lambda x: any((x > LIMIT).any().unsqueeze(0).tolist()),
    "in": lambda x: any(number in x for number in range(6, 99)),
    "contains": lambda x: x.max() in range(6, 99),
    "equal": lambda x: not torch.equal(x.clamp(max=LIMIT), x),
    "allclose": lambda x: not torch.allclose(x.clamp(max=LIMIT), x),
    "is_nonzero": lambda x: torch.is_nonzero((x > LIMIT).any()),
    "iteration": lambda x: any(float(number) > LIMIT for number in x.flatten()),
    "max of Python": lambda x: max(x.flatten()) > LIMIT,
    "sorted": lambda x: float(sorted(x.flatten())[-1]) > LIMIT,
    "a format of a number": lambda x: float(f"{x.max():.1f}") > LIMIT,
    "a percent sign": lambda x: int("%d" % x.max()) > LIMIT,  # noqa: UP031
    "struct": lambda x: struct.unpack("f", struct.pack("f", x.max()))[0] > LIMIT,
    "an array of Python": lambda x: max(array.array("f", x.flatten())) > LIMIT,
    "bytes": lambda x: max(bytes(x.flatten().abs().long())) > LIMIT,
    "an entry of a TensorDict": lambda x: TensorDict(x=x)["x"].max().item() > LIMIT,
    "a copied tensor": lambda x: torch.asarray(x.max()) > LIMIT,
}
"""Ways of reading that a recorder sees: they become guards."""
FLAGS = {"bool", "if", "not", "and", "is_nonzero", "allclose", "tolist of flags"}
"""Those that read a flag, which differs from frame to frame less often than numbers."""
HIDDEN: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy().max() > LIMIT,
    "numpy by force": lambda x: x.numpy(force=True).max() > LIMIT,
    "numpy of data": lambda x: x.data.numpy().max() > LIMIT,
    "numpy of a result": lambda x: (x * 1).detach().cpu().numpy().max() > LIMIT,
    "asarray": lambda x: np.asarray(x).max() > LIMIT,
    "__array__": lambda x: x.__array__().max() > LIMIT,
    "a function of numpy": lambda x: np.square(x).max() > LIMIT**2,
    "a number of numpy": lambda x: np.float32(x.max()) > LIMIT,
    "an array of tensors": lambda x: np.array([x.max(), x.min()]).max() > LIMIT,
    "memoryview": lambda x: max(memoryview(x.flatten().numpy())) > LIMIT,
    "from_dlpack": lambda x: np.from_dlpack(x).max() > LIMIT,
    "__dlpack__": lambda x: torch.utils.dlpack.from_dlpack(x.__dlpack__()).max() > 5,
    "data_ptr": lambda x: max(floats(x.data_ptr(), x.numel())) > LIMIT,
    "storage": lambda x: max(x.storage()) > LIMIT,
    "a list of a storage": lambda x: max(x.storage().tolist()) > LIMIT,
    "untyped_storage": lambda x: max(floats_of(bytes(x.untyped_storage()))) > LIMIT,
    "an address of a storage": lambda x: (
        max(floats(x.untyped_storage().data_ptr(), x.numel())) > LIMIT
    ),
    "str": lambda x: "1e" in str(x) or float(str(x.max())[7:-1]) > LIMIT,
    "repr": lambda x: float(repr(x.max())[7:-1]) > LIMIT,
    "a format": lambda x: float(f"{x.max().unsqueeze(0)}"[8:-2]) > LIMIT,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.max())).item() > LIMIT,
    "save": lambda x: saved(x.max()).item() > LIMIT,
    "apply_": lambda x: x.clone().apply_(lambda number: number > LIMIT).any(),
    "map_": lambda x: x.clone().map_(x, lambda _, number: number > LIMIT).any(),
    "a list of tensors": lambda x: torch.tensor([x.max(), x.min()]).max() > LIMIT,
    "a subclass of list": lambda x: torch.tensor(Numbers([x.max()])).max() > LIMIT,
    "tensors in lists": lambda x: torch.tensor([[x.max()], [x.min()]]).max() > LIMIT,
    "as_tensor": lambda x: torch.as_tensor((x.max(), x.min())).max() > LIMIT,
    "asarray of torch": lambda x: torch.asarray([x.max(), x.min()]).max() > LIMIT,
    "new_tensor": lambda x: x.new_tensor([x.max(), x.min()]).max() > LIMIT,
    "a class of tensors": lambda x: torch.FloatTensor([x.max(), 0]).max() > LIMIT,
    "Tensor": lambda x: torch.Tensor([x.max(), 0]).max() > LIMIT,
    "new": lambda x: x.new([x.max(), 0]).max() > LIMIT,
    "tensor_split": lambda x: (
        len(torch.zeros(99).tensor_split(x.max().long()[None])[0]) > LIMIT
    ),
    "a TensorDict of numpy": lambda x: TensorDict(x=x).numpy()["x"].max() > LIMIT,
    "a dict of a TensorDict": lambda x: (
        TensorDict(x=x.max()).to_dict(convert_tensors=True)["x"] > LIMIT
    ),
    "numpy of a result of a function": lambda x: Doubled.apply(x).numpy().max() > 11,
    "in an autograd function": lambda x: Beyond.apply(x).any(),
    "a mask": lambda x: x[x > LIMIT].numel() > 0,
    "nonzero": lambda x: len((x > LIMIT).nonzero()) > 0,
    "unique": lambda x: x.unique()[-1] > LIMIT,
    "bincount": lambda x: len(torch.bincount(x.flatten().long())) > LIMIT + 1,
    "sparse": lambda x: (x > LIMIT).float().to_sparse().values().numel() > 0,
    "packed sequences": lambda x: packed(x) > LIMIT,
}
"""Ways of reading that a recorder does not see: the module is called."""


def floats(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


def floats_of(content: bytes) -> tuple[float, ...]:
    return struct.unpack(f"{len(content) // 4}f", content)


def saved(x: Tensor) -> Tensor:
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    loaded: Tensor = torch.load(stream)
    return loaded


def packed(x: Tensor) -> int:
    """Return the longest length, as the number of steps in a packed sequence."""
    lengths = x.flatten(1).amax(-1).long().clamp(min=1)
    pack: Any = nn.utils.rnn.pack_padded_sequence
    sequences = torch.zeros(len(x), 99, 1)
    packed = pack(sequences, lengths, batch_first=True, enforce_sorted=False)
    return len(packed.batch_sizes)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Beyond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() > LIMIT)


def check_like_the_module(read: Callable[[Tensor], Any]) -> str:
    """Check that a policy acts as when it is called; return how it acts.

    It acts in another way in frames late in an episode, as ``read`` tells it.
    """

    def act(_: Any, x: Tensor) -> Any:
        factor = -1 if read(x) else 1
        return factor * (x[..., :2] + 1) / 20, torch.zeros(len(x), 2).long()

    keys: list[Any] = [("prey", "action"), ("hunter", "action")]
    expected, how = collected(Collector, CountingEnv, Called(act), "prey", keys)
    assert "is called once per frame" in how
    beyond = (expected[keys[0]] < 0).flatten(2).any(-1)
    assert 5 < beyond.sum() < beyond.numel() - 5
    actual, how = collected(Collector, CountingEnv, Computes(act), "prey", keys)
    assert torch.equal(actual[keys[0]], expected[keys[0]]), how
    return how


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", SEEN)
def test_a_value_that_a_recorder_sees_is_a_guard(name: str) -> None:
    how = check_like_the_module(SEEN[name])
    called = "it reads values in Python that" in how and name not in FLAGS
    assert how.startswith("Fused") or called, how


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", HIDDEN)
def test_a_value_that_a_recorder_does_not_see_is_read_by_the_module(name: str) -> None:
    how = check_like_the_module(HIDDEN[name])
    assert how.startswith("Not fused"), how
