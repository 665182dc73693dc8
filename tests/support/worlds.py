"""Simulators of many worlds whose data are known: each world is a CountingEnv."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np
from workloads.counting import CountingEnv

from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import FLAGS, allocate

GARBAGE = 77
"""What rows of dead agents have before the engine clears them."""
OWN_SEED = 12345
"""Seed of the episodes that worlds begin themselves."""


@final
class CountingWorlds(BatchedEnv):
    """K CountingEnvs behind the contract of batches, with garbage for dead agents.

    Args:
        worlds: K.
        resets_itself: return ``first`` where worlds end, and expect no ``begin`` there.
        options: of CountingEnv.
    """

    def __init__(
        self, worlds: int = 4, *, resets_itself: bool = False, **options: Any
    ) -> None:
        self.envs = [CountingEnv(**options) for _ in range(worlds)]
        description = self.envs[0].description
        self.groups = description.groups
        self.rows = [allocate(description.row()) for _ in self.envs]
        for env, row in zip(self.envs, self.rows, strict=True):
            env.bind(row)
        self.resets_itself = resets_itself
        self.begun: list[list[int]] = []
        world_description = replace(description, repeats=not resets_itself)
        super().__init__(world_description, worlds)

    def begin(self, which: Any, seeds: Any) -> Mapping[Any, Any]:
        worlds = range(self.worlds) if which is None else np.flatnonzero(which).tolist()
        self.begun.append(list(worlds))
        for k in worlds:
            self.envs[k].reset_row(int(seeds[k]))
        return self.look()

    def advance(self, actions: Mapping[str, Any]) -> Step:
        dead = {name: self.stack(name, "done")[..., 0].copy() for name in self.groups}
        for k in range(self.worlds):
            self.step_world(k, actions)
        observations = self.flat()
        for key, array in observations.items():
            if key[1:] == ("action_mask",):
                # What a dead agent may do is up to the engine, from its end on.
                array[self.stack(key[0], "done")[..., 0]] = False
            elif key[0] in dead:
                array[dead[key[0]]] = GARBAGE
        rewards = {name: self.stack(name, "reward")[..., 0] for name in self.groups}
        _, terminated, truncated = (
            {name: self.stack(name, flag)[..., 0] for name in self.groups}
            for flag in FLAGS
        )
        for name, died in dead.items():
            # What the end of a world does to other agents is up to the engine.
            truncated[name] &= self.stack("truncated")
            for array in (rewards[name], terminated[name], truncated[name]):
                array[died] = GARBAGE
        ended = self.stack("done")[:, 0]
        first = None
        if self.resets_itself and ended.any():
            first = self.renew(ended)
        return Step(nested(observations), rewards, terminated, truncated, first)

    def step_world(self, k: int, actions: Mapping[str, Any]) -> None:
        row = self.rows[k]
        assert not row["done",][0], "a world is stepped after its end"
        for name, group in self.groups.items():
            action = actions[name][k]
            if group.one_hot:
                action = np.eye(group.n_actions)[action]
            row[name, "action"][...] = action
        self.envs[k].step_row()

    def renew(self, ended: Any) -> Mapping[Any, Any]:
        """Begin episodes where ``ended``; return garbage for the other worlds."""
        for k in np.flatnonzero(ended):
            self.envs[k].reset_row(OWN_SEED)
        observations = self.flat()
        for array in observations.values():
            array[~ended] = GARBAGE
        return nested(observations)

    def look(self) -> Mapping[Any, Any]:
        return nested(self.flat())

    def flat(self) -> dict[tuple[str, ...], Any]:
        """Return what is observed, without flags and masks."""
        keys = self.envs[0].description.observed()
        return {k: self.stack(*k) for k in keys if k[-1] not in (*FLAGS, "mask")}

    def stack(self, *key: str) -> Any:
        return np.stack([row[key] for row in self.rows])

    def close(self) -> None:
        super().close()
        for env in self.envs:
            env.close()


def nested(flat: Mapping[tuple[str, ...], Any]) -> dict[Any, Any]:
    """Return observations as `begin` and `advance` return them."""
    out: dict[Any, Any] = {}
    for key, array in flat.items():
        if key[1:2] != ("observation",):
            out[key if len(key) > 1 else key[0]] = array
        elif len(key) == 2:
            out[key[0]] = array
        else:
            out.setdefault(key[0], {})[key[2]] = array
    return out
