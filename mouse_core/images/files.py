"""Opens files that rows name by path, within allowed folders.

A row of an untrusted dataset can contain any path, for example the path of a private image, of a pipe that blocks
forever, or of a device. So only regular files are opened, and only inside the folder of the dataset or a folder that
the caller named.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from typing import IO, Any

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_list


def check_roots(roots: Iterable[str | os.PathLike[str]], *, where: str) -> tuple[str, ...]:
    """Return the absolute paths of folders, with symbolic links resolved; raise ConfigError for a path that is not a
    folder.
    """
    if isinstance(roots, str | bytes | os.PathLike):
        raise ConfigError(f"{where}: expected a list of folders, found {roots!r}; write [{roots!r}]")
    found = []
    for root in roots:
        if not isinstance(root, str | os.PathLike) or not os.path.isdir(root):
            raise ConfigError(f"{where}: expected folders, found {root!r}")
        found.append(os.path.realpath(os.fspath(root)))
    return tuple(found)


def dataset_folders(dataset: Any) -> tuple[str, ...]:
    """Return the folders with the files of a ``datasets.Dataset``; the result is empty for a dataset in memory."""
    files = getattr(dataset, "cache_files", None) or ()
    folders = (os.path.dirname(os.path.realpath(file["filename"])) for file in files)
    return tuple(dict.fromkeys(folders))


def open_inside(path: str, roots: Sequence[str]) -> IO[bytes]:
    """Open the image file that a row names.

    Args:
        path: The path in the row. A relative path is searched in each allowed folder.
        roots: The allowed folders (absolute, without links).

    Raises:
        DataError: The file does not exist, is not a regular file, or is outside the folders (possibly through a link).
    """
    return _found_inside(path, roots, "image", "an image")[1]


def find_video(path: str, roots: Sequence[str]) -> str:
    """Return the absolute path, with links resolved, of a video that rows name; raise the errors of ``open_inside``."""
    real, file = _found_inside(path, roots, "video", "a video")
    file.close()
    return real


def _found_inside(path: str, roots: Sequence[str], what: str, one: str) -> tuple[str, IO[bytes]]:
    roots = tuple(dict.fromkeys(check_list("image_roots", roots)))
    wanted = f"expected {one} file inside the dataset's folder or a folder that --image-root or image_roots= names"
    for root in roots:
        real = os.path.realpath(os.path.join(root, path))
        if os.path.commonpath([root, real]) != root or not os.path.lexists(real):
            continue
        try:
            # The call neither waits for the other end of a pipe nor follows a link that was created since.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(real, flags)
        except OSError as error:
            raise DataError(f"expected a readable {what}, found path {path!r}: {error.strerror}") from error
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return real, os.fdopen(descriptor, "rb")
        os.close(descriptor)
        raise DataError(f"{wanted}, found path {path!r}, which is not a regular file")
    inside = [root for root in roots if os.path.commonpath([root, os.path.realpath(os.path.join(root, path))]) == root]
    if inside:
        raise DataError(f"expected a readable {what}, found path {path!r}, but no such file in {inside}")
    raise DataError(f"{wanted} (now {list(roots)}), found path {path!r}{_leads_to(path, roots)}")


def _leads_to(path: str, roots: Sequence[str]) -> str:
    """Describe the target of a link in an allowed folder, for an error message."""
    for root in roots:
        named = os.path.normpath(os.path.join(root, path))
        if os.path.commonpath([root, named]) == root and os.path.lexists(named):
            return f", which leads to {os.path.realpath(named)!r}"
    return ""
