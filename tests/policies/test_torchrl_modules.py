"""TorchRL's modules behave in our collectors as in TorchRL's."""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl_envs import ACTION, LENGTH, OBSERVATION, Noughts, discrete

from marl_collect import Collector, MultiSyncCollector

torchrl = pytest.importorskip("torchrl")
from torchrl.data import Bounded, Categorical, Composite  # noqa: E402
from torchrl.modules import (  # noqa: E402
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
)

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def zeros() -> TensorDictModule:
    return TensorDictModule(torch.zeros_like, in_keys=[OBSERVATION], out_keys=[ACTION])


def likeliest() -> TensorDictModule:
    torch.manual_seed(0)
    net = MLP(in_features=3, out_features=4, num_cells=[8])
    return TensorDictModule(
        nn.Sequential(net, Argmax()), in_keys=[OBSERVATION], out_keys=[ACTION]
    )


class Argmax(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.argmax(-1)


def batch_of(collector: Any) -> TensorDict:
    with collector:
        batch: TensorDict = collector.next().clone()
    return batch


KINDS: Any = pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])


@KINDS
@pytest.mark.parametrize("n_envs", [1, 3])
def test_noise_of_ornstein_and_uhlenbeck_begins_with_each_episode(
    kind: Any, n_envs: int
) -> None:
    spec = Composite(a=Composite(action=Bounded(-9, 9, (2, 3)), shape=(2,)))
    noise = OrnsteinUhlenbeckProcessModule(
        spec, action_key=ACTION, annealing_num_steps=10, theta=0.05, safe=False
    )
    policy = TensorDictSequential(zeros(), noise)
    torch.manual_seed(0)
    frames = 100 * LENGTH
    batch = batch_of(
        kind([Noughts] * n_envs, policy, frames_per_batch=n_envs * frames, seed=1)
    )
    first = batch["is_init"][..., 0]
    assert torch.equal(first, batch[OBSERVATION][..., 0, 0] == 0)
    assert not batch["next", "is_init"].any()
    assert not any(str(key[-1]).startswith("_") for key in batch.keys(True, True))
    actions = batch[ACTION]
    # One step of the process from 0 has the standard deviation sigma sqrt(dt) = 0.02.
    assert 0.018 < actions[first].std() < 0.022
    steps = (actions[:, 1:] - (1 - 0.05 * 0.01) * actions[:, :-1])[~first[:, 1:]]
    assert 0.018 < steps.std() < 0.022
    assert actions[batch["next", "done"][..., 0]].std() > 0.05


def test_the_noise_continues_from_a_state() -> None:
    spec = Composite(a=Composite(action=Bounded(-9, 9, (2, 3)), shape=(2,)))
    options: Any = {"frames_per_batch": 15, "seed": 0}

    def policy() -> TensorDictSequential:
        noise = OrnsteinUhlenbeckProcessModule(spec, action_key=ACTION, safe=False)
        return TensorDictSequential(zeros(), noise)

    with MultiSyncCollector([Noughts], policy(), **options) as collector:
        collector.next()
        state = collector.state_dict()
        expected = collector.next()[ACTION].clone()
    with MultiSyncCollector([Noughts], policy(), **options) as collector:
        collector.load_state_dict(state)
        assert torch.equal(collector.next()[ACTION], expected)


@KINDS
def test_a_share_of_greedy_actions_is_random(kind: Any) -> None:
    spec = Composite(a=Composite(action=Categorical(4, (2,)), shape=(2,)))
    greedy = likeliest()
    policy = TensorDictSequential(
        greedy, EGreedyModule(spec, eps_init=0.5, eps_end=0.5, action_key=ACTION)
    )
    batch = batch_of(kind([discrete] * 2, policy, frames_per_batch=2000, seed=0))
    with torch.no_grad():
        expected = greedy.module(batch[OBSERVATION])
    differing = (batch[ACTION] != expected).float().mean()
    assert abs(differing - 0.5 * 3 / 4) < 0.05


@KINDS
def test_gaussian_noise_is_added(kind: Any) -> None:
    spec = Composite(a=Composite(action=Bounded(-9, 9, (2, 3)), shape=(2,)))
    noise = AdditiveGaussianModule(
        spec, sigma_init=0.3, sigma_end=0.3, action_key=ACTION, safe=False
    )
    policy = TensorDictSequential(zeros(), noise)
    batch = batch_of(kind([Noughts] * 2, policy, frames_per_batch=1000, seed=0))
    assert abs(batch[ACTION].std() - 0.3) < 0.02


