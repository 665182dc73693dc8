"""Runs a policy on the rows of some agents, if it computes every agent's row alone.

Of several policies, each acts for some of the agents. A network that sees one agent at
a time need not compute the rows of the others. Its own rows are copied together as if
each were an environment with one agent, and a copy of the policy for one agent runs on
8, 4, 2 or 1 of them at a time. So a few recordings serve any number of rows, which may
change with every episode. If the network treats agents differently, because they have
identities or weights of their own, each agent has a copy of the policy.

The noise is that of the whole policy. Other kernels compute the rows than in one large
batch, so results may differ from it in the last bits.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from marl_collect.core.description import EnvDescription, Key, Row, allocate
from marl_collect.policies.fused.elementary import ELEMENTWISE
from marl_collect.policies.fused.numpy_calls import copying
from marl_collect.policies.fused.random_frames import RandomFrames
from marl_collect.policies.fused.recordable import declares, why_not_recordable
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.noise import NoiseStream
from marl_collect.policies.probe import (
    ProbeResult,
    input_keys,
    output_keys,
    undisturbed,
)
from marl_collect.policies.runner import Generators
from marl_collect.weights.state import ModuleState

Call = Callable[[int], None]

BY_ROW = "by_row"
"""The attribute with which a module declares that it does not mix agents.

Its output for an agent depends on the inputs of this agent and of the environment only,
in the same way for all agents, if its children are like that. If it has the attribute
``n_agents``, its copy with ``n_agents = 1`` computes the output of one agent.
"""
KEEP_AGENT = "keep_agent"
"""The method of a module that treats agents differently, but does not mix them.

``module.keep_agent(i)`` makes a copy of the module compute the output of agent ``i``
from the input of this agent alone. The module then declares ``by_row``.
"""
_LAYERS = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(TensorDictSequential, ProbabilisticTensorDictSequential),
    *(nn.Linear, nn.Conv2d, nn.Flatten, nn.LayerNorm, *ELEMENTWISE),
)
"""Layers that treat rows alike. Where one of them mixes agents, its size counts them.

Then the copy for one agent fails: a convolution whose channels are agents, for example.
"""
_SIZES = (8, 4, 2, 1)
"""Numbers of rows per run. Larger runs do not reduce the time per row."""
_RUN = 10_000_000
"""Fixed cost of a run, in floating-point operations."""
_ROW = 250_000
"""Cost of copying a row, in floating-point operations."""
_COMPARED = 2
"""How often the copies are compared with the policy, on random observations."""
_RTOL, _ATOL, _UNLIKE = 1e-3, 1e-3, 0.01
"""Tolerances of this comparison, and the share of numbers that may be beyond them.

Other kernels compute the rows. A difference in the last bit may change a sampled
action, or the logarithm of its density close to a bound. Copies that compute something
else differ in nearly all numbers.
"""


class _CannotBeSplitError(Exception):
    """A policy's copies for one agent do not work."""


@contextmanager
def _code_of_users() -> Iterator[None]:
    """Have an error mean that all rows have to be computed.

    A layer that mixes agents can raise anything if there is one agent.
    """
    try:
        yield
    except Exception as error:
        raise _CannotBeSplitError from error


