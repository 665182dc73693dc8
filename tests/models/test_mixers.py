"""Mixers equal their formulas and TorchRL's mixers."""

from typing import Any

import pytest
import torch

from marl_collect.models import QMixer, VDNMixer

N = 4


def test_qmix_is_monotonic_in_every_agents_value() -> None:
    mixer = QMixer((3, 2), 8, N)
    q = torch.randn(64, N, 1, requires_grad=True)

    mixer(q, torch.randn(64, 3, 2)).sum().backward()

    assert (q.grad >= 0).all()
    assert (q.grad > 0).any()


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
