"""Batches, what a dataset of them must hold, and ways to damage one.

Frames are compared as bytes with what was added, and episodes are put together by a
plain loop: the package's storage only writes and reads.
"""

import errno
import itertools
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, EnvDescription, GroupDescription
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    EndedEpisode,
    RunDescription,
    Writer,
    open_dataset,
)

N_AGENTS = 2
_BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
GROUP = GroupDescription(("a", "b"), _BOX, spaces.Discrete(5))
ABOUT = DatasetDescription("stream", EnvDescription("stream", {"g": GROUP}))
"""Of the batches of a ``Stream``."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float32),
    *(torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    torch.complex64,
)
SHAPES = ((), (1,), (2, 3), (0,), (2, 0), (40, 36, 3))
CALLS = ("fsync", "rename", "replace", "unlink", "utime", "open")
"""Functions of ``os`` that change what is on disk."""
Frame = dict[tuple[str, ...], bytes]


@dataclass
class Stream:
    """Environments whose values are drawn; episodes end at random.

    Attributes:
        seed: of everything.
        n_envs: rows of a batch.
        extras: further keys of the group: dtype and shape of an agent's value.
        ragged: whether rows have padding.
        begun: whether the first episodes are seen from their first frame.
        says_begin: whether batches have ``is_init``.
    """

    seed: int = 0
    n_envs: int = 2
    extras: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = field(
        default_factory=dict
    )
    ragged: bool = False
    begun: bool = True
    says_begin: bool = False

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._kinds: Any = {"observation": (torch.float32, (3,)), **self.extras}
        self.episode = np.full(self.n_envs, 0 if self.begun else 7)
        self._frame = np.full(self.n_envs, 0 if self.begun else 3)
        self._root = self._draw()

    def batch(self, frames: int = 6) -> TensorDict:
        """Return the next batch ``[n_envs, frames]``."""
        valid = np.ones((self.n_envs, frames), np.bool_)
        if self.ragged and self.n_envs > 1:
            # What is behind the mask is padding, whatever its values are.
            valid[-1, self._rng.integers(1, frames + 1) :] = False
        steps = [self._step(column) for column in valid.T]
        batch = TensorDict({}, valid.shape)
        for key in steps[0]:
            values = torch.from_numpy(np.stack([step[key] for step in steps], 1))
            if key[-1] in self._kinds:
                dtype, _ = self._kinds[key[-1]]
                values = values.flatten().view(dtype).view(values.shape[:-1])
            batch[key] = values
        if self.ragged:
            batch["collector", "mask"] = torch.from_numpy(valid)
        return batch

    def batches(self, count: int = 2, frames: int = 6) -> list[TensorDict]:
        return [self.batch(frames) for _ in range(count)]

    def _draw(self) -> dict[str, Any]:
        """Draw any bits: NaN, infinities and -0.0 among them."""
        values: dict[str, Any] = {}
        for name, (dtype, shape) in self._kinds.items():
            size = (self.n_envs, N_AGENTS, *shape, dtype.itemsize)
            high = 2 if dtype == torch.bool else 256
            values[name] = self._rng.integers(0, high, size, np.uint8)
        return values

    def _step(self, moves: Any) -> dict[tuple[str, ...], Any]:
        """Return the next frame of each environment, and go on in those that move."""
        after, fresh, draw = self._draw(), self._draw(), self._rng.random
        done, stays = draw(self.n_envs) < 0.25, draw(self.n_envs) < 0.2
        terminated = done & (draw(self.n_envs) < 0.5)
        frame: dict[tuple[str, ...], Any] = {}
        for name, root in self._root.items():
            after[name][stays] = root[stays]  # Observations that stand still.
            frame["g", name], frame["next", "g", name] = root, after[name]
            following = after[name].copy()
            following[done], following[~moves] = fresh[name][done], root[~moves]
            self._root[name] = following
        frame["g", "action"] = self._rng.integers(0, 5, (self.n_envs, N_AGENTS))
        frame["frame",] = self._frame
        frame["collector", "traj_ids"] = (np.arange(self.n_envs) << 32) + self.episode
        if self.says_begin:
            frame["is_init",] = self._frame[:, None] == 0
        rewards = self._rng.standard_normal((self.n_envs, N_AGENTS, 1), np.float32)
        frame["next", "g", "reward"] = rewards
        frame["next", "done"] = done[:, None]
        frame["next", "terminated"] = terminated[:, None]
        self._frame = np.where(moves, np.where(done, 0, self._frame + 1), self._frame)
        self.episode = self.episode + (moves & done)
        return frame


def write(
    path: Path,
    batches: Iterable[TensorDict],
    about: DatasetDescription = ABOUT,
    run: RunDescription | None = None,
) -> None:
    """Write batches as one run."""
    with Writer(path, about, run) as writer:
        for batch in batches:
            writer.add(batch)


def add_run(path: Path, seed: int, task: str = "c") -> list[TensorDict]:
    """Write a run with pictures, whose episodes cross batches; return its batches."""
    envs = [partial(CountingEnv, state=True)] * 3
    collector = Collector(envs, frames_per_batch=30, total_frames=300, seed=seed)
    batches = [batch.clone() for batch in collector]
    for batch in batches:
        shape = (*batch.shape, 2, 40, 36, 3)
        batch["hunter", "image"] = torch.randint(256, shape, dtype=torch.uint8)
    versions = {"python": "3.11" if seed < 2 else "3.12"}
    run = RunDescription(seed, {"kind": "random"}, versions=versions)
    write(path, batches, DatasetDescription(task, collector.description), run)
    return batches


def read(dataset: Dataset | Path) -> list[Frame]:
    """Return all frames of a dataset, or of the folder of one, as bytes by key."""
    if isinstance(dataset, Path):
        dataset = open_dataset(dataset)
    return flat_frames(dataset.transitions[:])


def frames_of(*batches: TensorDict) -> list[Frame]:
    """Return the valid frames of batches, row by row, as bytes by key."""
    frames: list[Frame] = []
    for batch in batches:
        tensors = flatten(batch)
        everything = torch.ones(batch.shape, dtype=torch.bool)
        valid = tensors.pop(("collector", "mask"), everything)
        frames += [
            {key: bytes_of(tensor[b, t]) for key, tensor in tensors.items()}
            for b, t in valid.nonzero().tolist()
        ]
    return frames


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flat_frames(data: TensorDict) -> list[Frame]:
    return frames_of(data.unsqueeze(0))


def traj_id(frame: Frame) -> int:
    return int.from_bytes(frame["collector", "traj_ids"], sys.byteorder)


def complete_episodes(frames: list[Frame]) -> dict[int, list[Frame]]:
    """Return the complete episodes of a run by their trajectory, as they end."""
    by_id: dict[int, list[Frame]] = {}
    for frame in frames:
        by_id[traj_id(frame)] = [*by_id.pop(traj_id(frame), []), frame]
    return {
        key: episode
        for key, episode in by_id.items()
        if [int.from_bytes(frame["frame",], sys.byteorder) for frame in episode]
        == list(range(len(episode)))
        and episode[-1]["next", "done"] == b"\1"
    }


def ended_episode(frames: list[Frame]) -> EndedEpisode:
    """Return what a dataset says about a complete episode, from its frames."""
    rewards = [np.frombuffer(f["next", "g", "reward"], np.float32) for f in frames]
    returns: Any = np.sum(rewards, 0, np.float64)
    end = frames[-1]["next", "terminated"] == b"\1"
    agents = {"g": tuple(returns.tolist())}
    return EndedEpisode(traj_id(frames[0]), len(frames), end, agents)


def damage(path: Path, draw: random.Random) -> None:
    """Change some bytes of a file, cut it, or extend it."""
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if draw.random() < 0.3:  # The footer is small but has everything in it.
        at = len(content) - 1 - draw.randrange(min(len(content), 6000))
    kind = draw.choice(["flip", "flip", "flip", "zeros", "cut", "extend", "noise"])
    if kind == "flip":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif kind == "cut":
        del content[at:]
    elif kind == "extend":
        content += draw.randbytes(100)
    else:
        content[at : at + 4] = draw.randbytes(len(content[at : at + 4]))
    path.write_bytes(content)


class BrokenDiskError(OSError):
    """A disk that fails."""


def act_at_calls(
    patch: pytest.MonkeyPatch,
    names: Iterable[str],
    before: Callable[[int], object] = lambda _: None,
    after: Callable[[int], object] = lambda _: None,
) -> None:
    """Call these with the number of each call of functions of ``os``."""
    calls = itertools.count()

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            before(call := next(calls))
            try:
                return function(*args, **keywords)
            finally:  # Also where it fails, such as to remove what is not there.
                after(call)

        return wrapped

    for name in names:
        patch.setattr(os, name, wrap(getattr(os, name)))


@contextmanager
def failing(call: int, number: int = errno.EIO) -> Iterator[None]:
    """Let the calls that change what is on disk fail, from one of them on."""

    def fail(current: int) -> None:
        if current >= call:
            raise BrokenDiskError(number, "broken disk")

    with pytest.MonkeyPatch.context() as patch:
        act_at_calls(patch, ("open", "fsync", "rename"), before=fail)
        yield


def killed(call: int, after: bool, work: Callable[[Path], Any], folder: Path) -> bool:
    """Call ``work`` in a fork that dies before or after a call; return if it died."""

    def die(current: int) -> None:
        if current == call:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            when: Any = {"after" if after else "before": die}
            act_at_calls(pytest.MonkeyPatch(), CALLS, **when)
            work(folder)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the fork must end
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), "the fork failed"
    return status != 0
