"""Pieces of Minari's episodes, however they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.formats.minari._spaces import is_picture, leaf_shape, space_leaves
from mouse_core.images.pixels import decode_into

BUDGET = 32 << 20
"""Bytes that a piece may take."""

KNOWN = ("observations", "actions", "rewards", "terminations", "truncations")
"""What every episode has."""


@dataclass
class EpisodeSlice:
    """Consecutive rows of one episode.

    Args:
        episode: Its number.
        begins: The number of the first row in its episode.
        observations: ``[n, ...]``, nested as the space is.
        arriving: ``actions``, ``rewards``, ``terminations`` and ``truncations`` of the transitions that led to the
            rows: n, or n - 1 where the piece begins the episode.
        beside: Infos and other values by path, ``[n, ...]``.
        arriving_beside: Those of which there is one a transition.
        about: What is said of the episode: seed, options.
    """

    episode: int
    begins: int
    observations: Any
    arriving: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    arriving_beside: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def sampled(count: int, sample: int) -> list[int]:
    """Numbers of the episodes to look at: ``sample`` of them, evenly spaced, and all for 0."""
    if not sample or count <= sample:
        return list(range(count))
    return sorted({index * (count - 1) // (sample - 1) for index in range(sample)})


def subspace(space: Any, name: str, where: str) -> Any:
    """A part of a Dict or Tuple space; None where the space is not known."""
    if space is None:
        return None
    parts = space.get("subspaces")
    found = parts.get(name) if isinstance(parts, dict) else None
    if isinstance(parts, list) and name.isdigit() and int(name) < len(parts):
        found = parts[int(name)]
    if found is None:
        raise DataError(f"{where}: expected a part of the {space['type']} space, found none of that name")
    return found


def shaped(values: npt.NDArray[Any], space: Any, *, where: str) -> npt.NDArray[Any]:
    """A leaf's stored values as its space says: pictures decoded, text as text, the shape restored.

    Raises:
        DataError: They are not of that space.
    """
    if space is None:
        return plain_text(values)
    shape = leaf_shape(space, where=where)
    if space["type"] == "Text":
        if values.dtype.kind not in "OSU":
            raise DataError(f"{where}: expected text, found {values.dtype}")
        return plain_text(values)
    encoded = values.dtype.kind == "O" or (values.ndim == 2 and values.shape[1] != int(np.prod(shape)))
    if encoded and is_picture(space, where=where):
        return _pictures(values, shape, where)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: expected numbers of shape {list(shape)}, found {values.dtype}")
    if values.shape[1:] != shape:
        if int(np.prod(values.shape[1:])) != int(np.prod(shape)):
            raise DataError(f"{where}: expected values of shape {list(shape)}, found {list(values.shape[1:])}")
        return values.reshape(len(values), *shape)
    return values


def _pictures(values: npt.NDArray[Any], shape: tuple[int, ...], where: str) -> npt.NDArray[np.uint8]:
    frames = np.empty((len(values), *shape), np.uint8)
    wanted = (*shape, 1)[:3]
    for index, encoded in enumerate(values):
        data = encoded if isinstance(encoded, bytes) else encoded.tobytes()
        try:
            decode_into(data, frames[index].reshape(wanted))
        except ValueError as error:
            raise DataError(f"{where}, step {index}: {error}") from error
    return frames


def plain_text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Text of fixed width as an array of objects, anything else as it is."""
    if values.dtype.kind == "S":
        return values.astype(object)
    return values


def picture_bytes(spaces: Mapping[str, Any]) -> int:
    """How many bytes the pictures of a step take once they are decoded."""
    leaves = [(key, leaf) for key, space in spaces.items() if space is not None for _, leaf in space_leaves(space)]
    return sum(int(np.prod(leaf_shape(leaf, where=key))) for key, leaf in leaves if is_picture(leaf, where=key))
