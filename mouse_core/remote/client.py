"""The protocol of clients that read remote objects: two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """The current state of an object.

    Args:
        path: Name of the object, below the client's ``url``.
        size: Size in bytes.
        version: A text that changes with the content: an ETag, a version, a commit. Empty if the server has none; the
            object then counts as one that never changes.
    """

    path: str
    size: int
    version: str


class ObjectClient(Protocol):
    """Reads objects by ranges of bytes. Several threads may use one at once.

    A client may have a third method, ``get_all(wanted, versions)``: ranges of several objects at once, each a path, its
    first byte and its end, and the versions by path. A mirror calls it instead of ``get_ranges`` for each object.

    The kind of an error tells whether another try may help:

    - ``StorageError``: a temporary failure: a time-out, a dropped connection, status 500 or 503.
    - ``ChangedError``: the object has another version now.
    - ``DataError``: the object is missing, or access is denied.

    No message contains a credential, or an address with a query.
    """

    @property
    def url(self) -> str:
        """The address of the objects, equal for every reader and without credentials: ``s3://bucket/runs``."""
        ...

    def head(self, path: str) -> ObjectInfo:
        """Return the current size and version of an object.

        Raises:
            DataError: The object is missing, or access is denied.
            StorageError: The request failed, and may succeed later.
        """
        ...

    def get_ranges(
        self, path: str, begins: Sequence[int], ends: Sequence[int], version: str
    ) -> Sequence[bytes | memoryview]:
        """Return some ranges of an object.

        Args:
            path: Name of the object.
            begins: The first byte of each range.
            ends: The byte behind the last one of each range.
            version: The version that the object must have; "": any, because the caller compares checksums.

        Returns:
            The bytes of each range, complete, in memory that never changes.

        Raises:
            ChangedError: The object has another version now.
            DataError: The object is missing, access is denied, or the object ends before a range does.
            StorageError: The request failed, and may succeed later.
        """
        ...