@KINDS
def test_log_probabilities_belong_to_the_observations(kind: Any) -> None:
    torch.manual_seed(0)
    net = MLP(in_features=3, out_features=4, num_cells=[8])
    policy = ProbabilisticActor(
        TensorDictModule(net, [OBSERVATION], [("a", "logits")]),
        in_keys=[("a", "logits")],
        out_keys=[ACTION],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    batch = batch_of(kind([discrete] * 2, policy, frames_per_batch=40, seed=0))
    with torch.no_grad():
        distribution = torch.distributions.Categorical(logits=net(batch[OBSERVATION]))
        expected = distribution.log_prob(batch[ACTION])
    name = next(k for k in batch["a"].keys() if "log_prob" in k)
    torch.testing.assert_close(batch["a", name], expected)


def recurrent(kind: str) -> nn.Module:
    """One network for the whole environment, with all observations as input."""
    torch.manual_seed(0)
    keys: Any = {"in_key": "sight", "out_key": "features"}
    if kind == "gru":
        module: Any = GRUModule(input_size=3, hidden_size=6, **keys)
    else:
        module = LSTMModule(input_size=3, hidden_size=6, **keys)
    head = TensorDictModule(nn.Unflatten(-1, (2, 3)), ["features"], [ACTION])
    return TensorDictSequential(module, head)


@KINDS
@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_recurrent_modules_carry_their_states(
    kind: Any, n_envs: int, cell: str
) -> None:
    policy = recurrent(cell)
    frames = 3 * LENGTH + 5
    collector = kind(
        [Noughts] * n_envs, recurrent(cell), frames_per_batch=n_envs * frames
    )
    assert all(line.startswith("Fused") for line in collector.explain())
    batch = batch_of(collector)
    names = [key[1] for key in policy.out_keys if key[0] == "next"]
    assert names
    states: dict[str, torch.Tensor] = {}
    for frame in range(frames):
        root = batch[:, frame]
        first = root["is_init"]
        td = TensorDict({"sight": root["sight"], "is_init": first}, [n_envs])
        for name, state in states.items():
            # The collector sets states to zero in an episode's first frame.
            td[name] = torch.where(first.unsqueeze(-1), torch.zeros_like(state), state)
        for name in names:
            if name in td.keys():
                torch.testing.assert_close(root[name], td[name])
        with torch.no_grad():
            out = policy(td)
        torch.testing.assert_close(root[ACTION], out[ACTION])
        states = {name: out["next", name] for name in names}
        for name, state in states.items():
            torch.testing.assert_close(root["next", name], state)


def test_a_compiled_module_acts_like_the_original() -> None:
    plain = likeliest()
    policy = TensorDictModule(
        torch.compile(plain.module, backend="eager"), [OBSERVATION], [ACTION]
    )
    batch = batch_of(Collector([discrete] * 2, policy, frames_per_batch=40, seed=0))
    with torch.no_grad():
        assert torch.equal(batch[ACTION], plain.module(batch[OBSERVATION]))


def test_a_compiled_policy_that_overwrites_its_observation_acts_like_the_original() -> (
    None
):
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    policy = TensorDictSequential(
        TensorDictModule(net, [OBSERVATION], [OBSERVATION]),
        TensorDictModule(nn.Tanh(), [OBSERVATION], [ACTION]),
    )
    batch = batch_of(
        Collector(
            [Noughts] * 2,
            policy,
            frames_per_batch=40,
            seed=0,
            compile_policy={"backend": "eager"},
        )
    )
    ahead = batch["next", *OBSERVATION][:, :-1]
    follows = ~batch["next", "done"][:, :-1, 0]
    with torch.no_grad():
        expected = net(ahead)
    torch.testing.assert_close(batch[OBSERVATION][:, 1:][follows], expected[follows])
    torch.testing.assert_close(batch[ACTION], batch[OBSERVATION].tanh())


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_torchrls_random_policy_takes_random_actions(kind: Any) -> None:
    spec = Composite(a=Composite(action=Categorical(4, (2,)), shape=(2,)))
    batches = []
    for policy in (torchrl.modules.RandomPolicy(spec), None):
        with kind(discrete, policy, frames_per_batch=20, seed=0) as collector:
            batches.append(collector.next())
    assert (batches[0] == batches[1]).all()
