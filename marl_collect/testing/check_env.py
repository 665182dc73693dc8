"""Validates an environment against the contract, in this process."""

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from marl_collect.core.batched import BatchedEnv
from marl_collect.core.description import EnvDescription
from marl_collect.core.env import MultiAgentEnv, require_factory
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.core.factories import BUILD_ANEW
from marl_collect.core.first_ends import FirstEnds
from marl_collect.core.groups import RESERVED
from marl_collect.core.seeding import episode_seed
from marl_collect.core.sharing import simulators
from marl_collect.options import Option, require
from marl_collect.testing.check_play import Play, Snapshot, StopError, differences
from marl_collect.testing.check_rows import name_of
from marl_collect.testing.check_sharing import beside
from marl_collect.testing.check_worlds import WorldPlay

_NUMBERS = re.compile(r"(?<!\w)-?(\d+(\.\d*)?(e[+-]?\d+)?|nan|inf)\b")
"""Matches numbers, but not those in names such as ``agent_1``."""


_Env = MultiAgentEnv | BatchedEnv | EnvWrapper


class ContractError(AssertionError):
    """An environment breaks the contract.

    Attributes:
        findings: one sentence per violation. A violation in several steps is reported
            once, with its first step and the number of steps.
    """

    def __init__(self, name: str, findings: tuple[str, ...]) -> None:
        """Store the environment's name and the findings."""
        super().__init__(name, findings)
        self.name = name
        self.findings = findings

    def __str__(self) -> str:
        """List the findings."""
        lines = "".join(f"\n- {finding}" for finding in self.findings)
        return f"{self.name} breaks the environment contract:{lines}"


def check_env(
    factory: Callable[[], _Env], *, seed: int = 0, episodes: int = 3, steps: int = 100
) -> None:
    """Check that the environment of ``factory`` fulfils the contract.

    Builds two environments, or two batches of worlds, and plays episodes with random
    legal actions. Checks:

    - names, keys, shapes, dtypes and bounds;
    - flags, masks, and the rows of agents that are done;
    - that every key is written, and that actions are not;
    - that an episode depends only on its seed and actions, not on earlier episodes,
      complete or not, or on previous contents of the memory, nor on another
      environment of the factory that is played at the same time, step by step in turn;
    - that ``rollout()`` returns the keys, shapes and dtypes of ``fake_tensordict()``;
    - for a ``BatchedEnv``: that worlds begin alone without changes to others, that
      episodes do not depend on the index of their world, and that the last observation
      of an episode is not the first one of the next.

    Warns if episodes end with their first agent while others could go on
    (``done_on_any``).

    Args:
        factory: callable that builds the environment.
        seed: of episodes and actions.
        episodes: number of episodes to play.
        steps: maximum number of steps per episode.

    Raises:
        TypeError: if ``factory`` is not a factory.
        ContractError: if the environment breaks the contract; lists all violations.
    """
    require_factory(factory, "check_env's argument")
    episodes = require("episodes", episodes, int, Option("", at_least=1))
    steps = require("steps", steps, int, Option("", at_least=1))
    findings: list[str] = []
    built: list[_Env] = []
    try:
        built.append(_build(factory))
        built.append(_build(factory))
        env, twin = built
        for finding in _check(env, twin, seed, episodes, steps):
            findings.append(finding)  # noqa: PERF402 - kept when the next one raises
    except StopError as stop:
        findings.append(str(stop))
    finally:
        for env in built:
            findings.extend(_closed(env))
    if findings:
        name = built[0].description.name if built else "The environment"
        raise ContractError(name, tuple(_once(findings)))


def _once(findings: list[str]) -> Iterator[str]:
    """Yield one finding of those that differ in their numbers only."""
    kinds = [_NUMBERS.sub("#", finding) for finding in findings]
    counts = Counter(kinds)
    for kind, finding in zip(kinds, findings, strict=True):
        count = counts.pop(kind, 0)
        if count:
            yield finding if count == 1 else f"{finding} (Found {count} times.)"


def _check(
    env: _Env, twin: _Env, seed: int, episodes: int, steps: int
) -> Iterator[str]:
    inside = {id(simulator) for simulator in simulators(env)}
    for simulator in simulators(twin):
        if id(simulator) in inside:
            raise StopError(
                "Two environments of the factory share one "
                f"{type(simulator).__name__} object. {BUILD_ANEW}"
            )
    yield from _description(env.description, twin.description)
    if env.batch_size != twin.batch_size:
        raise StopError(
            "Two environments of one factory have the batch sizes "
            f"{list(env.batch_size)} and {list(twin.batch_size)}."
        )
    pair: list[Any] = [env, twin]
    if env.batch_size:
        yield from _play_worlds(
            *(WorldPlay(batch, seed, episodes, steps) for batch in pair)
        )
    else:
        yield from _play((env, twin), seed, episodes, steps)
    yield from _tensordict_api(env)


