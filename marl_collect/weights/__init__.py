"""Weights on their way from the trainer's module to the workers' copies."""
