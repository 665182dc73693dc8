"""Environments that share something: right in a layout, refused, or reported."""

import random
import re
from collections.abc import Callable, Sequence
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

FRAMES = 10
"""Of each environment: two episodes."""


Kinds = Sequence[type[Game]]
Layout = Callable[[Kinds], TensorDictBase]
"""Two environments of each kind; returns their data ``[2 * kinds, T]``."""


def wrapped(kind: type[Game]) -> Any:
    return PettingZooWrapper(kind())


def factories(kinds: Kinds, times: int = 2) -> list[Any]:
    return [partial(wrapped, kind) for kind in kinds for _ in range(times)]


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
LEGAL: Kinds = [
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
def test_check_env_accepts_odd_ones_that_share_nothing(kind: type[Game]) -> None:
    check_env(partial(wrapped, kind))


@pytest.mark.parametrize("layout", IN_THIS_PROCESS)
@pytest.mark.parametrize("kind", [*LEGAL, *SHARING])
def test_only_what_is_reported_is_wrong_here(kind: type[Game], layout: str) -> None:
    assert consistent(IN_THIS_PROCESS[layout]([kind]), kind) == (kind in LEGAL)


@pytest.mark.processes
@pytest.mark.parametrize("layout", IN_OTHERS)
def test_what_a_process_shares_is_right_with_one_environment_each(layout: str) -> None:
    # All processes share the file. The group of the last one has another name.
    left_out: Kinds = (sharing.InFile, sharing.NumberedAgents)
    kinds: Kinds = [kind for kind in (*LEGAL, *SHARING) if kind not in left_out]
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
        check_env(partial(wrapped, sharing.InClassList))
    assert states() == before
