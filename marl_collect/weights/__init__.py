"""Transfers weights from the trainer's module to the workers' copies."""
