import torch

from marl_collect.training.epsilon import EpsilonGreedyLogits

VALUES = torch.tensor([[[1.0, 3.0, 2.0, 9.0]]])
LEGAL = torch.tensor([[[True, True, True, False]]])


def test_probabilities_are_epsilon_s_share_and_the_rest_for_the_best_legal_action():
    logits = EpsilonGreedyLogits(0.3)(VALUES, LEGAL)
    expected = torch.tensor([[[0.1, 0.8, 0.1, 0.0]]])
    torch.testing.assert_close(logits.softmax(-1), expected, atol=1e-5, rtol=0)


def test_the_mode_is_the_best_action_even_where_all_are_drawn_alike():
    assert EpsilonGreedyLogits(1.0)(VALUES).argmax(-1).item() == 3
    assert EpsilonGreedyLogits(1.0)(VALUES, LEGAL).argmax(-1).item() == 1


def test_without_chance_logits_are_finite():
    assert EpsilonGreedyLogits(0.0)(VALUES, LEGAL).isfinite().all()
