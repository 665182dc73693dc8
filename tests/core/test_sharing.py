"""Environments that share something: right in a layout, refused, or reported."""

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support import sharing
from support.sharing import Game, consistent
from support.zoo import Countdown, ScriptedEnv, ScriptedTurns
from tensordict import TensorDictBase

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


LAYOUTS = [in_one_worker, in_serial_env, in_a_process_of_parallel_env, in_evaluate]


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["parallel", "lists", "wrapped"])
def test_every_layout_refuses_environments_of_one_process_that_share_one(
    layout: Callable[[Factory], None], kind: str
) -> None:
    with pytest.raises(TypeError, match=MESSAGE):
        layout(shared(kind))


@pytest.mark.processes
def test_record_refuses_environments_of_a_process_that_share_one(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=MESSAGE):
        record(tmp_path / "data", shared("parallel"), frames=40, envs_per_worker=2)


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


FRAMES = 10
"""Of each environment: two episodes."""


Kinds = Sequence[type[Game]]
Layout = Callable[[Kinds], TensorDictBase]
"""Two environments of each kind; returns their data ``[2 * kinds, T]``."""


def of_kind(kind: type[Game]) -> Any:
    return PettingZooWrapper(kind())


def factories(kinds: Kinds, times: int = 2) -> list[Any]:
    return [partial(of_kind, kind) for kind in kinds for _ in range(times)]


def collected(collector: Any) -> TensorDictBase:
    with collector:
        return torch.cat([batch.clone() for batch in collector], 1)


def sizes(kinds: Kinds) -> Any:
    frames = 2 * len(kinds) * FRAMES
    return {"frames_per_batch": frames, "total_frames": frames}


def in_this_process(kinds: Kinds) -> TensorDictBase:
    return collected(Collector(factories(kinds), **sizes(kinds)))


def in_workers(envs: int, kinds: Kinds) -> TensorDictBase:
    own = factories(kinds, 2 // envs)
    return collected(MultiSyncCollector(own, envs_per_worker=envs, **sizes(kinds)))


def rolled_out(kind: Any, kinds: Kinds) -> TensorDictBase:
    with kind(2 * len(kinds), factories(kinds)) as env:
        return env.rollout(FRAMES, break_when_any_done=False)


def in_processes(envs: int, kinds: Kinds) -> TensorDictBase:
    return rolled_out(partial(ParallelEnv, envs_per_process=envs), kinds)


IN_THIS_PROCESS: dict[str, Layout] = {
    "Collector": in_this_process,
    "SerialEnv": partial(rolled_out, SerialEnv),
}
IN_OTHERS: dict[str, Layout] = {
    "workers": partial(in_workers, 1),
    "workers of two": partial(in_workers, 2),
    "ParallelEnv": partial(in_processes, 1),
    "ParallelEnv of two": partial(in_processes, 2),
}
APART = {"workers", "ParallelEnv"}
"""Layouts in which each environment has a process of its own."""
_ONE_GLOBAL = "They share what changes in an episode: "
REPORTED: dict[type[Game], str] = {
    sharing.InClassList: f"{_ONE_GLOBAL}the class attribute InClassList.totals",
    sharing.InClassDict: f"{_ONE_GLOBAL}the class attribute InClassDict.totals",
    sharing.InModule: f"{_ONE_GLOBAL}the global support.sharing.TOTAL",
    sharing.InCache: f"{_ONE_GLOBAL}the attribute InCache.board",
    sharing.InFile: "Look for state outside of the object: .* files",
    sharing.InLibrary: "Look for state outside of the object: .* libraries",
    sharing.FromNumPy: r"They draw from NumPy's global generator \(np.random\)",
    sharing.FromPython: r"They draw from Python's global generator \(random\)",
    sharing.FromTorch: "They draw from torch's global generator",
}
"""What ``check_env`` reports."""
LEGAL: Kinds = [
    Game,
    sharing.OwnGenerator,
    sharing.RestoresGenerator,
    sharing.Remembers,
    sharing.OneArray,
    sharing.ReadOnly,
    sharing.NumberedAgents,
]


@pytest.mark.parametrize("kind", REPORTED)
def test_check_env_reports_what_environments_share(kind: type[Game]) -> None:
    with pytest.raises(ContractError) as raised:
        check_env(partial(of_kind, kind))
    (finding,) = raised.value.findings
    assert "Two environments of one process change each other's episodes" in finding
    assert re.search(r"player/observation differs in step [1-3]", finding)
    assert re.search(REPORTED[kind], finding)


@pytest.mark.parametrize("episodes", [1, 2, 3])
def test_few_episodes_are_enough(episodes: int) -> None:
    with pytest.raises(ContractError, match="change each other's"):
        check_env(partial(of_kind, sharing.InClassList), episodes=episodes)


@pytest.mark.parametrize("kind", LEGAL)
def test_check_env_accepts_odd_ones_that_share_nothing(kind: type[Game]) -> None:
    check_env(partial(of_kind, kind))


@pytest.mark.parametrize("layout", IN_THIS_PROCESS)
@pytest.mark.parametrize("kind", [*LEGAL, *REPORTED])
def test_only_what_is_reported_is_wrong_here(kind: type[Game], layout: str) -> None:
    assert consistent(IN_THIS_PROCESS[layout]([kind]), kind) == (kind in LEGAL)


@pytest.mark.processes
@pytest.mark.parametrize("layout", IN_OTHERS)
def test_what_a_process_shares_is_right_with_one_environment_each(layout: str) -> None:
    # All processes share the file. The group of the last one has another name.
    left_out: Kinds = (sharing.InFile, sharing.NumberedAgents)
    kinds: Kinds = [kind for kind in (*LEGAL, *REPORTED) if kind not in left_out]
    data = IN_OTHERS[layout](kinds)
    pairs = zip(kinds, data.split(2), strict=True)
    right = {kind: consistent(pair, kind) for kind, pair in pairs}
    assert right == {kind: kind in LEGAL or layout in APART for kind in kinds}
    numbered: Any = sharing.NumberedAgents
    assert consistent(IN_OTHERS[layout]([numbered]), numbered)


def states() -> tuple[Any, list[int]]:
    numbers: Any = np.random.get_state()[1]  # noqa: NPY002 - the global generator
    return random.getstate(), numbers.tolist()


def test_the_search_for_causes_restores_the_global_generators() -> None:
    before = states()
    with pytest.raises(ContractError):
        check_env(partial(of_kind, sharing.InClassList))
    assert states() == before