@final
@dataclass(frozen=True, eq=False)
class OwnRows:
    """Runs a policy on the rows of its agents, on the memory of K environments.

    Attributes:
        module: runs the whole policy; for its signature, noise and errors.
        bound: the memory to which it is bound, with outputs of its own.
        memory: of the step loop, ``[K, ...]`` per key.
        groups: what acts for each group.
        state: of the policy; once it has changed, the copies have other settings or
            tensors.
    """

    module: ModuleRunner
    bound: Row
    memory: Row
    groups: Mapping[str, "_GroupRows"]
    state: ModuleState

    def equals_all_rows(self) -> bool:
        """Return whether the copies compute what the policy does, on random inputs."""
        module, memory = self.module, self.memory
        saved = {key: array.copy() for key, array in memory.items()}
        frames = RandomFrames(module.description, memory)
        mine = {
            group: rows.compared(len(memory["done",]))
            for group, rows in self.groups.items()
        }
        stored = {**module.signature.outputs, **module.signature.carried}
        unlike = total = 0
        try:
            for _ in range(_COMPARED):
                frames.draw()
                for stream in module.noise.streams:
                    frames.fill_noise(stream)
                    stream.slot = stream.array[None].copy()
                for key in module.signature.carried:
                    self.bound[key][...] = memory[key]
                with _code_of_users(), undisturbed(module.policy):
                    values = [value.detach().clone() for value in module.call()]
                for group_rows in self.groups.values():
                    group_rows.begin(1)
                with undisturbed(module.policy):
                    self.call(mine)(0)
                for key, value in zip(module.targets, values, strict=True):
                    key = key[1:] if key[0] == "next" else key
                    if key not in stored:
                        continue
                    rows = mine[key[0]]
                    expected, actual = value.numpy()[rows], memory[key][rows]
                    close = np.isclose(actual, expected, _RTOL, _ATOL, equal_nan=True)
                    unlike += int((~close | ~np.isfinite(expected)).sum())
                    total += close.size
        finally:
            for stream in module.noise.streams:
                stream.slot = None
            for key, array in saved.items():
                memory[key][...] = array
        return unlike <= _UNLIKE * total

    def begin(self, frames: int, generators: Generators) -> None:
        """Prepare for ``frames`` frames; sample the noise of all rows."""
        self.module.begin(frames, generators)
        for rows in self.groups.values():
            rows.begin(frames)

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Sample the noise of one environment anew; the runs read the same arrays."""
        self.module.redraw(k, frame, generators)

    def call(self, mine: Mapping[str, NDArray[np.bool_]]) -> Call:
        """Return the call that acts for some agents in a frame.

        Args:
            mine: whether an agent acts with this policy, ``[K, n]`` by group.
        """
        runs = [
            run
            for group, rows in self.groups.items()
            for run in rows.calls(
                [(k, i) for k, i in np.argwhere(mine[group]).tolist()],
                [s for s in self.module.noise.streams if s.head.group == group],
            )
        ]

        def act(frame: int) -> None:
            try:
                for run in runs:
                    run(frame)
            except Exception:
                self._explain_error(frame)
                raise

        return act

    def explain(self) -> str:
        """Return how the rows are computed."""
        how = " ".join(rows.explain() for rows in self.groups.values())
        return f"Runs on the rows of its agents only. {how}"

    def _explain_error(self, frame: int) -> None:
        """Run the policy on all rows, so that the error has the indices of a batch."""
        for key in self.module.signature.carried:
            self.bound[key][...] = self.memory[key]
        self.module.act(frame)


@final
class _GroupRows:
    """Runs the part of a policy that acts for one group, with its copies for one agent.

    Attributes:
        alike: whether one copy computes the rows of all agents.
    """

    def __init__(
        self,
        policy: nn.Module,
        group: str,
        description: EnvDescription,
        memory: Row,
        how: InteractionType | None,
    ) -> None:
        self._policy = policy
        self._copies: dict[int, nn.Module] = {}
        self.alike = is_by_row(policy)
        self._flops = 0.0
        about = description.groups[group]
        one = replace(about, agents=about.agents[:1])
        self._description = replace(description, groups={group: one})
        self._group = group
        self._memory = memory
        self._how = how
        self._frames = 0
        self._runs: dict[tuple[int, int], _Run] = {}
        self._probed: dict[int, ProbeResult] = {}

    def can_be_split(self) -> bool:
        """Return whether the copies together compute what the policy does."""
        # A copy with one agent mixes none, whatever the policy does with several.
        separable = self.alike or _tells_agents_apart(self._policy)
        return separable and is_by_row(self.alone(0))

    def alone(self, agent: int) -> nn.Module:
        """Return the copy for one agent, which shares the policy's tensors."""
        if agent not in self._copies:
            with _code_of_users():
                self._copies[agent] = _for_one_agent(self._policy, agent)
        return self._copies[agent]

    def prepare(self, flops: float) -> None:
        """Make the first run, for rows of so many floating-point operations."""
        self._flops = flops
        self._run(0, 1)

    def begin(self, frames: int) -> None:
        self._frames = frames
        for run in self._runs.values():
            run.runner.start(frames)

    def calls(
        self, rows: list[tuple[int, int]], streams: list[NoiseStream]
    ) -> list[Call]:
        by_copy: dict[int, list[tuple[int, int]]] = {}
        for k, i in rows:
            by_copy.setdefault(0 if self.alike else i, []).append((k, i))
        calls: list[Call] = []
        for number, rows_of_copy in by_copy.items():
            first = 0
            for size in sizes_of_runs(len(rows_of_copy), self._flops):
                run = self._run(number, size)
                part = rows_of_copy[first : first + size]
                calls.append(run.call(part, self._memory, streams))
                first += size
        return calls

    def compared(self, n_envs: int) -> NDArray[np.bool_]:
        """Return the rows ``[K, n]`` that are compared with the policy.

        Two agents are enough where each has a copy, which takes long to record.
        """
        n_agents = self._memory[self._group, "done"].shape[1]
        rows = np.zeros((n_envs, n_agents), np.bool_)
        rows[0, :: 1 if self.alike else max(n_agents - 1, 1)] = True
        return rows

    def explain(self) -> str:
        return self._run(0, 1).runner.explain()

    def _run(self, number: int, size: int) -> "_Run":
        if (number, size) not in self._runs:
            module = ModuleRunner(
                self.alone(number), self._description, size, how=self._how
            )
            probed = self._probed.get(number)
            run = _Run(module, self._memory, probed)
            self._probed[number] = module.probed
            if self._frames:
                run.runner.start(self._frames)
            self._runs[number, size] = run
        return self._runs[number, size]


