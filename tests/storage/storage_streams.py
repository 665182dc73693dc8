"""Batches, what a dataset of them must hold, and ways to damage one.

Frames are compared as bytes with what was added, and episodes are put together by a
plain loop: the package's storage only writes and reads.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, EnvDescription, GroupDescription
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
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
        self._episode = [0 if self.begun else 7] * self.n_envs
        self._frame = [0 if self.begun else 3] * self.n_envs
        self._root = [self._draw() for _ in range(self.n_envs)]

    def batch(self, frames: int = 6) -> TensorDict:
        """Return the next batch ``[n_envs, frames]``."""
        rows = [[self._step(env) for _ in range(frames)] for env in range(self.n_envs)]
        batch: Any = torch.stack([torch.stack(row) for row in rows])
        if self.ragged:
            # What is behind the mask is padding, whatever its values are.
            valid = torch.ones(self.n_envs, frames, dtype=torch.bool)
            short = self._rng.integers(1, frames + 1)
            if self.n_envs > 1:
                valid[-1, short:] = False
                self._rewind(rows[-1], int(short))
            batch["collector", "mask"] = valid
        return batch

    def batches(self, count: int = 2, frames: int = 6) -> list[TensorDict]:
        """Return the next batches."""
        return [self.batch(frames) for _ in range(count)]

    def _rewind(self, row: list[TensorDict], short: int) -> None:
        """Continue the last row behind its last valid frame."""
        if short == len(row):
            return
        following = row[short]
        traj_id = int(following["collector", "traj_ids"])
        self._episode[-1] = traj_id & 0xFFFFFFFF
        self._frame[-1] = int(following["frame"])
        self._root[-1] = following.select("g").exclude(("g", "action")).clone()

    def _draw(self) -> TensorDict:
        group = {"observation": self._values(torch.float32, (3,))}
        for name, (dtype, shape) in self.extras.items():
            group[name] = self._values(dtype, shape)
        return TensorDict({"g": TensorDict(group, [N_AGENTS])}, [])

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        raw = self._rng.integers(0, 256, (N_AGENTS, *shape, dtype.itemsize), np.uint8)
        if dtype == torch.bool:
            raw &= 1
        if not raw.size:
            return torch.empty(N_AGENTS, *shape, dtype=dtype)
        # Any bits: NaN, infinities and -0.0 among them.
        return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(N_AGENTS, *shape)

    def _step(self, env: int) -> TensorDict:
        root, following = self._root[env], self._draw()
        if self._rng.random() < 0.2:  # Observations that stand still.
            following = root.clone()
        done = torch.tensor([bool(self._rng.random() < 0.25)])
        terminated = done & bool(self._rng.integers(2))
        is_init = torch.tensor([self._frame[env] == 0])
        frame = root.clone()
        frame["g", "action"] = torch.from_numpy(self._rng.integers(0, 5, N_AGENTS))
        frame["frame"] = torch.tensor(self._frame[env])
        traj_id = (env << 32) + self._episode[env]
        frame["collector"] = TensorDict({"traj_ids": torch.tensor(traj_id)}, [])
        if self.says_begin:
            frame["is_init"] = is_init
        nxt = following.clone()
        reward = self._rng.standard_normal((N_AGENTS, 1)).astype(np.float32)
        nxt["g", "reward"] = torch.from_numpy(reward)
        nxt["done"], nxt["terminated"] = done, terminated
        frame["next"] = nxt
        self._frame[env] += 1
        self._root[env] = following
        if done:
            self._episode[env] += 1
            self._frame[env] = 0
            self._root[env] = self._draw()
        return frame


def collected(
    n_envs: int = 2,
    *,
    frames: int = 20,
    batches: int = 5,
    seed: int = 0,
    state: bool = False,
    endless: bool = False,
    **options: Any,
) -> tuple[DatasetDescription, list[TensorDict]]:
    """Collect batches of a counting environment.

    Args:
        n_envs: rows of a batch.
        frames: of a batch.
        batches: how many.
        seed: of the collector.
        state: whether the environment has a state.
        endless: whether its episodes never end.
        options: of the collector.
    """
    lengths: Any = {"min_length": 10**9, "max_length": 10**9, "deaths": False}
    collector = Collector(
        [lambda: CountingEnv(state=state, **(lengths if endless else {}))] * n_envs,
        frames_per_batch=frames,
        total_frames=batches * frames,
        seed=seed,
        **options,
    )
    about = DatasetDescription("counting", collector.description)
    return about, [batch.clone() for batch in collector]


def write(
    path: Path,
    batches: Iterable[TensorDict],
    about: DatasetDescription = ABOUT,
    run: RunDescription | None = None,
) -> str:
    """Write batches as one run, and return its name."""
    with Writer(path, about, run) as writer:
        for batch in batches:
            writer.add(batch)
    return writer.run


def read(dataset: Dataset | Path) -> list[Frame]:
    """Return all frames of a dataset, or of the folder of one, as bytes by key."""
    if isinstance(dataset, Path):
        dataset = open_dataset(dataset)
    return flat_frames(dataset[range(len(dataset))])


def frames_of(*batches: TensorDict) -> list[Frame]:
    """Return the valid frames of batches, row by row, as bytes by key."""
    return [frame for batch in batches for frame in _frames_of(batch)]


def _frames_of(batch: TensorDict) -> list[Frame]:
    keys = [
        key if isinstance(key, tuple) else (key,)
        for key in batch.keys(include_nested=True, leaves_only=True)
    ]
    mask = ("collector", "mask")
    valid = batch[mask] if mask in keys else torch.ones(batch.shape, dtype=torch.bool)
    tensors = {key: batch[key] for key in keys if key != mask}
    return [
        {key: bytes_of(tensor[b, t]) for key, tensor in tensors.items()}
        for b, t in valid.nonzero().tolist()
    ]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flat_frames(data: TensorDict) -> list[Frame]:
    """Return frames ``[n]`` that were read, as bytes by key."""
    return frames_of(data.unsqueeze(0))


def number(frame: Frame) -> int:
    """Return the number of a frame in its episode, which the stream has written."""
    return int(np.frombuffer(frame["frame",], np.int64)[0])


def traj_id(frame: Frame) -> int:
    """Return the trajectory of a frame."""
    return int(np.frombuffer(frame["collector", "traj_ids"], np.int64)[0])


def complete_episodes(frames: list[Frame]) -> dict[int, list[Frame]]:
    """Return the complete episodes of a run by their trajectory, from its frames."""
    by_id: dict[int, list[Frame]] = defaultdict(list)
    for frame in frames:
        by_id[traj_id(frame)].append(frame)
    return {
        key: episode
        for key, episode in by_id.items()
        if [number(frame) for frame in episode] == list(range(len(episode)))
        and episode[-1]["next", "done"] == b"\1"
    }


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
