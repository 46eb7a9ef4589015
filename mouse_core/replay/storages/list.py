"""Rows as any Python objects."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_text
from mouse_core.dtypes import refuse_hidden
from mouse_core.errors import DataError, SchemaError, StateError
from mouse_core.nested import children_of, copied, find, flatten, is_node, is_varying, map_tree, opened
from mouse_core.replay.ground.encoding import object_array
from mouse_core.replay.ground.protocols import FieldKey, Slots
from mouse_core.replay.ground.state import check_state
from mouse_core.replay.storages._signatures import Signatures, gathered
from mouse_core.replay.storages.ring import RingStorage, check_put
from mouse_core.spec import Alignment, check_list


class ListStorage(RingStorage):
    """Rows as any Python objects.

    Arrays and tensors, and the dicts, lists, tuples and dataclasses that hold them, are copied on the way in and out.
    Objects of all other kinds stay references.

    Of nested dicts, tuples and lists of arrays a batch has one field for each leaf. It is an array where all rows that
    are there have numbers of one shape, and else a list: whichever rows are drawn, it is the same. Where lists of
    arrays differ in length from row to row, they are lists in every batch.

    Args:
        capacity: Rows it holds.
        alignment: Which transition a row's action, reward and done belong to; None: "outgoing", as for all transitions.
        ragged: Fields that are lists also while all rows have one shape.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(
        self, capacity: int = 1000, *, alignment: Alignment | None = None, ragged: Iterable[FieldKey] = ()
    ) -> None:
        super().__init__(capacity, 1, alignment)
        self._ragged = check_list("ragged", ragged)
        self._signatures = Signatures(self._ragged)
        self._items: list[Any] = []

    def __repr__(self) -> str:
        return f"ListStorage({len(self)} of {self._capacity} rows)"

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write objects behind the last, over the oldest where there is no room; see ``Storage.append``.

        Args:
            rows: The object for ``one``; else a list of them, or a tree of arrays ``[n, ...]``, which is taken apart.
            one: ``rows`` is a single object.
        """
        items = [rows] if one else take_apart(rows, self._ragged)
        for item in items:
            _check(item)
        items = [copied(item) for item in items]
        for number, item in enumerate(items, self._written):
            slot = number % self._capacity
            if slot == len(self._items):
                self._items.append(item)
            else:
                self._items[slot] = item
            self._signatures.wrote(slot)
        return self._appended(len(items)), len(items)

    def put(self, slots: Slots, rows: Any) -> None:
        """Replace the objects in ``slots``; ``rows`` as for ``append``."""
        self._check_slots(slots)
        items = take_apart(rows, self._ragged)
        for item in items:
            _check(item)
        check_put(slots, len(items))
        for slot, item in zip(slots.reshape(-1).tolist(), [copied(item) for item in items], strict=True):
            self._items[slot] = item
            self._signatures.wrote(slot)
        self._changes += 1

    def get(self, slots: Slots) -> list[Any]:
        """The objects in ``slots``, as a list; of lists, for slots ``[B, S]``."""
        self._check_slots(slots)
        if slots.ndim > 1:
            return [self.get(part) for part in slots]
        return [copied(self._items[slot]) for slot in slots.tolist()]

    def batch(self, slots: Slots) -> Any:
        """The objects in ``slots`` as one tree of arrays, of objects where they are no numbers of one shape."""
        self._check_slots(slots)
        return gathered(self._items, slots, self._signatures.columns(self._items))

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the objects in ``slots``, where they are nested dicts or tuples."""
        if isinstance(slots, slice):
            slots = np.arange(len(self._items), dtype=np.int64)[slots]
        found = [find(self._items[slot], key) for slot in slots.reshape(-1).tolist()]
        try:
            values = np.array(found)
        except ValueError:  # rows of differing length
            values = object_array(found, (len(found),))
        if is_varying(values):
            values = object_array([copied(value) for value in values.reshape(-1)], values.shape)
        return values.reshape(*slots.shape, *values.shape[1:])

    def empty(self) -> None:
        """Forget all objects."""
        super().empty()
        self._items = []
        self._signatures = Signatures(self._ragged)

    def state(self) -> dict[str, Any]:
        """The objects, pickled, and how many were written."""
        try:
            pickled = pickle.dumps(self._items, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise DataError(f"ListStorage: expected objects that can be pickled, found {error}") from error
        return {
            "kind": "objects",
            "capacity": self._capacity,
            "alignment": self._alignment,
            "size": len(self._items),
            "written": self._written,
            "items": np.frombuffer(pickled, np.uint8),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken from. Pickled objects can run code: load only what you trust."""
        check_state(self, state, "objects")
        try:
            items = pickle.loads(np.asarray(state["items"], np.uint8).tobytes())
        except Exception as error:
            raise StateError(f"storage: expected pickled objects, found {type(error).__name__}: {error}") from error
        if not isinstance(items, list) or len(items) != state["size"]:
            raise StateError(f"storage: expected a list of {state['size']} objects, found {items!r:.80}")
        self._items = items
        self._signatures = Signatures(self._ragged)
        for slot in range(len(items)):
            self._signatures.wrote(slot)
        self._written, self._size = int(state["written"]), len(items)
        self._changes += 1


def _check(tree: Any) -> None:
    """Raise DataError where a mask hides a value, as a batch has none, and SchemaError for a name that is no text."""
    if not is_node(tree):
        refuse_hidden(tree)
        return
    for name, child in children_of(tree):
        if isinstance(name, str) and not is_text(name):
            raise SchemaError(f"rows: expected names of fields as Unicode text, found {name!r}")
        _check(child)


def take_apart(rows: Any, ragged: Collection[FieldKey] = ()) -> list[Any]:
    """The rows of a list of items, or of a tree of arrays ``[n, ...]``; ``ragged`` fields may be lists of arrays."""
    if isinstance(rows, list):
        return rows
    rows = opened(rows, 1, ragged)
    leaves = flatten(rows)
    single = next((leaf for leaf in leaves.values() if not hasattr(leaf, "__len__")), None)
    if single is not None:
        raise DataError(f"rows: expected a list of rows, or arrays [n, ...], found {type(single).__name__}")
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) != 1:
        raise DataError(f"rows: expected leaves of one length, found {sorted(lengths)}")
    return [map_tree(operator.itemgetter(number), rows) for number in range(lengths.pop())]
