"""TorchRL's policies are fused, and write what they write when they are called."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.distributions import OneHotCategorical
from torch import nn

from marl_collect import (
    BatchedEnv,
    Collector,
    EnvDescription,
    GroupDescription,
    MultiSyncCollector,
    Step,
)
from marl_collect.policies.fused import runner as fused_runner
from marl_collect.policies.fused.elementary import without_branches
from marl_collect.weights.state import ModuleState

pytest.importorskip("torchrl")
from torchrl.data import Bounded, Categorical, Composite
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    ConvNet,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    MultiAgentMLP,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueModule,
    RandomPolicy,
    TanhDelta,
    TanhNormal,
)
from torchrl.modules import distributions as theirs

OBSERVATION, ACTION = ("a", "observation"), ("a", "action")
VALUES = ("a", "action_value")
RANDOM = InteractionType.RANDOM


NUMBERS: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)
WORLDS = 3


class Noughts(BatchedEnv):
    """Episodes of ten frames, in which two agents see random numbers."""

    def __init__(self, action: Any = NUMBERS, **options: Any) -> None:
        group = GroupDescription(("a_0", "a_1"), NUMBERS, action, **options)
        description = EnvDescription(
            "noughts", {"a": group}, root={"sight": NUMBERS}, time_limit=10
        )
        super().__init__(description, WORLDS)

    def begin(self, which: Any, seeds: Any) -> Any:
        assert which is None or which.all()
        self.random = np.random.default_rng(seeds)
        return self.look()

    def advance(self, actions: Any) -> Step:
        del actions
        over = np.zeros(WORLDS, np.bool_)
        return Step(self.look(), {"a": np.zeros((WORLDS, 2))}, over)

    def look(self) -> Any:
        seen = self.random.standard_normal((WORLDS, 2, 3), np.float32)
        return {"a": seen, "sight": seen[:, 0]}


discrete = partial(Noughts, spaces.Discrete(4))
one_hot = partial(discrete, categorical_actions=False)


def box(high: float = 1.0) -> Composite:
    return Composite(a=Composite(action=Bounded(-high, high, (2, 3)), shape=(2,)))


def choices() -> Composite:
    return Composite(a=Composite(action=Categorical(4, (2,)), shape=(2,)))


def deterministic() -> TensorDictModule:
    return TensorDictModule(MLP(3, 3, num_cells=[8]), [OBSERVATION], [ACTION])


def multi_agent(n_outputs: int) -> MultiAgentMLP:
    return MultiAgentMLP(
        3, n_outputs, 2, centralised=True, share_params=False, depth=1, num_cells=8
    )


def greedy(*modules: nn.Module, safe: bool = False) -> TensorDictSequential:
    out_keys = [ACTION, VALUES, ("a", "chosen_action_value")]
    return TensorDictSequential(
        TensorDictModule(multi_agent(4), [OBSERVATION], [VALUES]),
        QValueModule(
            action_value_key=VALUES,
            out_keys=out_keys,
            spec=choices(),
            action_space="categorical",
            safe=safe,
        ),
        *modules,
    )


def epsilon(start: float = 0.5) -> EGreedyModule:
    return EGreedyModule(choices(), start, 0.0, 10, action_key=ACTION)


def gaussian(**options: Any) -> AdditiveGaussianModule:
    return AdditiveGaussianModule(
        box(), 0.9, 0.0, annealing_num_steps=10, action_key=ACTION, **options
    )


def process(**options: Any) -> OrnsteinUhlenbeckProcessModule:
    return OrnsteinUhlenbeckProcessModule(
        box(), 1.0, 0.0, 10, sigma=4.0, action_key=ACTION, **options
    )


def normal(**options: Any) -> ProbabilisticActor:
    net = nn.Sequential(multi_agent(6), NormalParamExtractor())
    keys = [("a", "loc"), ("a", "scale")]
    return ProbabilisticActor(
        TensorDictModule(net, [OBSERVATION], keys),
        in_keys=keys,
        out_keys=[ACTION],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -torch.ones(3), "high": torch.ones(3)},
        return_log_prob=True,
        **options,
    )


def delta(*modules: nn.Module) -> TensorDictSequential:
    actor = ProbabilisticActor(
        TensorDictModule(multi_agent(3), [OBSERVATION], [("a", "param")]),
        in_keys=[("a", "param")],
        out_keys=[ACTION],
        distribution_class=TanhDelta,
        distribution_kwargs={"low": -torch.ones(3), "high": torch.ones(3)},
    )
    return TensorDictSequential(actor, *modules)


def categorical() -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(multi_agent(4), [OBSERVATION], [("a", "logits")]),
        in_keys=[("a", "logits")],
        out_keys=[ACTION],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def convolutional() -> TensorDictSequential:
    def image(x: torch.Tensor) -> Any:
        return x.unflatten(-1, (1, 1, 3)).expand(*x.shape[:-1], 1, 3, 3)

    vars(image)["pure_forward"] = True
    net = ConvNet(in_features=1, num_cells=[2], kernel_sizes=2, strides=1)
    return TensorDictSequential(
        TensorDictModule(image, [OBSERVATION], [("a", "image")]),
        TensorDictModule(net, [("a", "image")], [("a", "hidden")]),
        TensorDictModule(nn.Linear(8, 3), [("a", "hidden")], [ACTION]),
    )


def recurrent(kind: Any, **options: Any) -> TensorDictSequential:
    """Return an actor with one recurrent network for the whole environment."""
    features, logits = "features", ("a", "logits")
    sizes = {"input_size": 3, "hidden_size": 8} | options
    net = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)))
    return TensorDictSequential(
        kind(in_key="sight", out_key=features, **sizes),
        TensorDictModule(net, [features], [logits]),
        ProbabilisticTensorDictModule(
            in_keys={"logits": logits},
            out_keys=[ACTION],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def logits_of(
    kind: Any, *, name: str = "logits", masked: bool = False
) -> TensorDictSequential:
    """Return an actor with a distribution of logits, and perhaps a mask."""
    logits, mask = ("a", "logits"), ("a", "legal")
    return TensorDictSequential(
        TensorDictModule(multi_agent(4), [OBSERVATION], [logits]),
        TensorDictModule(torch.isfinite, [logits], [mask]),
        ProbabilisticTensorDictModule(
            in_keys={name: logits} | ({"mask": mask} if masked else {}),
            out_keys=[ACTION],
            distribution_class=kind,
            return_log_prob=True,
        ),
    )


def location_of(kind: Any, *names: str) -> TensorDictSequential:
    """Return an actor with a distribution of a location and, by name, a scale."""
    keys = [("a", "loc"), ("a", "scale")][: len(names)]
    return TensorDictSequential(
        TensorDictModule(MLP(3, 3, num_cells=[8]), [OBSERVATION], keys[:1]),
        TensorDictModule(torch.sigmoid, keys[:1], [("a", "scale")]),
        ProbabilisticTensorDictModule(
            in_keys=dict(zip(names, keys, strict=True)),
            out_keys=[ACTION],
            distribution_class=kind,
            return_log_prob=len(names) > 1,
        ),
    )


def independent(loc: torch.Tensor, scale: torch.Tensor) -> Any:
    normal = torch.distributions.Normal(loc, scale)
    return torch.distributions.Independent(normal, 1)


vars(independent)["pure_forward"] = True


def clamping() -> TensorDictModule:
    module = TensorDictModule(lambda x: x.clamp(-1, 1), [ACTION], [ACTION])
    module.pure_forward = True
    return module


CONTINUOUS: dict[str, Callable[[], Any]] = {
    "MLP": deterministic,
    "MultiAgentMLP": lambda: TensorDictModule(multi_agent(3), [OBSERVATION], [ACTION]),
    "ConvNet": convolutional,
    "lambda": lambda: TensorDictSequential(deterministic(), clamping()),
    "ProbabilisticActor": normal,
    "ProbabilisticActor, safe": lambda: normal(spec=box(), safe=True),
    "DDPG": lambda: delta(gaussian()),
    "AdditiveGaussianModule": lambda: TensorDictSequential(deterministic(), gaussian()),
    "AdditiveGaussianModule, safe": lambda: TensorDictSequential(
        deterministic(), gaussian(safe=True)
    ),
    "OrnsteinUhlenbeckProcessModule": lambda: TensorDictSequential(
        deterministic(), process(safe=False)
    ),
    "OrnsteinUhlenbeckProcessModule, safe": lambda: delta(process()),
    "IndependentNormal": lambda: location_of(theirs.IndependentNormal, "loc", "scale"),
    "TruncatedNormal": lambda: location_of(theirs.TruncatedNormal, "loc", "scale"),
    "TanhNormal": lambda: location_of(theirs.TanhNormal, "loc", "scale"),
    "Independent of torch": lambda: location_of(independent, "loc", "scale"),
    "Delta": lambda: location_of(theirs.Delta, "param"),
    "TanhDelta": lambda: location_of(theirs.TanhDelta, "param"),
}
DISCRETE: dict[str, Callable[[], Any]] = {
    "ProbabilisticActor, Categorical": categorical,
    "QValueModule": greedy,
    "QValueModule, safe": lambda: greedy(safe=True),
    "QMIX": lambda: greedy(epsilon()),
    "MaskedCategorical": lambda: logits_of(theirs.MaskedCategorical, masked=True),
    "Ordinal": lambda: logits_of(theirs.Ordinal, name="scores"),
    "GRUModule": lambda: recurrent(GRUModule),
    "GRUModule, two layers": lambda: recurrent(GRUModule, num_layers=2),
    "GRUModule in Python": lambda: recurrent(GRUModule, python_based=True),
    "LSTMModule": lambda: recurrent(LSTMModule),
    "LSTMModule, two layers": lambda: recurrent(LSTMModule, num_layers=2, bias=False),
    "LSTMModule in Python": lambda: recurrent(LSTMModule, python_based=True),
    "GRUModule, dropout": lambda: recurrent(GRUModule, num_layers=2, dropout=0.5),
    "LSTMModule, dropout": lambda: recurrent(LSTMModule, num_layers=2, dropout=0.5),
}
ONE_HOT: dict[str, Callable[[], Any]] = {
    "OneHotCategorical": lambda: logits_of(theirs.OneHotCategorical),
    "tensordict's OneHotCategorical": lambda: logits_of(OneHotCategorical),
    "MaskedOneHotCategorical": lambda: logits_of(
        theirs.MaskedOneHotCategorical, masked=True
    ),
    "OneHotOrdinal": lambda: logits_of(theirs.OneHotOrdinal, name="scores"),
}
POLICIES = CONTINUOUS | DISCRETE | ONE_HOT


def environment(name: str) -> Any:
    if name in ONE_HOT:
        return one_hot
    return discrete if name in DISCRETE else Noughts


def collect(
    name: str, *, interaction_type: Any = RANDOM, fused: bool | None = True
) -> TensorDict:
    """Return two batches, on the given path; None for any."""
    torch.manual_seed(0)
    policy = POLICIES[name]()
    torch.manual_seed(1)
    with Collector(
        environment(name),
        policy,
        frames_per_batch=WORLDS * 14,
        seed=0,
        exploration_type=interaction_type,
    ) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        (explained,) = collector.explain()
    if fused is not None:
        assert explained.startswith("Fused" if fused else "Not fused"), explained
    joined: TensorDict = torch.cat(batches, 1)
    return joined


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TensorDict]:
    """Return ``collect`` with policies that are called once per frame."""

    def collecting(name: str, **options: Any) -> TensorDict:
        with monkeypatch.context() as patch:
            patch.setattr(fused_runner, "why_not_recordable", lambda *_: "of this test")
            return collect(name, fused=False, **options)

    return collecting


@pytest.mark.filterwarnings("ignore:deterministic_sample wasn't found")
@pytest.mark.filterwarnings("ignore:size_average and reduce args")  # TorchRL 0.11.
@pytest.mark.parametrize("interaction_type", [RANDOM, InteractionType.DETERMINISTIC])
@pytest.mark.parametrize("name", POLICIES)
def test_fused_and_called_policies_write_the_same(
    name: str, interaction_type: Any, called: Callable[..., TensorDict]
) -> None:
    must_be_fused = None if "dropout" in name else True  # Not while it drops.
    fused = collect(name, interaction_type=interaction_type, fused=must_be_fused)
    expected = called(name, interaction_type=interaction_type)
    assert set(fused.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        torch.testing.assert_close(fused[key], value, rtol=1e-4, atol=1e-4)


def test_other_threads_clamp_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Bounded(-1.0, 1.0, (2,))
    value = torch.tensor([3.0, 0.0])
    names, results = [], []
    is_in = type(spec).is_in

    def asks(spec: Any, value: Any) -> Any:
        names.append(threading.current_thread().name)
        return is_in(spec, value)

    monkeypatch.setattr(type(spec), "is_in", asks)
    with without_branches():
        other = threading.Thread(
            target=lambda: results.append(spec.project(value)), name="other"
        )
        other.start()
        other.join()
        results.append(spec.project(value))
    assert names == ["other"]
    assert all(torch.equal(result, torch.tensor([1.0, 0.0])) for result in results)
    spec.project(value)
    assert len(names) == 2


@pytest.mark.parametrize("share_params", [True, False])
def test_calls_of_a_network_of_torchrl_change_no_setting(share_params: bool) -> None:
    """They replace what its parameters note of the last operation (``_last_op``)."""
    net = MultiAgentMLP(
        5, 4, 3, centralised=False, share_params=share_params, depth=2, num_cells=8
    )
    states = [ModuleState(net), ModuleState(net, of_recording=True)]
    for _ in range(3):
        net(torch.zeros(1, 3, 5))
        assert [state.changed() for state in states] == [False, False]
    net.eval()
    assert [state.changed() for state in states] == [True, True]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_torchrls_random_policy_takes_random_actions(kind: Any) -> None:
    batches = []
    for policy in (RandomPolicy(choices()), None):
        with kind(discrete, policy, frames_per_batch=21, seed=0) as collector:
            batches.append(collector.next())
    assert (batches[0] == batches[1]).all()
