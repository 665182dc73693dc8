"""Multi-agent networks, policies and mixers.

Read ``base.py`` first (what ``centralised`` and ``share_params`` mean), then ``mlp.py``.
Policies are made in ``policy.py`` from a network and a head (``heads.py``), which says
how actions are drawn (``distributions.py``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "marl_collect.models":
    raise ImportError(
        f"Import marl_collect.models, not {__name__}: it would exist twice."
    )

if TYPE_CHECKING:
    from marl_collect.materialize import infer_lazy, materialize
    from marl_collect.models.base import MultiAgentNetBase
    from marl_collect.models.convnet import MultiAgentConvNet
    from marl_collect.models.mlp import MultiAgentMLP

_WHERE = {
    "MultiAgentConvNet": "marl_collect.models.convnet",
    "MultiAgentMLP": "marl_collect.models.mlp",
    "MultiAgentNetBase": "marl_collect.models.base",
    "infer_lazy": "marl_collect.materialize",
    "materialize": "marl_collect.materialize",
}

__all__ = [
    "MultiAgentConvNet",
    "MultiAgentMLP",
    "MultiAgentNetBase",
    "infer_lazy",
    "materialize",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
