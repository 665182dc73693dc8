"""PettingZoo's own environments, and what the reference makes of them."""

import importlib
import warnings
from functools import partial
from typing import Any

import numpy as np
from oracle_reference import MASK, ReferenceEnv
from pettingzoo import ParallelEnv
from stock_replay import PACKAGES, Frame, Trial

from marl_collect import MarlGroupMapType


def build(trial: Trial) -> Any:
    """Build the stock environment of a trial."""
    if trial.script is not None:
        from support.zoo import ScriptedEnv, ScriptedTurns

        return (ScriptedEnv if trial.parallel else ScriptedTurns)(trial.script)
    family, _, name = trial.task.partition("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module(f"{PACKAGES[family]}.{name}")
    make = module.parallel_env if trial.parallel else module.env
    return make(**trial.kwargs)


def wrap(trial: Trial, **options: Any) -> Any:
    """Return our environment around that of a trial."""
    from marl_collect.envs import PettingZooWrapper

    return PettingZooWrapper(build(trial), **options)


class Stock:
    """The stock environment of a trial; the numbers in its infos are asked for.

    Attributes:
        factory: of our environment.
    """

    def __init__(self, trial: Trial) -> None:
        from marl_collect.envs import PettingZooEnv

        self.trial, options = trial, dict(trial.options)
        group_map = options.get("group_map")
        if isinstance(group_map, str):
            options["group_map"] = MarlGroupMapType(group_map)
        self.infos = self._infos()
        options["info_keys"] = self.infos
        make: Any = partial(PettingZooEnv, trial.task, trial.parallel, **trial.kwargs)
        if trial.script is not None:
            make = partial(wrap, trial)
        self.factory = partial(make, **options)
        self.turns, self.stack = not trial.parallel, 0
        self.absent = options.get("absent", "dead")
        self.use_mask = options.get("use_mask", True)
        self.categorical = options.get("categorical_actions", True)
        self.agent_ids = options.get("agent_ids", False)
        self.episode_reward = options.get("episode_reward", False)
        self.state = options.get("return_state", False)
        self.time_limit = options.get("time_limit")
        on_any = options.get("done_on_any")
        self.any_ends = trial.parallel if on_any is None else on_any
        with self.factory() as ours:
            self.group_map = ours.group_map
            described = ours.description.groups
            self.masked_groups = {g for g, d in described.items() if d.action_mask}
        self.env = ReferenceEnv(self)

    def _infos(self) -> dict[str, tuple[int, ...]]:
        env = self.raw()
        answer = env.reset(seed=0)
        env.close()
        infos = answer[1] if isinstance(env, ParallelEnv) else env.infos
        arrays = {k: np.asarray(v) for info in infos.values() for k, v in info.items()}
        return {
            key: array.shape
            for key, array in arrays.items()
            if key != MASK and array.dtype.kind in "biuf"
        }

    def raw(self) -> Any:
        return build(self.trial)

    def close(self) -> None:
        self.env.raw.close()

    def reset(self, seed: int) -> Frame:
        """Begin an episode in a new environment, so it follows from its seed alone."""
        self.close()
        self.env.raw = self.raw()
        self.env.reset(seed)
        return self.env.observed()

    def step(self, actions: Frame, *, cut: bool) -> tuple[Frame, Frame, bool]:
        """Step; return what is observed, what came of it, and whether it is over."""
        self.env.step({key[0]: value for key, value in actions.items()})
        if cut and not self.env.row["done",][0]:
            self.env.cut()
        return self.env.observed(), self.env.outcome(), bool(self.env.row["done",][0])
