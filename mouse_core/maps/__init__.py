"""Maps whose keys are rows. Rows are compared exactly, and operations take many rows at once."""

from mouse_core.maps.hashing import binary_to_decimal, hash_to_int, random_projection, row_hash
from mouse_core.maps.row_map import RowMap

__all__ = ["RowMap", "binary_to_decimal", "hash_to_int", "random_projection", "row_hash"]
