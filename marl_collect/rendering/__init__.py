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

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.rendering.playing import play as play
    from marl_collect.rendering.replaying import to_frames as to_frames
    from marl_collect.rendering.video import write_video as write_video

__getattr__, __dir__ = lazy.attach(__name__)
