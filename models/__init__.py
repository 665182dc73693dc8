"""Multi-agent networks, policies and mixers.

Read ``base.py`` first: it defines ``centralised`` and ``share_params``. The modules of
``layers/`` apply the weights of all agents at once. ``policy.py`` combines a network
with a head of ``distributions/``, which samples the actions.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if __name__ != "marl_collect.models":
    raise ImportError(
        f"Import marl_collect.models, not {__name__}: it would exist twice."
    )

if TYPE_CHECKING:
    from marl_collect.models.attention import MultiAgentAttention as MultiAgentAttention
    from marl_collect.models.base import MultiAgentNetBase as MultiAgentNetBase
    from marl_collect.models.convnet import MultiAgentConvNet as MultiAgentConvNet
    from marl_collect.models.critic import CrossCriticGroupSpec as CrossCriticGroupSpec
    from marl_collect.models.critic import CrossGroupCritic as CrossGroupCritic
    from marl_collect.models.distributions.categorical import (
        MaskedCategorical as MaskedCategorical,
    )
    from marl_collect.models.distributions.categorical import (
        MaskedOneHotCategorical as MaskedOneHotCategorical,
    )
    from marl_collect.models.distributions.categorical import (
        MultiCategorical as MultiCategorical,
    )
    from marl_collect.models.distributions.heads import ActionHead as ActionHead
    from marl_collect.models.distributions.heads import (
        CategoricalHead as CategoricalHead,
    )
    from marl_collect.models.distributions.heads import HeadOptions as HeadOptions
    from marl_collect.models.distributions.heads import (
        MultiCategoricalHead as MultiCategoricalHead,
    )
    from marl_collect.models.distributions.heads import NormalHead as NormalHead
    from marl_collect.models.distributions.heads import TanhNormalHead as TanhNormalHead
    from marl_collect.models.distributions.normal import (
        IndependentNormal as IndependentNormal,
    )
    from marl_collect.models.distributions.normal import TanhNormal as TanhNormal
    from marl_collect.models.group_module import GroupModule as GroupModule
    from marl_collect.models.layers.inputs import ImageInput as ImageInput
    from marl_collect.models.layers.inputs import LocScale as LocScale
    from marl_collect.models.layers.inputs import VectorInput as VectorInput
    from marl_collect.models.make_critic import make_critic as make_critic
    from marl_collect.models.mixers import Mixer as Mixer
    from marl_collect.models.mixers import QMixer as QMixer
    from marl_collect.models.mixers import VDNMixer as VDNMixer
    from marl_collect.models.mlp import MultiAgentMLP as MultiAgentMLP
    from marl_collect.models.policy import make_head as make_head
    from marl_collect.models.policy import make_policy as make_policy
    from marl_collect.models.policy_options import HeadFactory as HeadFactory
    from marl_collect.models.policy_options import NetworkFactory as NetworkFactory
    from marl_collect.models.policy_options import PolicyOptions as PolicyOptions
    from marl_collect.models.recurrent.module import RecurrentModule as RecurrentModule
    from marl_collect.models.recurrent.networks import MultiAgentGRU as MultiAgentGRU
    from marl_collect.models.recurrent.networks import MultiAgentLSTM as MultiAgentLSTM
    from marl_collect.models.recurrent.networks import (
        set_recurrent_mode as set_recurrent_mode,
    )
    from marl_collect.models.saved_policy import load_policy as load_policy
    from marl_collect.models.saved_policy import save_policy as save_policy
    from marl_collect.weights.materialize import infer_lazy as infer_lazy
    from marl_collect.weights.materialize import materialize as materialize

__getattr__, __dir__ = lazy.attach(__name__)
