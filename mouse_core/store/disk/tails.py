"""Segments over the files of appended rows, as their writer and their readers have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.store._segments import Segment
from mouse_core.store._tail.rows import Extent
from mouse_core.store.disk.sealed import rows_of
from mouse_core.store.disk.tail import TailReader


class TailSegment(Segment):
    """Rows of a file that is appended to, as many as there were."""

    _where: tuple[Path, str, int]
    _show: Callable[[], None] | None = None

    @classmethod
    def of(
        cls,
        extent: Extent,
        image_roots: tuple[str, ...],
        place: tuple[object, int],
        where: tuple[Path, str, int],
        show: Callable[[], None] | None = None,
    ) -> TailSegment:
        """The rows that an extent has now.

        Args:
            extent: It.
            image_roots: See ``Segment``.
            place: See ``Segment``.
            where: The folder, the name of the file, and how many rows of the folder were before its first.
            show: Lets other processes see the rows.
        """
        segment = cls.of_extent(extent, image_roots)
        assert isinstance(segment, TailSegment)
        segment.place, segment._where, segment._show = place, where, show
        return segment

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the file, or the one that has the rows by then.
        if self._show is not None:
            self._show()
        return rows_at, (*self._where, self.num_rows, self._named_roots)


def rows_at(folder: Path, name: str, first: int, count: int, image_roots: tuple[str, ...]) -> Segment:
    """Rows of a folder, wherever they lie by now.

    Args:
        folder: It.
        name: The file that they lay in.
        first: How many rows were before them.
        count: How many they are.
        image_roots: See ``Segment``.

    Raises:
        DataError: They are not kept any more.
    """
    try:
        tail = TailReader(folder / name)
        if tail.committed() >= count:
            return TailSegment.of(tail.extent(count), image_roots, (tail.token, first), (folder, name, first))
    except ConfigError:
        pass  # it was sealed since
    return Segment(rows_of(folder, first, count), image_roots=image_roots)
