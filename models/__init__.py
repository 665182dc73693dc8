"""Multi-agent networks, policies and mixers.

Read ``base.py`` first: what ``centralised`` and ``share_params`` mean. ``stacking.py``
and the layers below it apply all agents' weights at once. Policies are made in
``policy.py`` of a network, and a head (``heads.py``) that draws actions from one of the
``distributions.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ != "marl_collect.models":
    raise ImportError(
        f"Import marl_collect.models, not {__name__}: it would exist twice."
    )

if TYPE_CHECKING:
    from marl_collect.materializing import infer_lazy, materialize
    from marl_collect.models.base import MultiAgentNetBase
    from marl_collect.models.categorical import (
        MaskedCategorical,
        MaskedOneHotCategorical,
        MultiCategorical,
    )
    from marl_collect.models.convnet import MultiAgentConvNet
    from marl_collect.models.critic import CrossCriticGroupSpec, CrossGroupCritic
    from marl_collect.models.group_module import GroupModule
    from marl_collect.models.heads import (
        ActionHead,
        CategoricalHead,
        HeadOptions,
        MultiCategoricalHead,
        NormalHead,
        TanhNormalHead,
    )
    from marl_collect.models.inputs import ImageInput, LocScale, VectorInput
    from marl_collect.models.mixers import Mixer, QMixer, VDNMixer
    from marl_collect.models.mlp import MultiAgentMLP
    from marl_collect.models.normal import IndependentNormal, TanhNormal
    from marl_collect.models.policy import make_head, make_policy
    from marl_collect.models.policy_options import PolicyOptions
    from marl_collect.models.recurrent import (
        MultiAgentGRU,
        MultiAgentLSTM,
        set_recurrent_mode,
    )
    from marl_collect.models.recurrent_module import RecurrentModule

_NAMES = {
    "base": ("MultiAgentNetBase",),
    "categorical": (
        "MaskedCategorical",
        "MaskedOneHotCategorical",
        "MultiCategorical",
    ),
    "convnet": ("MultiAgentConvNet",),
    "critic": ("CrossCriticGroupSpec", "CrossGroupCritic"),
    "group_module": ("GroupModule",),
    "heads": (
        "ActionHead",
        "CategoricalHead",
        "HeadOptions",
        "MultiCategoricalHead",
        "NormalHead",
        "TanhNormalHead",
    ),
    "inputs": ("ImageInput", "LocScale", "VectorInput"),
    "mixers": ("Mixer", "QMixer", "VDNMixer"),
    "mlp": ("MultiAgentMLP",),
    "normal": ("IndependentNormal", "TanhNormal"),
    "policy": ("make_head", "make_policy"),
    "policy_options": ("PolicyOptions",),
    "recurrent": ("MultiAgentGRU", "MultiAgentLSTM", "set_recurrent_mode"),
    "recurrent_module": ("RecurrentModule",),
}
# Public name -> the module that has it.
_MODULES = {
    name: f"marl_collect.models.{module}"
    for module, names in _NAMES.items()
    for name in names
} | dict.fromkeys(("infer_lazy", "materialize"), "marl_collect.materializing")

__all__ = [
    "ActionHead",
    "CategoricalHead",
    "CrossCriticGroupSpec",
    "CrossGroupCritic",
    "GroupModule",
    "HeadOptions",
    "ImageInput",
    "IndependentNormal",
    "LocScale",
    "MaskedCategorical",
    "MaskedOneHotCategorical",
    "Mixer",
    "MultiAgentConvNet",
    "MultiAgentGRU",
    "MultiAgentLSTM",
    "MultiAgentMLP",
    "MultiAgentNetBase",
    "MultiCategorical",
    "MultiCategoricalHead",
    "NormalHead",
    "PolicyOptions",
    "QMixer",
    "RecurrentModule",
    "TanhNormal",
    "TanhNormalHead",
    "VDNMixer",
    "VectorInput",
    "infer_lazy",
    "make_head",
    "make_policy",
    "materialize",
    "set_recurrent_mode",
]


def __getattr__(name: str) -> object:
    """Load a public name's module; the name is an ordinary global from then on."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, loaded or not."""
    return sorted(__all__)
