"""The objects that some rows lie in, whose bytes come to lie in a mirror, each page as it was written.

Digests of a segment's pages lie in an object beside it, which ``upload`` sends: 64 KB for 64 MB. So any page is held
against its digest when it comes, whatever else is read. Where there is no such object, as in a folder that was copied,
the segment is read once as a whole, held against what the manifest says of it, and its digests are kept in the cache.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import ChangedError, DataError, StorageError
from mouse_core.files.checksum import PAGE, PageChecksums, check, digest, page_checksums, with_digest, without_digest
from mouse_core.files.ipc.summed import SummedFile
from mouse_core.files.writing import make_folder, write_file
from mouse_core.remote.client import ObjectInfo
from mouse_core.remote.clients import Reaching, open_client
from mouse_core.store.disk.manifest import Sealed

if TYPE_CHECKING:
    from mouse_core.readahead.backing import RemoteMemory
    from mouse_core.remote.clients.objects import FolderClient
    from mouse_core.remote.mirror import Mirror, MirrorObject

# Of a segment that is read as a whole, so much is asked for at a time.
_PIECE = 64 << 20
_MARK = b"mousesum"
# Digests of so many segments stay in memory: some 64 MB.
_MOST_KNOWN = 1024


class Range(NamedTuple):
    """Some bytes of an object: its number among those of a dataset, the first byte, and the one behind the last."""

    object: int
    begin: int
    end: int


class Place:
    """A client of remote objects and the mirror that caches what was read.

    Args:
        client: Reads, and lists, the objects.
        mirror: Keeps what was read.
    """

    def __init__(self, client: FolderClient, mirror: Mirror) -> None:
        self.client, self.mirror = client, mirror
        self.sums = KnownSums(client, mirror.folder)
        """Known checksums of pages."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.client, self.mirror)

    @classmethod
    def of(cls, url: str, reaching: Reaching) -> Place:
        """Return the place of an address; nothing is requested yet."""
        from mouse_core.remote.mirror import Mirror

        client = open_client(url, reaching.storage_options)
        return cls(client, Mirror(reaching.cache, cache_bytes=reaching.cache_bytes, fail=reaching.fail))


class Objects:
    """Some objects, numbered, that are read range by range.

    Args:
        place: Where they are.
        infos: What each was when it was opened; it must be that still.
        sums: Of each who knows what was written; none: objects are read as they come.
    """

    def __init__(self, place: Place, infos: Sequence[ObjectInfo], sums: Sequence[FileSums] = ()) -> None:
        self.place, self.infos, self._sums = place, list(infos), sums

    @memo
    def _placed(self) -> list[MirrorObject]:
        # At once: then all lie in the same map.
        return self.place.mirror.add(self.place.client, self.infos, self._sums)

    @property
    def backing(self) -> RemoteMemory | None:
        """Memory behind the addresses of ``begin``; None without objects."""
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
        return Objects, (self.place, self.infos, self._sums)


# ---------------------------------------------------------------------- what was written


