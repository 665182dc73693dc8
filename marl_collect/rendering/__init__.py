"""Pictures and videos of episodes.

========================  =====================================================
file                      content
========================  =====================================================
``playing.py``            pictures of episodes that a policy plays
``replaying.py``          pictures of a recorded episode
``video.py``              writes pictures to a video file
``pictures.py``           takes one picture of an environment
``overlay.py``            writes step and returns, and cuts unused margins
========================  =====================================================
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.rendering.playing import play as play
    from marl_collect.rendering.replaying import to_frames as to_frames
    from marl_collect.rendering.video import write_video as write_video

__getattr__, __dir__ = lazy.attach(__name__)
