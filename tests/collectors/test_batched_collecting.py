"""Collectors treat the worlds of a simulator like single environments."""

from functools import partial
from typing import Any

import pytest
from support.worlds import CountingWorlds
from workloads.counting import CountingEnv

from marl_collect import Collector, ParallelEnv, SerialEnv, describe

K = 3
Worlds = partial(CountingWorlds, K, action_mask=True)
KEYWORDS: Any = {"frames_per_batch": 24 * K, "total_frames": -1, "seed": 5}


def test_worlds_that_reset_themselves_begin_new_episodes() -> None:
    factory = partial(CountingWorlds, K, resets_itself=True)
    with (
        Collector(factory, None, **KEYWORDS) as straight,
        Collector(factory, None, **KEYWORDS) as other,
    ):
        straight.next()
        with pytest.warns(UserWarning, match="does not repeat its episodes"):
            other.load_state_dict(straight.state_dict())
        assert (other.next()["hunter", "observation"][:, 0, 0, 1] == 0).all()


def test_worlds_are_described_like_one() -> None:
    assert describe(Worlds) == CountingEnv(action_mask=True).description


@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
def test_joint_environments_refuse_worlds_and_name_the_way(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"CountingWorlds. Pass it to a collector"):
        kind(2, Worlds)


def test_several_batches_in_one_process_are_refused_with_the_way() -> None:
    with pytest.raises(TypeError, match="Build one batch with more worlds"):
        Collector([Worlds] * 2, None, **KEYWORDS)
