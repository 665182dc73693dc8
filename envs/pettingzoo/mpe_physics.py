"""Faster physics for the multi-agent particle environments, with the same results.

``mpe2`` computes forces and collisions with small arrays for every pair of entities.
This module does the same operations in the same order on plain numbers, so IEEE 754
guarantees bitwise equal results. The only exception, ``logaddexp``, which IEEE 754 does
not define, is NumPy's here too. ``make equality`` compares the results.
"""

import math
from typing import Any, final

import numpy as np

_SAME = (
    "step",
    "entities",
    "policy_agents",
    "scripted_agents",
    "apply_action_force",
    "apply_environment_force",
    "integrate_state",
    "update_agent_state",
    "get_collision_force",
)

_NO_FORCE = -750.0
"""Below this value ``exp`` returns 0, so two entities exert no force on each other."""


_COLLIDING = frozenset(
    f"mpe2.{task}.{task}"
    for task in ("simple_spread", "simple_tag", "simple_world_comm")
)
"""Scenarios whose ``is_collision`` tests whether two entities overlap."""


def patch(raw: Any) -> None:
    """Replace methods of the world and the scenario of ``raw`` only."""
    from mpe2._mpe_utils.core import World

    kind = type(raw.world)
    if all(getattr(kind, name) is getattr(World, name) for name in _SAME):
        raw.world.step = Physics(raw.world).step
    module = type(raw.scenario).__module__
    if module in _COLLIDING:
        raw.scenario.is_collision = overlap
    if module == "mpe2.simple_spread.simple_spread":
        raw.scenario.global_reward = uncovered


def overlap(one: Any, two: Any) -> bool:
    """Return whether two entities touch."""
    x, y = one.state.p_pos.tolist()
    other_x, other_y = two.state.p_pos.tolist()
    dx = x - other_x
    dy = y - other_y
    reach: float = one.size + two.size
    return math.sqrt(dx * dx + dy * dy) < reach


def uncovered(world: Any) -> float:
    """Return minus the sum of each landmark's distance to its nearest agent."""
    positions = [agent.state.p_pos.tolist() for agent in world.agents]
    reward = 0.0
    for landmark in world.landmarks:
        x, y = landmark.state.p_pos.tolist()
        deltas = [(ax - x, ay - y) for ax, ay in positions]
        reward -= min([math.sqrt(dx * dx + dy * dy) for dx, dy in deltas])
    return reward


@final
class Physics:
    """Forces between entities and their motion, in two dimensions."""

    def __init__(self, world: Any) -> None:
        """Store the world."""
        self._world = world

    def step(self) -> None:
        """Replace ``World.step``."""
        world = self._world
        forces = self._forces()
        if forces is None:
            type(world).step(world)
            return
        dt = world.dt
        drag = 1 - world.damping
        dim_c = world.dim_c
        for agent, (fx, fy) in zip(world.agents, forces, strict=True):
            state = agent.state
            if agent.movable:
                position = state.p_pos
                x, y = position.tolist()
                vx, vy = state.p_vel.tolist()
                position[0] = x + vx * dt
                position[1] = y + vy * dt
                mass = agent.mass
                vx = vx * drag + fx / mass * dt
                vy = vy * drag + fy / mass * dt
                limit = agent.max_speed
                if limit is not None:
                    speed = math.sqrt(vx * vx + vy * vy)
                    if speed > limit:
                        vx = vx / speed * limit
                        vy = vy / speed * limit
                state.p_vel = np.array((vx, vy))
            state.c = np.zeros(dim_c) if agent.silent else agent.action.c + 0.0

    def _forces(self) -> list[list[float]] | None:
        """Return the force on each agent, or None if ``World.step`` must be used.

        This is the case for scripted or noisy agents, movable landmarks, and two
        entities at the same position.
        """
        world = self._world
        forces = []
        bodies = []
        for agent in world.agents:
            if agent.action_callback or agent.u_noise or agent.c_noise:
                return None
            # World adds noise of 0.0, which turns -0.0 into 0.0.
            force = [value + 0.0 for value in agent.action.u.tolist()]
            forces.append(force)
            if agent.collide:
                bodies.append((force, agent.size, *agent.state.p_pos.tolist()))
        for landmark in world.landmarks:
            if landmark.movable:
                return None
            if landmark.collide:
                position = landmark.state.p_pos.tolist()
                bodies.append((None, landmark.size, *position))
        if len(bodies) > 1 and not self._collide(bodies):
            return None
        return forces

    def _collide(self, bodies: list[Any]) -> bool:
        """Add the contact forces of ``bodies``, tuples (force, size, x, y).

        Returns False if two of them are at the same position.
        """
        margin = self._world.contact_margin
        strength = self._world.contact_force
        touching = []
        overlaps = []
        for i, (one, size, x, y) in enumerate(bodies):
            for two, other_size, other_x, other_y in bodies[i + 1 :]:
                dx = x - other_x
                dy = y - other_y
                distance = math.sqrt(dx * dx + dy * dy)
                overlap = -(distance - (size + other_size)) / margin
                if not overlap <= _NO_FORCE:  # also true for NaN
                    if distance == 0.0:
                        return False
                    touching.append((one, two, dx, dy, distance))
                    overlaps.append(overlap)
        if not touching:
            return True
        soft = np.logaddexp(0, overlaps).tolist()
        for (one, two, dx, dy, distance), overlap in zip(touching, soft, strict=True):
            penetration = overlap * margin
            fx = strength * dx / distance * penetration
            fy = strength * dy / distance * penetration
            if one is not None:
                one[0] += fx
                one[1] += fy
            if two is not None:
                two[0] -= fx
                two[1] -= fy
        return True
