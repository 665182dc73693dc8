"""Files: changed atomically, descriptions of environments in JSON, logs, locks.

Everything outside of the engine uses this room; the engine does not.
"""
