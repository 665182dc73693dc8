"""What is stepped, and who acts.

===================  ==========================================================
file                 its one job
===================  ==========================================================
``table.py``         every workload: groups, sizes, and the libraries' own loops
``burning.py``       an environment whose step is a fixed amount of work
``free.py``          an environment whose step costs almost nothing
``counting.py``      an environment that can be recomputed, and fails on request
``pair.py``          an environment whose best returns can be derived by hand
``adapters.py``      a workload as our environment, and as TorchRL's
``networks.py``      the networks, with the same weights for everybody
``policies.py``      a policy for a collector, ours or TorchRL's
===================  ==========================================================

``table.py``, ``free.py`` and ``burning.py`` are imported in the peers'
environments too, where neither torch nor what this package needs may be installed.
"""
