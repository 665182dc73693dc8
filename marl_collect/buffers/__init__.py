"""The memory of batches: its layout, its slots, and who writes what into it.

Also what is made of filled slots: compact observations and batches by trajectory.
"""
