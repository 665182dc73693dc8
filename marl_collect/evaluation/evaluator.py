"""Evaluates policies on whole episodes in parallel workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from numbers import Integral
from typing import Annotated, Any, ClassVar, cast, final

import numpy as np
from torch import nn

from marl_collect.buffers.slots import Slots
from marl_collect.buffers.trajectories import LONGEST
from marl_collect.collectors import messages
from marl_collect.collectors.multi import start_workers
from marl_collect.collectors.options import (
    CollectorOptions,
    ExplorationType,
    WorkerOptions,
)
from marl_collect.collectors.statistics import agent_return, episode_means, team_return
from marl_collect.collectors.workers import Workers
from marl_collect.core.batch import consecutive
from marl_collect.core.closing import Closing
from marl_collect.core.factories import Factory
from marl_collect.core.ranks import Ranks
from marl_collect.core.seeding import LARGEST_SEED, episode_seeds
from marl_collect.errors import ClosedError, warn
from marl_collect.options import (
    Option,
    RejectedKeyword,
    declared,
    function,
    method,
    require,
    values,
)
from marl_collect.processes.closing import CLOSE_SECONDS, close_after
from marl_collect.rollout.episodes import Episode

_FRAMES = 100  # Per environment, between two checks for ended episodes.
_LONG = 10_000  # Frames of an episode, after which a warning names the limit.
_SLOT = 0  # There is only one.


@dataclass(frozen=True)
class _Shared(WorkerOptions):
    """The arguments that evaluate() and Evaluator share."""

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = {
        **WorkerOptions.rejected_keywords,
        **{
            option.name: RejectedKeyword("evaluation does not return batches")
            for option in declared(CollectorOptions)
            if option not in declared(WorkerOptions)
            if option.name not in ("create_env_fn", "policy", "max_frames_per_traj")
        },
        "seed": RejectedKeyword("it takes seeds: a root seed, or one for each episode"),
        "exploration_type": RejectedKeyword("it takes deterministic=True or False"),
    }
    renamed_keywords: ClassVar[Mapping[str, str]] = {
        "max_episode_frames": "max_frames_per_traj"
    }

    policy: Annotated[Any, Option("as for collectors; None for random actions")]
    create_env_fn: Annotated[
        Factory | Sequence[Factory], Option("as for collectors", checked=False)
    ]
    _: KW_ONLY
    deterministic: Annotated[
        bool, Option("use deterministic actions instead of sampled ones")
    ] = True
    max_frames_per_traj: Annotated[
        int | None,
        Option(
            "end episodes after this many frames; needed if episodes may never end",
            at_least=1,
        ),
    ] = None


@dataclass(frozen=True)
class EvaluatorArguments(_Shared):
    """The arguments of ``Evaluator``."""

    _: KW_ONLY
    seeds: Annotated[
        int,
        Option(
            "one root seed, from which each episode's seed is derived. Episodes are "
            "those of environment 0 of a collector with this seed",
            at_least=0,
            at_most=LARGEST_SEED,
        ),
    ] = 0


@dataclass(frozen=True)
class EvaluationArguments(_Shared):
    """The arguments of ``evaluate``."""

    _: KW_ONLY
    episodes: Annotated[
        int,
        Option(
            "number of episodes, which the environments play in turn: episode i is "
            "that of environment i, modulo their number",
            at_least=1,
        ),
    ]
    seeds: Annotated[
        int | Iterable[int],
        Option(
            "one root seed, from which each episode's seed is derived, or one seed per "
            "episode, in the order of the result. Episodes of a root seed are those "
            "of environment 0 of a collector with this seed: pass another one than to "
            "training",
            checked=False,
        ),
    ] = 0
    all_ranks: Annotated[
        bool,
        Option(
            "share the episodes among the ranks of a job, all of which must call "
            "evaluate() and get all of its episodes. By default a rank plays all of "
            "them and waits for no other, so rank 0 may evaluate alone"
        ),
    ] = False


@final
@dataclass(frozen=True)
class Evaluation:
    """The episodes of an evaluation.

    Attributes:
        episodes: in the order of their seeds. ``environment`` is the number of the
            episode.
    """

    episodes: tuple[Episode, ...]

    @property
    def team_returns(self) -> list[float]:
        """Return of each episode, summed over all agents."""
        return [team_return(episode) for episode in self.episodes]

    @property
    def agent_returns(self) -> list[float]:
        """Return of each episode, averaged over all agents."""
        return [agent_return(episode) for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        """Frames of each episode."""
        return [episode.length for episode in self.episodes]

    @property
    def mean_team_return(self) -> float:
        """Mean over episodes of the sum over agents."""
        return cast(float, self._means["mean_team_return"])

    @property
    def mean_agent_return(self) -> float:
        """Mean over episodes and agents."""
        return cast(float, self._means["mean_agent_return"])

    @property
    def mean_group_returns(self) -> dict[str, float]:
        """Mean over episodes and the agents of each group, by group."""
        return cast(dict[str, float], self._means["mean_group_returns"])

    @property
    def mean_returns(self) -> dict[str, list[float]]:
        """Mean over episodes of each agent's return, by group."""
        return cast(dict[str, list[float]], self._means["mean_returns"])

    @property
    def mean_length(self) -> float:
        """Mean over episodes of the number of frames."""
        return cast(float, self._means["mean_length"])

    @property
    def _means(self) -> dict[str, Any]:
        return episode_means(self.episodes)


