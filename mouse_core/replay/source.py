"""BufferSource: the numbered batches of a buffer. The rows of a batch are drawn several batches before its delivery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mouse_core._base.checks import UNREADABLE, check_numbers, part_of
from mouse_core.errors import ConfigError, MouseError, StateError
from mouse_core.nested import (
    children_of,
    copied,
    flatten,
    is_node,
    is_varying,
    keys_of,
    map_tree,
    object_array,
    rebuilt,
    unflatten,
)
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.buffer import BaseBuffer, Drawn
from mouse_core.replay.protocols import Draw

_LISTED = "rows of differing length"


class BufferSource:
    """The numbered batches of a buffer; each batch is drawn in the caller's thread, ``ahead`` batches before its
    delivery.

    Because the caller's thread draws, the draws do not depend on the number and timing of the threads that assemble
    batches.

    Args:
        buffer: A ``ReplayBuffer`` or a ``ReplayBufferEnsemble``.
        batch_size: The number of windows in a batch; None: the batch size of the buffer.
        ahead: The number of batches between a draw and the delivery of its batch.

    Raises:
        ConfigError: ``batch_size`` is None, and the buffer has no batch size.
    """

    # Attributes that a loader reads from a feed; see ``prefetch.loader``.
    first_index = epoch_start = 0

    def __init__(self, buffer: BaseBuffer, batch_size: int | None, ahead: int) -> None:
        if batch_size is None and buffer.batch_size is None:
            raise ConfigError(
                "batch_size: expected a batch size as argument of the loader or of the buffer, found none"
            )
        self.buffer = buffer
        self._batch_size = batch_size
        self._count = ahead
        self._drawn: dict[int, Drawn] = {}
        self._ends: set[int] = set()
        self._lacks = False  # whether the last draw failed

    def __repr__(self) -> str:
        return repr(self.buffer)

    def __len__(self) -> int:
        # list() asks for the length, ignores a TypeError, and raises any other error.
        raise TypeError(
            "loader: expected a loader over a store, which has a length, found a loader over a replay buffer"
        )

    @property
    def source(self) -> BufferSource:
        """The source of a loader's batches: this object."""
        return self

    def prepare(self, index: int, *, first: bool = False) -> bool:
        """Draw batch ``index`` and the batches after it, up to ``ahead`` batches; called in the caller's thread before
        batch ``index`` is delivered.

        A failed draw (for example, if a ``ConsumingSampler`` has no row left) is repeated before the next batch. An
        error is raised only if the failed draw belongs to batch ``index``.

        Returns:
            Whether a batch was drawn whose earlier draw had failed; a thread may already have requested this batch.

        Raises:
            ConfigError: See ``ReplayBuffer.sample``.
        """
        lacked, self._lacks = self._lacks, True
        drew = False
        for number in range(index, index + self._count + 1):
            if number in self._drawn:
                continue
            try:
                drawn = self.buffer.draw(self._batch_size)
            except MouseError:
                if number == index:
                    raise
                return lacked and drew
            drawn.last = self.buffer.ran_out
            self._drawn[number], drew = drawn, True
        self._lacks = False
        return lacked and drew

    def drawn(self, index: int) -> Drawn:
        """Return the rows that were drawn for batch ``index``. Any thread may call this method."""
        return self._drawn[index]

    def __getitem__(self, index: int) -> Any:
        """Return batch ``index``, which must already be drawn."""
        return self.buffer.finish(self.drawn(index))

    def delivered(self, index: int) -> None:
        """Record that batch ``index`` was delivered to the caller."""
        drawn = self._drawn.pop(index)
        self._ends = {index + 1} if drawn.last else set()

    def ends_at(self, index: int) -> bool:
        """Whether an epoch ended with batch ``index - 1``."""
        return index in self._ends

    def state(self, next_index: int) -> dict[str, Any]:
        """Return the index of the next batch, and the draws of batches that were not delivered yet."""
        numbers = sorted(number for number in self._drawn if number >= next_index)
        return {
            "next_index": next_index,
            "ahead": self._count,
            "drawn": {str(number): _encoded(self._drawn[number]) for number in numbers},
        }

    def refreshed(self, next_index: int) -> BufferSource:
        """Call the buffer's ``refresh``, which includes new rows of its store; existing draws are unchanged."""
        self.buffer.refresh()
        return self

    def restored(self, state: Mapping[str, Any]) -> tuple[BufferSource, int]:
        """Return two values: a source with the draws in ``state``, and the index of the next batch.

        Raises:
            StateError: The state is damaged or comes from another loader.
        """
        numbers = check_numbers(state, {"ahead": self._count}, ("next_index",))
        source = BufferSource(self.buffer, self._batch_size, self._count)
        try:
            source._drawn = {
                int(number): _decoded(copied(entry), self.buffer)
                for number, entry in part_of(state, "drawn", {}).items()
            }
        except UNREADABLE as error:
            raise StateError(f"state: expected draws, found {error!r}") from error
        return source, numbers["next_index"]


def _encoded(drawn: Drawn) -> dict[str, Any]:
    """Return a draw as a dict of plain values and arrays, for a state."""
    draw, rows = drawn.draw, drawn.rows
    return {
        "last": drawn.last,
        "seed": drawn.key.seed,
        "sample": drawn.key.index,
        "members": [number for number, _ in rows] if _of_ensemble(rows) else None,
        "rows": {str(number): _encoded(part) for number, part in rows} if _of_ensemble(rows) else map_tree(_copy, rows),
        "index": np.array(draw.index),
        "mask": draw.mask,
        "priority_weight": draw.priority_weight,
        "pad": draw.pad,
        "extra": dict(draw.extra),
        **({} if drawn.settled is None else {"settled": copied(drawn.settled)}),
    }


def _decoded(entry: Mapping[str, Any], buffer: Any) -> Drawn:
    """Return the draw that ``_encoded`` converted to a dict."""
    rows: Any = entry["rows"]
    if entry["members"] is not None:
        members = buffer.buffers
        rows = [(number, _decoded(rows[str(number)], members[number])) for number in entry["members"]]
    else:
        rows, structure = _opened(buffer._accept(rows)), getattr(buffer.storage, "structure", None)
        leaves, keys = list(flatten(rows).values()), [] if structure is None else keys_of(structure)
        if len(keys) == len(leaves):  # named tuples of the storage may have become plain tuples
            rows = unflatten(structure, dict(zip(keys, leaves, strict=True)))
    mask, weight = (
        None if values is None else np.asarray(values) for values in (entry["mask"], entry["priority_weight"])
    )
    extra = {name: np.asarray(values) for name, values in entry["extra"].items()}
    draw = Draw(np.asarray(entry["index"]), mask, weight, entry["pad"], extra)
    key = Key(int(entry["seed"]), Purpose.REPLAY, int(entry["sample"]))
    return Drawn(rows, draw, key, entry.get("settled"), bool(entry["last"]))


def _of_ensemble(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], tuple) and isinstance(rows[0][-1], Drawn)


def _copy(leaf: Any) -> Any:
    if is_varying(leaf):
        return {_LISTED: leaf.reshape(-1).tolist(), "shape": list(leaf.shape)}
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _opened(tree: Any) -> Any:
    """Restore the arrays of objects that ``_copy`` converted to lists."""
    if isinstance(tree, Mapping):
        if tree.keys() == {_LISTED, "shape"}:
            return object_array(tree[_LISTED], tuple(tree["shape"]))
        return {name: _opened(child) for name, child in tree.items()}
    return rebuilt(tree, [_opened(child) for _, child in children_of(tree)]) if is_node(tree) else tree
