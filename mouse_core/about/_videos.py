"""The videos that frames of a dataset are of, as it lists them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from mouse_core.errors import ConfigError, SchemaError

_MOST = 1 << 20


def check_videos(given: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of a path and a digest, or ConfigError."""
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > _MOST:
        raise ConfigError(f"videos: expected a list of at most {_MOST} pairs (path, digest), found {given!r:.80}")
    for pair in given:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConfigError(f"videos: expected pairs (path, digest), found {pair!r:.200}")
        path = PurePosixPath(pair[0])
        if path.is_absolute() or not path.name or ".." in path.parts or "\\" in pair[0] or "\0" in pair[0]:
            raise ConfigError(f"videos: expected paths below the dataset's folder, with /, found {pair[0]!r:.200}")
    return tuple((path, digest) for path, digest in given)


def joined_videos(said: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> Sequence[tuple[str, str]]:
    """The list that all parts have which have one; rows name files by their place in it.

    Raises:
        SchemaError: There are several; names two parts.
    """
    lists = [(where, videos) for where, videos in said if videos]
    for where, videos in lists[1:]:
        first, known = lists[0]
        if videos != known:
            raise SchemaError(
                f"videos: expected one list of files, found {len(known)} in {first} and {len(videos)} others in "
                f"{where}; make a store of each, and mix them (mouse_core.mixtures)"
            )
    return lists[0][1] if lists else ()