def _play(pair: tuple[Any, Any], seed: int, episodes: int, steps: int) -> Iterator[str]:
    play, twin = (Play(env, steps) for env in pair)
    yield from play.values_before_cast(episode_seed(seed, 0, 0))
    seeds = [episode_seed(seed, 0, number) for number in range(episodes)]
    runs = []
    ends = FirstEnds(play.description)
    for number in seeds:
        yield from play.rules(number)
        runs.append(play.episode(number))
        if len(runs[-1]) > 1:
            ends.look(runs[-1][-1].__getitem__)
    if play.description.repeats:
        problems = list(_repeats(play, twin, seeds, runs))
        yield from problems
        if not problems:
            yield from beside(pair, (play, twin), seeds, runs)
    yield from play.stale_memory(seeds[0])


def _play_worlds(play: WorldPlay, twin: WorldPlay) -> Iterator[str]:
    yield from play.rules()
    if play.description.repeats:
        yield from play.repeated(twin)


def _build(factory: Callable[[], _Env]) -> _Env:
    try:
        env: Any = factory()
    except Exception as error:
        raise StopError(
            f"The factory raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(env, (MultiAgentEnv, BatchedEnv, EnvWrapper)):
        raise StopError(
            f"The factory must return a MultiAgentEnv or a BatchedEnv, but returned "
            f"{env!r} of type {type(env).__name__}. Wrap a PettingZoo environment: "
            "lambda: PettingZooWrapper(MyEnv())."
        )
    return env


def _description(one: EnvDescription, two: EnvDescription) -> Iterator[str]:
    if not one.groups:
        raise StopError("The description has no groups.")
    yield from _names(one)
    try:
        one.row()
    except (TypeError, AttributeError) as error:
        raise StopError(
            f"The description has a space that arrays cannot store: {error}"
        ) from error
    try:
        copy = pickle.loads(pickle.dumps(one))
    except Exception as error:
        raise StopError(f"The description cannot be pickled: {error}") from error
    if _plain(copy) != _plain(one):
        yield "The description differs from its pickled copy."
    if _plain(one) != _plain(two):
        yield (
            "Two environments of one factory differ in groups or spaces: "
            f"{_plain(one)} and {_plain(two)}."
        )


def _names(description: EnvDescription) -> Iterator[str]:
    groups = description.groups
    counts = Counter(agent for group in groups.values() for agent in group.agents)
    for agent, count in counts.items():
        if not isinstance(agent, str) or not agent:
            yield f"Agent names must be non-empty strings, but one is {agent!r}."
        if count > 1:
            yield f"The agent {agent} is {count} times in the groups: expected once."
    for name, group in groups.items():
        if name in RESERVED:
            yield f"The group name {name!r} is the name of another key: rename it."
        if not group.agents:
            yield f"The group {name!r} has no agents."
        if np.any(getattr(group.action, "start", 0)):
            yield f"{name}/action must start at 0, but its space is {group.action}."


def _plain(description: EnvDescription) -> dict[str, object]:
    fields = {name_of(k): (f.shape, f.dtype.str) for k, f in description.row().items()}
    return {"agents": description.group_map, "fields": fields}


def _repeats(
    play: Play, twin: Play, seeds: list[int], runs: list[list[Snapshot]]
) -> Iterator[str]:
    alone = True
    for seed, run in zip(seeds, runs, strict=True):
        for other, which in ((play, "again"), (twin, "in another environment")):
            for problem in differences(run, other.episode(seed)):
                alone = False
                yield (
                    f"An episode depends on more than its seed and its actions: seed "
                    f"{seed} played {which}, {problem}."
                )
    if alone:
        list(islice(play.frames(seeds[-1]), 2))
        for problem in differences(runs[0], play.episode(seeds[0])):
            alone = False
            yield (
                f"An episode depends on the one before it: seed {seeds[0]} played "
                f"after an episode that was left after a step, {problem}."
            )
    if alone:
        for problem in differences(runs[0], play.episode(seeds[0], poison=1)):
            yield (
                f"Some memory is not written, or is read: with other previous "
                f"contents, {problem}."
            )


def _tensordict_api(env: _Env) -> Iterator[str]:
    try:
        fake = env.fake_tensordict()
        real = env.rollout(2, break_when_any_done=False)
    except Exception as error:
        raise StopError(
            f"fake_tensordict() or rollout() raised {type(error).__name__}: {error}"
        ) from error
    announced = {k: (tuple(v.shape), v.dtype) for k, v in _items(fake).items()}
    time = env.batch_dims
    rolled_out = {
        k: ((*v.shape[:time], *v.shape[time + 1 :]), v.dtype)
        for k, v in _items(real).items()
    }
    for key in sorted(announced.keys() ^ rolled_out.keys()):
        where = "fake_tensordict()" if key in announced else "rollout()"
        yield f"{key} is in {where} only."
    for key in sorted(announced.keys() & rolled_out.keys()):
        if announced[key] != rolled_out[key]:
            yield (
                f"{key} is {announced[key]} in fake_tensordict(), but "
                f"{rolled_out[key]} in rollout()."
            )


def _items(tensordict: Any) -> dict[str, Any]:
    flat = tensordict.flatten_keys("/")
    return dict(flat.items())


def _closed(env: _Env) -> Iterator[str]:
    for which in ("", " when called again"):
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - of an environment, any
            yield f"close() raised {type(error).__name__}{which}: {error}"
            return
    if not env.is_closed:
        yield "is_closed is False after close()."
