"""How a policy acts on the memory of environments, in the step loop.

===================  ==========================================================
file                 its one job
===================  ==========================================================
``runner.py``        what a rollout needs of a policy; random actions
``choose.py``        which runner acts for a policy
``signature.py``     the keys that a policy reads and writes, and where they are
``policies/probe.py``      finds them out by calls on real observations
``module.py``        any TensorDict module, called once per frame
``checked.py``       another runner, whose actions are looked at
``device_transfer.py``     a policy on another device, and what crosses to it and back
``fused.py``         a recognised policy's operations, repeated without the call
``recognised.py``    which policies may be recorded
``recording.py``     what a policy does, as a list of tensor operations
``program.py``       such a list, ready to be repeated in place
``numpy_calls.py``   which of them numpy computes, and with which calls
``comparisons.py``        random frames on which both must agree
``noise.py``         noise of heads, from the environments' own generators
``random.py``        uniformly random legal actions
``wrap.py``          whatever a user passes, made a callable on TensorDicts
===================  ==========================================================
"""
