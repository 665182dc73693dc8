"""Files: atomic changes, complete folders, locks, logs, URLs, environments in JSON.

Everything outside of the engine uses this room; the engine does not.
"""
