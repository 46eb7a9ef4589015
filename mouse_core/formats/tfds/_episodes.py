"""An episode of a TFDS dataset: the features of its record as steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.columns.named import nested
from mouse_core.formats.columns.steps import Stack
from mouse_core.formats.tfds._example import Feature
from mouse_core.formats.tfds._features import Leaf, decode_leaf

STEPS = "steps/"
_ABOUT_NUMBERS = 64


def episode_pieces(
    features: Mapping[str, Feature], number: int, leaves: Mapping[str, Leaf], batch_rows: int
) -> Iterator[Stack]:
    """An episode's steps, in pieces of at most ``batch_rows``.

    Args:
        features: Those of its record.
        number: The episode's.
        leaves: What is read of them.
        batch_rows: As for ``read_tfds``.
    """
    count = len(features.get(f"{STEPS}is_first", ()))
    of_episode = [leaf for leaf in leaves.values() if not is_of_step(leaf) and repeatable(leaf)]
    about = _nest({leaf.name: decode_leaf(leaf, features, None) for leaf in of_episode})
    steps = {leaf.name.removeprefix(STEPS): leaf for leaf in leaves.values() if is_of_step(leaf)}
    # What has to be decoded is decoded piece by piece.
    encoded = {name: leaf for name, leaf in steps.items() if is_encoded(leaf)}
    whole = {name: decode_leaf(leaf, features, count) for name, leaf in steps.items() if name not in encoded}
    size = rows_at_once(sum(map(_step_bytes, encoded.values())), most=batch_rows)
    for first in range(0, count, size):
        part = slice(first, min(first + size, count))
        values = {name: array[part] for name, array in whole.items()}
        values |= {name: decode_leaf(leaf, features, count, part) for name, leaf in encoded.items()}
        ordered = {name: values[name] for name in steps}
        yield Stack(_nest(ordered), part.stop - first, number, first, part.stop == count, about)


def _step_bytes(leaf: Leaf) -> int:
    """About how many bytes a step's value takes once it is decoded."""
    return math.prod(size or 256 for size in leaf.shape) * np.dtype(leaf.dtype).itemsize


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    return nested({tuple(path.split("/")): value for path, value in flat.items()})


def is_encoded(leaf: Leaf) -> bool:
    """Whether its values have to be decoded one by one."""
    return leaf.kind == "image" or leaf.encoding != "none"


def is_of_step(leaf: Leaf) -> bool:
    """Whether each step has a value of its own."""
    return leaf.name.startswith(STEPS)


def is_column(leaf: Leaf) -> bool:
    """Whether a feature can be a column: one value a step, or one sequence of values."""
    return leaf.kind != "other" and leaf.ragged - is_of_step(leaf) <= 1


def repeatable(leaf: Leaf) -> bool:
    """Whether an episode's own feature can stand in all its rows."""
    numbers = math.prod(size or 1 << 20 for size in leaf.shape)
    return not leaf.ragged and leaf.kind != "image" and numbers <= _ABOUT_NUMBERS
