"""The memory of batches: layout, slots, and the code that writes frames to them.

Also converts filled slots to compact observations and to batches by trajectory.
"""
