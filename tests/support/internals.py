"""How tests reach what collectors keep to themselves."""

from typing import Any


def source_of(collector: Any) -> Any:
    """Return what fills a collector's batches."""
    return collector._source


def workers_of(collector: Any) -> Any:
    """Return the trainer's side of a collector's workers."""
    return source_of(collector)._workers


def pool_of(collector: Any) -> Any:
    """Return the pool of a collector's workers."""
    return workers_of(collector)._pool
