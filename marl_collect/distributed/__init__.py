"""Collection on a Ray cluster: workers run on its nodes.

========================  =====================================================
file                      content
========================  =====================================================
``collector.py``          ``RayCollector``, and the workers of all its actors
``ray_options.py``        its options
``cluster.py``            connects to a running Ray or starts a local one
``pool.py``               exchanges messages with them, as one pool
``relay.py``              runs in an actor: a pool of workers on a node
``worker.py``             the main function of these workers
``vectors.py``            weights in the object store and on the nodes
========================  =====================================================
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.distributed.collector import RayCollector as RayCollector

__getattr__, __dir__ = lazy.attach(__name__)
