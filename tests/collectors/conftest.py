"""Workers do not import the test modules of this folder."""

from support.by_value import sent_by_value

__all__ = ["sent_by_value"]
