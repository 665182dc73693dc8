"""Lab2d and MeltingPot: stock wrappers around a forked copy of each started Lab2d."""

import contextlib
import os
import signal
import traceback
import warnings
from multiprocessing.connection import Pipe  # noqa: TID251 - to forks of its own
from typing import Any

import dm_env
import dmlab2d
import numpy as np
from stock_replay import FLAGS, Array, Frame, Trial

from marl_collect import MarlGroupMapType
from marl_collect.envs.meltingpot.imports import meltingpot_modules

DEADLINE = 120.0
WORLD = "WORLD.RGB"
LIMITS = ("settings.maxEpisodeLengthFrames", "settings.episodeLengthFrames")

Step = tuple[list[Frame], Array | None, list[float], bool]
"""Observations by player, image of the world, rewards, whether it is the last step."""


class Spy:
    """Forwards all calls to a Lab2d, and forks at each start of an episode."""

    def __init__(self, lab: Any, forks: "Forks") -> None:
        self._lab = lab
        self._forks = forks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lab, name)

    def start(self, episode: int, seed: int) -> None:
        self._lab.start(episode, seed)
        self._forks.fork(self._lab, seed)


class Forks:
    """Copies of this process, one for each started episode, by its seed."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.options = dict(trial.options)
        group_map = self.options.get("group_map")
        if isinstance(group_map, str) and group_map != "role":
            self.options["group_map"] = MarlGroupMapType(group_map)
        self._children: dict[int, tuple[int, Any]] = {}
        self.groups: dict[str, list[str]] = {}

    def __enter__(self) -> "Forks":
        """Watch every Lab2d that is built from now on."""
        self._build = dmlab2d.Lab2d
        dmlab2d.Lab2d = lambda *args: Spy(self._build(*args), self)
        if self.trial.task.startswith("meltingpot/"):
            with meltingpot_modules():
                from meltingpot.utils.substrates import substrate  # noqa: F401
        return self

    def __exit__(self, *error: object) -> None:
        dmlab2d.Lab2d = self._build
        for seed in list(self._children):
            self._end(seed)

    def factory(self) -> Any:
        from marl_collect.envs import Lab2dEnv, MeltingpotEnv

        family, _, name = self.trial.task.partition("/")
        env: Any
        if family == "lab2d":
            env = Lab2dEnv(name, self.trial.kwargs, **self.options)
        else:
            env = MeltingpotEnv(name, **self.options, **self.trial.kwargs)
        self.groups = env.group_map
        return env

    def fork(self, lab: Any, seed: int) -> None:
        """Keep a copy of this process that can continue with ``lab``."""
        if seed in self._children:
            self._end(seed)
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads, which the copy ignores
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                ours.close()
                for _, other in self._children.values():
                    other.close()
                self._serve(lab, theirs)
            os._exit(0)
        theirs.close()
        self._children[seed] = (child, ours)

    def reset(self, seed: int) -> Frame:
        """Continue with the copy of the episode of ``seed``."""
        if seed not in self._children:
            raise AssertionError(f"No episode was started with the seed {seed}.")
        self._now = self._children[seed][1]
        self._steps = 0
        first, self._limit = self._receive()
        return self._frame(first, dict.fromkeys(FLAGS, False))

    def step(self, actions: Frame, *, cut: bool) -> tuple[Frame, Frame, bool]:
        """Step; return what is observed, what came of it, and whether it is over."""
        joint_action: dict[int, Any] = {}
        for group, names in self.groups.items():
            for row, name in enumerate(names):
                action = actions[group, "action"][row]
                if self.options.get("categorical_actions", True) is False:
                    action = action.argmax()
                joint_action[int(name.removeprefix("player_"))] = action
        self._now.send([joint_action[player] for player in sorted(joint_action)])
        step: Step = self._receive()
        self._steps += 1
        over = step[3] or cut or self._steps == self.options.get("max_steps")
        terminated = step[3] and self._steps != self._limit
        flags = {"done": over, "terminated": terminated}
        flags["truncated"] = over and not terminated
        outcome: Frame = {}
        for group, players in self._players().items():
            rewards = [[step[2][player]] for player in players]
            outcome[group, "reward"] = np.array(rewards, np.float32)
        return self._frame(step, flags), outcome, over

    def _players(self) -> dict[str, list[int]]:
        return {
            group: [int(name.removeprefix("player_")) for name in names]
            for group, names in self.groups.items()
        }

    def _frame(self, step: Step, flags: dict[str, bool]) -> Frame:
        observations, world, _, _ = step
        frame: Frame = {(name,): np.array([flag]) for name, flag in flags.items()}
        for group, players in self._players().items():
            for key in observations[players[0]]:
                values = [
                    np.atleast_1d(observations[player][key]) for player in players
                ]
                frame[group, "observation", *key] = np.stack(values)
            for name, flag in flags.items():
                frame[group, name] = np.full((len(players), 1), flag)
        if self.options.get("world_rgb") and world is not None:
            frame["RGB",] = world
        return frame

    def _receive(self) -> Any:
        if not self._now.poll(DEADLINE):
            raise AssertionError(f"The copy was silent for {DEADLINE:.0f} s.")
        answer = self._now.recv()
        if isinstance(answer, str):
            raise AssertionError(  # noqa: TRY004 - it is the copy's traceback
                f"The copy failed:\n{answer}"
            )
        return answer

    def _end(self, seed: int) -> None:
        child, pipe = self._children.pop(seed)
        pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _serve(self, lab: Any, pipe: Any) -> None:
        """Step the stock environment around ``lab`` with the received actions."""
        try:
            family, _, name = self.trial.task.partition("/")
            stock = (_Level if family == "lab2d" else _Substrate)(lab, name)
            pipe.send((stock.begin(), _limit(lab)))
            while True:
                pipe.send(stock.step(pipe.recv()))
        except EOFError:
            return
        except BaseException:  # noqa: BLE001 - sent to the other side
            pipe.send(traceback.format_exc())


def _limit(lab: Any) -> int | None:
    for name in LIMITS:
        with contextlib.suppress(KeyError, ValueError):
            return int(float(lab.read_property(name)))
    return None


def _started(lab: Any) -> Any:
    """Return dmlab2d's environment around a Lab2d that was started already."""
    raw = dmlab2d.Environment(lab, lab.observation_names(), seed=1)

    def reset() -> Any:
        raw._reset_next_step = False  # instead of a second start
        return dm_env.restart(raw.observation())

    raw.reset = reset
    return raw


