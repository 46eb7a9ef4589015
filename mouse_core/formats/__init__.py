"""Readers that convert recorded data of other formats to rows of steps, and writers of these formats."""

from mouse_core.formats.base import RowStream, rows_digest
from mouse_core.formats.opening import ID_SCHEMES, open, save

__all__ = ["ID_SCHEMES", "RowStream", "open", "rows_digest", "save"]
