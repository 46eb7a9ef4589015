"""The rows of an episode: T transitions between T + 1 observations, in either alignment.

The action of transition t was chosen after observation t, and led to observation t + 1. Three transitions a0 a1 a2
between the observations o0 o1 o2 o3 become these rows:

    "arrived":   row 0: o0 -    row 1: o1 a0    row 2: o2 a1    row 3: o3 a2
    "outgoing":  row 0: o0 a0   row 1: o1 a1    row 2: o2 a2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.spec import Alignment

Columns = dict[str, npt.NDArray[Any]]
"""Values by column name, arrays ``[n, ...]``; strings and bytes are arrays of objects."""


def done_code(terminated: Any, truncated: Any) -> int:
    """Return 1 if an episode terminated (even if it was also truncated), 2 if it was only truncated, else 0."""
    return 1 if terminated else 2 if truncated else 0


def done_codes(terminated: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
    """Return the ``done_code`` of each element of two arrays of flags."""
    ended = np.asarray(terminated).astype(bool)
    if truncated is None:
        return ended.astype(np.int64)
    return np.where(ended, 1, np.where(np.asarray(truncated).astype(bool), 2, 0)).astype(np.int64)


GONE = 3
"""The code in ``agent_done`` for transitions after an agent's end."""


def agent_codes(
    terminated: npt.ArrayLike, truncated: npt.ArrayLike, gone: npt.ArrayLike | None = None
) -> npt.NDArray[np.int8]:
    """Return the ``done_code`` of each agent in each transition, and ``GONE`` after an agent's end.

    Example: in three transitions of two agents, the first agent terminates in the second transition, and the second
    agent is truncated in the third. The codes are ``[[0, 0], [1, 0], [3, 2]]``. Flags after the end of an agent are
    ignored.

    Args:
        terminated, truncated: Flags ``[T, A]``.
        gone: Whether each agent has already ended, bool ``[A]``; None: no agent has ended.

    Returns:
        int8 ``[T, A]``.
    """
    codes = done_codes(terminated, truncated).astype(np.int8)
    before = np.zeros_like(codes[:1], np.bool_) if gone is None else np.asarray(gone)[None]
    ended = np.logical_or.accumulate(np.concatenate([before, codes != 0]))[:-1]
    return np.where(ended, np.int8(GONE), codes)


def placeholder(values: npt.NDArray[Any], count: int = 1) -> npt.NDArray[Any]:
    """Return ``count`` rows of zeros (or empty texts and lists) with the type and shape of the rows of ``values``."""
    if values.dtype.kind in "OSU":
        first = next((value for value in values.flat if value is not None), "")
        is_plain = isinstance(first, str | bytes | list | tuple | dict | int | float | np.generic)
        empty = np.zeros_like(first) if isinstance(first, np.ndarray) else type(first)() if is_plain else None
        rows = np.empty((count, *values.shape[1:]), object)
        rows.fill(empty)
        return rows
    return np.zeros((count, *values.shape[1:]), values.dtype)


def episode_rows(
    observations: Mapping[str, npt.NDArray[Any]],
    transitions: Mapping[str, npt.NDArray[Any]],
    *,
    begins: int = 0,
    alignment: Alignment = "arrived",
) -> Columns:
    """Return the rows of an episode, or of a part of an episode.

    Args:
        observations: Columns of the observations, ``[n, ...]``, from observation ``begins`` on.
        transitions: Columns of the transitions, including ``done``. With alignment "arrived", a part that begins the
            episode (``begins == 0``) has ``n - 1`` values for each column, and a row of zeros is inserted before these
            values. A later part has ``n`` values; the first value belongs to the transition that led to the part's
            first row. With alignment "outgoing", the part has as many rows as transitions, and an observation after the
            last transition is dropped.
        begins: The index in the episode of the part's first row.
        alignment: The alignment of the rows.

    Returns:
        All columns, ``[rows, ...]`` each, and ``episode_step``.
    """
    moved = alignment == "arrived" and begins == 0
    rows = {
        name: np.concatenate([placeholder(values), values]) if moved else values for name, values in transitions.items()
    }
    count = len(next(iter(rows.values())))
    rows |= {name: values[:count] if alignment == "outgoing" else values for name, values in observations.items()}
    rows["episode_step"] = np.arange(begins, begins + count, dtype=np.int64)
    return rows
