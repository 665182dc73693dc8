"""Task provider of JaxMARL: an entry point of ``marl_collect.tasks``."""

from typing import Any, Final

from marl_collect.envs.common import defaults_of
from marl_collect.envs.family import Family
from marl_collect.envs.jaxmarl.library import TASKS, arguments


def _defaults(task: str) -> dict[str, Any]:
    from marl_collect.envs.jaxmarl.env import JaxMarlEnv

    return arguments(task) | defaults_of(JaxMarlEnv)


FAMILY: Final = Family(
    name="jaxmarl",
    extra="jaxmarl",
    modules=("jaxmarl",),
    distributions=("jaxmarl", "jax"),
    listed=TASKS.keys,
    known=TASKS.__contains__,
    env="marl_collect.envs.jaxmarl.env:JaxMarlEnv",
    defaults=_defaults,
    pettingzoo=False,
    safe=(
        "group_map",
        "action_type",
        "score_function",
        "scenario",
        "layout",
        "observation_type",
        "attack_mode",
        "hand_size",
        "agent_view_size",
    ),
)