class KnownSums:
    """The digests of segments that were found last. It knows no mirror, whose objects know it.

    Args:
        client: Reads the objects.
        folder: The cache's.
    """

    def __init__(self, client: FolderClient, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.one_at_a_time = ProcessLock()
        """Held by who reads a whole segment, which takes its bytes of memory."""
        self._lock, self._known = ProcessLock(), OrderedDict[tuple[str, str], PageChecksums]()

    def known(self, sealed: Sealed, sums: PageChecksums | None = None) -> PageChecksums | None:
        """Return, or keep, the checksums of a segment; None if they are not known any more."""
        key = sealed.name, sealed.digest
        with self._lock:
            found = sums if sums is not None else self._known.get(key)
            if found is not None:
                self._known[key] = found
                self._known.move_to_end(key)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
            return found

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownSums, (self.client, self.folder)


class FileSums:
    """The digests of a segment's pages: those beside it, or found by reading all of it once. See ``PageSums``.

    Args:
        known: Those that were found.
        info: The object that it is.
        sealed: What the manifest says of it.
    """

    def __init__(self, known: KnownSums, info: ObjectInfo, sealed: Sealed) -> None:
        self._known, self._info, self._sealed = known, info, sealed
        self._lock = ProcessLock()

    def __call__(self) -> PageChecksums:
        """See ``PageSums``."""
        found = self._known.known(self._sealed)
        if found is None:
            with self._lock:
                found = self._here()
                if found is None:
                    (found,) = self._beside([self])
                    if found is None:
                        found = self._read()
                    self._keep(found)
        return found

    def find(self, others: Sequence[FileSums]) -> None:
        """See ``PageSums``: those beside their segments come at once; whoever has none is left to find them by itself,
        as are those that another thread is finding.
        """
        held = []
        try:
            for one in others:
                if self._known.known(one._sealed) is None and one._lock.acquire(blocking=False):
                    held.append(one)
            lacking = [one for one in held if one._here() is None]
            if len(lacking) > 1:
                for one, found in zip(lacking, self._beside(lacking), strict=True):
                    if found is not None:
                        one._keep(found)
        finally:
            for one in held:
                one._lock.release()

    def named(self, message: str) -> str:
        """See ``PageSums``."""
        return f"{self._known.client.shown(self._info.path)}: {message}"

    @memo
    def _file(self) -> Path:
        """File of the cache that has the checksums."""
        said = [self._known.client.url, self._info.path, self._info.version, str(self._info.size)]
        return self._known.folder / "sums-1" / digest("\0".join(said).encode())

    def _here(self) -> PageChecksums | None:
        """Return the checksums that are known or in the cache."""
        found = self._known.known(self._sealed)
        if found is None:
            try:
                found = sums_in(self._file.read_bytes(), self._sealed)
            except OSError:
                return None
        return found if found is None else self._known.known(self._sealed, found)

    def _keep(self, sums: PageChecksums) -> None:
        self._known.known(self._sealed, sums)
        try:
            make_folder(self._file.parent, sync=False)
            write_file(self._file, sums_as_bytes(sums, self._sealed), sync=False)
        except StorageError:
            pass  # they are found again

    def _beside(self, several: Sequence[FileSums]) -> list[PageChecksums | None]:
        """Return the checksums that were uploaded with segments; None: missing, damaged, or of another file."""
        wanted = [(name_of_sums(one._sealed), 0, size_of_sums(one._sealed)) for one in several]
        try:
            contents = self._known.client.get_all(wanted, {})
        except DataError:  # which one lacks them is not said
            return [None] * len(several)
        return [sums_in(content, one._sealed) for one, content in zip(several, contents, strict=True)]

    def _read(self) -> PageChecksums:
        with self._known.one_at_a_time:
            try:
                content = checked_content(self._known.client, self._info, self._sealed)
            except DataError as error:
                if isinstance(error, ChangedError):
                    raise
                content = checked_content(
                    self._known.client, self._info, self._sealed
                )  # it may be whole but for the way
            return page_checksums([content])

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSums, (self._known, self._info, self._sealed)


def name_of_sums(sealed: Sealed) -> str:
    """The object beside a segment that has the digests of its pages."""
    return f"{sealed.name}.sums"


def size_of_sums(sealed: Sealed) -> int:
    """Return the bytes of the object with the checksums of a segment."""
    return len(with_digest(_MARK + sealed.digest.encode())) + 4 * -(-sealed.bytes // PAGE)


def sums_as_bytes(sums: PageChecksums, sealed: Sealed) -> bytes:
    """Return the bytes that ``sums_in`` takes: the segment's digest, the checksums, and the digest of both."""
    return with_digest(_MARK + sealed.digest.encode() + sums.astype("<u4").tobytes())


def sums_in(content: bytes | memoryview, sealed: Sealed) -> PageChecksums | None:
    """The digests of a segment's pages; None where they are damaged, or another's."""
    bare, head = without_digest(content), _MARK + sealed.digest.encode()
    if bare is None or len(content) != size_of_sums(sealed) or not bare.startswith(head):
        return None
    return np.frombuffer(bare, "<u4", offset=len(head))


def checked_content(client: FolderClient, info: ObjectInfo, sealed: Sealed) -> mmap.mmap:
    """All of a segment, read past the cache and held against its digest.

    Raises:
        ChangedError: It is another object now.
        DataError: It is not what was written.
        StorageError: It was not reached.
    """
    where = client.shown(sealed.name)
    if info.size != sealed.bytes:
        raise DataError(f"{where}: expected {sealed.bytes} bytes as were written, found {info.size}")
    memory = mmap.mmap(-1, info.size)
    for begin in range(0, info.size, _PIECE):
        end = min(begin + _PIECE, info.size)
        (memory[begin:end],) = client.get_ranges(sealed.name, [begin], [end], info.version)
    if sealed.batch_rows:
        # Of which no record batch is made.
        file = SummedFile(where, memory, pa.schema([]), sealed.rows, sealed.batch_rows, sealed.digest)
        file.check_all()
    else:
        check(where, "the file", sealed.digest, digest(memory))
    return memory
