"""Errors that the task providers of all environment families raise."""


class UnknownTaskError(ValueError):
    """No installed task has this name. The message says where to find it, if known."""
