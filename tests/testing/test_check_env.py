"""check_env finds and names every kind of violation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import numpy as np
import pytest
from gymnasium import spaces
from workloads.counting import CountingEnv, CountingOptions, Fault

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.testing.check_env import ContractError, check_env

pytest.importorskip("torch")

PAIR = EnvDescription(
    name="pair",
    groups={
        "pair": GroupDescription(
            agents=("pair_0", "pair_1"),
            observation=spaces.Box(-5, 5, (2,), np.float32),
            action=spaces.Discrete(3),
        )
    },
)


@final
class Pair(MultiAgentEnv):
    """Two agents that add up actions, with an optional violation.

    ``harm`` is called with this object at the end of ``reset_row`` and ``step_row``.
    """

    def __init__(
        self,
        harm: Callable[["Pair"], None] | None = None,
        description: EnvDescription = PAIR,
    ) -> None:
        self.description_ = description
        self.harm = harm
        self.closed = False
        self.episodes = 0

    @property
    def description(self) -> EnvDescription:
        return self.description_

    @property
    def is_closed(self) -> bool:
        return self.closed

    def bind(self, row: Row) -> None:
        self.row = row
        self.flags = Flags(row, self.description_)
        self.first_row = getattr(self, "first_row", row)

    def reset_row(self, seed: int) -> None:
        self.steps = 0
        self.episodes += 1
        self.total = np.array([seed % 3, 1.0])
        self.flags.clear()
        self.write()

    def step_row(self) -> None:
        self.steps += 1
        self.total = (self.total + self.row["pair", "action"]) % 4
        self.row["pair", "reward"][:, 0] = self.total
        if self.steps == 4:
            self.flags.end_all(terminated=True, truncated=False)
        self.write()

    def write(self) -> None:
        self.row["pair", "observation"][:, 0] = self.total
        self.row["pair", "observation"][:, 1] = self.steps
        self.row["pair", "mask"][...] = self.row["pair", "done"][:, 0] == 0
        if self.harm is not None:
            self.harm(self)

    def render(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def findings(factory: Callable[[], Any], **keywords: int) -> str:
    with pytest.raises(ContractError) as excinfo:
        check_env(factory, **keywords)
    return "\n".join(excinfo.value.findings)


def described(**changes: Any) -> EnvDescription:
    return replace(PAIR, groups={"pair": replace(PAIR.groups["pair"], **changes)})


def at_step(step: int, do: Callable[[Pair], None]) -> Callable[[Pair], None]:
    return lambda env: do(env) if env.steps == step else None


def put(*key: str, value: Any, index: Any = ...) -> Callable[[Pair], None]:
    def do(env: Pair) -> None:
        env.row[key][index] = value

    return do


def end_both(env: Pair) -> None:
    for agent in (0, 1):
        env.flags.end("pair", agent, terminated=True, truncated=False)


def end_root(env: Pair) -> None:
    env.row["done",][0] = env.row["terminated",][0] = True


def test_an_environment_that_keeps_the_contract_passes() -> None:
    check_env(Pair)


@pytest.mark.parametrize(
    "options",
    [
        CountingOptions(),
        CountingOptions(action_mask=True, state=True, episode_reward=True),
        CountingOptions(image=(4, 4, 3), done_on_any=True, categorical_actions=False),
        CountingOptions(n_prey=0, mask=False, deaths=False),
    ],
)
def test_the_counting_environment_passes(options: CountingOptions) -> None:
    check_env(lambda: CountingEnv(options))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (put("pair", "observation", value=9.0), "pair/observation of pair_0 is out of"),
        (put("pair", "observation", value=np.nan), "is NaN"),
        (
            at_step(2, put("pair", "reward", value=np.inf)),
            "pair/reward of pair_0 is inf",
        ),
        (at_step(0, put("pair", "done", value=True)), "must be False after a reset"),
        (
            at_step(2, put("pair", "done", index=0, value=True)),
            "done of pair_0 must be terminated or truncated",
        ),
        (at_step(2, put("done", value=True)), "The root's done must be"),
        (
            at_step(4, put("pair", "mask", value=True)),
            "pair/mask is True for pair_0, which is done",
        ),
        (at_step(1, put("pair", "mask", value=False)), "No agent acts"),
        (at_step(2, end_both), "The root must be done"),
        (at_step(2, end_root), "so every agent must be"),
    ],
)
def test_wrong_contents_are_named(harm: Callable[[Pair], None], message: str) -> None:
    assert message in findings(lambda: Pair(harm))


def test_a_violation_in_many_steps_is_reported_once_with_its_first_step() -> None:
    def harm(env: Pair) -> None:
        if env.steps >= 2:
            env.row["pair", "observation"][0, 0] = 6 + env.steps

    with pytest.raises(ContractError) as excinfo:
        check_env(lambda: Pair(harm), episodes=2)
    (finding,) = excinfo.value.findings
    assert finding.startswith("Step 2 of seed")
    assert "pair_0 is out of bounds" in finding
    assert finding.endswith("(Found 4 times.)")  # steps 2 and 3 of two episodes


def test_a_violation_of_two_agents_is_reported_for_each() -> None:
    harm = put("pair", "observation", value=9.0)
    with pytest.raises(ContractError) as excinfo:
        check_env(lambda: Pair(harm))
    after_reset = [f for f in excinfo.value.findings if not f.startswith("Step")]
    assert len(after_reset) == 2
    assert len(excinfo.value.findings) == 4


def test_findings_of_the_environment_s_audit_are_reported() -> None:
    class Unsure(Pair):  # type: ignore[misc]
        def audit(self) -> list[str]:
            return ["something is odd"] if self.steps == 2 else []

    assert "Step 2 of seed" in findings(Unsure)
    assert "something is odd" in findings(Unsure)


def test_an_agent_that_is_not_zeroed_after_its_end_is_named() -> None:
    def harm(env: Pair) -> None:
        if env.steps >= 2:
            env.flags.end("pair", 0, terminated=True, truncated=False)
            env.row["pair", "mask"][0] = False

    text = findings(lambda: Pair(harm))
    assert "observation of pair_0 is not zero after its end" in text


@pytest.mark.parametrize("reward", [-0.5, 0.5, -np.inf])
def test_a_reward_after_an_agents_end_is_named(reward: float) -> None:
    def harm(env: Pair) -> None:
        if env.steps == 1:
            env.flags.end("pair", 0, terminated=True, truncated=False)
        if env.steps:
            env.row["pair", "mask"][0] = False
        if env.steps >= 2:
            env.row["pair", "observation"][0] = 0
            env.row["pair", "reward"][0] = reward

    text = findings(lambda: Pair(harm))
    assert f"pair/reward of pair_0 is {reward} after its end" in text


def test_flags_that_change_after_an_agents_end_are_named() -> None:
    def harm(env: Pair) -> None:
        if env.steps == 1:
            env.flags.end("pair", 0, terminated=True, truncated=False)
        if env.steps == 2:
            env.row["pair", "truncated"][0] = True

    assert "truncated of pair_0 changed after its end" in findings(lambda: Pair(harm))


def test_an_agent_may_come_back() -> None:
    def harm(env: Pair) -> None:
        if env.steps in (1, 2):
            env.flags.end("pair", 0, terminated=True, truncated=False)
            env.row["pair", "mask"][0] = False
        if env.steps == 2:
            env.row["pair", "observation"][0] = env.row["pair", "reward"][0] = 0
        if env.steps == 3:
            env.flags.revive("pair", 0)
            env.row["pair", "mask"][0] = True

    check_env(lambda: Pair(harm))


def test_an_agent_that_comes_back_with_a_flag_is_named() -> None:
    def harm(env: Pair) -> None:
        if env.steps == 1:
            env.flags.end("pair", 0, terminated=True, truncated=False)
        if env.steps == 2:
            env.flags.revive("pair", 0)
            env.row["pair", "truncated"][0] = True

    assert "or all become False if the agent comes" in findings(lambda: Pair(harm))


def test_a_shape_that_does_not_fit_is_reported_with_its_phase() -> None:
    def harm(env: Pair) -> None:
        env.row["pair", "observation"][...] = np.zeros((2, 3))

    assert "raised ValueError" in findings(lambda: Pair(harm))
    assert "reset_row" in findings(lambda: Pair(harm))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_values_that_the_dtype_cannot_hold_are_named(dtype: type[np.integer]) -> None:
    integers = described(observation=spaces.Box(0, 5, (2,), dtype))

    def harm(env: Pair) -> None:
        env.row["pair", "observation"][0, 0] = 0.5

    text = findings(lambda: Pair(harm, integers))
    assert f" {dtype.__name__}, which cannot hold the value 0.5" in text


@pytest.mark.parametrize(
    ("description", "harm", "message"),
    [
        (
            replace(PAIR, root={"state": spaces.Box(-1, 1, (2,), np.float32)}),
            None,
            "state differs after the reset",
        ),
        (
            described(agents=("pair_0", "pair_0")),
            None,
            "pair_0 is 2 times in the groups",
        ),
        (
            replace(PAIR, groups={"next": PAIR.groups["pair"]}),
            None,
            "'next' is the name of another key",
        ),
        (described(action=spaces.Discrete(3, start=1)), None, "must start at 0"),
        (described(observation=spaces.Text(3)), None, "pair/observation"),
        (
            described(action_mask=True),
            put("pair", "action_mask", value=False),
            "action_mask leaves pair_0 no action",
        ),
    ],
)
def test_what_contradicts_the_description_is_named(
    description: EnvDescription, harm: Any, message: str
) -> None:
    assert message in findings(lambda: Pair(harm, description))


def test_an_illegal_action_of_an_agent_that_does_not_act_is_named() -> None:
    def harm(env: Pair) -> None:
        env.row["pair", "action_mask"].fill(True)
        if env.steps == 2:
            env.row["pair", "mask"][0] = False
            env.row["pair", "action_mask"][0, 1] = False

    text = findings(lambda: Pair(harm, described(action_mask=True)))
    assert "action_mask of pair_0, which does not act, must be all True" in text


def test_a_reward_that_is_added_to_memory_is_named() -> None:
    def harm(env: Pair) -> None:
        if env.steps:
            total = env.row["pair", "episode_reward"]
            np.add(total, env.row["pair", "reward"], out=total)

    text = findings(lambda: Pair(harm, described(episode_reward=True)))
    assert "Some memory is not written, or is read" in text
    assert "pair/episode_reward" in text


def test_an_episode_that_depends_on_the_one_before_is_named() -> None:
    def harm(env: Pair) -> None:
        env.row["pair", "observation"][0, 1] = env.episodes % 5

    text = findings(lambda: Pair(harm))
    assert "depends on more than its seed and its actions" in text
    assert "pair/observation differs after the reset" in text


def test_an_environment_without_repeats_need_not_repeat_episodes() -> None:
    def harm(env: Pair) -> None:
        env.row["pair", "observation"][0, 1] = env.episodes % 5

    check_env(lambda: Pair(harm, replace(PAIR, repeats=False)))


def test_an_environment_that_keeps_old_memory_is_named() -> None:
    def harm(env: Pair) -> None:
        env.first_row["pair", "reward"][...] = 0

    assert "memory bound before" in findings(lambda: Pair(harm))


def test_two_builds_that_differ_are_named() -> None:
    sizes = iter([2, 3])

    def factory() -> CountingEnv:
        return CountingEnv(n_hunters=next(sizes))

    assert "Two environments of one factory differ" in findings(factory)


def test_a_factory_that_returns_the_same_object_twice_is_named() -> None:
    env = Pair()
    assert "share one Pair object" in findings(lambda: env)


def test_a_factory_of_another_type_is_refused_with_the_wrapper() -> None:
    assert "PettingZooWrapper(MyEnv())" in findings(object)


def test_an_instance_instead_of_a_factory_is_refused_with_the_factory() -> None:
    with pytest.raises(TypeError, match=r"lambda: Pair\(...\)"):
        check_env(Pair())  # type: ignore[arg-type]


def test_an_episode_longer_than_the_time_limit_is_named() -> None:
    text = findings(
        lambda: Pair(lambda env: env.flags.clear(), replace(PAIR, time_limit=3)),
        steps=5,
    )
    assert "longer than the time limit of 3" in text


@pytest.mark.parametrize("phase", ["create", "reset", "step"])
def test_an_exception_is_a_finding_that_names_its_type(phase: Any) -> None:
    text = findings(lambda: CountingEnv(fault=Fault("raise", phase)))
    assert f"raised CountingError: fault in {phase}" in text


def test_is_closed_must_be_true_after_close() -> None:
    env = [Pair(), Pair()]

    def factory() -> Pair:
        pair = env.pop()
        pair.close = lambda: None  # type: ignore[method-assign]
        return pair

    assert "is_closed is False" in findings(factory)
