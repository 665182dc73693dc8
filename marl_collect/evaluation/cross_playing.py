"""``cross_play``: every policy of a population against every policy, with intervals."""

import inspect
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np

from marl_collect.core.factories import spread
from marl_collect.core.seeding import LARGEST_SEED, Purpose, derive
from marl_collect.errors import imports_of
from marl_collect.evaluation.evaluator import EvaluationArguments, evaluate
from marl_collect.evaluation.intervals import Floats, Interval, bootstrap
from marl_collect.options import Option, parse, require
from marl_collect.parallel_env.describe import describe
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.pool import PolicyPool
from marl_collect.programs.printable import markdown_row
from marl_collect.rollout.episodes import Episode

Seats: TypeAlias = Callable[[int, tuple[str, ...]], Collection[str]]
"""From an episode's seed and all agents to the agents of the row's policy."""


@final
@dataclass(frozen=True)
class CrossPlay:
    """The returns of every policy against every policy.

    Attributes:
        names: of the policies, in the order of rows and columns.
        returns: ``[P, P, episodes]``; entry ``[i, j]`` has the returns per agent of
            policy i, which plays with policy j.
    """

    names: tuple[str, ...]
    returns: Floats

    @property
    def means(self) -> Floats:
        """Mean return per agent of the row's policy, ``[P, P]``."""
        means: Floats = self.returns.mean(-1)
        return means

    def interval(self, row: str, column: str) -> Interval:
        """Return the mean return of a policy against another, and its 95 % interval.

        Raises:
            KeyError: if there is no such policy.
        """
        for name in (row, column):
            if name not in self.names:
                raise KeyError(
                    f"There is no policy {name!r}: the policies are {list(self.names)}."
                )
        i, j = self.names.index(row), self.names.index(column)
        return bootstrap([self.returns[i, j]], estimate=np.mean)

    def to_markdown(self) -> str:
        """Return means and intervals as a table; the row's policy has the return."""
        rows = [["", *self.names], ["---"] * (len(self.names) + 1)]
        for row in self.names:
            cells = [str(self.interval(row, column)) for column in self.names]
            rows.append([row, *cells])
        return "\n".join(map(markdown_row, rows))

    def plot(self, path: str | Path) -> None:
        """Write a heat map of the means; the suffix of ``path`` selects the format.

        Raises:
            ImportError: if matplotlib is not installed; says what to install.
        """
        with imports_of("plot", "A picture"):
            from matplotlib.figure import Figure
            from matplotlib.text import Text

        count = len(self.names)
        size = 2.5 + 0.8 * count
        figure = Figure(figsize=(size + 1, size), layout="constrained")
        axes = figure.add_subplot()
        means = self.means
        picture = axes.imshow(means, cmap="viridis")
        middle = (means.min() + means.max()) / 2
        axes.set_xticks(range(count), self.names, rotation=45, ha="right")
        axes.set_yticks(range(count), self.names)
        axes.set_xlabel("policy of the other agents")
        axes.set_ylabel("policy")
        for i, row in enumerate(self.names):
            for j, column in enumerate(self.names):
                interval = self.interval(row, column)
                half = (interval.high - interval.low) / 2
                text = f"{interval.value:.2f}\n±{half:.2f}"
                # Viridis is bright at high values.
                color = "black" if means[i, j] > middle else "white"
                axes.text(j, i, text, ha="center", va="center", color=color)
        figure.colorbar(picture, label="return per agent")
        for artist in figure.findobj(Text):
            artist.set_parse_math(False)  # A ``$`` in a name begins no formula.
        figure.savefig(path, dpi=120)


def cross_play(
    policies: Mapping[str, Any] | PolicyPool,
    create_env_fn: Any,
    *,
    episodes: int,
    seats: Seats | None = None,
    seed: int = 0,
    **options: Any,
) -> CrossPlay:
    """Let every policy play with every policy, itself included.

    Actions are deterministic unless ``deterministic=False`` is passed. In a game
    without chance, all episodes of a pair with the same seats are then the same game,
    and intervals show no more than the choice of seats.

    Args:
        policies: by name, as for collectors; or a pool, whose versions play.
        create_env_fn: the factory, or a list of factories.
        episodes: number of episodes of each pair.
        seats: returns the agents of the row's policy in an episode, from its seed and
            all agents; the others have the policy of the column. None: half of the
            agents, rounded up, sampled from the seed. It is called once per episode,
            in this process.
        seed: of the first episode; each episode has the seed after the last one's.
        options: further arguments of ``evaluate``.

    Raises:
        TypeError: if ``seats`` is not a function of a seed and the agents.
        ValueError: if there are no policies or no episodes, or if ``seats`` does not
            return agents.
    """
    check_arguments("cross_play()", create_env_fn, episodes, seed, options)
    population = members(policies)
    names = tuple(population)
    check_policies(population)
    _check_takes_two(seats or sampled_half)
    agents = agents_of(create_env_fn, options)
    seeds = range(seed, seed + episodes * len(names) ** 2)
    # Called here only, so returns are of the agents that had the row's policy even if
    # the function does not depend on its arguments alone.
    taken = [
        _taken(seats or sampled_half, episode_seed, everybody(agents))
        for episode_seed in seeds
    ]
    evaluation = evaluate(
        None,
        create_env_fn,
        episodes=len(seeds),
        seeds=seeds,
        policies=population,
        assign=_Pairs(names, tuple(taken), seed, episodes),
        **options,
    )
    flat = [
        per_capita(episode, agents, seated)
        for episode, seated in zip(evaluation.episodes, taken, strict=True)
    ]
    return CrossPlay(names, np.array(flat).reshape(len(names), len(names), episodes))


