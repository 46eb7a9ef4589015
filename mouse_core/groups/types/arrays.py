"""Tokens and what is known of each, as arrays of one's own that cannot be written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import is_ml_float, to_numpy, widened
from mouse_core.errors import DataError

_MAX_TOKEN = 2**31 - 1
# Log-probabilities are at most 0; float32 leaves a little above, of which nothing is kept.
_MOST_LOGPROB = 1e-4


def array_of(values: Any, where: str) -> npt.NDArray[Any]:
    """Values as NumPy has them: tensors wherever they lie, with gradients or without, and narrow floats as float32.

    Raises:
        DataError: They are no array; ``where`` begins the message.
    """
    try:
        array = to_numpy(widened(values.detach()).cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where} as an array, found {values!r:.80}: {error}") from error
    return widened(array) if is_ml_float(array.dtype) else array


def tokens_of(values: Any) -> npt.NDArray[np.int32]:
    """Token ids as int32 ``[n]``; DataError: they are not."""
    tokens = array_of(values, "tokens: expected integers [n]")
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"tokens: expected integers [n], found {tokens.dtype} {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > _MAX_TOKEN):
        wrong = int(np.flatnonzero((tokens < 0) | (tokens > _MAX_TOKEN))[0])
        raise DataError(f"tokens: expected 0..{_MAX_TOKEN}, found {tokens[wrong]} at {wrong}")
    return own_array(tokens, np.int32, values)


def floats_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Finite numbers as float32 ``[length]``; DataError, whose message ``where`` begins: they are not."""
    floats = array_of(values, where)
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


def logprobs_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Log-probabilities as float32 ``[length]``, at most 0: what rounding in float32 left above becomes 0.

    Raises:
        DataError: They are none; ``where`` begins the message.
    """
    logprobs = floats_of(values, length, where)
    if length and (most := logprobs.max()) > 0:
        if most > _MOST_LOGPROB:
            wrong = int(logprobs.argmax())
            raise DataError(
                f"{where} as logarithms of probabilities, at most 0, found {logprobs[wrong]} at {wrong}; of 16 bits "
                "they are to be computed in float32"
            )
        logprobs = np.minimum(logprobs, np.float32(0))
        logprobs.flags.writeable = False
    return logprobs


def own_array(values: npt.NDArray[Any], dtype: Any, given: Any) -> npt.NDArray[Any]:
    """The values in a dtype, in memory that what was given does not share unless nobody may write to it."""
    shared = values.flags.writeable and not isinstance(given, list | tuple)
    with np.errstate(over="ignore"):
        own: npt.NDArray[Any] = values.astype(dtype, copy=shared)
    own.flags.writeable = False
    return own
