"""What fills slots, and how they become batches: shape, trajectories, device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from marl_collect.buffers.compact_observations import LastObservations, attach
from marl_collect.buffers.layout import VALID, Layout
from marl_collect.buffers.trajectories import (
    TrajectoryAssembler,
    TrajFormat,
    split_trajectories,
)
from marl_collect.collectors.options import CollectorOptions, storage_dims
from marl_collect.collectors.publish import Publisher
from marl_collect.collectors.statistics import Statistics
from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.host_copies import moved
from marl_collect.core.tensordicts import assemble, flatten
from marl_collect.rollout.env_calls import EnvCall
from marl_collect.rollout.episodes import Episode


@final
@dataclass(frozen=True)
class FilledSlot:
    """One filled slot.

    Attributes:
        tensors: ``[B, T, ...]`` per key; views of the slot's memory.
        ends: number of valid frames of each environment; T unless the batch is ragged.
        episodes: the episodes that ended in it.
        sizes: number of environments of each worker in it.
        last: the observations that ``compact_obs`` stores separately.
    """

    tensors: Mapping[Key, torch.Tensor]
    ends: list[int]
    episodes: Sequence[Episode]
    sizes: Sequence[int]
    last: LastObservations | None = None

    @property
    def frames(self) -> int:
        """Number of valid frames of all environments."""
        return sum(self.ends)


class Source(Protocol):
    """Fills slots: environments, policy and memory of one kind of collector.

    It is ``Teams``, or the ``OwnRollout`` of a ``Collector``.

    Attributes:
        description: of the environments.
        sizes: number of environments of each worker.
        shape: layout of all batches, ``sizes``, and the frames of each worker's
            environments; None if batches vary.
        batch_frames: frames of one batch, or of the largest.
        equal_batches: whether all batches have as many frames.
        weights: the policy's weights.
        statistics: counts what happens.
        works_in_forks: whether a forked process may use it as well.
        keeps_state: whether ``states`` works after ``close`` too.
    """

    description: EnvDescription
    sizes: list[int]
    shape: tuple[Layout, list[int], list[int]] | None
    batch_frames: int
    equal_batches: bool
    weights: Publisher
    statistics: Statistics
    works_in_forks: bool
    keeps_state: bool

    def fill(self, *, random: bool, delivered: int) -> FilledSlot:
        """Fill one slot.

        Args:
            random: take random actions instead of the policy's.
            delivered: frames of all earlier batches; limits how far to prefetch.
        """

    def begin_episodes(
        self, workers: Sequence[int] | None = None, seed: int | None = None
    ) -> None:
        """Begin new episodes.

        Args:
            workers: their indices; None for all.
            seed: from which all workers derive all random numbers from now on.
        """

    def states(self) -> list[Any]:
        """Return the state of every worker, for ``load``."""

    def load(self, states: list[Any]) -> None:
        """Resume from these states."""

    def attribute(self, owner: str, name: str) -> list[Any]:
        """Return an attribute of every worker's ``"env"`` or ``"policy"``."""

    def call_env(self, call: EnvCall) -> list[Any]:
        """Call a method in environments, whose rows count over all workers.

        Returns:
            A result for each environment, or one for each simulator, in their order.
        """

    def set_level(self, level: int) -> None:
        """Set the curriculum's level for episodes of the batches begun from now on."""

    def explain(self) -> list[str]:
        """Return how each worker's policy runs, and why, also after ``close``."""

    def steps(self) -> int:
        """Return the frames stepped so far, from any thread."""

    def metrics(self) -> dict[str, Any]:
        """Return entries of ``stats()`` in addition to ``statistics``."""

    def outline(self) -> str:
        """Describe workers, environments and batch shape; also after ``close``."""

    def close(self, timeout: float) -> None:
        """Release all resources within ``timeout`` seconds."""


