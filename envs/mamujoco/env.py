"""``MamujocoEnv``: robots of MuJoCo whose joints are divided among agents."""

from typing import Any, final

from marl_collect.envs.common import closed_on_error
from marl_collect.envs.pettingzoo.description import split_options
from marl_collect.envs.pettingzoo.env import PettingZooBase
from marl_collect.errors import imports_of
from marl_collect.options import Option, require

with imports_of("mamujoco", "MamujocoEnv"):
    from gymnasium_robotics import mamujoco_v1


@final
class MamujocoEnv(PettingZooBase):
    """A task of gymnasium-robotics' MaMuJoCo, such as ``"Ant-4x2"``.

    Example:
        >>> from functools import partial
        >>> factory = partial(MamujocoEnv, "HalfCheetah-6x1", agent_obsk=0)
    """

    def __init__(self, task: str, **kwargs: Any) -> None:
        """Build the environment.

        Args:
            task: robot and division of its joints: agents, ``x``, joints of each.
            kwargs: arguments of ``mamujoco_v1.parallel_env`` and of the robot, such as
                ``agent_obsk=0``, and keywords of ``PettingZooWrapper``.

        Raises:
            TypeError: for an unknown keyword.
            ValueError: if a value does not fit.
        """
        options, arguments = split_options(kwargs)
        require("task", task, str, Option(""))
        scenario, _, division = task.partition("-")
        try:
            env = mamujoco_v1.parallel_env(scenario, division, **arguments)
        except Exception as error:
            error.add_note("`marl-collect envs mamujoco` lists robots and divisions.")
            raise
        with closed_on_error(env):
            spec = env.single_agent_env.spec
            limit = None if spec is None else spec.max_episode_steps
            super().__init__(env, task, options.with_limit(limit), fast=False)
