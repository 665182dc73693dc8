"""Action distributions equal torch's; any noise gives legal samples."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D

from marl_collect.models import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    MultiCategorical,
    TanhNormal,
)

SHAPE = (4, 3)
LOW, HIGH = torch.tensor([-2.0, 0.0]).double(), torch.tensor([1.0, 5.0]).double()


def masked() -> Any:
    logits = torch.randn(*SHAPE, 5, dtype=torch.float64)
    mask = torch.rand(*SHAPE, 5) > 0.5
    mask[..., 2] = True
    return logits, mask


def normal_parameters() -> Any:
    loc = torch.randn(*SHAPE, 2, dtype=torch.float64)
    return loc, torch.rand(*SHAPE, 2, dtype=torch.float64) + 0.1


def test_masked_categorical_equals_torchs() -> None:
    logits, mask = masked()
    ours = MaskedCategorical(logits, mask)
    theirs = D.Categorical(logits=logits.masked_fill(~mask, -1e300))
    action = theirs.sample((7,))
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode, theirs.mode)
    assert torch.equal(ours.deterministic_sample, theirs.mode)
    assert torch.equal(ours.enumerate_support(), theirs.enumerate_support())


@pytest.mark.parametrize("kind", [MaskedCategorical, MaskedOneHotCategorical])
def test_samples_follow_the_probabilities_and_are_legal(kind: Any) -> None:
    logits, mask = masked()
    dist = kind(logits, mask)
    action = dist.sample((20_000,))
    one_hot = action if kind is MaskedOneHotCategorical else F.one_hot(action, 5)
    assert action.dtype == torch.int64
    assert not (one_hot.bool() & ~mask).any()
    torch.testing.assert_close(one_hot.double().mean(0), dist.probs, atol=0.02, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-45, 1 - 2**-24])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_no_noise_gives_an_illegal_action(value: Any, scale: float) -> None:
    logits = torch.randn(100, 6) * scale
    mask = F.one_hot(torch.randint(6, (100,)), 6).bool()
    noise = torch.full((100, 6), value)
    action = MaskedCategorical(logits, mask).sample_from_noise(noise)
    assert torch.equal(action, mask.int().argmax(-1))


def test_masked_gradients_are_finite() -> None:
    logits, mask = masked()
    logits.requires_grad_()
    dist = MaskedCategorical(logits, mask)
    (dist.entropy().sum() + dist.log_prob(dist.mode).sum()).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any()


def test_one_hot_equals_categorical() -> None:
    logits, mask = masked()
    plain, one_hot = (
        MaskedCategorical(logits, mask),
        MaskedOneHotCategorical(logits, mask),
    )
    noise = torch.rand(*plain.noise_shape)
    action = plain.sample_from_noise(noise)
    assert torch.equal(one_hot.sample_from_noise(noise), F.one_hot(action, 5))
    torch.testing.assert_close(
        one_hot.log_prob(F.one_hot(action, 5)), plain.log_prob(action)
    )
    torch.testing.assert_close(one_hot.entropy(), plain.entropy())
    assert torch.equal(one_hot.mode.argmax(-1), plain.mode)


def test_several_choices_equal_independent_categoricals() -> None:
    logits = torch.randn(*SHAPE, 7, dtype=torch.float64)
    ours = MultiCategorical(logits, [3, 4])
    theirs = [D.Categorical(logits=chunk) for chunk in logits.split([3, 4], -1)]
    action = ours.sample((11,))
    assert action.shape == (11, *SHAPE, 2)
    expected = sum(d.log_prob(action[..., i]) for i, d in enumerate(theirs))
    torch.testing.assert_close(ours.log_prob(action), expected)
    torch.testing.assert_close(ours.entropy(), sum(d.entropy() for d in theirs))
    assert torch.equal(ours.mode, torch.stack([d.mode for d in theirs], -1))
    assert action[..., 0].max() == 2
    assert action[..., 1].max() == 3


def test_normal_equals_torchs() -> None:
    loc, scale = normal_parameters()
    ours, theirs = IndependentNormal(loc, scale), D.Independent(D.Normal(loc, scale), 1)
    action = ours.sample((7,))
    noise = torch.randn(*SHAPE, 2, dtype=torch.float64)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.variance, theirs.variance)
    torch.testing.assert_close(ours.sample_from_noise(noise), loc + scale * noise)


def reference(loc: torch.Tensor, scale: torch.Tensor) -> Any:
    transforms = [
        D.TanhTransform(cache_size=1),
        D.AffineTransform((LOW + HIGH) / 2, (HIGH - LOW) / 2),
    ]
    return D.Independent(D.TransformedDistribution(D.Normal(loc, scale), transforms), 1)


def test_tanh_normal_equals_torchs_transformed_normal() -> None:
    loc, scale = normal_parameters()
    ours = TanhNormal(loc, scale, LOW, HIGH)
    action = ours.sample((7,))
    torch.testing.assert_close(
        ours.log_prob(action), reference(loc, scale).log_prob(action)
    )
    assert ((action >= LOW) & (action <= HIGH)).all()
    middle, half = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    torch.testing.assert_close(ours.deterministic_sample, middle + half * loc.tanh())
    assert torch.equal(ours.median, ours.deterministic_sample)


def test_tanh_normal_is_finite_and_within_bounds() -> None:
    dist = TanhNormal(torch.tensor([[50.0, -50.0]]), torch.ones(1, 2), -0.1, 0.3)
    action = dist.sample((100,))
    assert action.min() >= torch.tensor(-0.1)
    assert action.max() <= torch.tensor(0.3)
    assert dist.log_prob(action).isfinite().all()
    outside = torch.tensor([[0.3, -0.1]])
    assert dist.log_prob(outside).isfinite().all()


@pytest.mark.parametrize("loc", [-2.0, -0.01, 0.3, 1.5])
@pytest.mark.parametrize("scale", [0.2, 0.7, 1.2, 3.0])
def test_the_mode_of_tanh_normal_has_the_highest_density(
    loc: float, scale: float
) -> None:
    dist = TanhNormal(
        torch.full((1, 1), loc, dtype=torch.float64),
        torch.full((1, 1), scale, dtype=torch.float64),
    )
    x = torch.linspace(-25, 25, 500_001, dtype=torch.float64).view(-1, 1, 1)
    slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
    density = D.Normal(loc, scale).log_prob(x) - slope
    best = x[density.argmax()].tanh()
    torch.testing.assert_close(dist.mode, best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [IndependentNormal, TanhNormal])
def test_rsample_has_gradients(kind: Any) -> None:
    loc, scale = (p.requires_grad_() for p in normal_parameters())
    dist = kind(loc, scale)
    dist.rsample((3,)).sum().backward()
    assert loc.grad.isfinite().all()
    assert (scale.grad != 0).all()
    assert not dist.sample().requires_grad


def test_undefined_statistics_are_errors() -> None:
    logits, _ = masked()
    with pytest.raises(NotImplementedError, match="no mean"):
        _ = MaskedCategorical(logits).mean
    with pytest.raises(NotImplementedError, match="rsample"):
        MaskedCategorical(logits).rsample()
    with pytest.raises(NotImplementedError):
        TanhNormal(logits, logits.exp()).entropy()
