"""Files: changed atomically, descriptions of environments, logs, locks, URLs.

Everything outside of the engine uses this room; the engine does not.
"""
