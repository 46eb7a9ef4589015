"""Maps whose keys are rows, compared exactly, with operations on many rows at a time."""

from mouse_core.maps.hashing import binary_to_decimal, hash_to_int, random_projection, row_hash
from mouse_core.maps.row_map import RowMap

__all__ = ["RowMap", "binary_to_decimal", "hash_to_int", "random_projection", "row_hash"]