@final
@dataclass(frozen=True)
class _Pairs:
    """Assigns the policies of the pair to which an episode's seed belongs."""

    names: tuple[str, ...]
    taken: tuple[frozenset[str], ...]
    first: int
    episodes: int

    def __call__(self, seed: int, agents: tuple[str, ...]) -> dict[str, str]:
        """Return each agent's policy."""
        count = len(self.names)
        # Seeds outside of the range are only tried before the first episode.
        number = (seed - self.first) % len(self.taken)
        cell = number // self.episodes
        row, column = self.names[cell // count], self.names[cell % count]
        seated = self.taken[number]
        return {agent: row if agent in seated else column for agent in agents}


def sampled_half(seed: int, agents: tuple[str, ...]) -> list[str]:
    """Return half of the agents, rounded up, sampled from ``seed``."""
    rng = random.Random(derive(seed, Purpose.SEATS))
    return rng.sample(agents, -(-len(agents) // 2))


def members(policies: Any) -> dict[str, Any]:
    """Return the policies of a population by name.

    Args:
        policies: a mapping; a pool, whose filled places are the members; or a single
            policy.

    Raises:
        ValueError: if there are none.
    """
    if isinstance(policies, PolicyPool):
        numbers = policies.versions.tolist()
        both = zip(numbers, policies.members, strict=True)
        versions = {
            f"version_{number}": member for number, member in both if number >= 0
        }
        return dict(sorted(versions.items(), key=lambda entry: int(entry[0][8:])))
    if not isinstance(policies, Mapping):
        return {"policy": policies}
    if not policies:
        raise ValueError("There are no policies: pass at least one.")
    return dict(policies)


def check_policies(policies: Mapping[str, Any]) -> None:
    """Check policies as ``evaluate`` does, before any process starts.

    Raises:
        TypeError, ValueError: if a policy or its name is not possible.
    """
    AssignedPolicies(policies, lambda _seed, _agents: {})


def check_arguments(
    caller: str,
    create_env_fn: Any,
    episodes: int,
    seed: int,
    options: Mapping[str, Any],
) -> None:
    """Check numbers and options as ``evaluate`` does, before any process starts.

    Raises:
        TypeError: if an option is unknown, or an argument has a wrong type.
        ValueError: if a number is out of bounds.
    """
    for name in ("policy", "policies", "assign", "seeds"):
        if name in options:
            raise TypeError(
                f"{caller} takes no {name}: it assigns policies itself, in episodes "
                "with the seeds from seed on."
            )
    arguments = {**options, "episodes": episodes}
    parse(EvaluationArguments, caller, (None, create_env_fn), arguments)
    require("seed", seed, int, Option("", at_least=0, at_most=LARGEST_SEED))


def agents_of(create_env_fn: Any, options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the agents of each group.

    Args:
        create_env_fn: the factory, or a list of factories.
        options: of ``evaluate``.
    """
    workers = spread(
        create_env_fn,
        options.get("num_workers"),
        options.get("envs_per_worker", 1),
        options.get("create_env_kwargs"),
    )
    return describe(workers[0][0]).group_map


def everybody(agents: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return all agents, in the order in which ``assign`` gets them."""
    return tuple(agent for group in agents.values() for agent in group)


def _check_takes_two(seats: Any) -> None:
    try:
        inspect.signature(seats).bind(0, ())
    except ValueError:
        pass  # Some built-in functions do not tell their signature.
    except TypeError as error:
        raise TypeError(
            "seats must be a function of an episode's seed and all agents, such as "
            f"lambda seed, agents: agents[:1], but is {seats!r}: {error}."
        ) from error


def _taken(seats: Any, seed: int, agents: tuple[str, ...]) -> frozenset[str]:
    """Return the agents of the row's policy in an episode."""
    seated = seats(seed, agents)
    if (
        isinstance(seated, str)
        or not isinstance(seated, Collection)
        or not seated
        or not set(seated) <= set(agents)
    ):
        raise ValueError(
            f"seats must return some of the agents {agents}, but returned {seated!r} "
            f"for the seed {seed}."
        )
    return frozenset(seated)


def per_capita(
    episode: Episode, agents: Mapping[str, list[str]], chosen: Collection[str]
) -> float:
    """Return the mean return of the chosen agents in an episode."""
    returns = [
        value
        for group, names in agents.items()
        for agent, value in zip(names, episode.returns[group], strict=True)
        if agent in chosen
    ]
    return float(np.mean(returns))
