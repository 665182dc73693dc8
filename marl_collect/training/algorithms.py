"""Table of algorithms. To add one, write a file with a ``Learner`` and add a line."""

from typing import Final

ALGORITHMS: Final = {
    "ippo": "marl_collect.training.ppo:PPOLearner",
    "mappo": "marl_collect.training.ppo:PPOLearner",
    "ia2c": "marl_collect.training.ppo:PPOLearner",
    "maa2c": "marl_collect.training.ppo:PPOLearner",
    "iql": "marl_collect.training.value_decomposition:ValueLearner",
    "vdn": "marl_collect.training.value_decomposition:ValueLearner",
    "qmix": "marl_collect.training.value_decomposition:ValueLearner",
    "maddpg": "marl_collect.training.maddpg:MADDPGLearner",
    "iddpg": "marl_collect.training.maddpg:MADDPGLearner",
}
"""The learner of each algorithm as ``module:class``, imported when it is used.

The order is that of training, of ``--help`` and of error messages.
"""
