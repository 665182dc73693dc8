"""Environments that share something: right in a layout, refused, or reported."""

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import sharing
from support.sharing import Game, consistent
from tensordict import TensorDictBase

from marl_collect import (
    Collector,
    MultiSyncCollector,
    ParallelEnv,
    SerialEnv,
    check_env,
)
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import ContractError

FRAMES = 20


def wrapped(kind: type[Game]) -> Any:
    return PettingZooWrapper(kind())


def collected(collector: Any) -> TensorDictBase:
    with collector:
        return torch.cat([batch.clone() for batch in collector], 1)


def in_this_process(factory: Any) -> TensorDictBase:
    size = {"frames_per_batch": FRAMES, "total_frames": FRAMES}
    return collected(Collector([factory] * 2, **size))


def in_workers(envs: int, factory: Any) -> TensorDictBase:
    options = {"num_workers": 3 - envs, "envs_per_worker": envs}
    size = {"frames_per_batch": FRAMES, "total_frames": FRAMES}
    return collected(MultiSyncCollector(factory, **size, **options))


def in_one_batch(kind: Any, factory: Any) -> TensorDictBase:
    with kind(2, factory) as env:
        return env.rollout(FRAMES // 2, break_when_any_done=False)


Layouts = dict[str, Callable[[Any], TensorDictBase]]
IN_THIS_PROCESS: Layouts = {
    "Collector": in_this_process,
    "SerialEnv": partial(in_one_batch, SerialEnv),
}
IN_OTHERS: Layouts = {
    "two workers": partial(in_workers, 1),
    "one worker": partial(in_workers, 2),
    "ParallelEnv": partial(in_one_batch, partial(ParallelEnv, num_processes=2)),
    "one process of ParallelEnv": partial(
        in_one_batch, partial(ParallelEnv, num_processes=1)
    ),
}
APART = {"two workers", "ParallelEnv"}
"""Layouts in which each environment has a process of its own."""
_ONE_GLOBAL = "They share what changes in an episode: "
SHARING: dict[type[Game], str] = {
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
LEGAL = [
    Game,
    sharing.OwnGenerator,
    sharing.RestoresGenerator,
    sharing.Remembers,
    sharing.OneArray,
    sharing.ReadOnly,
    sharing.NumberedAgents,
]


@pytest.mark.parametrize("kind", SHARING)
def test_check_env_reports_what_environments_share(kind: type[Game]) -> None:
    with pytest.raises(ContractError) as raised:
        check_env(partial(wrapped, kind))
    (finding,) = raised.value.findings
    assert "Two environments of one process change each other's episodes" in finding
    assert re.search(r"player/observation differs in step [1-3]", finding)
    assert re.search(SHARING[kind], finding)


@pytest.mark.parametrize("episodes", [1, 2, 3])
def test_few_episodes_are_enough(episodes: int) -> None:
    with pytest.raises(ContractError, match="change each other's"):
        check_env(partial(wrapped, sharing.InClassList), episodes=episodes)


@pytest.mark.parametrize("kind", LEGAL)
def test_check_env_accepts_odd_environments_that_share_nothing(
    kind: type[Game],
) -> None:
    check_env(partial(wrapped, kind))


@pytest.mark.parametrize("layout", IN_THIS_PROCESS)
@pytest.mark.parametrize("kind", LEGAL)
def test_odd_environments_are_right_in_this_process(
    kind: type[Game], layout: str
) -> None:
    assert consistent(IN_THIS_PROCESS[layout](partial(wrapped, kind)), kind)


@pytest.mark.parametrize("layout", IN_OTHERS)
@pytest.mark.parametrize("kind", LEGAL)
def test_odd_environments_are_right_in_other_processes(
    kind: type[Game], layout: str
) -> None:
    assert consistent(IN_OTHERS[layout](partial(wrapped, kind)), kind)


@pytest.mark.parametrize("layout", IN_THIS_PROCESS)
@pytest.mark.parametrize("kind", SHARING)
def test_no_report_is_a_false_alarm(kind: type[Game], layout: str) -> None:
    assert not consistent(IN_THIS_PROCESS[layout](partial(wrapped, kind)), kind)


@pytest.mark.parametrize("layout", IN_OTHERS)
@pytest.mark.parametrize("kind", [k for k in SHARING if k is not sharing.InFile])
def test_what_a_process_shares_is_right_with_one_environment_per_process(
    kind: type[Game], layout: str
) -> None:
    right = consistent(IN_OTHERS[layout](partial(wrapped, kind)), kind)
    assert right == (layout in APART)


@pytest.mark.parametrize("layout", IN_OTHERS)
def test_a_raw_object_is_refused_or_each_process_has_its_own(layout: str) -> None:
    factory = partial(PettingZooWrapper, Game())
    if layout in APART:
        assert consistent(IN_OTHERS[layout](factory), Game)
    else:
        with pytest.raises(TypeError, match="share one Game object"):
            IN_OTHERS[layout](factory)


def states() -> tuple[Any, list[int]]:
    numbers: Any = np.random.get_state()[1]  # noqa: NPY002 - the global generator
    return random.getstate(), numbers.tolist()


def test_the_search_for_causes_restores_the_global_generators() -> None:
    before = states()
    with pytest.raises(ContractError):
        check_env(partial(wrapped, sharing.InClassList))
    assert states() == before
