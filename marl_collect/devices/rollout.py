"""The step loop on a device: worlds, memory and slots are tensors of it.

The host waits for the device once per slot, for the flags and rewards that its
bookkeeping needs. Whatever happens between slots, such as resets and replays, goes
through the memory of the host, as in every rollout.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.layout import STEP_COUNT, TRAJ_IDS, VALID, VERSION, Layout
from marl_collect.core.batched import WorldBatch
from marl_collect.core.description import Key
from marl_collect.core.seeding import episode_seeds_on
from marl_collect.core.signature import IS_INIT, PolicySignature
from marl_collect.devices.memory import (
    BOOLS,
    FAULTS,
    DeviceMemory,
    DeviceSlot,
    DeviceSlots,
)
from marl_collect.devices.random_actions import DeviceRandomRunner
from marl_collect.devices.worlds import DeviceWorlds, impossible_actions
from marl_collect.policies.runner import PolicyRunner
from marl_collect.rollout.episodes import (
    EPISODE_BITS,
    Arrays,
    EndedEpisodes,
    Plan,
)
from marl_collect.rollout.loop import Collected, Rollout, StateMark
from marl_collect.rollout.progress import ProgressReporter

_Copies = list[tuple[Key, torch.Tensor]]
"""Blocks of a slot with what is copied there in each frame, ``[K, ...]``."""


@final
class DeviceRollout(Rollout):
    """Collects frames of the worlds of a simulator with a device."""

    def __init__(
        self,
        engine: WorldBatch,
        policy: PolicyRunner,
        plan: Plan,
        progress: ProgressReporter,
        *,
        random_frames: bool = False,
    ) -> None:
        """Bind simulator and policy to memory on the device.

        Args:
            engine: of the simulator.
            policy: acts on tensors of the device.
            plan: which episodes to collect.
            progress: receives what this rollout is doing.
            random_frames: whether some frames have random actions instead of those of
                the policy.

        Raises:
            ValueError: if these frames cannot be stored, because the policy changes
                observations.
        """
        assert engine.env.simulator_device is not None
        self._env, self._simulator = engine.env, engine
        self._device = engine.env.simulator_device
        self._random_frames = random_frames
        self._there: DeviceMemory | None = None
        # Whether the memory of the host, or that of the device, has changed since the
        # last copy.
        self._host_is_newer, self._device_is_newer = False, False
        super().__init__(engine, policy, plan, progress)
        limits = [self._description.time_limit, plan.max_frames_per_traj]
        limit = min((limit for limit in limits if limit is not None), default=None)
        self._worlds = DeviceWorlds(self._env, self._device_memory, limit)
        self._checks = [
            check
            for name, group in self._description.groups.items()
            for check in impossible_actions(name, group)
        ]

    @property
    def _device_memory(self) -> DeviceMemory:
        if self._there is None:
            self._there = DeviceMemory(self._description, self._memory, self._device)
        return self._there

    def _bind(self, policy: PolicyRunner) -> None:
        policy.bind(self._device_memory.tensors)  # type: ignore[arg-type]

    def _random_runner(self, instead_of: PolicySignature) -> PolicyRunner:
        changed = sorted("/".join(key) for key in instead_of.apart)
        if changed and self._random_frames:
            raise ValueError(
                f"init_random_frames is not supported on {self._device} if the policy "
                f"changes what the environment writes, here {changed}: write to other "
                "keys, or build the simulator without a device."
            )
        return DeviceRandomRunner(self._description)

    def _write(self, arrays: Arrays) -> None:
        for key, value in arrays.items():
            self._device_memory.tensors[key].copy_(torch.from_numpy(value))

    def slots(self, layout: Layout) -> DeviceSlots:
        """Return the slots of a collector whose batches have this layout."""
        repeats = self._description.repeats
        return DeviceSlots(
            layout,
            self._device_memory,
            outputs=list(self._signature.roots),
            host=list(self._description.actions()) if repeats else [],
            faults=len(self._checks),
        )

    def collect(
        self, slot: Any, version: int = 0, *, random: bool = False
    ) -> Collected:
        """Fill a ``DeviceSlot``; see ``Rollout``.

        Raises:
            ValueError: if the policy took an action that does not exist, or the
                simulator said that no world begins when one did.
        """
        started = time.perf_counter()
        if not self._episodes.started:
            self.reset()
        self._early_seeds = None
        self._load_memory()
        self._episodes.enter()
        frames = len(slot.blocks[BOOLS])
        numbers, lengths = self._numbers_and_lengths()
        if self._is_init is not None:
            slot.blocks[IS_INIT][0] = self._device_memory.tensors[IS_INIT]
        nobody = self._step_all(slot, frames, numbers, random=random)
        self._stamp_slot(slot, numbers, lengths, version)
        self._find_faults(slot)
        arrays = slot.host()
        self._raise_faults(slot, arrays, nobody)
        self._device_is_newer = True
        return self._collected(started, frames, self._note_ends(arrays, frames))

    def mark(self) -> StateMark:
        """Return what ``state`` needs to know of this moment."""
        self._store_memory()
        return super().mark()

    def load(self, state: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Continue from ``state``; see ``Rollout``."""
        self._store_memory()
        super().load(state, fresh=fresh)
        self._host_is_newer = True

    def explain(self) -> str:
        """Return how actions are computed, and where."""
        return f"On {self._device}, in batches of tensors. {super().explain()}"

    def _begin(self, rows: NDArray[np.int64]) -> None:
        self._store_memory()
        super()._begin(rows)
        self._host_is_newer = True

    def _store_memory(self) -> None:
        if self._device_is_newer:
            self._device_memory.store(self._memory)
            self._device_is_newer = False

    def _load_memory(self) -> None:
        if self._host_is_newer:
            self._device_memory.load(self._memory)
            self._worlds.load_sums(self._simulator.sums())
            self._host_is_newer = False

    def _numbers_and_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number and the length of each running episode, int64 ``[K]``."""
        state = self._episodes.state()
        both = np.stack([state["episode"], state["length"]])
        numbers, lengths = torch.from_numpy(both).to(self._device)
        self._worlds.frames.copy_(lengths)
        return numbers, lengths

    def _step_all(
        self,
        slot: DeviceSlot,
        frames: int,
        numbers: torch.Tensor,
        *,
        random: bool,
    ) -> list[int]:
        """Step through a slot; return the frames in which nobody is said to begin."""
        plan, worlds, memory = self.plan, self._worlds, self._device_memory
        roots, outputs, following = self._copies()
        acted = _by_frame(slot, outputs, frames)
        stepped = _by_frame(slot, following, frames)
        begun = _by_frame(slot, roots, frames)
        environments = torch.arange(
            plan.environments.start, plan.environments.stop, device=self._device
        )
        ahead = torch.arange(frames + 1, device=self._device)
        seeds = episode_seeds_on(
            plan.seed, environments[:, None], numbers[:, None] + ahead
        )
        count = torch.zeros_like(numbers)[:, None]
        carried = [memory.tensors[key] for key in self._signature.carried]
        is_init = memory.tensors.get(IS_INIT)
        act = self._begin_acting(frames, random=random)
        progress = self._progress
        nobody: list[int] = []
        _copy(*begun[0])
        for frame in range(frames):
            progress.acting()
            act(frame)
            _copy(*acted[frame])
            progress.stepping()
            worlds.step()
            _copy(*stepped[frame])
            count += worlds.over[:, None]
            if not worlds.begin(seeds.gather(1, count)[:, 0]):
                nobody.append(frame)
            elif carried:
                for tensor in carried:
                    over = worlds.over.view(-1, *[1] * (tensor.ndim - 1))
                    tensor.masked_fill_(over, 0)
            if is_init is not None:
                is_init.copy_(worlds.over[:, None])
            if frame + 1 < frames:
                _copy(*begun[frame + 1])
        return nobody

    def _copies(self) -> tuple[_Copies, _Copies, _Copies]:
        """Return what is copied at the root, after acting, and under ``next``."""
        signature, memory = self._signature, self._device_memory
        changed = {*signature.roots, *signature.removed}
        observed = [*self._description.observed(), *signature.states]
        outputs = {key: memory.tensors[at] for key, at in signature.roots.items()}
        roots = {
            memory.block_of(key): memory.blocks[memory.block_of(key)]
            for key in observed
            if key not in changed
        }
        following = {
            memory.block_of(key): memory.blocks[memory.block_of(key)]
            for key in [*observed, *self._description.outcome()]
        }
        return (
            list(roots.items()),
            list(outputs.items()),
            [(("next", *key), block) for key, block in following.items()],
        )

    def _stamp_slot(
        self,
        slot: DeviceSlot,
        numbers: torch.Tensor,
        lengths: torch.Tensor,
        version: int,
    ) -> None:
        """Write ids, counts and versions; see ``RunningEpisodes``."""
        blocks = slot.blocks
        frames = len(blocks[BOOLS])
        done = slot.tensors()["next", "done"][..., 0].transpose(0, 1)
        began = torch.zeros_like(done, dtype=torch.int64)
        began[1:] = done[:-1]
        if TRAJ_IDS in blocks:
            first = self.plan.environments.start
            index = torch.arange(first, first + len(numbers), device=self._device)
            blocks[TRAJ_IDS].copy_((index << EPISODE_BITS) + numbers + began.cumsum(0))
        if STEP_COUNT in blocks:
            time = torch.arange(frames, device=self._device)[:, None]
            start = torch.where(began.bool(), time, -(2**62))
            start[0] = -lengths
            counts = (time - start.cummax(0).values)[..., None]
            blocks[STEP_COUNT].copy_(counts)
            blocks["next", *STEP_COUNT].copy_(counts + 1)
        if IS_INIT in blocks:
            blocks[IS_INIT][1:] = began[1:, :, None].bool()
            blocks["next", *IS_INIT].fill_(False)
        if VALID in blocks:
            blocks[VALID].fill_(True)
        if VERSION in blocks:
            blocks[VERSION].fill_(version)
            blocks["next", *VERSION].fill_(version)

    def _find_faults(self, slot: DeviceSlot) -> None:
        """Write which kinds of actions were impossible in some frame."""
        for number, (_, wrong) in enumerate(self._wrong(slot)):
            torch.any(wrong, out=slot.blocks[FAULTS][number])

    def _wrong(self, slot: DeviceSlot) -> Sequence[tuple[Key, torch.Tensor]]:
        """Return by key which agents took impossible actions, bool ``[K, T, n]``."""
        tensors = slot.tensors()
        out = []
        for key, rule in self._checks:
            wrong = rule(tensors[key])
            if (key[0], "mask") in tensors:
                wrong = wrong & tensors[key[0], "mask"].bool()
            out.append((key, wrong))
        return out

    def _raise_faults(
        self, slot: DeviceSlot, arrays: Mapping[Key, Any], nobody: Sequence[int]
    ) -> None:
        name = self._description.name
        over = arrays["next", "done"][:, nobody, 0]
        if over.any():
            world, index = np.argwhere(over)[0].tolist()
            raise ValueError(
                f"begin() of {name} returned None, which means that no world begins, "
                f"but world {world} ended in frame {nobody[index]} of the batch."
            )
        if not arrays[FAULTS].any():
            return
        for key, wrong in self._wrong(slot):
            for world, frame, agent in wrong.nonzero().tolist():
                action = slot.tensors()[key][world, frame, agent].tolist()
                agents = self._description.groups[key[0]].agents
                raise ValueError(
                    f"The action {action} of agent {agents[agent]} in "
                    f"{'/'.join(key)}, in world {world} and frame {frame} of the "
                    f"batch, is not in its space: expected an action of "
                    f"{self._description.groups[key[0]].action}."
                )

    def _note_ends(self, arrays: Mapping[Key, Any], frames: int) -> EndedEpisodes:
        """Count the episodes that ended in a slot, and those that began."""
        done = arrays["next", "done"][..., 0].swapaxes(0, 1)
        for frame in np.flatnonzero(done.any(1)).tolist():
            (rows,) = done[frame].nonzero()
            self._episodes.end(rows, frame + 1)
            self._episodes.begin(rows, self._level)
        slot = {key: array for key, array in arrays.items() if key != FAULTS}
        ended = self._episodes.leave(slot, frames)
        self._calls.passed(frames)
        self._make_pending()
        return ended


def _by_frame(
    slot: DeviceSlot, copies: _Copies, frames: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return the targets and sources of the copies of each frame."""
    copies = [(key, source) for key, source in copies if key in slot.blocks]
    sources = [source for _, source in copies]
    rows = [slot.blocks[key].unbind(0) for key, _ in copies]
    return [([row[t] for row in rows], sources) for t in range(frames)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy all sources, in as few kernels as the device allows."""
    if targets:
        torch._foreach_copy_(targets, sources)
