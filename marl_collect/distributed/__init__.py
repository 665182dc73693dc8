"""Collecting on many machines: actors on a Ray cluster, each with a local collector.

========================  =====================================================
file                      its one job
========================  =====================================================
``collector.py``          ``RayCollector``, what users see
``ray_options.py``        what is asked of a cluster, checked before it starts
``cluster.py``            a Ray that runs already, or one of our own
``specs.py``              from the user's arguments to what each actor is sent
``messages.py``           what crosses between trainer and actors
``entry.py``              the door of an actor, open before torch is imported
``actor.py``              what runs in an actor: a collector, driven from afar
``outcomes.py``           from what an actor returns, or does not, to an error
``fleet.py``              the trainer's side of the actors
``member.py``             one actor, as the trainer knows it
``vigil.py``              waiting for actors that may die or hang
``vectors.py``            weights in the object store, once per version
``intake.py``             from an actor's bytes to rows of the trainer's slot
``gathering.py``          what sync and async collection have in common
``together.py``           sync: all actors fill one batch
``by_turns.py``           async: first come, first served
========================  =====================================================
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.distributed.collector import RayCollector as RayCollector

__getattr__, __dir__ = lazy.attach(__name__)
