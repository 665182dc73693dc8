"""Environments that share a simulator are refused in every layout."""

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.zoo import Countdown, ScriptedEnv, ScriptedTurns

from marl_collect import (
    Collector,
    EnvWrapper,
    MultiSyncCollector,
    ParallelEnv,
    SerialEnv,
    check_env,
    evaluate,
)
from marl_collect.envs import AgentLists, PettingZooWrapper
from marl_collect.storage import record
from marl_collect.testing.check_env import ContractError

Factory = Callable[[], Any]
MESSAGE = "environments 0 and 1 .* share one"


class Unchanged(EnvWrapper):
    """Wraps without a change."""


class Around:
    """A wrapper of the user's own, with all attributes of what it wraps."""

    def __init__(self, raw: Any) -> None:
        self.inside = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inside"], name)

    @property
    def observation_space(self) -> Any:
        return self.inside.observation_space

    @property
    def action_space(self) -> Any:
        return self.inside.action_space

    def reset(self, seed: int | None = None) -> Any:
        return self.inside.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        return self.inside.step(actions)


def in_turns(raw: Any) -> Any:
    from pettingzoo.utils import parallel_to_aec

    return PettingZooWrapper(parallel_to_aec(raw))


SHARING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "parallel": (ScriptedEnv, PettingZooWrapper),
    "turns": (ScriptedTurns, PettingZooWrapper),
    "converted": (ScriptedEnv, in_turns),
    "lists": (Countdown, lambda raw: PettingZooWrapper(AgentLists(raw))),
    "own wrapper": (
        Countdown,
        lambda raw: PettingZooWrapper(AgentLists(Around(raw))),
    ),
    "wrapped": (ScriptedEnv, lambda raw: Unchanged(Unchanged(PettingZooWrapper(raw)))),
    "wrapped twice": (lambda: PettingZooWrapper(ScriptedEnv()), Unchanged),
}
"""What is built once, and what environments do with it."""


def shared(kind: str) -> Factory:
    build, wrap = SHARING[kind]
    raw = build()
    return lambda: wrap(raw)


@pytest.mark.parametrize("kind", SHARING)
def test_two_that_share_one_are_refused(kind: str) -> None:
    factory = shared(kind)
    with pytest.raises(TypeError, match=MESSAGE):
        Collector([factory, factory], frames_per_batch=20, total_frames=20)
    with Collector(shared(kind), frames_per_batch=20, total_frames=20) as collector:
        assert sum(batch.numel() for batch in collector) == 20
    with pytest.raises(ContractError, match="share one"):
        check_env(shared(kind))


def in_one_worker(factory: Factory) -> None:
    MultiSyncCollector(factory, frames_per_batch=20, num_workers=1, envs_per_worker=2)


def in_serial_env(factory: Factory) -> None:
    SerialEnv(2, factory)


def in_a_process_of_parallel_env(factory: Factory) -> None:
    ParallelEnv(2, factory, num_processes=1).close()


def in_evaluate(factory: Factory) -> None:
    evaluate(None, factory, episodes=2, num_workers=1, envs_per_worker=2)


def in_record(factory: Factory) -> None:
    with TemporaryDirectory() as folder:
        record(f"{folder}/data", factory, frames=40, envs_per_worker=2)


LAYOUTS = [
    *(in_one_worker, in_serial_env, in_a_process_of_parallel_env),
    *(in_evaluate, in_record),
]


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["lists", "wrapped"])
def test_every_layout_refuses_environments_of_one_process_that_share_one(
    layout: Callable[[Factory], None], kind: str
) -> None:
    with pytest.raises(TypeError, match=MESSAGE):
        layout(shared(kind))


def test_the_message_names_the_object_and_the_factory_to_write() -> None:
    with pytest.raises(TypeError) as raised:
        SerialEnv(2, shared("parallel"))
    assert "one ScriptedEnv" in str(raised.value)
    assert "lambda: PettingZooWrapper(MyEnv())" in str(raised.value)


def test_torchrl_environments_that_share_one_are_refused() -> None:
    envs = pytest.importorskip("torchrl.envs")
    from torchrl.testing.mocking_classes import CountingEnv

    from marl_collect.interop.torchrl import TorchRLWrapper

    raw = CountingEnv(max_steps=5)
    with pytest.raises(TypeError, match=MESSAGE):
        SerialEnv(2, lambda: TorchRLWrapper(raw))
    steps = lambda: envs.TransformedEnv(raw, envs.StepCounter())  # noqa: E731
    with pytest.raises(TypeError, match=MESSAGE):
        SerialEnv(2, lambda: TorchRLWrapper(steps()))


class Pure:
    """A simulator without a state, which its caller passes, as in JAX."""

    action_space = spaces.Discrete(2)

    def reset(self, seed: int) -> int:
        return seed % 7

    def step(self, state: int, action: int) -> int:
        return state + action


def test_what_has_no_state_may_be_shared() -> None:
    pure, space = Pure(), spaces.Box(0, 9, (1,), np.float32)

    class Own(Countdown):
        def __init__(self) -> None:
            super().__init__()
            self.pure, self.space, self.kind = pure, space, Countdown

    with SerialEnv(2, lambda: PettingZooWrapper(AgentLists(Own()))) as env:
        assert len(env) == 2
