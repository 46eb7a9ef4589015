"""Other formats of recorded data: reading them as rows of steps, and writing them."""

from mouse_core.formats.base import RowStream, rows_digest
from mouse_core.formats.opening import ID_SCHEMES, open, save

__all__ = ["ID_SCHEMES", "RowStream", "open", "rows_digest", "save"]
