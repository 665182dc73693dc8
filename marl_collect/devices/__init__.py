"""Collection with all memory on the device of a simulator."""
