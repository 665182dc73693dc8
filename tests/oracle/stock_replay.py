"""Replay collected episodes in the stock libraries and compares every entry.

A ``Collector`` with a random policy records frames of a task. Then the library's own
environment is reset with the same episode seeds, stepped with the same actions, and a
plain model of the data contract says what each entry must be: observations, rewards,
flags, masks, state, infos, sums of rewards. Nothing here is shared with the adapters.

Levels made with MeltingPot do not repeat an episode for its seed, so at each start of
an episode the process is forked, and the stock wrappers step the copy of that Lab2d.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracle_seeds import episode_seed

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

Array = NDArray[Any]
Key = tuple[str, ...]
Frame = dict[Key, Array]

PACKAGES = {
    "atari": "pettingzoo.atari",
    "butterfly": "pettingzoo.butterfly",
    "classic": "pettingzoo.classic",
    "magent": "magent2.environments",
    "mpe": "mpe2",
    "sisl": "pettingzoo.sisl",
}
FLAGS = ("done", "terminated", "truncated")


class MismatchError(AssertionError):
    """A collected entry differs from what the stock library returned."""


@dataclass(frozen=True)
class Trial:
    """One task with the options that shape its data.

    Attributes:
        task: with its family, such as ``"mpe/simple_v3"``, ``"lab2d/clean_up"`` or
            ``"meltingpot/coins"``.
        parallel: False for agents that take turns.
        kwargs: of the task.
        options: of our environment.
        cut: ``max_frames_per_traj`` of the collector.
        seed: of the collector.
        script: what a scripted environment of ``support.zoo`` plays, instead of a task.
    """

    task: str
    parallel: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    cut: int | None = None
    seed: int = 0
    script: Any = None


def replay(trial: Trial, frames: int) -> int:
    """Collect at least ``frames`` frames and compare them with the stock library.

    Returns:
        How many frames were compared.

    Raises:
        MismatchError: naming frame, key, row, and what was expected and found.
    """
    if trial.task.startswith(("lab2d/", "meltingpot/")):
        from stock_lab2d import Forks

        with Forks(trial) as forks:
            batch = collect(trial, forks.factory, frames)
            stock: Any = forks
            return compare(trial, stock, batch)
    from stock_zoo import Stock

    stock = Stock(trial)
    try:
        batch = collect(trial, stock.factory, frames)
        return compare(trial, stock, batch)
    finally:
        stock.close()


def collect(trial: Trial, factory: Any, frames: int) -> Frame:
    """Return what a collector with a random policy records, ``[frames, ...]``."""
    import torch

    from marl_collect import Collector, RandomPolicy

    with Collector(
        factory,
        RandomPolicy(),
        frames_per_batch=-(-frames // 3),  # the total is rounded up to batches
        total_frames=frames,
        max_frames_per_traj=trial.cut,
        seed=trial.seed,
    ) as collector:
        batches = [batch.clone() for batch in collector]
    transitions: Any = torch.cat(batches, 1)[0]
    keys = transitions.keys(include_nested=True, leaves_only=True)
    return {
        key if isinstance(key, tuple) else (key,): transitions[key].numpy()
        for key in keys
    }


def compare(trial: Trial, stock: Any, recorded: Frame) -> int:
    """Compare ``recorded`` with the data of ``stock``; return the number of frames."""
    frames = len(recorded["done",])
    known_keys: set[Key] = set()
    frame = episode = 0
    while frame < frames:
        steps = 0
        observation = stock.reset(episode_seed(trial.seed, 0, episode))
        over = False
        while not over and frame < frames:
            location = f"{trial}: frame {frame}, episode {episode}, step {steps}"
            known_keys |= _check(location, (), observation, recorded, frame)
            actions = {
                key: value[frame]
                for key, value in recorded.items()
                if len(key) > 1 and key[1] == "action"
            }
            known_keys |= actions.keys()
            steps += 1
            observation, outcome, over = stock.step(actions, cut=steps == trial.cut)
            known_keys |= _check(
                location, ("next",), {**observation, **outcome}, recorded, frame
            )
            book: Frame = {("collector", "traj_ids"): np.asarray(episode)}
            if trial.cut is not None:
                book["step_count",] = np.asarray([steps - 1])
                book["next", "step_count"] = np.asarray([steps])
            known_keys |= _check(location, (), book, recorded, frame)
            frame += 1
        episode += 1
    surplus = recorded.keys() - known_keys
    if surplus:
        raise MismatchError(f"{trial}: nobody expects the entries {sorted(surplus)}.")
    return frames


def _check(
    location: str, prefix: Key, expected: Frame, recorded: Frame, frame: int
) -> set[Key]:
    for key, value in expected.items():
        name = "/".join((*prefix, *key))
        if (*prefix, *key) not in recorded:
            raise MismatchError(f"{location}: {name} is missing.")
        actual = recorded[(*prefix, *key)][frame]
        if actual.shape != value.shape:
            raise MismatchError(
                f"{location}: {name} is {actual.shape}, not {value.shape}."
            )
        equal = actual == value
        if actual.dtype.kind == "f":
            equal |= np.isnan(actual) & np.isnan(value)
        if not equal.all():
            at = tuple(int(i) for i in np.argwhere(~equal)[0])
            raise MismatchError(
                f"{location}: {name}{list(at)} is {actual[at]}, but the stock library "
                f"says {value[at]}; {int((~equal).sum())} of {equal.size} differ."
            )
        if actual.dtype != value.dtype:
            raise MismatchError(
                f"{location}: {name} is {actual.dtype}, not {value.dtype}."
            )
    return {(*prefix, *key) for key in expected}


def small_trials() -> list[Trial]:
    """Return a few trials that take some seconds together."""
    per_agent = "one_group_per_agent"
    all_in_one = "all_in_one_group"
    fallen = {"terminate_on_fall": False, "max_cycles": 60}
    lasting = {"done_on_any": False}
    rich: dict[str, Any] = {"return_state": True, "episode_reward": True}
    return [
        Trial("mpe/simple_spread_v3", kwargs={"max_cycles": 9}, options=rich),
        Trial("mpe/simple_tag_v3", cut=7, options={"group_map": per_agent}),
        Trial("mpe/simple_reference_v3", options={"categorical_actions": False}),
        Trial(
            "mpe/simple_spread_v3", parallel=False, options={"group_map": all_in_one}
        ),
        Trial("sisl/multiwalker_v9", kwargs=fallen, options=lasting | rich),
        Trial("sisl/multiwalker_v9", kwargs=fallen, parallel=False, cut=50),
        Trial("sisl/multiwalker_v9", options={"agent_ids": True, "fast": False}),
        Trial("sisl/pursuit_v5", kwargs={"max_cycles": 12}),
        Trial("classic/connect_four_v3", parallel=False, options={"agent_ids": True}),
        Trial(
            "classic/tictactoe_v3", parallel=False, options={"group_map": all_in_one}
        ),
        Trial("classic/leduc_holdem_v4", parallel=False),
        Trial("classic/texas_holdem_v4", parallel=False),
        Trial("classic/rps_v2", kwargs={"max_cycles": 5}),
        Trial("magent/battle_v4", kwargs={"map_size": 12}, options=lasting),
        Trial("butterfly/knights_archers_zombies_v11", options=lasting, cut=40),
        Trial("butterfly/pistonball_v6", kwargs={"n_pistons": 3, "max_cycles": 4}),
        Trial("butterfly/cooperative_pong_v6", kwargs={"max_cycles": 4}),
        Trial("mpe/simple_world_comm_v3", parallel=False),
        Trial("classic/chess_v6", parallel=False),
        Trial("classic/go_v5", parallel=False, kwargs={"board_size": 5}),
        Trial(
            "lab2d/commons_harvest",
            kwargs={"numPlayers": 2},
            options={"group_map": {"all": ["player_1", "player_0"]}},
            cut=11,
        ),
        Trial("lab2d/clean_up", kwargs={"numPlayers": 2}, options={"max_steps": 20}),
        Trial(
            "meltingpot/coins",
            options={"world_rgb": True, "group_map": per_agent},
            cut=10,
        ),
        Trial("meltingpot/collaborative_cooking__cramped"),
        Trial(
            "meltingpot/prisoners_dilemma_in_the_matrix__repeated",
            options={"group_map": {"all": ["player_1", "player_0"]}, "max_steps": 20},
        ),
    ]
