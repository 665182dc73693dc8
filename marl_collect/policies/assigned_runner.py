"""Runs several policies, each for the agents that it is assigned to.

In each frame, each policy that somebody acts with is run once for all environments, and
the rows of its agents are copied to the memory of the step loop. A policy that computes
every row alone is run on the rows of its agents only, if this is faster
(``by_row.py``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Field, Key, Row, allocate
from marl_collect.core.signature import NOBODY, POLICY_ID, PolicySignature
from marl_collect.errors import PolicyError
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.by_row import Call, OwnRows, own_rows
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.runner import Generators, PolicyRunner

_Copy = tuple[NDArray[Any], NDArray[Any], Any]
_TRIED = 4
"""Number of seeds for which ``assign`` is called before the first episode."""
_MOST_COPIES = 10
"""How often a policy is copied for its rows before all rows are computed instead.

It is copied again when its settings or its tensors are replaced.
"""


@final
class AssignedRunner(PolicyRunner):
    """Runs the policies of ``AssignedPolicies`` on the memory of K environments."""

    chooses = True

    def __init__(
        self,
        policies: AssignedPolicies,
        runners: Sequence[PolicyRunner],
        description: EnvDescription,
        size: int,
    ) -> None:
        """Combine runners.

        Args:
            policies: the policies, and the function that assigns them.
            runners: of each policy, in the order of ``policies.names``.
            description: of the environments.
            size: K, the number of environments.
        """
        self._policies = policies
        self._runners = list(runners)
        self._description = description
        self._agents = _agents(description)
        self._ids = np.full((size, len(self._agents)), NOBODY, np.int64)
        self._ids_of = self._by_group(self._ids)  # Views of the same memory.
        self._pending: dict[int, int] = {}
        self._signature: PolicySignature
        self._lacking: list[dict[str, set[Key]]] = []
        self._memory: Row
        self._parts: list[PolicyRunner | OwnRows] = []
        # How states come to a policy that computes all rows, and what it writes to
        # the memory, by group.
        self._copies: dict[int, tuple[Call, dict[str, Call]]] = {}
        self._mine: list[dict[str, NDArray[np.bool_]]] = []
        self._unwritten: list[list[tuple[NDArray[Any], NDArray[np.bool_]]]] = []
        self._copied = [0] * len(self._runners)
        self._tried = np.full((_TRIED, len(self._agents)), NOBODY, np.int64)
        self._dirty = True
        self._acting: list[tuple[str, Call]] = []

    def probe(self, memory: Row) -> None:
        """Probe every policy, and call ``assign`` for some seeds.

        Raises:
            PolicyError: if outputs of policies differ, cannot be stored by agent, or
                if ``assign`` returns something else than a policy of each agent.
        """
        for name, runner in zip(self._policies.names, self._runners, strict=True):
            try:
                runner.probe(memory)
            except Exception as error:
                error.add_note(f"The policy is policies[{name!r}].")
                raise
        self._signature = self._combined()
        actions = self._description.actions()
        self._lacking = [
            {
                group: {key for key in actions if key[0] == group}
                - runner.signature.outputs.keys()
                for group in self._description.groups
            }
            for runner in self._runners
        ]
        for seed in range(_TRIED):
            try:
                self._tried[seed] = self._chosen(seed)
            except Exception as error:
                if not isinstance(error, PolicyError):
                    error.add_note(
                        "Before the first episode assign is tried with the seeds 0 to "
                        f"{_TRIED - 1}, so it must return policies for these, too."
                    )
                raise

    @property
    def signature(self) -> PolicySignature:
        """The keys of all policies, and ``(g, "policy_id")``."""
        return self._signature

    def bind(self, memory: Row) -> None:
        """Act on ``memory``, with outputs of each policy in memory of its own."""
        self._memory = memory
        # Changed in place when episodes begin, so what uses it is built only once.
        self._mine = [
            {group: np.zeros(ids.shape, bool) for group, ids in self._ids_of.items()}
            for _ in self._runners
        ]
        self._unwritten = [
            [
                (memory[key], _like(mine[key[0]], memory[key]))
                for key in self._merged().keys()
                - runner.signature.outputs.keys()
                - runner.signature.carried.keys()
                if key[1:] != (POLICY_ID,)
            ]
            for runner, mine in zip(self._runners, self._mine, strict=True)
        ]
        self._parts = [self._part(index) for index in range(len(self._runners))]
        for group in self._description.groups:
            memory[group, POLICY_ID].fill(NOBODY)
        self._dirty = True

    def begin_episodes(self, seeds: Mapping[int, int]) -> None:
        """Assign policies to the agents of new episodes, before they act.

        A worker may begin episodes before it reads the newest weights, which have the
        probabilities of a pool.
        """
        self._pending |= seeds
        self._dirty = True

    def assigned(self) -> Any:
        """Return which policies act, and the seeds of episodes without policies yet.

        Returns:
            ``acts``, bool ``[K, agents]`` by policy, and ``seeds``, int64 ``[K]``, -1
            if the policies have been chosen.
        """
        seeds = np.full(len(self._ids), -1)
        seeds[[*self._pending]] = [*self._pending.values()]
        names = self._policies.names
        acts = {name: self._ids == index for index, name in enumerate(names)}
        return {"acts": acts, "seeds": seeds}

    def assign(self, assigned: Any) -> None:
        """Restore what ``assigned`` returned.

        Raises:
            ValueError: if it is from a single policy, or names an unknown policy.
        """
        numbers = {name: index for index, name in enumerate(self._policies.names)}
        if assigned is None:
            raise ValueError(
                "The state is of a collector with a single policy, so it does not say "
                "which of the policies act in its running episodes. Load only its "
                "weights, into one of the policies."
            )
        acts = {name: where for name, where in assigned["acts"].items() if where.any()}
        unknown = acts.keys() - numbers.keys()
        if unknown:
            raise ValueError(
                f"The state has running episodes of the policies {sorted(unknown)}, "
                f"but this collector has {list(self._policies.names)}. Use the same "
                "names."
            )
        self._ids.fill(NOBODY)
        for name, where in acts.items():
            self._ids[where] = numbers[name]
        (rows,) = (assigned["seeds"] >= 0).nonzero()
        seeds = assigned["seeds"][rows]
        self._pending = dict(zip(rows.tolist(), seeds.tolist(), strict=True))
        self._dirty = True

    def begin(self, frames: int, generators: Generators) -> None:
        """Prepare every policy, with noise of its own."""
        for index, part in enumerate(self._parts):
            if isinstance(part, OwnRows) and part.state.changed():
                self._parts[index] = self._part(index)
            self._parts[index].begin(frames, generators.apart(index))
        self._dirty = True

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Sample the noise of every policy anew for one environment."""
        for index, part in enumerate(self._parts):
            part.redraw(k, frame, generators.apart(index))

    def act(self, frame: int) -> None:
        """Run the policies that somebody acts with, and copy what they wrote."""
        if self._dirty:
            self._refresh()
        name = ""
        try:
            for name, call in self._acting:  # noqa: B007 - named in the error
                call(frame)
        except Exception as error:
            error.add_note(f"The policy is policies[{name!r}].")
            raise

    def explain(self) -> str:
        """Return the explanation of every policy."""
        lines = zip(self._policies.names, self._parts, strict=True)
        return " ".join(f"{name}: {part.explain()}" for name, part in lines)

    def _part(self, index: int) -> PolicyRunner | OwnRows:
        """Return what runs a policy, bound to memory for its outputs."""
        runner, memory = self._runners[index], self._memory
        shared = {k: a for k, a in memory.items() if k not in self._merged()}
        fields = runner.signature.memory(self._description)
        private = {k: f for k, f in fields.items() if k not in shared}
        actions = self._description.actions()
        outputs = allocate(private | actions, (len(self._ids),))
        if isinstance(runner, FusedRunner) and self._copied[index] < _MOST_COPIES:
            self._copied[index] += 1
            runner.module.bind(shared | outputs)
            part = own_rows(
                runner.module,
                shared | outputs,
                memory,
                self._episodes(index),
            )
            if part is not None:
                return part
        runner.bind(shared | outputs)
        carried = runner.signature.carried
        loading = _copying([(outputs[key], memory[key], True) for key in carried])
        storing: dict[str, list[_Copy]] = {}
        for key in {**runner.signature.outputs, **carried}:
            where = _like(self._mine[index][key[0]], memory[key])
            storing.setdefault(key[0], []).append((memory[key], outputs[key], where))
        by_group = {group: _copying(copies) for group, copies in storing.items()}
        self._copies[index] = loading, by_group
        return runner

    def _episodes(self, index: int) -> dict[str, NDArray[np.bool_]]:
        """Return who acts with a policy in the tried episodes, ``[T, n]`` by group.

        If nobody does, it is one agent at a time.
        """
        acts = self._tried == index
        if not acts.any():
            acts = np.eye(len(self._agents), dtype=np.bool_)
        return self._by_group(acts)

    def _by_group(self, agents: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return views ``[..., n]`` by group of an array ``[..., agents]``."""
        groups = self._description.groups
        ends = np.cumsum([group.n_agents for group in groups.values()])[:-1]
        return dict(zip(groups, np.split(agents, ends, -1), strict=True))

    def _chosen(self, seed: int) -> list[int]:
        """Return the index of each agent's policy in the episode of ``seed``."""
        chosen = self._policies.choose(seed, tuple(a for a, _ in self._agents))
        for index, (agent, group) in zip(chosen, self._agents, strict=True):
            missing = self._lacking[index][group]
            if missing:
                raise PolicyError(
                    f"assign(seed={seed}, agents) gives {agent!r} the policy "
                    f"{self._policies.names[index]!r}, which does not write "
                    f"{sorted('/'.join(key) for key in missing)}, the action of this "
                    "agent."
                )
        return chosen

    def _merged(self) -> dict[Key, Field]:
        """Return the fields that are written agent by agent."""
        signature = self._signature
        return {**signature.outputs, **signature.carried}

    def _combined(self) -> PolicySignature:
        outputs: dict[Key, Field] = {}
        carried: dict[Key, Field] = {}
        owners: dict[tuple[str, Key], str] = {}
        for name, runner in zip(self._policies.names, self._runners, strict=True):
            signature = runner.signature
            self._check(name, signature)
            for kind, merged, fields in (
                ("", outputs, signature.outputs),
                ("next/", carried, signature.carried),
            ):
                for key, leaf in fields.items():
                    first = owners.setdefault((kind, key), name)
                    if merged.setdefault(key, leaf) != leaf:
                        raise PolicyError(
                            f"The policies {first!r} and {name!r} write "
                            f"{kind}{'/'.join(key)} with different shapes or dtypes "
                            f"({merged[key]} and {leaf}), so a batch cannot store "
                            "both: let one of them write to another key."
                        )
        for key in outputs.keys() & carried.keys():
            raise PolicyError(
                f"The policy {owners['next/', key]!r} has a state at {'/'.join(key)}, "
                f"which the policy {owners['', key]!r} writes at the root, so a batch "
                "cannot store both: let one of them write to another key."
            )
        for group, about in self._description.groups.items():
            ids = Field((about.n_agents,), np.dtype(np.int64))
            outputs[group, POLICY_ID] = ids
        return PolicySignature(
            outputs=outputs,
            carried=carried,
            reads_is_init=any(
                runner.signature.reads_is_init for runner in self._runners
            ),
            private=frozenset().union(*(r.signature.private for r in self._runners)),
        )

    def _check(self, name: str, signature: PolicySignature) -> None:
        """Check that what a policy writes can be stored by agent."""
        who = f"The policy {name!r} acts for some of the agents, but"
        changed = signature.apart | signature.removed
        if changed:
            raise PolicyError(
                f"{who} changes {_names(changed)}, which all policies read: write to "
                "another key."
            )
        if signature.kept:
            raise PolicyError(
                f"{who} reads {_names(signature.kept)}, which it wrote in the previous "
                'frame: write it under "next", as a state of each agent.'
            )
        for key, leaf in {**signature.outputs, **signature.carried}.items():
            group = self._description.groups.get(key[0])
            if group is None or leaf.shape[:1] != (group.n_agents,):
                raise PolicyError(
                    f"{who} writes {'/'.join(key)} of shape {list(leaf.shape)} per "
                    "environment, which belongs to no agent: write "
                    f"[agents, ...] under a group of {list(self._description.groups)}, "
                    "or leave it out."
                )
            if key[1:] == (POLICY_ID,):
                raise PolicyError(f"{who} writes {'/'.join(key)}: use another key.")

    def _refresh(self) -> None:
        """Update who acts, after episodes began."""
        self._dirty = False
        for k, seed in self._pending.items():
            self._ids[k] = self._chosen(seed)
        self._pending.clear()
        for group, ids in self._ids_of.items():
            self._memory[group, POLICY_ID][...] = ids
        # States are read by all policies that compute all rows before one is replaced.
        acting: list[tuple[str, Call]] = []
        alone: list[tuple[str, Call]] = []
        storing: list[tuple[str, Call]] = []
        for index in sorted({*self._ids.ravel().tolist()} - {NOBODY}):
            name = self._policies.names[index]
            part, mine = self._parts[index], self._mine[index]
            groups = [
                group
                for group, ids in self._ids_of.items()
                if np.equal(ids, index, out=mine[group]).any()
            ]
            for target, where in self._unwritten[index]:
                np.copyto(target, 0, where=where)
            if isinstance(part, OwnRows):
                alone.append((name, part.call(mine)))
            else:
                loading, by_group = self._copies[index]
                if part.signature.carried:
                    acting.append((name, loading))
                acting.append((name, part.act))
                storing += [(name, by_group[g]) for g in groups if g in by_group]
        self._acting = acting + alone + storing


def _agents(description: EnvDescription) -> list[tuple[str, str]]:
    """Return name and group of each agent.

    Raises:
        ValueError: if two agents have the same name, because ``assign`` tells agents
            apart by their names.
    """
    agents = [
        (agent, name)
        for name, group in description.groups.items()
        for agent in group.agents
    ]
    names = [agent for agent, _ in agents]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(
            f"{description.name} has several agents called {double}, so policies "
            "cannot be assigned by name."
        )
    return agents


def _copying(copies: Sequence[_Copy]) -> Call:
    """Return a call that copies each source to its target, where the mask is True."""
    copyto: Any = np.copyto

    def call(frame: int) -> None:
        del frame
        for target, source, where in copies:
            copyto(target, source, "same_kind", where)

    return call


def _like(mine: NDArray[np.bool_], array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return ``mine`` with the number of dimensions of ``array``."""
    return mine.reshape(*mine.shape, *(1,) * (array.ndim - 2))


def _names(keys: Any) -> list[str]:
    return sorted("/".join(key) for key in keys)