@final
class Evaluator(Closing):
    """Evaluates one policy repeatedly in the same worker processes.

    Environments and policy are built only once. Close the evaluator, or use it in a
    ``with`` block::

        with Evaluator(policy, factory, num_workers=2) as evaluator:
            before = evaluator.evaluate(episodes=100)
            train(policy)
            after = evaluator.evaluate(episodes=100)  # with the current weights

    The arguments are the fields of ``EvaluatorArguments``.

    Raises:
        TypeError: if an option is passed that is about batches.
    """

    @method(EvaluatorArguments)
    def __init__(self, arguments: EvaluatorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        self._root = arguments.seeds
        self._limit = arguments.max_frames_per_traj
        self._closed = False
        self._workers = start_workers(
            _collector_options(arguments),
            # If a policy is called at the start, no environment is reset twice for it.
            first_seeds=partial(_derived, self._root),
        )
        try:
            self._slots = _attached(self._workers)
        except BaseException as error:
            close_after(error, self._workers.close)
            raise

    def __repr__(self) -> str:
        """Return the task and the number of workers, or that it is closed."""
        if self._closed:
            return "Evaluator(closed)"
        workers = len(self._workers)
        return f"Evaluator({self._workers.description.name}, {workers} workers)"

    def evaluate(
        self,
        episodes: int,
        *,
        seeds: int | None = None,
        first: int = 0,
        weights: Any = None,
        model_id: str | None = None,
    ) -> Evaluation:
        """Run whole episodes and return their returns and lengths.

        The same seed gives the same episodes, regardless of earlier evaluations and of
        the number of workers: their seeds are derived from it, and from these random
        actions and the noise of ``make_policy``'s heads. Policies that draw from
        torch's generator repeat with equal workers only. With another number of
        environments per worker, or if ``environments`` does not divide ``first``,
        the last bit of a network's outputs may differ.

        Args:
            episodes: number of episodes.
            seeds: root seed of these episodes; None uses the evaluator's own.
            first: number of the first episode that is played; those before it are left
                out.
            weights: a module, a state_dict or a TensorDict of parameters to act with;
                None uses the policy's current weights.
            model_id: name of the policy that ``weights`` are for, if there are several,
                or path of a submodule. All others use their current weights.

        Raises:
            ClosedError: after ``close``, and after an error or Ctrl-C during an
                evaluation.
            KeyError: if ``weights`` have other names than the policy, or there is no
                policy ``model_id``.
            TypeError: if a number is no integer.
            ValueError: if ``weights`` do not fit the policy, or there is no episode.
        """
        if self._closed:
            raise ClosedError("This Evaluator is closed: create a new one.")
        episodes = require("episodes", episodes, int, Option("", at_least=1))
        first = require("first", first, int, Option("", at_least=0))
        if first >= episodes:
            raise ValueError(
                f"episodes must be at least 1 and more than first, but is {episodes}, "
                f"and first is {first}."
            )
        workers = self._workers
        root = self._root
        if seeds is not None:
            bounds = Option("", at_least=0, at_most=LARGEST_SEED)
            root = require("seeds", seeds, int, bounds)
        chosen_seeds = _derived(root, episodes)
        policy = workers.weights.policy
        tensors = None
        chosen = weights is not None or model_id is not None
        if chosen or (isinstance(policy.module, nn.Module) and policy.names):
            tensors = policy.chosen(weights, model_id)
        if tensors is not None:
            # This contacts no worker, so workers stay usable after an error here.
            workers.weights.publish((tensors, None))
        return self._play(root, chosen_seeds[first:], first)

    @property
    def environments(self) -> int:
        """Number of episodes that are played at the same time."""
        return sum(self._workers.sizes)

    def _play(self, root: int, seeds: Sequence[int], first: int = 0) -> Evaluation:
        workers = self._workers
        count = sum(workers.sizes)
        # Whatever the number of workers, an episode has the same row in its worker.
        shares = [tuple(seeds[k::count]) for k in range(count)]
        try:
            workers.play(root, shares)
            played = _played(workers, list(map(len, shares)), self._limit)
        except BaseException as error:
            # Unread replies would be taken for replies to later commands.
            close_after(error, self.close)
            raise
        return Evaluation(
            tuple(
                replace(played[i % count][i // count], environment=first + i)
                for i in range(len(seeds))
            )
        )

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._workers.pids

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the workers, by force after ``timeout`` seconds; may be called twice."""
        if not self._closed:
            self._closed = True
            with closing(self._slots):
                self._workers.close(timeout)


@function(EvaluationArguments)
def evaluate(arguments: EvaluationArguments) -> Evaluation:
    """Run whole episodes and return their returns and lengths.

    The same seeds give the same episodes, whatever the number of workers, unless the
    policy draws from torch's generator.

    The arguments are the fields of ``EvaluationArguments``.

    Raises:
        TypeError: if an option is passed that is about batches.
        ValueError: if numbers are invalid, for example if the number of seeds differs
            from the number of episodes, or, with ``all_ranks``, if they differ
            between ranks.
        RuntimeError: with ``all_ranks``, if ``torch.distributed`` does not connect the
            ranks, or another rank has failed or ended.
    """
    episodes = arguments.episodes
    root, seeds = _checked(arguments.seeds, episodes)
    if seeds and arguments.on_worker_failure == "restart":
        raise ValueError(
            'on_worker_failure="restart" replaces a lost episode by another one, but '
            "seeds=[...] assigns a seed to each episode: pass one root seed, or omit "
            "on_worker_failure."
        )
    chosen = seeds or _derived(root, episodes)

    def played(shared: Sequence[int]) -> Evaluation:
        evaluator = Evaluator(**values(_Shared, arguments), seeds=root)
        evaluation = evaluator._play(root, shared)  # noqa: SLF001 - of this module
        evaluator.close()
        return evaluation

    return _of_all_ranks(played, chosen) if arguments.all_ranks else played(chosen)


def _of_all_ranks(
    play: Callable[[Sequence[int]], Evaluation], seeds: Sequence[int]
) -> Evaluation:
    """Let each rank play some of the episodes; return all of them, on all ranks."""
    ranks = Ranks.of(None, None)
    caller = "evaluate(all_ranks=True)"
    # Before anything is played, since it may take minutes.
    for rank, others in enumerate(ranks.gather(list(seeds), caller)):
        if others != list(seeds):
            raise ValueError(
                f"{caller} plays the same episodes on all ranks, but rank "
                f"{ranks.rank} has {len(seeds)} episodes and rank {rank} has "
                f"{len(others)}, or their seeds differ: pass equal episodes and seeds."
            )

    def play_share() -> tuple[Episode, ...]:
        share = seeds[ranks.rank :: ranks.world_size]
        return play(share).episodes if share else ()

    shares = ranks.together(play_share, caller)
    return Evaluation(
        tuple(
            replace(shares[i % len(shares)][i // len(shares)], environment=i)
            for i in range(len(seeds))
        )
    )


def _collector_options(arguments: EvaluatorArguments) -> CollectorOptions:
    """Return the options of a collector that plays the episodes."""
    return CollectorOptions(
        arguments.create_env_fn,
        arguments.policy,
        **values(WorkerOptions, arguments),
        frames_per_batch=_FRAMES,
        exploration_type=ExplorationType.DETERMINISTIC
        if arguments.deterministic
        else ExplorationType.RANDOM,
        max_frames_per_traj=arguments.max_frames_per_traj,
        seed=arguments.seeds,
        storing_device="cpu",  # Batches stay where they are, whatever devices act.
        # Numbers of environments are those of episodes, on every rank.
        rank=0,
        world_size=1,
    )


def _attached(workers: Workers) -> Slots:
    """Let the workers map one slot."""
    slots = Slots(workers.layout(sum(workers.sizes), _FRAMES), prepared=1)
    try:
        rows = consecutive(workers.sizes)
        parts = {index: (of_worker, _FRAMES) for index, of_worker in enumerate(rows)}
        workers.attach(slots, slots.acquire(), parts)
    except BaseException:
        slots.close()
        raise
    return slots


def _played(
    workers: Workers, wanted: Sequence[int], limit: int | None
) -> list[list[Episode]]:
    """Collect until each environment has its number of episodes; return these.

    Workers whose environments have theirs rest.

    Args:
        workers: with a slot of ``_FRAMES`` frames attached.
        wanted: number of episodes of each environment.
        limit: ``max_frames_per_traj``.

    Raises:
        RuntimeError: if an episode is longer than ``LONGEST``, and there is no limit.
    """
    ended: list[list[Episode]] = [[] for _ in wanted]
    newest = [0] * len(wanted)  # When the newest episode of each environment ended.
    frames = 0
    while True:
        waiting = {
            index
            for index, rows in enumerate(consecutive(workers.sizes))
            if any(len(ended[k]) < wanted[k] for k in rows)
        }
        if not waiting:
            return ended
        late = [k for k, n in enumerate(wanted) if n and not ended[k]]
        if frames == _LONG and limit is None and late:
            warn(
                f"In an evaluation, the first episode of environment {late[0]} "
                f"has not ended after {frames:,} frames. An evaluation waits for its "
                "end. If there may be none, pass max_frames_per_traj, or --set "
                "max_frames_per_traj=FRAMES to `marl-collect compare`."
            )
        for k, n in enumerate(wanted):
            running = frames - newest[k] if len(ended[k]) < n else 0
            if running > LONGEST and limit is None:
                raise RuntimeError(
                    f"In an evaluation, an episode of environment {k} has not ended "
                    f"after {running:,} frames. If episodes may never end, or are "
                    "longer, pass max_frames_per_traj, which truncates them."
                )
        frames += _FRAMES
        workers.collect(sorted(waiting), messages.Collect(_SLOT))
        while waiting:
            index, reply = workers.wait(waiting)
            waiting.remove(index)
            for episode in reply.episodes:
                ended[episode.environment].append(episode)
                newest[episode.environment] = frames


def _derived(root: int, episodes: int) -> list[int]:
    """Return the seeds that one environment of a collector would give its episodes."""
    seeds = episode_seeds(root, np.zeros(1, np.int64), np.arange(episodes))
    return cast(list[int], seeds.tolist())


def _checked(seeds: Any, episodes: int) -> tuple[int, tuple[int, ...]]:
    """Return the root seed, and the seeds of the episodes if these were given."""
    numbers = tuple(seeds) if isinstance(seeds, Iterable) else (seeds,)
    for seed in numbers:
        if not isinstance(seed, Integral) or not 0 <= int(seed) <= LARGEST_SEED:
            raise ValueError(
                f"seeds must be non-negative integers below 2**63, but found {seed!r}."
            )
    if isinstance(seeds, Integral):
        return int(seeds), ()
    if len(numbers) != episodes:
        raise ValueError(
            f"There are {episodes} episodes, but {len(numbers)} seeds: pass one seed "
            "per episode."
        )
    return 0, tuple(map(int, numbers))