class _Level:
    """A level of Lab2d through dmlab2d's own environment."""

    def __init__(self, lab: Any, _name: str) -> None:
        self._raw = _started(lab)
        self._spec = self._raw.action_spec()
        names = [*self._spec, *lab.observation_names()]
        prefixes = {name.split(".")[0] for name in names if "." in name}
        numbers = sorted(int(name) for name in prefixes if name.isdecimal())
        self._prefixes = [f"{number}." for number in numbers] or [""]

    def begin(self) -> Step:
        return self._said(self._raw.reset())

    def step(self, actions: list[Any]) -> Step:
        raw_actions = {}
        for prefix, action in zip(self._prefixes, actions, strict=True):
            names = sorted(name for name in self._spec if name.startswith(prefix))
            for name, value in zip(names, np.atleast_1d(action), strict=True):
                raw_actions[name] = int(value) + self._spec[name].minimum
        return self._said(self._raw.step(raw_actions))

    def _said(self, timestep: Any) -> Step:
        observed = timestep.observation
        frames: list[Frame] = []
        for prefix in self._prefixes:
            frame: Frame = {
                (name.removeprefix(prefix),): np.array(value)
                for name, value in observed.items()
                if name.startswith(prefix) and np.asarray(value).dtype.kind in "biuf"
            }
            frame.pop(("REWARD",), None)
            frames.append(frame)
        shared = timestep.reward or 0.0
        rewards = [
            float(observed.get(prefix + "REWARD", shared)) for prefix in self._prefixes
        ]
        # Without players there is one agent, which gets all observations.
        return frames, None, rewards, bool(timestep.last())


class _Substrate:
    """A substrate through MeltingPot's own wrappers."""

    def __init__(self, lab: Any, name: str) -> None:
        with meltingpot_modules():
            from meltingpot.configs import substrates as configs
            from meltingpot.utils.substrates import substrate

            config = configs.get_config(name)
            raw = _started(lab)
            substrate.builder.builder = lambda _settings: raw
            self._stock = substrate.build_substrate(
                lab2d_settings=None,
                individual_observations=config.individual_observation_names,
                global_observations=config.global_observation_names,
                action_table=config.action_set,
            )

    def begin(self) -> Step:
        with meltingpot_modules():
            return self._said(self._stock.reset())

    def step(self, actions: list[Any]) -> Step:
        with meltingpot_modules():
            return self._said(self._stock.step([int(action) for action in actions]))

    def _said(self, timestep: Any) -> Step:
        observations: list[Frame] = [
            {(k,): np.array(v) for k, v in player.items() if k != WORLD}
            for player in timestep.observation
        ]
        world = np.array(timestep.observation[0][WORLD])
        rewards = [float(reward) for reward in timestep.reward]
        return observations, world, rewards, bool(timestep.last())
