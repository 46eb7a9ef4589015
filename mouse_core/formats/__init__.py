"""Other formats of recorded data: reading them as rows of steps, and writing them."""

from mouse_core.formats.base import RowStream, rows_digest
from mouse_core.formats.opening import ID_SCHEMES, save, stream

__all__ = ["ID_SCHEMES", "RowStream", "rows_digest", "save", "stream"]
