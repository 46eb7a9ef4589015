"""The protocol of clients that read remote objects: two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """An object as it is now.

    Args:
        path: Its name, below the client's ``url``.
        size: Bytes.
        version: What another content would have another of: an ETag, a version, a commit. Empty where the server says
            nothing of that kind: the object is then taken to be one that never changes.
    """

    path: str
    size: int
    version: str


class ObjectClient(Protocol):
    """Reads objects by ranges of bytes. Several threads may use one at once.

    A client may have a third method, ``get_all(wanted, versions)``: ranges of several objects at once, each a path, its
    first byte and its end, and the versions by path. A mirror calls it instead of ``get_ranges`` for each object.

    What a call raises says whether it may help to try again:

    - ``StorageError``: the object was not reached, which may pass: a time-out, a connection that was dropped, an
      error 500 or 503.
    - ``ChangedError``: the object is another one now.
    - ``DataError``: there is no such object, or it is not for us.

    No message names a credential, and no address in one has a query.
    """

    @property
    def url(self) -> str:
        """The address of the objects, equal for every reader and without credentials: ``s3://bucket/runs``."""
        ...

    def head(self, path: str) -> ObjectInfo:
        """Return the current size and version of an object.

        Raises:
            DataError: There is none, or it is not for us.
            StorageError: It was not reached.
        """
        ...

    def get_ranges(
        self, path: str, begins: Sequence[int], ends: Sequence[int], version: str
    ) -> Sequence[bytes | memoryview]:
        """Some ranges of an object, at once.

        Args:
            path: Its name.
            begins: The first byte of each range.
            ends: The byte behind its last.
            version: The version that the object must have; "": any, as whoever asks can tell by the bytes.

        Returns:
            The bytes of each range, all of them; nobody writes to them any more.

        Raises:
            ChangedError: The object is another one now.
            DataError: It is not there, or not for us, or ends before a range does.
            StorageError: It was not reached.
        """
        ...