@final
class _Run:
    """A policy for one agent, with memory for the rows of one run."""

    def __init__(
        self,
        module: ModuleRunner,
        memory: Row,
        probed: ProbeResult | None,
    ) -> None:
        """Prepare the runs.

        Args:
            module: runs the policy for one agent, on as many rows.
            memory: of the step loop.
            probed: what a probe of the same policy on other numbers of rows found.
        """
        description = module.description
        (self._group,) = description.groups
        self._n_agents = memory[self._group, "done"].shape[1]
        self._size = size = module.size
        self._packed = allocate(description.row(), (size,))
        for key in description.observed():
            # Something to probe the policy with.
            source = memory[key][:1, :1] if key[0] == self._group else memory[key][:1]
            self._packed[key][...] = source
        self._module = module
        self.runner = FusedRunner(module)
        if probed is not None:
            module.probed = probed
        else:
            with _code_of_users():  # The probe has worked for the whole policy.
                self.runner.probe(self._packed)
        signature = self.runner.signature
        self._packed |= allocate(signature.memory(description), (size,))
        self.runner.bind(self._packed)
        read = input_keys(module.policy)
        self._read = [
            key
            for key in self._packed
            if any(key[: len(prefix)] == prefix for prefix in read)
        ]
        self._written = [*signature.outputs, *signature.carried]

    def call(
        self, rows: list[tuple[int, int]], memory: Row, streams: list[NoiseStream]
    ) -> Call:
        """Return a call that computes the outputs of ``rows`` in a frame.

        Args:
            rows: environment and agent of each row. If they are fewer than those of
                this run, the last one is computed repeatedly.
            memory: of the step loop.
            streams: noise of all rows, sampled for the slot.
        """
        filled = rows + rows[-1:] * (self._size - len(rows))
        load = [
            copying(ours, theirs)
            for key in self._read
            for ours, theirs in self._pairs(key, filled, memory)
        ]
        store = [
            copying(theirs, ours)
            for key in self._written
            for ours, theirs in self._pairs(key, rows, memory)
        ]
        act = self.runner.act
        places = np.array([k * self._n_agents + i for k, i in filled])
        noise = [
            (
                ours.array.reshape(self._size, -1),
                stream.slot.reshape(len(stream.slot), -1, ours.array.shape[-1]),
            )
            for ours, stream in zip(self._module.noise.streams, streams, strict=True)
            if stream.slot is not None
        ]

        def run(frame: int) -> None:
            for copy_row in load:
                copy_row()
            for ours, sampled in noise:
                np.take(sampled[frame], places, 0, ours, "clip")
            act(frame)
            for copy_row in store:
                copy_row()

        return run

    def _pairs(
        self, key: Key, rows: list[tuple[int, int]], memory: Row
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the memory of each row here and in the step loop."""
        ours, theirs = self._packed[key], memory[key]
        of_agents = key[0] == self._group
        for row, (k, i) in enumerate(rows):
            if of_agents:
                yield ours[row, 0, ...], theirs[k, i, ...]
            else:
                yield ours[row, ...], theirs[k, ...]


def own_rows(
    module: ModuleRunner,
    bound: Row,
    memory: Row,
    episodes: Mapping[str, NDArray[np.bool_]],
) -> OwnRows | None:
    """Return what runs a policy on its rows; None if all rows have to be computed.

    Args:
        module: see ``OwnRows``, like the other arguments.
        bound: memory of the policy.
        memory: of the step loop.
        episodes: which agents act with the policy in some episodes, ``[T, n]`` by
            group.
    """
    policy, description = module.policy, module.description
    if not isinstance(policy, nn.Module):
        return None
    state = ModuleState(policy, of_recording=True)
    if why_not_recordable(policy, state):
        return None
    with torch.no_grad(), set_interaction_type(module.how):
        try:
            groups = {
                group: _GroupRows(part, group, description, memory, module.how)
                for group, part in _parts(policy, description).items()
            }
            if not groups or not all(rows.can_be_split() for rows in groups.values()):
                return None
            flops = _flops_per_row(module, groups)
            alike = {group: rows.alike for group, rows in groups.items()}
            if not is_worth_it(episodes, alike, module.size, flops):
                return None
            for rows in groups.values():
                rows.prepare(flops)
            copies = OwnRows(module, bound, memory, groups, state)
            return copies if copies.equals_all_rows() else None
        except _CannotBeSplitError:
            return None


def is_worth_it(
    episodes: Mapping[str, NDArray[np.bool_]],
    alike: Mapping[str, bool],
    n_envs: int,
    flops: float,
) -> bool:
    """Return whether a policy's own rows cost less than all rows.

    Args:
        episodes: which agents act with it in some episodes, ``[T, n]`` by group.
        alike: for each group whether one copy computes all agents.
        n_envs: number of environments, each in one of these episodes.
        flops: floating-point operations for a row.
    """
    all_rows = n_envs * sum(episodes[group].shape[1] for group in alike)
    cost_of_all = cost = 0.0
    for first in range(len(next(iter(episodes.values())))):
        running = np.arange(first, first + n_envs)
        counts: list[int] = []
        for group, one_copy in alike.items():
            rows = np.take(episodes[group], running, 0, mode="wrap").sum(0)
            counts += [int(rows.sum())] if one_copy else rows.tolist()
        if any(counts):
            cost_of_all += _RUN + all_rows * flops
        for count in counts:
            cost += count * _ROW
            cost += sum(_RUN + size * flops for size in sizes_of_runs(count, flops))
    return cost < cost_of_all


def sizes_of_runs(rows: int, flops: float) -> list[int]:
    """Return how many rows each run computes, at least ``rows`` in total.

    Args:
        rows: number of rows.
        flops: floating-point operations for a row.
    """
    largest = _SIZES[0]
    full, rest = divmod(rows, largest)
    exact = [size for size in _SIZES if size & rest]
    padded = min(size for size in _SIZES if size >= rest)
    if rest and _RUN + padded * flops < len(exact) * _RUN + rest * flops:
        exact = [padded]
    return [largest] * full + exact


def is_by_row(policy: Any) -> bool:
    """Return whether a policy computes every agent's row alone, in the same way."""
    return (
        isinstance(policy, nn.Module)
        and all(map(_treats_rows_alike, policy.modules()))
        and why_not_recordable(policy) is None
    )


def _tells_agents_apart(policy: nn.Module) -> bool:
    """Return whether ``keep_agent`` handles all modules that are not by row."""
    return hasattr(policy, KEEP_AGENT) or (
        _treats_rows_alike(policy) and all(map(_tells_agents_apart, policy.children()))
    )


def _treats_rows_alike(module: nn.Module) -> bool:
    wraps = type(module) is TensorDictModule and isinstance(module.module, nn.Module)
    return wraps or type(module) in _LAYERS or declares(module, BY_ROW)


def _flops_per_row(module: ModuleRunner, groups: Mapping[str, _GroupRows]) -> float:
    """Return the floating-point operations for one agent.

    One product with each weight is not counted. A linear layer mostly waits for its
    weights, for few rows as for many; a convolution uses each of them for every pixel.
    """
    policy: Any = module.policy
    counter = FlopCounterMode(display=False)
    with _code_of_users(), undisturbed(policy), counter:
        module.call()
    acts = {key[0] for key in module.signature.outputs}
    rows = sum(n for name, n in module.description.group_sizes.items() if name in acts)
    alone = nn.ModuleList(group.alone(0) for group in groups.values())
    weights = sum(parameter.numel() for parameter in alone.parameters())
    return max(counter.get_total_flops() / (rows * module.size) - 2 * weights, 0.0)


def _parts(policy: Any, description: EnvDescription) -> dict[str, nn.Module]:
    """Return what acts for each group; empty if that cannot be told apart."""
    children = [policy]
    if type(policy) is TensorDictSequential:
        inner: Any = policy.module
        children = [*(inner.values() if isinstance(inner, nn.ModuleDict) else inner)]
    for parts in (children, [policy]):
        groups = [_groups_of(part) & description.groups.keys() for part in parts]
        names = [name for part_groups in groups for name in part_groups]
        if len(parts) == len(names) == len(set(names)):
            return dict(zip(names, parts, strict=True))
    return {}


def _groups_of(part: Any) -> set[str]:
    keys = input_keys(part) | output_keys(part)
    return {key[1] if key[0] == "next" else key[0] for key in keys}


def _for_one_agent(part: nn.Module, agent: int) -> nn.Module:
    """Return a copy of a policy that shares its tensors, for a group of one agent."""
    shared = {id(t): t for t in (*part.parameters(), *part.buffers())}
    alone = copy.deepcopy(part, shared)
    for module in list(alone.modules()):
        keep: Any = getattr(module, KEEP_AGENT, None)
        if keep is not None:
            keep(agent)
        elif hasattr(module, "n_agents"):
            setattr(module, "n_agents", 1)  # noqa: B010 - no attribute of all modules
    return alone
