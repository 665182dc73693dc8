"""Collected frames equal those of the stock libraries, entry by entry."""

import importlib.util
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from stock_replay import PACKAGES, MismatchError, Trial, collect, compare, replay
from stock_replay import small_trials as small

NEEDED = {
    "lab2d": ["dmlab2d"],
    "meltingpot": ["dmlab2d", "meltingpot"],
    "sisl/multiwalker_v9": ["pygame", "Box2D"],
    "butterfly/pistonball_v6": ["pygame", "pymunk"],
    "classic/chess_v6": ["pygame", "chess"],
    "classic/leduc_holdem_v4": ["pygame", "rlcard"],
    "classic/texas_holdem_v4": ["pygame", "rlcard"],
}


def require(trial: Trial) -> None:
    family = trial.task.partition("/")[0]
    default = ["pygame", PACKAGES.get(family, family).partition(".")[0]]
    for module in NEEDED.get(trial.task, NEEDED.get(family, default)):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")


def name_of(trial: Trial) -> str:
    options = [f"{k}={v}" for k, v in {**trial.kwargs, **trial.options}.items()]
    kind = "parallel" if trial.parallel else "turns"
    return "-".join([trial.task.replace("/", "_"), kind, *options, f"cut={trial.cut}"])


def trials() -> list[Any]:
    """Return the trials; a copy of a world of Lab2d is a fork."""
    return [
        pytest.param(
            trial,
            marks=[pytest.mark.forks]
            * trial.task.startswith(("lab2d/", "meltingpot/")),
            id=name_of(trial),
        )
        for trial in small()
    ]


# cooperative_pong observes by rendering, and warns if no render_mode is set.
@pytest.mark.filterwarnings("ignore:.*calling render method:UserWarning")
@pytest.mark.processes
@pytest.mark.parametrize("trial", trials())
def test_a_replay_in_the_stock_library_gives_every_entry(trial: Trial) -> None:
    require(trial)
    assert replay(trial, 60) == 60


TAG = Trial("mpe/simple_tag_v3", kwargs={"max_cycles": 9}, cut=7)
KEYS: list[tuple[str, ...]] = [
    ("adversary", "observation"),
    ("next", "agent", "observation"),
    ("next", "adversary", "reward"),
    ("next", "agent", "truncated"),
    ("adversary", "mask"),
    ("next", "done"),
    ("agent", "action"),
    ("collector", "traj_ids"),
    ("step_count",),
]


def test_wrong_unexpected_and_missing_entries_are_found() -> None:
    require(TAG)
    from stock_zoo import Stock

    stock = Stock(TAG)
    frames = collect(TAG, stock.factory, 21)
    assert compare(TAG, stock, frames) == 21
    for key in KEYS:
        wrong = np.array(frames[key])
        entry = wrong[5:6].reshape(-1)
        entry[-1] = not entry[-1] if wrong.dtype == bool else entry[-1] + 1
        with pytest.raises(MismatchError, match="frame [56], episode 0"):
            compare(TAG, stock, {**frames, key: wrong})
    with pytest.raises(MismatchError, match="nobody expects"):
        compare(TAG, stock, {**frames, ("agent", "more"): np.zeros(21)})
    del frames["next", "agent", "done"]
    with pytest.raises(MismatchError, match="next/agent/done is missing"):
        compare(TAG, stock, frames)
    stock.close()
