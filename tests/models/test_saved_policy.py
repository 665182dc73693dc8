"""A damaged file of weights is refused by name, or has the weights that were saved."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import load_policy, make_policy
from marl_collect.models.saved_policy import (
    load_networks,
    read_tensors,
    save_policy,
    saved_options,
    write_tensors,
)

SECTOR = 512
FLIPS = 600
"""Single bits that are flipped, in as many copies of the file."""


def description() -> EnvDescription:
    group = GroupDescription(
        ("a", "b"), spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(3)
    )
    return EnvDescription("nowhere", {"g": group})


@pytest.fixture
def policy() -> nn.Module:
    torch.manual_seed(0)
    return make_policy(description(), num_cells=(64, 64))


@pytest.fixture
def file(tmp_path: Path, policy: nn.Module) -> Path:
    path = tmp_path / "weights.pt"
    save_policy(path, policy, description(), num_cells=(64, 64))
    return path


def flipped(content: bytes) -> Iterator[bytes]:
    """Yield copies of the content, each with one bit that is flipped."""
    draws = random.Random(0)
    for position in draws.sample(range(8 * len(content)), FLIPS):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        yield bytes(damaged)


def zeroed(content: bytes) -> Iterator[bytes]:
    """Yield copies of the content, each with one sector of zeros."""
    for begin in range(0, len(content), SECTOR):
        damaged = bytearray(content)
        damaged[begin : begin + SECTOR] = bytes(len(damaged[begin : begin + SECTOR]))
        yield bytes(damaged)


def cut(content: bytes) -> Iterator[bytes]:
    """Yield the first bytes of the content."""
    for end in range(0, len(content), SECTOR // 2):
        yield content[:end]


def test_a_policy_of_numbers_does_not_act_with_one_hot_actions(file: Path) -> None:
    about = description()
    groups = about.groups.items()
    one_hot = {name: replace(g, categorical_actions=False) for name, g in groups}
    with pytest.raises(ValueError, match="has a policy for another environment"):
        load_policy(file, replace(about, groups=one_hot))


@pytest.mark.parametrize("damage", [flipped, zeroed, cut])
def test_damage_is_an_error_that_names_the_file_or_changes_no_weight(
    file: Path, policy: nn.Module, damage: Callable[[bytes], Iterator[bytes]]
) -> None:
    content = file.read_bytes()
    expected = {name: w.numpy().tobytes() for name, w in policy.state_dict().items()}
    refused = unnamed = 0
    for damaged in damage(content):
        file.write_bytes(damaged)
        try:
            loaded = load_policy(file, description())
        except ValueError as error:
            unnamed += str(file) not in str(error)
            refused += damaged != content
            continue
        weights = {n: w.numpy().tobytes() for n, w in loaded.state_dict().items()}
        assert weights == expected
    assert refused
    assert not unnamed


def damaged_weight(file: Path, weight: torch.Tensor) -> None:
    """Flip one bit of a weight in the file."""
    content = bytearray(file.read_bytes())
    position = content.find(weight.numpy().tobytes())
    assert position > 0
    content[position + 1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "read",
    [
        load_policy,
        read_tensors,
        saved_options,
        lambda path: load_networks(str(path), {}, description()),
    ],
)
def test_every_reader_refuses_a_damaged_weight(
    file: Path, policy: nn.Module, read: Callable[[Path], Any]
) -> None:
    damaged_weight(file, max(policy.state_dict().values(), key=torch.numel))
    with pytest.raises(ValueError, match=r"weights\.pt is damaged.*CRC"):
        read(file)


def test_a_file_has_checksums_whatever_torch_is_told(tmp_path: Path) -> None:
    path, weight = tmp_path / "x.pt", torch.arange(100.0)
    torch.serialization.set_crc32_options(False)
    try:
        write_tensors(path, {"weight": weight})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_tensors(path)["weight"], weight)
    damaged_weight(path, weight)
    with pytest.raises(ValueError, match=r"x\.pt is damaged"):
        read_tensors(path)


@pytest.mark.parametrize(
    "options",
    [
        {"conv": {"dtype": "hub"}},
        {"conv": {"dtype": "load"}},
        {"head": {}},
        {"network": {}},
        {"activation_class": "Module"},
    ],
)
def test_options_in_a_file_name_no_code(file: Path, options: dict[str, Any]) -> None:
    state = read_tensors(file)
    write_tensors(file, state | {"make_policy": options})
    with pytest.raises(ValueError, match=r"weights\.pt is damaged"):
        load_policy(file)


def test_files_of_torch_s_earlier_format_are_read(tmp_path: Path) -> None:
    path, weight = tmp_path / "old.pt", torch.arange(10.0)
    torch.save({"w": weight}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_tensors(path)["w"], weight)


@pytest.mark.parametrize("part", ["", "0", "0.module", "1"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_compiled_policy_is_saved(tmp_path: Path, part: str, groups: int) -> None:
    one = description().groups["g"]
    environment = EnvDescription("nowhere", {f"g{i}": one for i in range(groups)})
    policy = make_policy(environment, num_cells=(4,))
    expected = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    path = ".".join(filter(None, ["" if groups == 1 else "module.g1", "module", part]))
    if part:
        parent, _, name = path.rpartition(".")
        outer: Any = policy.get_submodule(parent)
        setattr(outer, name, torch.compile(outer.get_submodule(name)))
    compiled: Any = policy if part else torch.compile(policy)
    assert any("_orig_mod" in name for name in dict(compiled.named_modules()))
    save_policy(tmp_path / "p.pt", compiled, environment, num_cells=(4,))
    weights = load_policy(tmp_path / "p.pt", environment).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="builds another policy"):
        save_policy(tmp_path / "p.pt", compiled, environment, num_cells=(5,))
    with pytest.raises(TypeError, match="must be a module .*, but is {}"):
        save_policy(tmp_path / "p.pt", {}, environment)  # type: ignore[arg-type]
