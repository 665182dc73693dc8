"""Mixers equal their formulas and TorchRL's mixers."""

from typing import Any

import pytest
import torch

from marl_collect.models import QMixer, VDNMixer

N = 4


@pytest.mark.parametrize(
    ("mixer", "inputs", "message"),
    [
        (VDNMixer(N), (torch.zeros(2, 3, 1),), r"n_agents=4.*\[2, 3, 1\]"),
        (VDNMixer(N), (torch.zeros(2, N, 1), torch.zeros(2, 3)), "takes no state"),
        (QMixer((3,), 4, N), (torch.zeros(2, N, 1),), "but found none"),
        (
            QMixer((3,), 4, N),
            (torch.zeros(2, N, 1), torch.zeros(2, 5)),
            r"state of shape \[2, 3\], but found the shape \[2, 5\]",
        ),
    ],
)
def test_bad_inputs_name_expected_and_found(
    mixer: Any, inputs: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mixer(*inputs)
