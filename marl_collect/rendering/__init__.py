"""Pictures of what happens in environments.

========================  =====================================================
file                      its one job
========================  =====================================================
``playing.py``            pictures of episodes that a policy plays
``replaying.py``          pictures of a recorded episode
``video.py``              pictures into a video file
``pictures.py``           one picture of an environment, or the reason why not
========================  =====================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_collect.rendering.playing import play
    from marl_collect.rendering.replaying import to_frames
    from marl_collect.rendering.video import write_video

_MODULES = {"play": "playing", "to_frames": "replaying", "write_video": "video"}

__all__ = ["play", "to_frames", "write_video"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
