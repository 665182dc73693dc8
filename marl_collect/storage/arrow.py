"""PyArrow, which the extra ``datasets`` installs."""

from marl_collect.errors import imports_of

with imports_of("datasets", "A dataset"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

__all__ = ["pa", "pc", "pq"]
