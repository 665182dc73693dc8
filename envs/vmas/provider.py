"""Task provider of VMAS: an entry point of ``marl_collect.tasks``."""

from typing import Final

from marl_collect.envs.family import Family


def _listed() -> list[str]:
    import vmas

    return [*vmas.scenarios, *vmas.mpe_scenarios]


def _known(scenario: str) -> bool:
    import vmas

    return scenario in [*_listed(), *vmas.debug_scenarios]


_SAFE = (
    *("device", "group_map", "clamp_actions"),
    *("shared_reward", "shared_rew", "share_reward"),
    *("n_agents", "n_adversaries", "n_boxes", "n_food", "n_gaussians", "n_lines"),
    *("n_blue_agents", "n_red_agents", "n_obstacles", "n_packages", "n_passages"),
    *("n_targets", "n_lidar_rays", "num_adversaries", "num_food", "num_forests"),
    *("num_good_agents", "num_landmarks", "agents_per_target", "ai_strength"),
    *("ai_red_agents", "ai_blue_agents", "agent_collision_penalty", "collisions"),
    *("collision_reward", "final_reward", "time_penalty", "pos_shaping_factor"),
    *("dist_shaping_factor", "energy_coeff", "energy_rew_coeff", "split_goals"),
    *("enforce_bounds", "covering_range", "covering_rew_coeff", "lidar_range"),
    *("observe_all_goals", "observe_pos", "observe_vel", "observe_rel_pos"),
    *("obs_agents", "obs_noise", "use_agent_lidar", "targets_respawn", "max_speed"),
    *("package_mass", "package_width", "package_length", "mass_position", "mass_ratio"),
    *("random_package_pos_on_line", "use_vel_controller", "x_semidim", "y_semidim"),
    *("joint_length", "random_start_angle", "fixed_passage", "u_range", "v_range"),
    *("world_spawning_x", "world_spawning_y", "min_distance_between_entities"),
)
"""Device, groups, and numbers of VMAS' scenarios, but not ``map_file_path``: a file."""


FAMILY: Final = Family(
    name="vmas",
    extra="vmas",
    modules=("vmas",),
    distributions=("vmas",),
    listed=_listed,
    known=_known,
    env="marl_collect.envs.vmas.env:VmasEnv",
    pettingzoo=False,
    safe=_SAFE,
)
