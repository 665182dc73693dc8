"""``RwareEnv``: the multi-robot warehouse."""

from typing import Any, final

from marl_collect.envs import registered
from marl_collect.envs.agent_lists import AgentLists
from marl_collect.envs.common import closed_on_error
from marl_collect.envs.pettingzoo.description import split_options
from marl_collect.envs.pettingzoo.env import PettingZooBase
from marl_collect.envs.rware.provider import FAMILY


@final
class RwareEnv(PettingZooBase):
    """A task of rware, such as ``"rware-tiny-2ag-v2"``.

    Example:
        >>> from functools import partial
        >>> factory = partial(RwareEnv, "rware-tiny-4ag-v2", reward_type="global")
    """

    def __init__(self, task: str, **kwargs: Any) -> None:
        """Build the environment.

        Args:
            task: name in Gymnasium's registry.
            kwargs: arguments of the task, such as ``max_steps=200``, and keywords of
                ``PettingZooWrapper``.

        Raises:
            TypeError: for an unknown keyword.
            UnknownTaskError: if there is no such task.
            ValueError: if a value does not fit.
        """
        registered.require(FAMILY, task)
        options, arguments = split_options(kwargs)
        env = registered.build("rware", task, arguments)
        with closed_on_error(env):
            # rware 2.0.0 calls its limit a termination; there is no other one, unless
            # max_inactivity_steps is set.
            options = options.with_limit(env.max_steps or None)
            super().__init__(AgentLists(env), task, options, fast=False)
