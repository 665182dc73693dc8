"""JaxMARL, simulators of many worlds that JAX compiles."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.jaxmarl.env import JaxMarlEnv as JaxMarlEnv

__getattr__, __dir__ = lazy.attach(__name__)
