"""Environments and a policy fill a slot: the step loop and the running episodes."""
