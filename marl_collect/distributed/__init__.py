"""Collection on a Ray cluster: each actor runs a local collector.

========================  =====================================================
file                      content
========================  =====================================================
``collector.py``          ``RayCollector``
``ray_options.py``        its options
``cluster.py``            connects to a running Ray or starts a local one
``specs.py``              converts the user's arguments into one spec per actor
``messages.py``           messages between trainer and actors
``entry.py``              the Ray actor class; light, so that imports can overlap
``actor.py``              runs in the actor: a collector with a remote interface
``results.py``            converts Ray results to values or errors
``actor_group.py``        the trainer's view of all actors
``actor_handle.py``       the trainer's view of one actor
``watchdog.py``           waits for actors that may die or hang
``vectors.py``            weights in the object store
``unpack.py``             copies an actor's bytes into rows of the trainer's slot
``gathering.py``          what sync and async collection have in common
``sync_gathering.py``     all actors fill one batch
``async_gathering.py``    each batch comes from one actor, in order of arrival
========================  =====================================================
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.distributed.collector import RayCollector as RayCollector

__getattr__, __dir__ = lazy.attach(__name__)
