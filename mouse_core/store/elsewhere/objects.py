"""The objects that some rows lie in, whose bytes come to lie in a mirror."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mouse_core._base.memo import memo
from mouse_core.remote.client import ObjectInfo
from mouse_core.remote.clients import Reaching, open_client
from mouse_core.store.elsewhere.asking import Range

if TYPE_CHECKING:
    from mouse_core.ahead.backing import Backing
    from mouse_core.remote.clients.objects import FolderClient
    from mouse_core.remote.mirror import Mirror, MirrorObject


class Place:
    """Where objects are, and where what was read of them is kept.

    Args:
        client: Reads, and lists, the objects.
        mirror: Keeps what was read.
    """

    def __init__(self, client: FolderClient, mirror: Mirror) -> None:
        self.client, self.mirror = client, mirror

    @classmethod
    def of(cls, url: str, reaching: Reaching) -> Place:
        """That of an address; nothing is asked for yet."""
        from mouse_core.remote.mirror import Mirror

        client = open_client(url, reaching.storage_options)
        return cls(client, Mirror(reaching.cache, cache_bytes=reaching.cache_bytes, fail=reaching.fail))


class Objects:
    """Some objects, numbered, that are read range by range.

    Args:
        place: Where they are.
        infos: What each was when it was opened; it must be that still.
    """

    def __init__(self, place: Place, infos: Sequence[ObjectInfo]) -> None:
        self.place, self.infos = place, list(infos)

    @memo
    def _placed(self) -> list[MirrorObject]:
        # At once: then all lie in the same map.
        return self.place.mirror.add(self.place.client, self.infos)

    @property
    def backing(self) -> Backing | None:
        """What stands behind the addresses of ``begin``; None where there are no objects."""
        return self._placed[0].backing if self._placed else None

    def begin(self, number: int) -> int:
        """The address at which an object's bytes begin, once they are there."""
        return self._placed[number].address

    def read(self, ranges: Sequence[Range]) -> Sequence[Any]:
        """The bytes of some ranges, of whichever objects, in memory that nobody writes to any more.

        Raises:
            ChangedError: An object is another one now.
            DataError: It is not there any more.
            StorageError: It was not reached.
        """
        first = np.array([self._placed[one.object].address for one in ranges], np.int64)
        begins, ends = (
            np.array(part, np.int64) for part in zip(*((one.begin, one.end) for one in ranges), strict=True)
        )
        return self._placed[0].backing.read(first + begins, first + ends)

    def shown(self, number: int) -> str:
        """An object's address, for messages."""
        return self.place.client.shown(self.infos[number].path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Objects, (self.place, self.infos)
