"""A digest of a stream of batches that is the same in every framework."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from mouse_core.digest import as_arrays, canonical
from mouse_core.errors import ConfigError


def stream_digest(loader: Any, n: int) -> str:
    """Return a digest of the next ``n`` batches of a loader: names, kinds, shapes, and the bits of every value.

    Batches of NumPy, PyTorch and JAX have the same digest if and only if they have the same fields with the same
    values. The width of a number is ignored: an integer counts as int32 if all values of its array fit, and otherwise
    as int64. A float counts as float32 if the conversion is exact, and otherwise as float64. For example, a stream that
    JAX without x64 stores in 32 bits has the digest of the 64-bit stream, unless narrowing changed a value. All NaNs
    count as equal; -0.0 and 0.0 count as different.

    Args:
        loader: A loader, which advances by ``n`` batches; a ``BatchSource``, whose first batches are used; or any
            iterable of batches. A batch is a mapping of names to arrays, or a tuple of such views.
        n: Number of batches.

    Returns:
        32 hexadecimal digits.

    Raises:
        ConfigError: There are fewer than ``n`` batches.

    Example:
        >>> stream_digest([{"reward": np.zeros((2, 3))}], 1) == stream_digest([{"reward": np.zeros((2, 3), "f4")}], 1)
        True
    """
    digest = hashlib.sha256()
    taken = 0
    for batch in islice(_batches(loader), n):
        for view in batch if isinstance(batch, tuple) else (batch,):
            for name, values in sorted(as_arrays(view).items()):
                same = canonical(values)
                digest.update(f"{name!r} {same.dtype.str} {same.shape};".encode())
                digest.update(same.tobytes())
            digest.update(b"end of view;")
        digest.update(b"end of batch;")
        taken += 1
    if taken < n:
        raise ConfigError(f"stream_digest: expected {n} batches, found {taken}")
    return digest.hexdigest()[:32]


def _batches(loader: Any) -> Iterator[Any]:
    if hasattr(loader, "next_batch"):
        return (loader.next_batch() for _ in count())
    if hasattr(loader, "plan"):
        return (loader[index] for index in count(loader.epoch_start))
    if isinstance(loader, Iterable):
        return iter(loader)
    raise ConfigError(f"stream_digest: expected a loader or batches, found {type(loader).__name__}")
