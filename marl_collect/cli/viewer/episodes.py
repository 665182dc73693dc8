"""A dataset as JSON values and pictures: its episodes, and the frames of one."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache, partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import FLAGS, Key
from marl_collect.core.signature import ACTS, MEMBER, NOBODY, POLICY_ID
from marl_collect.rendering.pictures import to_picture, to_png

if TYPE_CHECKING:
    from marl_collect.rollout.episodes import Curriculum
    from marl_collect.storage import Trajectories

FRAMES: Final = 2_000
"""Frames of an episode that are sent at once; the page asks for the others."""
_CELLS: Final = 20_000
"""Returns of agents in one part of the list, which arrives part by part."""
_LINES: Final = 32
"""Components of one key that are drawn; the page says how many there are."""
_HIDDEN: Final = {
    *(*FLAGS, "mask", ACTS, MEMBER, "action_mask", POLICY_ID, "collector"),
}
"""Keys that are no lines: they are drawn in other ways, or follow from the frame."""
_RANDOM: Final = "random actions"
_WAS_CLOSED: Final = "The viewer was closed."
_CLOSING: Final = 5.0
"""Seconds that an environment has to end its step and to close."""
_Begin = Callable[[], Generator[bytes]]
"""Begins to draw the states of an episode."""


@final
class Episodes:
    """The complete episodes of a dataset, as the page asks for them.

    Args:
        trajectories: the episodes.
        find_factory: returns a factory of the environment, to draw episodes without
            stored pictures by repeating their actions; or why there is none.
        curriculum: that the episodes were recorded with, if any.
    """

    def __init__(
        self,
        trajectories: "Trajectories",
        find_factory: Callable[[], Callable[[], Any] | str],
        curriculum: "Curriculum | None" = None,
    ) -> None:
        self._list = trajectories
        self._find_factory = find_factory
        self._curriculum = curriculum
        groups = trajectories.description.environment.groups
        self._agents = [
            (name, i) for name, g in groups.items() for i in range(g.n_agents)
        ]
        self._shapes = {field.key: tuple(field.shape) for field in trajectories.keys}
        self._stored = list(self._stored_pictures())
        # Requests for the pictures of an episode come one after the other.
        self._episode = lru_cache(1)(trajectories.arrays)
        self._drawer = _Drawer()

    def close(self) -> None:
        """Stop drawing, and close the environment that draws."""
        self._drawer.close()

    def about(self) -> dict[str, Any]:
        """Return what the page shows besides the list."""
        description = self._list.description
        groups = description.environment.groups
        return {
            "title": description.task,
            "name": self._list.name,
            "frames": int(self._list.lengths.sum()),
            "episodes": len(self._list),
            "agents": [
                {"name": groups[group].agents[row], "group": group}
                for group, row in self._agents
            ],
            "policies": self._policies[0],
        }

    def listed(self, begin: int, chosen: Sequence[int] | None = None) -> dict[str, Any]:
        """Return a part of the list as columns, from one of the episodes on.

        Args:
            begin: position of the first one.
            chosen: numbers of the episodes of the list; None for all.
        """
        numbers = np.arange(len(self._list)) if chosen is None else chosen
        part = np.asarray(numbers, np.int64)[begin : begin + self._rows]
        returns, unknown = self._list.agent_returns, np.full(len(part), np.nan)
        by_agent = [
            returns[group][part, row] if group in returns else unknown
            for group, row in self._agents
        ]
        return {
            "next": begin + len(part) if begin + len(part) < len(numbers) else None,
            "number": part.tolist(),
            "length": self._list.lengths[part].tolist(),
            "terminated": self._list.terminated[part].tolist(),
            "team": _plain(self._list.returns[part]),
            "returns": _plain(np.stack(by_agent, 1)),
            "policies": self._policies[1][part].tolist(),
        }

    def episode(self, number: int, begin: int) -> dict[str, Any]:
        """Return ``FRAMES`` frames of an episode, from frame ``begin`` on."""
        frames = self._episode(number)
        end = begin + FRAMES
        run = int(self._list.run_numbers[number])
        return {
            "begin": begin,
            "length": int(self._list.lengths[number]),
            "frames": FRAMES,
            "seed": self._seeds[number],
            "run": run,
            "sources": [
                {"name": "/".join(key), "agent": self._agent_name(key[0], agent)}
                for key, agent in self._stored
            ],
            # Without stored pictures: True if it is drawn, or why it is not.
            "drawn": not self._stored and (callable(self._factory) or self._factory),
            "agents": [
                self._agent(frames, run, position, begin, end)
                for position in range(len(self._agents))
            ],
            "shared": self._lines(frames, (), None, begin, end),
        }

    def picture(self, number: int, source: int, frame: int) -> bytes | Future[bytes]:
        """Return a PNG of the state in which the actions of a frame were taken.

        Args:
            number: of the episode.
            source: of ``episode``; drawn from the actions if there are none.
            frame: of the episode.

        Returns:
            The picture, or its future if it is drawn.

        Raises:
            ValueError: if the episode cannot be drawn; says why.
        """
        if not self._stored:
            return self._drawer.picture(number, frame, self._replay)
        key, agent = self._stored[source]
        values = self._episode(number)[key][frame]
        picture = values if agent is None else values[agent]
        newest = picture[-1] if picture.ndim == 4 else picture
        return to_png(to_picture(newest))

    def pictures(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield source and frame of every picture of an episode that can be drawn."""
        last = int(self._list.lengths[number]) - 1
        try:
            # All of them, because the last one may be the first that cannot be drawn.
            drawn = self.picture(number, 0, last)
            if isinstance(drawn, Future):
                drawn.result()
        except (ValueError, ImportError):
            return
        sources = len(self._stored) or 1
        yield from ((s, t) for s in range(sources) for t in range(last + 1))

    def parts(self, number: int) -> range:
        """Return the first frames of the parts in which an episode is sent."""
        return range(0, int(self._list.lengths[number]), FRAMES)

    def known(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Return these episodes; without any, the best, the median and the worst.

        Raises:
            ValueError: if there is no such episode.
        """
        n = len(self._list)
        for number in chosen:
            if number >= n:
                raise ValueError(
                    f"There is no episode {number}: {self._list.name} has {n} "
                    "complete episodes, numbered from 0."
                )
        order = np.argsort(-self._list.returns, kind="stable").tolist()
        typical = [order[i] for i in (0, n // 2, -1)] if n else []
        return chosen or tuple(dict.fromkeys(typical))

    @property
    def _rows(self) -> int:
        return max(100, _CELLS // max(1, len(self._agents)))

    @cached_property
    def _seeds(self) -> list[int | None]:
        return self._list.seeds

    @cached_property
    def _policies(self) -> tuple[list[str], NDArray[np.int64]]:
        """Names of policies, and which each agent has in each episode, ``[n, a]``."""
        runs = self._list.run_numbers
        whose = np.zeros((len(runs), len(self._agents)), np.int64)
        labels: dict[str, int] = {}
        first = {
            group: self._list.first((group, POLICY_ID))
            for group in dict.fromkeys(group for group, _ in self._agents)
            if (group, POLICY_ID) in self._shapes
        }
        for run in np.unique(runs).tolist():
            chosen = np.flatnonzero(runs == run)
            for position, (group, row) in enumerate(self._agents):
                ids = np.full(len(chosen), NOBODY)
                if group in first:
                    ids = first[group][chosen, row]
                for one in np.unique(ids).tolist():
                    name = self._name(run, one) if group in first else self._label(run)
                    label = labels.setdefault(name, len(labels))
                    whose[chosen[ids == one], position] = label
        return list(labels), whose

    def _name(self, run: int, policy_id: int) -> str:
        if policy_id == NOBODY:
            return _RANDOM
        names = self._list.runs[run].policy.get("names")
        if isinstance(names, list) and 0 <= policy_id < len(names):
            return str(names[policy_id])
        return f"policy {policy_id}"

    def _label(self, run: int) -> str:
        policy = self._list.runs[run].policy
        if policy.get("kind") == "random":
            return _RANDOM
        kind = str(policy.get("kind", f"policy of run {run}"))
        return f"{kind} {str(policy.get('sha256', ''))[:8]}".strip()

    def _agent_name(self, group: str, agent: int | None) -> str | None:
        """Return the name of the agent that sees a picture; None if nobody owns it."""
        groups = self._list.description.environment.groups
        return None if agent is None else groups[group].agents[agent]

    @cached_property
    def _factory(self) -> Callable[[], Any] | str:
        return self._find_factory()

    def _agent(
        self,
        frames: Mapping[Any, NDArray[Any]],
        run: int,
        position: int,
        begin: int,
        end: int,
    ) -> dict[str, Any]:
        group, row = self._agents[position]
        reward = np.full(len(next(iter(frames.values()))), np.nan)
        if ("next", group, "reward") in self._shapes:
            reward[:] = frames["next", group, "reward"][:, row, 0]
        agent: dict[str, Any] = {
            "reward": _plain(reward[begin:end]),
            "return": _plain(reward.cumsum()[begin:end]),
            "lines": self._lines(frames, (group,), row, begin, end),
            "ends": [
                {"frame": t, "kind": kind}
                for kind in ("terminated", "truncated")
                for t in self._ends(frames, group, kind, row)
            ],
        }
        if (group, "mask") in self._shapes:
            agent["acts"] = _bits(frames[group, "mask"][begin:end, row])
        if (group, "action_mask") in self._shapes:
            legal = frames[group, "action_mask"][begin:end, row]
            agent["legal"] = [_bits(frame) for frame in legal]
        space = self._list.description.environment.groups[group].action
        if isinstance(space, spaces.Discrete):
            agent["n_actions"] = int(space.n)
        if (group, POLICY_ID) in self._shapes:
            ids = frames[group, POLICY_ID][begin:end, row].tolist()
            name = {one: self._name(run, one) for one in set(ids)}
            agent["policy"] = [name[one] for one in ids]
        return agent

    def _ends(
        self, frames: Mapping[Any, NDArray[Any]], group: str, kind: str, row: int
    ) -> list[int]:
        """Return the frames in which an agent ends while the episode goes on."""
        if ("next", group, kind) not in self._shapes:
            return []
        flags = frames["next", group, kind][:-1, row, 0]
        return np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0) == 1).tolist()

    def _lines(
        self,
        frames: Mapping[Any, NDArray[Any]],
        prefix: Key,
        row: int | None,
        begin: int,
        end: int,
    ) -> list[dict[str, Any]]:
        """Return the numbers over time of each key of an agent, or of the root."""
        groups = self._list.description.environment.groups
        pictures = {key for key, _ in self._stored}
        lines = []
        for key in self._shapes:
            at_root = not prefix and key[0] not in {"next", *groups}
            if not (at_root or (prefix and key[: len(prefix)] == prefix)):
                continue
            if key in pictures or key[len(prefix)] in _HIDDEN:
                continue
            values = frames[key][begin:end]
            if row is not None:
                values = values[:, row]
            values = values.reshape(len(values), -1)
            is_action = key[len(prefix) :] == ("action",) and values.shape[1] > 1
            if is_action and groups[prefix[0]].one_hot:
                values = values.argmax(1, keepdims=True)
            shown = values[:, :_LINES].astype(np.float64)
            lines.append(
                {
                    "name": "/".join(key[len(prefix) :]),
                    "size": values.shape[1],
                    "values": _plain(shown.T),
                }
            )
        return lines

    def _stored_pictures(self) -> Iterator[tuple[Key, int | None]]:
        """Yield the keys of stored pictures, each with the agent that sees it.

        They are ``[height, width, channels]``, or stacks of such, oldest first.
        """
        groups = self._list.description.environment.groups
        for field in self._list.keys:
            per_agent = field.key[0] in groups
            shape = field.shape[1:] if per_agent else field.shape
            picture = field.dtype == "uint8" and len(shape) in (3, 4)
            if not picture or field.key[0] == "next":
                continue
            if not per_agent:
                yield field.key, None
            else:
                n_agents = groups[field.key[0]].n_agents
                yield from ((field.key, agent) for agent in range(n_agents))

    def _replay(self, number: int) -> _Begin:
        """Return what yields a PNG of each state of an episode.

        Raises:
            ValueError: if the episode cannot be drawn; says why.
        """
        seed, factory = self._seeds[number], self._factory
        if not callable(factory):
            raise ValueError(factory)  # noqa: TRY004 - the reason, no wrong type
        if seed is None:
            raise ValueError("The seed of this episode was not stored.")
        return partial(_draw, factory, self._episode(number), seed, self._curriculum)


@final
class _Drawer:
    """Draws the states of one episode after the other, each when it is needed.

    Environments may draw only in the thread that built them, so there is one thread. It
    is a daemon: an environment that hangs does not keep the program from ending.
    """

    def __init__(self) -> None:
        """Wait for the first request."""
        self._thread: Thread | None = None
        self._requests: SimpleQueue[tuple[Future[bytes], _Begin, int] | None]
        self._requests = SimpleQueue()
        self._begin: dict[int, _Begin] = {}
        self._closed = False
        # Of the thread: the episode that it draws, and what it has of it.
        self._begun: _Begin | None = None
        self._states: Generator[bytes] | None = None
        self._drawn: list[bytes] = []
        self._error: Exception | None = None

    def picture(
        self, number: int, frame: int, find: Callable[[int], _Begin]
    ) -> Future[bytes]:
        """Return a picture of an episode.

        Args:
            number: of the episode; another one ends the drawing of the one before.
            frame: of the episode.
            find: returns what draws the states of an episode, in the thread.

        Raises:
            ValueError: after ``close``, or from ``find``.
        """
        if self._closed:
            raise ValueError(_WAS_CLOSED)
        if number not in self._begin:
            self._begin = {number: find(number)}
        if self._thread is None:
            self._thread = Thread(target=self._run, name="drawing", daemon=True)
            self._thread.start()
        picture: Future[bytes] = Future()
        self._requests.put((picture, self._begin[number], frame))
        return picture

    def close(self) -> None:
        """Close the environment after its step; leave it if that takes too long."""
        self._closed = True
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(_CLOSING)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            picture, begin, frame = request
            try:
                picture.set_result(self._draw(begin, frame))
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                picture.set_exception(error)
        self._turn_to(None)

    def _turn_to(self, begin: _Begin | None) -> None:
        before, self._begun = self._states, begin
        self._states = begin() if begin else None
        self._drawn, self._error = [], None
        if before is not None:
            before.close()

    def _draw(self, begin: _Begin, frame: int) -> bytes:
        if begin is not self._begun:
            self._turn_to(begin)
        while len(self._drawn) <= frame and not (self._error or self._closed):
            assert self._states is not None  # An episode was begun.
            try:
                self._drawn.append(next(self._states))
            except StopIteration:
                self._error = LookupError("The episode has no such frame.")
            except (ValueError, ImportError) as error:
                self._error = error  # Raised here, each time.
            except Exception as error:  # noqa: BLE001 - of an environment, any
                self._error = ValueError(
                    f"The environment raised {type(error).__name__}: {error}"
                )
        if frame < len(self._drawn):
            return self._drawn[frame]
        raise self._error or ValueError(_WAS_CLOSED)


def _draw(
    factory: Callable[[], Any],
    frames: Mapping[Any, NDArray[Any]],
    seed: int,
    curriculum: "Curriculum | None",
) -> Generator[bytes]:
    """Yield a PNG of each state of an episode in which actions were taken."""
    import torch
    from tensordict import TensorDict

    from marl_collect.rendering.replaying import replay_pictures

    values = {key: torch.from_numpy(array) for key, array in frames.items()}
    length = len(next(iter(frames.values())))
    pictures = replay_pictures(
        factory, TensorDict(values, [length]), seed=seed, curriculum=curriculum
    )
    for t, picture in enumerate(pictures):
        if t == length - 1:
            for _ in pictures:  # The state at the end is compared too, not shown.
                pass
        yield to_png(picture)


def _plain(values: NDArray[Any]) -> list[Any]:
    """Return numbers of seven digits as lists; None for those that JSON lacks."""
    flat = [
        float(f"{value:.7g}") if np.isfinite(value) else None
        for value in values.reshape(-1).tolist()
    ]
    if values.ndim == 1:
        return flat
    width = values.shape[-1]
    return [flat[i * width : (i + 1) * width] for i in range(len(values))]


def _bits(values: NDArray[Any]) -> str:
    return "".join("1" if value else "0" for value in values.tolist())
