"""Checking what samplers load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mouse_core._base.checks import state_number
from mouse_core.errors import StateError


def check_state(
    state: Any, fixed: Mapping[str, str], kinds: Mapping[str, type | str], sampler: object
) -> dict[str, Any]:
    """The values of a sampler's state.

    Args:
        state: What was given.
        fixed: Values that must be these: what the sampler was made with.
        kinds: What the others must be: ``int`` (from 0), ``float``, or the kinds of dtype of an array ``[n]`` ("iu").
        sampler: For the message.

    Raises:
        StateError: Other keys, or another value or type.
    """
    name = type(sampler).__name__
    expected = {*fixed, *kinds}
    if not isinstance(state, Mapping) or set(state) != expected:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)[:80]
        raise StateError(f"sampler: expected the state of a {name} with the keys {sorted(expected)}, found {found}")
    for key, value in fixed.items():
        if _renamed(str(state[key]), value) != value:
            raise StateError(f"sampler: expected the state of a sampler made as {value}, found {state[key]}")
    return {key: _checked(key, state[key], kind) for key, kind in kinds.items()}


def _checked(key: str, value: Any, kind: type | str) -> Any:
    """A value of the state, if it is of its kind."""
    if isinstance(kind, str):
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in kind:
            raise StateError(f"sampler: expected {key} as an array [n], found {array.dtype} {list(array.shape)}")
        return array
    if kind is int:
        return state_number(key, value, where="sampler")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise StateError(f"sampler: expected {key} as a finite number, found {value!r}")
    return float(value)


def _renamed(text: str, own: str) -> str:
    """What a state says of its sampler, in today's words.

    In version 0.1 the length was ``slice_len=``, or it followed from ``num_slices=`` and the size of the batch.
    """
    length = re.search(r"\bsequence_length=\d+", own)
    text = text.replace("slice_len=", "sequence_length=")
    return text if length is None else re.sub(r"\bnum_slices=\d+", length[0], text)
