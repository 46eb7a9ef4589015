"""Maps whose keys are rows that are compared exactly, with vectorised operations on many rows."""

from mouse_core.maps.hashing import binary_to_decimal, hash_to_int, random_projection, row_hash
from mouse_core.maps.row_map import RowMap

__all__ = ["RowMap", "binary_to_decimal", "hash_to_int", "random_projection", "row_hash"]
