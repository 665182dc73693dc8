"""Heads, their action distributions, which equal torch's, and epsilon-greedy ones."""

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import distributions as D
from workloads.counting import CountingEnv

from marl_collect.models import (
    CategoricalHead,
    HeadOptions,
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    MultiCategorical,
    MultiCategoricalHead,
    NormalHead,
    TanhNormal,
    TanhNormalHead,
    make_policy,
)
from marl_collect.models.policy import EpsilonGreedyLogits
from marl_collect.weights.materialize import materialize

OPTIONS = HeadOptions(group="walker", agents=("walker_0", "walker_1"))
LOW, HIGH = [-2.0, 0.0, 1.0], [1.0, 5.0, 1.5]
HEADS = {
    "categorical": lambda: CategoricalHead(4, OPTIONS, mask=True),
    "one_hot": lambda: CategoricalHead(4, OPTIONS, mask=True, one_hot=True),
    "multi": lambda: MultiCategoricalHead([2, 5], OPTIONS),
    "normal": lambda: NormalHead(3, OPTIONS),
    "tanh": lambda: TanhNormalHead(LOW, HIGH, OPTIONS),
}
SHAPES = {"one_hot": (4,), "multi": (2,), "normal": (3,), "tanh": (3,)}


def parameters(head: Any, batch: int = 6) -> Any:
    group = TensorDict({}, [batch, 2])
    for key in (key[-1] for key in head.in_keys):
        if key == "action_mask":
            group[key] = torch.rand(batch, 2, 4) > 0.5
            group[key][..., 1] = True
        elif key == "scale":
            group[key] = torch.rand(batch, 2, head.noise_size) + 0.1
        else:
            group[key] = torch.randn(batch, 2, head.noise_size)
    return TensorDict({"walker": group}, [batch])


