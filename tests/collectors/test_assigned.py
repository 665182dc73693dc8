"""Several policies: which agent acts with which is determined by the episode's seed."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import AssignedPolicies, Evaluator, PolicyError, PolicyPool, record
from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.models import make_policy

NAMES = ("main", "rival", "bot")
ENVIRONMENTS = 6
Agents = tuple[str, ...]


def scripted(td: TensorDictBase) -> TensorDictBase:
    """Acts by comparisons, without weights."""
    observation = td["hunter", "observation"]
    td["hunter", "action"] = (observation[..., 0] * 1009).long() % 4
    td["prey", "action"] = td["prey", "observation"][..., :2] * 2 - 1
    return td


def by_seed(seed: int, agents: Agents) -> dict[str, str]:
    return {agent: NAMES[(seed >> i) % 3] for i, agent in enumerate(agents)}


def everybody(name: str) -> Callable[[int, Agents], dict[str, str]]:
    return lambda _, agents: dict.fromkeys(agents, name)


def net(seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return make_policy(CountingEnv(), num_cells=(8,), **options)


def team() -> dict[str, Any]:
    return {"main": net(0), "rival": net(1), "bot": scripted}


def start(kind: Any = Collector, **changes: Any) -> Any:
    """Return a collector of six environments; of two workers, if it has workers."""
    options: dict[str, Any] = {"policies": team(), "assign": by_seed, "seed": 3}
    options |= {"frames_per_batch": 60} | changes
    factories = options.pop("factories", [CountingEnv] * ENVIRONMENTS)
    if kind is not Collector and len(factories) > 1:
        options.setdefault("num_workers", 2)
    return kind(factories, **options)


def collect(kind: Any = Collector, frames: int = 240, **options: Any) -> TensorDict:
    """Return batches of six environments, one behind the other."""
    collector = start(kind, total_frames=frames, **options)
    return torch.cat([batch.clone() for batch in collector], dim=1)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_state_names_the_policies_of_running_episodes(kind: Any) -> None:
    def begin(*names: str, **others: Any) -> Any:
        policies = {name: partial(acts, wins=name == "rival") for name in names}
        options = {"policies": policies, "assign": rival_first} | others
        return start(kind, frames_per_batch=6, **options)

    with begin("main", "rival") as uninterrupted, begin("rival", "main") as swapped:
        uninterrupted.next()
        state = uninterrupted.state_dict()
        swapped.load_state_dict(state)
        actual, expected = swapped.next(), uninterrupted.next()
        assert (actual["hunter", "action"] == expected["hunter", "action"]).all()
        assert (
            actual["hunter", "policy_id"] == 1 - expected["hunter", "policy_id"]
        ).all()
        with (
            begin("a", "b", assign=everybody("a")) as other,
            pytest.raises(ValueError, match=r"of the policies \['main', 'rival'\]"),
        ):
            other.load_state_dict(state)
        with begin(policies=None, assign=None, policy=scripted) as single_collector:
            single_collector.next()
            with pytest.raises(ValueError, match="of a collector with a single policy"):
                uninterrupted.load_state_dict(single_collector.state_dict())


def acts(td: TensorDictBase, *, wins: bool) -> TensorDictBase:
    scripted(td)
    td["hunter", "action"] = torch.full_like(td["hunter", "action"], 2 * wins)
    return td


def rival_first(_: int, agents: Agents) -> dict[str, str]:
    return {agent: "main" if i else "rival" for i, agent in enumerate(agents)}


def test_an_evaluator_takes_the_weights_of_one_policy() -> None:
    policies, other = team(), team()["main"]
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(-3)
    root: dict[str, Any] = {"episodes": 4, "seeds": 2}
    with Evaluator(None, CountingEnv, policies=policies, assign=by_seed) as evaluator:
        before = evaluator.evaluate(**root)
        other_evaluation = evaluator.evaluate(weights=other, model_id="main", **root)
        assert other_evaluation != before
        assert evaluator.evaluate(**root) == before
        state = other.state_dict()
        assert (
            evaluator.evaluate(weights=state, model_id="main", **root)
            == other_evaluation
        )
        with pytest.raises(KeyError, match="no submodule 'mian'"):
            evaluator.evaluate(weights=other, model_id="mian", **root)
        with pytest.raises(KeyError, match="and 13 others and surplus") as error:
            evaluator.evaluate(weights=other, **root)
        assert "pass model_id: 'main', 'rival'" in error.value.__notes__[0]
    policies["main"].load_state_dict(state)
    with Evaluator(None, CountingEnv, policies=policies, assign=by_seed) as evaluator:
        assert evaluator.evaluate(**root) == other_evaluation


def test_a_policy_can_be_called_policy() -> None:
    policies = {"policy": net(0), "rival": PolicyPool(net(1), size=2)}
    assign = by_name("policy", "rival")
    with start(MultiSyncCollector, policies=policies, assign=assign) as collector:
        with torch.no_grad():
            for weight in policies["policy"].parameters():
                weight.zero_()
        collector.update_policy_weights_(policies["policy"], model_id="policy")
        logits = collector.next()["hunter", "logits"]
        assert (logits[..., 0, :] == 0).all()
        assert (logits[..., 1, :] != 0).any()
        assert collector.policy_version == 1
        assert collector.policy["policy"] is policies["policy"]
        assert collector.get_model("policy") is policies["policy"]
        assert collector.get_model("rival_1") is policies["rival"].members[1]


def by_name(*names: str) -> Callable[[int, Agents], dict[str, str]]:
    return lambda _, agents: dict(zip(agents, [*names, *names, *names], strict=False))


@pytest.mark.parametrize("shape", [{}, {"trajs_per_batch": 6}], ids=str)
@pytest.mark.parametrize("mask", [True, False])
def test_the_batch_of_a_policy_has_no_other_agents_and_no_padding(
    mask: bool, shape: dict[str, int]
) -> None:
    """That of a pool has the agents of all its versions."""
    policies: dict[str, Any] = {"main": net(0), "bot": scripted}
    policies["rival"] = PolicyPool(net(1), size=2)
    factories = [partial(CountingEnv, mask=mask)] * ENVIRONMENTS
    with start(policies=policies, factories=factories, **shape) as collector:
        policies["rival"].update()
        collector.reset()
        batch = collector.next()
        parts = {name: collector.policy.batch_of(batch, name) for name in policies}
        with pytest.raises(KeyError, match=r"no policy 'other': found \['main'"):
            collector.policy.batch_of(batch, "other")
    valid = batch.get(("collector", "mask"), torch.ones(batch.shape).bool())
    assert valid.all() == (not shape)
    for (name, part), ids in zip(parts.items(), ([0], [1], [2, 3]), strict=True):
        for group in ("hunter", "prey"):
            who = batch[group, "policy_id"]
            assert all((who[valid] == index).any() for index in ids)
            member = sum(who == index for index in ids).bool() & valid[..., None]
            acts = valid[..., None].expand_as(member)
            if mask:
                acts = acts & batch[group, "mask"]
                after = batch["next", group, "mask"] & member
                assert (part["next", group, "mask"] == after).all(), name
            assert (part[group, "member"] == member).all(), name
            assert (part[group, "acts"] == acts).all(), name
            assert (part[group, "mask"] == (member & acts)).all(), name


def test_a_policy_may_act_for_one_group_only() -> None:
    def always(group: str, number: float, *shape: int) -> TensorDictModule:
        def act(observation: torch.Tensor) -> torch.Tensor:
            return torch.full((*observation.shape[:-1], *shape), number)

        keys = [[(group, name)] for name in ("observation", "action")]
        return TensorDictModule(act, *keys)

    policies = {"hunter": always("hunter", 2), "prey": always("prey", 0.5, 2)}
    policies |= {"random": None}

    def by_group(seed: int, agents: Agents) -> dict[str, str]:
        return {a: "random" if a.endswith("0") else a.split("_")[0] for a in agents}

    batch = collect(policies=policies, assign=by_group, check_actions=True)
    assert (batch["hunter", "policy_id"] == torch.tensor([2, 0])).all()
    assert (batch["hunter", "action"][..., 1] == 2).all()
    assert len(batch["hunter", "action"][..., 0].unique()) == 4
    assert (batch["prey", "action"][..., 1:, :] == 0.5).all()
    with pytest.raises(PolicyError, match=r"gives 'prey_0' the policy 'hunter', which"):
        collect(policies=policies, assign=everybody("hunter"))


def test_a_recording_has_the_names_of_several_policies(tmp_path: Any) -> None:
    options: dict[str, Any] = {"policies": team(), "assign": by_seed}
    (run,) = record(tmp_path, CountingEnv, episodes=4, seed=3, **options).runs
    assert run.policy["names"] == list(team())


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policies": {}}, ValueError, "policies is empty"),
    ({"policies": [scripted]}, TypeError, "policies must map names to policies"),
    ({"policies": {"a.b": scripted}}, ValueError, "cannot be named 'a.b'"),
    ({"policies": {"forward": scripted}}, ValueError, "cannot be named 'forward'"),
    *(
        ({"policies": {name: scripted}}, ValueError, f"cannot be named '{name}'")
        for name in ("_policy_names", "_places", "names", "assign", "training")
    ),
    ({"policies": {"main": 3}}, TypeError, r"policies\['main'\] must be"),
    ({"policies": None}, ValueError, "assign needs policies"),
    ({"assign": None}, ValueError, "policies needs assign"),
    ({"assign": "main"}, TypeError, "assign must be a function"),
    ({"assign": lambda agents: {}}, TypeError, "must take two arguments"),
    ({"policy": scripted}, ValueError, "Pass either policy or policies"),
    ({"policy_factory": lambda: scripted}, ValueError, "either policy_factory or"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_wrong_arguments_err_before_anything_starts(
    kind: Any, wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    def never() -> CountingEnv:
        raise AssertionError

    with pytest.raises(error, match=text):
        start(kind, factories=[never], **wrong)


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def locked(td: TensorDictBase) -> TensorDictBase:
        with lock:
            return scripted(td)

    def assign(seed: int, agents: Agents) -> dict[str, str]:
        with lock:
            return by_seed(seed, agents)

    with pytest.raises(
        TypeError, match="assign cannot be sent.*, in variable 'lock' of test"
    ):
        start(MultiSyncCollector, assign=assign)
    with pytest.raises(TypeError, match=r"policies\['bot'\] cannot be sent"):
        start(MultiSyncCollector, policies=team() | {"bot": locked})


@pytest.mark.parametrize(
    ("assign", "text"),
    [
        (lambda s, a: {}, "has no policy for .'hunter_0'"),
        (everybody("other"), "there is no policy 'other'"),
        (
            lambda s, a: by_seed(s, a) | {"ghost": "main"},
            "names .'ghost'., which are no",
        ),
        (lambda s, a: "main", "but returned 'main'"),
        (
            lambda s, a: {agent: ["main"] for agent in a},
            "has .'main'. as the name of a pol",
        ),
    ],
)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_wrong_assignments_err_at_the_start(kind: Any, assign: Any, text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        start(kind, assign=assign)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_errors_say_which_policy_or_seed_they_are_about(kind: Any) -> None:
    table = {100: dict.fromkeys(("hunter_0", "hunter_1"), "main")}
    with pytest.raises(KeyError) as raised:
        start(kind, assign=lambda seed, _: table[seed])
    assert "tried with the seeds 0 to 3" in "".join(raised.value.__notes__)
    idle = {"bot": lambda td: td}, (KeyError, "must write the action")
    factory = {"bot": lambda: scripted}, (TypeError, "what it returns as the policy")
    for wrong, (error, text) in (idle, factory):
        with pytest.raises(error, match=text) as excinfo:
            start(kind, policies=team() | wrong)
        assert "The policy is policies['bot']." in excinfo.value.__notes__


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_error_while_acting_says_which_policy_raised_it(kind: Any) -> None:
    countdown = iter(range(20))

    def failing(td: TensorDictBase) -> TensorDictBase:
        if next(countdown, None) is None:
            raise ArithmeticError("no more actions")
        return scripted(td)

    # A range iterator can be pickled, so workers have one of their own.
    with (
        start(kind, policies=team() | {"bot": failing}) as collector,
        pytest.raises(ArithmeticError, match="no more actions") as raised,
    ):
        list(islice(collector, 20))
    assert "The policy is policies['bot']." in raised.value.__notes__


def test_a_state_of_one_policy_is_no_output_of_another() -> None:
    def notes(td: TensorDictBase) -> TensorDictBase:
        td["hunter", "recurrent_state"] = torch.ones(*td.shape, 2, 64)
        return scripted(td)

    policies = {"main": net(0, recurrent="gru"), "bot": notes}
    text = "'main' has a state at hunter/recurrent_state, which the policy 'bot' writes"
    with pytest.raises(PolicyError, match=text):
        start(policies=policies, assign=everybody("main"))


def test_outputs_that_cannot_be_stored_by_agent_are_named() -> None:
    def pooled(td: TensorDictBase) -> TensorDictBase:
        td["summary"] = td["hunter", "observation"].sum(-2)
        return scripted(td)

    with pytest.raises(PolicyError, match="'bot'.*writes summary of shape"):
        start(policies=team() | {"bot": pooled})
    with pytest.raises(PolicyError, match="'main' and 'wide' write next/.*recurrent"):
        start(
            policies={
                "main": net(0, recurrent="gru", hidden_size=4),
                "wide": net(0, recurrent="gru", hidden_size=5),
            },
            assign=everybody("main"),
        )


def test_policies_cannot_be_called_outside_of_a_collector() -> None:
    policies = AssignedPolicies(team(), by_seed)
    assert policies["bot"] is scripted
    with pytest.raises(TypeError, match="cannot be called"):
        policies(TensorDict())