@final
class Delivery:
    """Turns filled slots into batches.

    The options are applied in this order: ``set_truncated``, ``cat_results``,
    ``split_trajs`` or ``trajs_per_batch``, ``storing_device``, ``postproc``,
    ``replay_buffer``.
    """

    def __init__(self, options: CollectorOptions, description: EnvDescription) -> None:
        """Prepare for these options.

        Attributes:
            device: of filled slots.
        """
        self._options = options
        self._description = description
        self._assembler = TrajectoryAssembler()
        self.device = torch.device("cpu")

    def batches(self, filled: FilledSlot) -> list[Any]:
        """Return the batches that this slot completes, usually one."""
        options = self._options
        if options.set_truncated:
            set_truncated(filled, list(self._description.groups))
        batch = as_batch(filled, self._description)
        if options.trajs_per_batch is not None:
            self._assembler.add(batch)
            return self.more()
        if options.split_trajs:
            return [self._finish(split_trajectories(batch), fresh=True)]
        return [self._finish(self._shape(batch, filled), fresh=False)]

    def blank(
        self, layout: Layout, sizes: Sequence[int], frames_of_each: Sequence[int]
    ) -> TensorDictBase:
        """Return zeros like a batch, before it is split into trajectories.

        Args:
            layout: of the slots.
            sizes: number of each worker's environments.
            frames_of_each: number of frames of each worker's environments.
        """
        batch, frames = layout.batch
        tensors = {
            key: torch.from_numpy(
                np.zeros((batch, frames, *leaf.shape), leaf.dtype)
            ).to(self.device)
            for key, leaf in layout.fields.items()
        }
        ends = np.repeat(frames_of_each, sizes).tolist()
        filled = FilledSlot(tensors, ends, [], sizes)
        return self._shape(as_batch(filled, self._description), filled)

    def more(self) -> list[Any]:
        """Return a batch that needs no further slot, if there is one."""
        count = self._options.trajs_per_batch or 1
        return [] if len(self._assembler) < count else [self._trajectories(count)]

    def rest(self) -> list[Any]:
        """Return the last complete trajectories, too few for ``more``, at the end."""
        return [self._trajectories()] if len(self._assembler) else []

    def state(self) -> dict[Key, torch.Tensor] | None:
        """Return the frames of undelivered trajectories, ``[N, ...]`` by key.

        None if batches are not trajectories.
        """
        if self._options.trajs_per_batch is None:
            return None
        held = self._assembler.held()
        frames = {} if held is None else flatten(held)
        # torch.save refuses tensors without elements that share an address.
        return {key: t if t.numel() else t.clone() for key, t in frames.items()}

    def check(
        self,
        state: Mapping[Key, torch.Tensor] | None,
        shape: tuple[Layout, Sequence[int], Sequence[int]] | None,
    ) -> None:
        """Check the state before anything is loaded.

        Args:
            state: what ``state`` returned.
            shape: arguments of ``blank``; None if batches vary.

        Raises:
            ValueError: if only one of the two collectors delivers whole trajectories,
                or if those of the state have other keys, shapes or dtypes.
        """
        whole = self._options.trajs_per_batch is not None
        problem = ""
        if whole and state is None:
            problem = "has no trajectories, but this collector has trajs_per_batch"
        elif not whole and state is not None:
            problem = "has trajectories, but this collector has no trajs_per_batch"
        elif state and shape is not None:
            leaves = flatten(self.blank(*shape))
            here = {(key, leaf.shape[2:], leaf.dtype) for key, leaf in leaves.items()}
            there = {(key, leaf.shape[1:], leaf.dtype) for key, leaf in state.items()}
            if differ := {key for key, *_ in here ^ there}:
                problem = (
                    "has trajectories whose keys, shapes or dtypes differ in "
                    f"{sorted(differ)}"
                )
        if problem:
            raise ValueError(
                f"The state {problem}. Build the collector with the arguments it was "
                "saved with."
            )

    def load(self, state: Mapping[Key, torch.Tensor] | None) -> None:
        """Resume from ``state``, which was checked."""
        self.forget()
        if state:
            row = {key: frames[None] for key, frames in state.items()}
            self._assembler.add(_assembled(row, self._description))

    def forget(self) -> None:
        """Drop all trajectories that were not delivered."""
        self._assembler = TrajectoryAssembler()

    def forget_open(self) -> None:
        """Drop trajectories that will not be continued."""
        self._assembler.drop_open()

    def _trajectories(self, most: int | None = None) -> Any:
        stored = self._options.replay_buffer is not None
        form: TrajFormat = "cat" if stored else self._options.traj_format
        return self._finish(self._assembler.take(form, most), fresh=True)

    def _shape(self, batch: TensorDictBase, filled: FilledSlot) -> TensorDictBase:
        """Join the rows of workers as ``cat_results`` says."""
        sizes = filled.sizes
        how, rows = self._options.cat_results, sizes[0]
        if how is None:
            return batch
        shaped = batch
        if how != "stack" and rows == 1:
            shaped = batch.reshape(-1)
            if self._options.ragged:
                frames = torch.arange(batch.shape[-1], device="cpu")
                ends = torch.tensor(filled.ends, device="cpu")
                shaped = shaped[(frames < ends[:, None]).reshape(-1)]
        elif how != 0 and rows > 1:
            shaped = batch.reshape(len(sizes), rows, batch.shape[-1])
            if how == -1:
                shaped = torch.cat(list(shaped.unbind(0)), dim=-1)
        shaped.names = [*([None] * (shaped.ndim - 1)), "time"]
        return shaped

    def _finish(self, batch: TensorDictBase, *, fresh: bool) -> Any:
        options = self._options
        device = options.store_on
        # Trajectories were joined on the CPU.
        here = torch.device("cpu") if fresh and not options.split_trajs else self.device
        elsewhere = here.type != "cpu" or batch.device is not None
        if device is not None and (device.type != "cpu" or elsewhere):
            batch = moved(batch, device)
            if device.type == "cuda" and not options.no_cuda_sync:
                torch.cuda.synchronize(device)
        elif not options.use_buffers and not fresh:
            batch = batch.clone()
        out: Any = batch if options.postproc is None else options.postproc(batch)
        if options.replay_buffer is None:
            return out
        if not is_tensor_collection(out):
            raise TypeError(
                "postproc must return the batch for the replay_buffer, but it returned "
                f"{out!r:.100}."
            )
        if 0 in out.shape:  # TorchRL's buffers refuse this.
            return None
        if storage_dims(options.replay_buffer) == 1:
            out = out.reshape(-1)
            if VALID in out.keys(include_nested=True):
                out = out[out.get(VALID)]
        options.replay_buffer.extend(out)
        return None


def as_batch(filled: FilledSlot, description: EnvDescription) -> TensorDict:
    """Return a slot's tensors as a TensorDict ``[B, T]``, without copying."""
    return attach(_assembled(filled.tensors, description), filled.last, filled.ends)


def _assembled(
    tensors: Mapping[Key, torch.Tensor], description: EnvDescription
) -> TensorDict:
    size = tuple(tensors["done",].shape[:2])
    return assemble(tensors, size, description.group_sizes, time=True)


def set_truncated(filled: FilledSlot, groups: list[str]) -> None:
    """Mark each environment's last valid frame, and the agents alive in it."""
    rows = torch.arange(len(filled.ends), device="cpu")
    last = torch.tensor(filled.ends, device="cpu") - 1
    for at in [(), *((group,) for group in groups)]:
        done = filled.tensors["next", *at, "done"]
        truncated = filled.tensors["next", *at, "truncated"]
        truncated[rows, last] |= ~done[rows, last]
        done[rows, last] = True