@pytest.fixture(params=HEADS)
def name(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param


def test_actions_and_log_probabilities_of_each_agent(name: str) -> None:
    head = HEADS[name]()
    out = head(parameters(head))
    action = out["walker", "action"]
    assert action.shape == (6, 2, *SHAPES.get(name, ()))
    is_number = name in ("normal", "tanh")
    assert action.dtype == (torch.float32 if is_number else torch.int64)
    assert out["walker", "action_log_prob"].shape == (6, 2)
    torch.testing.assert_close(
        out["walker", "action_log_prob"], head.get_dist(out).log_prob(action)
    )
    assert head.out_keys == [("walker", "action"), ("walker", "action_log_prob")]


def test_interaction_types_select_the_action(name: str) -> None:
    head = HEADS[name]()
    td = parameters(head)
    dist = head.get_dist(td)

    def chosen(kind: Any) -> Any:
        with set_interaction_type(kind):
            return head(td.clone())["walker", "action"]

    assert torch.equal(chosen(InteractionType.MODE), dist.mode)
    assert torch.equal(chosen(InteractionType.DETERMINISTIC), dist.deterministic_sample)
    assert torch.equal(head(td.clone())["walker", "action"], chosen("deterministic"))
    samples = torch.stack([chosen(InteractionType.RANDOM) for _ in range(20)])
    assert not torch.equal(samples[0], samples[1])
    if name in ("normal", "tanh"):
        assert chosen(InteractionType.MEAN).isfinite().all()
    else:
        with pytest.raises(NotImplementedError, match="'walker' has discrete"):
            chosen(InteractionType.MEAN)
    torch.manual_seed(1)
    once = chosen(InteractionType.RANDOM)
    torch.manual_seed(1)
    assert torch.equal(chosen(InteractionType.RANDOM), once)


def test_given_noise_determines_the_action(name: str) -> None:
    head = HEADS[name]()
    td = parameters(head)
    noise = torch.randn(6, 2, head.noise_size)
    direct = head.sample_from_noise(td.clone(), noise)
    head.noise = noise
    with set_interaction_type(InteractionType.RANDOM):
        called = head(td.clone())
    for key in head.out_keys:
        assert torch.equal(direct[key], called[key])
    rows = [head.sample_from_noise(td[i : i + 1], noise[i : i + 1]) for i in range(6)]
    for key in head.out_keys:
        # Vectorised functions may differ in the last bit for different numbers of rows.
        torch.testing.assert_close(torch.cat([row[key] for row in rows]), direct[key])
    assert torch.equal(
        head(td.clone())["walker", "action"], head.get_dist(td).deterministic_sample
    )


def test_heads_can_be_copied_pickled_and_materialized(name: str) -> None:
    with torch.device("meta"):
        on_meta = HEADS[name]()
    original = HEADS[name]()
    td = parameters(original)
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    for head in [*copies, materialize(on_meta), materialize(copies[1])]:
        out = head(td.clone())
        assert torch.equal(out["walker", "action"], original(td)["walker", "action"])
    assert original.state_dict() == {}
    assert "walker" in repr(original)


def test_a_missing_parameter_names_group_and_key(name: str) -> None:
    head = HEADS[name]()
    key = head.in_keys[0]
    with pytest.raises(KeyError, match=rf"walker.* needs walker/{key[-1]}, but found"):
        head(parameters(head).exclude(key))


def test_a_mask_without_legal_actions_is_an_error_that_names_group_and_agent() -> None:
    head = CategoricalHead(4, OPTIONS, mask=True)
    td = parameters(head)
    td["walker", "action_mask"][3, 1] = False
    with pytest.raises(ValueError, match=r"'walker_1' of group 'walker'.*\[3\]"):
        head(td)
    unchecked = CategoricalHead(4, OPTIONS, mask=True, check_mask=False)
    assert unchecked(td)["walker", "action"].shape == (6, 2)


@pytest.mark.parametrize("bound", [float("inf"), float("nan"), -3.0])
def test_bounds_must_be_finite_and_in_order(bound: Any) -> None:
    with pytest.raises(ValueError, match=r"'walker' needs finite bounds"):
        TanhNormalHead([-1.0], [bound], OPTIONS)


VALUES = torch.tensor([[[1.0, 3.0, 2.0, 9.0]]])
LEGAL = torch.tensor([[[True, True, True, False]]])


def test_epsilon_is_spread_over_legal_actions_and_the_best_gets_the_rest() -> None:
    logits = EpsilonGreedyLogits(0.3)(VALUES, LEGAL)
    expected = torch.tensor([[[0.1, 0.8, 0.1, 0.0]]])
    torch.testing.assert_close(logits.softmax(-1), expected, atol=1e-5, rtol=0)
    # The mode is the best action, even if all are equally likely.
    assert EpsilonGreedyLogits(1.0)(VALUES).argmax(-1).item() == 3
    assert EpsilonGreedyLogits(1.0)(VALUES, LEGAL).argmax(-1).item() == 1
    assert EpsilonGreedyLogits(0.0)(VALUES, LEGAL).isfinite().all()


@pytest.mark.processes
def test_make_policy_builds_values_and_acts_greedily_in_them() -> None:
    make_env = partial(CountingEnv, n_prey=0, action_mask=True)
    policy = make_policy(make_env, epsilon=0.0, return_log_prob=False)
    outputs = policy(make_env().reset())["hunter"]
    legal = outputs["action_value"].masked_fill(~outputs["action_mask"], -torch.inf)
    assert torch.equal(outputs["action"], legal.argmax(-1))
    assert "action_log_prob" not in outputs


SHAPE = (4, 3)
LOWER, UPPER = torch.tensor([-2.0, 0.0]).double(), torch.tensor([1.0, 5.0]).double()


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
    plain = MaskedCategorical(logits, mask)
    one_hot = MaskedOneHotCategorical(logits, mask)
    noise = torch.rand(*plain.noise_shape)
    action = plain.sample_from_noise(noise)
    assert torch.equal(one_hot.sample_from_noise(noise), F.one_hot(action, 5))
    log_prob = one_hot.log_prob(F.one_hot(action, 5))
    torch.testing.assert_close(log_prob, plain.log_prob(action))
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
        D.AffineTransform((LOWER + UPPER) / 2, (UPPER - LOWER) / 2),
    ]
    return D.Independent(D.TransformedDistribution(D.Normal(loc, scale), transforms), 1)


def test_tanh_normal_equals_torchs_transformed_normal() -> None:
    loc, scale = normal_parameters()
    ours = TanhNormal(loc, scale, LOWER, UPPER)
    action = ours.sample((7,))
    expected = reference(loc, scale).log_prob(action)
    torch.testing.assert_close(ours.log_prob(action), expected)
    assert ((action >= LOWER) & (action <= UPPER)).all()
    middle, half = (LOWER + UPPER) / 2, (UPPER - LOWER) / 2
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
def test_the_mode_of_tanh_normal_has_most_density(loc: float, scale: float) -> None:
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
