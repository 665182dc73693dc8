"""Task provider of MaMuJoCo: an entry point of ``marl_collect.tasks``."""

from typing import Any, Final

from marl_collect.envs.common import defaults_of
from marl_collect.envs.family import Family

_TASKS = (
    *("Ant-2x4", "Ant-2x4d", "Ant-4x2", "HalfCheetah-2x3", "HalfCheetah-6x1"),
    *("Hopper-3x1", "Humanoid-9|8", "HumanoidStandup-9|8", "Reacher-2x1"),
    *("Swimmer-2x1", "Walker2d-2x3"),
)
"""Without those that gymnasium-robotics 1.4.2 builds wrongly.

The order of Pusher's observations differs between two of its environments, because two
of its joints have the same label. CoupledHalfCheetah fails at once. The environments of
ManySegmentAnt and ManySegmentSwimmer write a file of one name in every process.
"""


_SAFE = (
    *("local_categories", "global_categories", "render_mode"),
    *("contact_cost_weight", "contact_force_range", "ctrl_cost_weight"),
    *("exclude_current_positions_from_observation", "forward_reward_weight"),
    *("frame_skip", "healthy_angle_range", "healthy_reward", "healthy_state_range"),
    *("healthy_z_range", "impact_cost_range", "impact_cost_weight"),
    *("max_episode_steps", "reset_noise_scale", "reward_control_weight"),
    *("reward_dist_weight", "terminate_when_unhealthy", "use_contact_forces"),
)
"""Numbers of Gymnasium's robots; without ``xml_file``, which names a file."""


def _defaults(task: str) -> dict[str, Any]:
    from gymnasium_robotics import mamujoco_v1

    del task  # They are the same for every task.
    return defaults_of(mamujoco_v1.parallel_env)


FAMILY: Final = Family(
    name="mamujoco",
    extra="mamujoco",
    modules=("gymnasium_robotics", "mujoco", "pettingzoo"),
    distributions=("gymnasium-robotics", "mujoco"),
    listed=lambda: _TASKS,
    known=_TASKS.__contains__,
    env="marl_collect.envs.mamujoco.env:MamujocoEnv",
    defaults=_defaults,
    safe=_SAFE,
)
