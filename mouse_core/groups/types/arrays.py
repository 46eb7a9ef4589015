"""Tokens and what is known of each, as arrays of one's own that cannot be written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError

_MAX_TOKEN = 2**31 - 1


def tokens_of(values: Any) -> npt.NDArray[np.int32]:
    """Token ids as int32 ``[n]``; DataError: they are not."""
    tokens = np.asarray(values)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"tokens: expected integers [n], found {tokens.dtype} {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > _MAX_TOKEN):
        wrong = int(np.flatnonzero((tokens < 0) | (tokens > _MAX_TOKEN))[0])
        raise DataError(f"tokens: expected 0..{_MAX_TOKEN}, found {tokens[wrong]} at {wrong}")
    return own_array(tokens, np.int32, values)


def floats_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Finite numbers as float32 ``[length]``; DataError, whose message ``where`` begins: they are not."""
    floats = np.asarray(values)
    if floats.shape != (length,):
        raise DataError(f"{where} for each of {length} tokens, found shape {list(floats.shape)}")
    if floats.size and floats.dtype.kind not in "iuf":
        raise DataError(f"{where} as numbers, found {floats.dtype}")
    narrow: npt.NDArray[np.float32] = own_array(floats, np.float32, values)
    finite = np.isfinite(narrow)
    if not finite.all():
        wrong = int(np.flatnonzero(~finite)[0])
        raise DataError(f"{where} as finite float32 numbers, found {floats[wrong]} at {wrong}")
    return narrow


def own_array(values: npt.NDArray[Any], dtype: Any, given: Any) -> npt.NDArray[Any]:
    """The values in a dtype, in memory that what was given does not share unless nobody may write to it."""
    shared = values.flags.writeable and not isinstance(given, list | tuple)
    with np.errstate(over="ignore"):
        own: npt.NDArray[Any] = values.astype(dtype, copy=shared)
    own.flags.writeable = False
    return own
