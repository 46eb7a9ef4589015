"""A storage of arbitrary Python objects, and the rules by which these objects become arrays in a batch.

Each field of a batch is either a numeric array or an array of objects. The choice must not depend on the drawn rows: a
field is numeric only if its values have equal shape and a common dtype in all rows of the storage. ``Signatures``
counts the rows of each combination of dtypes and shapes. Example: for the rows ``{"a": 1, "b": [1]}`` and ``{"a": 2,
"b": [1, 2]}``, field "a" is an int64 array in every batch. Field "b" is an array of objects, because its length
differs.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_text
from mouse_core.dtypes import number_kind, refuse_hidden
from mouse_core.errors import DataError, SchemaError, StateError
from mouse_core.nested import (
    children_of,
    copied,
    find,
    fit,
    flatten,
    is_node,
    is_varying,
    map_tree,
    object_array,
    opened,
    structure_of,
    unflatten,
)
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.replay.storages.array import RingStorage, check_put, check_state
from mouse_core.spec import Alignment

_LeafSignature = tuple[Any, ...]
"""The dtype and shape of a leaf: ("strong", dtype, shape) for NumPy values, ("weak", kind, shape) for Python numbers,
("any",) for other objects.
"""

_RowSignature = tuple[tuple[Any, ...], ...]
"""The signatures of all leaves of a row: a tuple (name, *signature) for each leaf."""

_ANY: _LeafSignature = ("any",)
_WEAK = {bool: ("weak", "b", ()), int: ("weak", "i", ()), float: ("weak", "f", ())}
_DTYPES = {"b": np.dtype(bool), "i": np.dtype(np.int64), "f": np.dtype(np.float64)}


class Signatures:
    """Counts how many rows of a storage have each combination of dtypes and shapes. A row is examined once, when the
    next batch after its write is assembled.

    Args:
        ragged: The fields that always become arrays of objects.
    """

    def __init__(self, ragged: Sequence[FieldKey] = ()) -> None:
        self._ragged = ragged
        # Two signatures for each slot: one enters lists, one takes each list as a leaf. None: not examined yet.
        self._by_slot: list[tuple[_RowSignature, _RowSignature] | None] = []
        self._pending: list[int] = []
        self._counts: dict[tuple[_RowSignature, _RowSignature], int] = {}
        # The dtype of each field (None: an array of objects), and the function that tells which nodes are leaves.
        self._layout: tuple[dict[FieldKey, np.dtype[Any] | None], Callable[[Any], bool]] | None = None

    def mark_changed(self, slot: int) -> None:
        """Record that a slot has a new object; the object's signature is computed at the next batch."""
        if slot == len(self._by_slot):
            self._by_slot.append(None)
        else:
            previous = self._by_slot[slot]
            if previous is None:
                return  # the slot is already pending
            self._by_slot[slot] = None
            self._counts[previous] -= 1
            if not self._counts[previous]:
                del self._counts[previous]
                self._layout = None
        self._pending.append(slot)

    def gather(self, items: Sequence[Any], slots: Slots) -> Any:
        """Return the objects in ``slots`` as one tree of arrays; fields that differ in shape become arrays of objects.

        Args:
            items: All objects of the storage, by slot.
            slots: Slots, an array of any shape.

        Raises:
            SchemaError: The objects have different fields.
        """
        for slot in self._pending:
            item = items[slot]
            signature = (_row_signature(item, _is_none), _row_signature(item, _is_none_or_list))
            self._by_slot[slot] = signature
            if signature not in self._counts:
                self._layout = None
            self._counts[signature] = self._counts.get(signature, 0) + 1
        self._pending.clear()
        if self._layout is None:
            entering_lists = [signature for signature, _ in self._counts]
            # If treating lists as nodes gives rows different fields, lists differ in length; then each list is one
            # leaf.
            if len({frozenset(key for key, *_ in signature) for signature in entering_lists}) < 2:
                self._layout = _dtypes_by_field(entering_lists, self._ragged), _is_none
            else:
                lists_as_leaves = list({signature: None for _, signature in self._counts})
                self._layout = _dtypes_by_field(lists_as_leaves, self._ragged), _is_none_or_list
        dtypes, is_leaf = self._layout
        drawn = [items[slot] for slot in slots.reshape(-1).tolist()]
        if dtypes.keys() == {()}:
            return _stack_values(drawn, dtypes[()], slots.shape, ())
        rows = [flatten(item, leaf=is_leaf) for item in drawn]
        columns = {key: _stack_values([row[key] for row in rows], dtypes[key], slots.shape, key) for key in dtypes}
        return unflatten(structure_of(drawn[0], leaf=is_leaf), columns)


def _is_none(node: Any) -> bool:
    return node is None


def _is_none_or_list(node: Any) -> bool:
    return node is None or isinstance(node, list)


def _stack_values(
    values: list[Any], dtype: np.dtype[Any] | None, shape: tuple[int, ...], key: FieldKey
) -> npt.NDArray[Any]:
    """Stack ``values`` to an array ``[*shape, ...]``. The array has the dtype ``dtype``, or contains objects if
    ``dtype`` is None.
    """
    if dtype is None:
        return object_array([copied(value) for value in values], shape)
    try:
        arrays = [
            value if isinstance(value, np.ndarray | np.generic) else fit(value, dtype, where=f"rows: field {key!r}")
            for value in values
        ]
        stacked = np.stack(arrays).astype(dtype, copy=False)
    except OverflowError as error:
        raise DataError(f"rows: field {key!r}: expected values that {dtype} can represent, found {error}") from error
    return stacked.reshape(*shape, *stacked.shape[1:])


def _row_signature(item: Any, is_leaf: Callable[[Any], bool]) -> _RowSignature:
    """Return the signatures of all leaves of a row; a row that is not a dict, tuple or list is a single leaf."""
    try:
        leaves = flatten(item, leaf=is_leaf) if isinstance(item, Mapping | tuple | list) else {(): item}
    except SchemaError:
        leaves = {(): item}
    return tuple((key, *_leaf_signature(leaf)) for key, leaf in leaves.items())


def _leaf_signature(leaf: Any) -> _LeafSignature:
    python_number = _WEAK.get(type(leaf))
    if python_number is not None:
        fits_int64 = type(leaf) is not int or -(2**63) <= leaf < 2**63
        return python_number if fits_int64 else _ANY
    if isinstance(leaf, np.ndarray | np.generic):
        return ("strong", leaf.dtype, leaf.shape) if number_kind(leaf.dtype) in "biufcmM" else _ANY
    if type(leaf) is list and leaf:
        try:
            array = np.asarray(leaf)
        except ValueError:
            return _ANY
        return ("weak", array.dtype.kind, array.shape) if array.dtype.kind in _DTYPES else _ANY
    return _ANY


def _dtypes_by_field(
    signatures: Sequence[_RowSignature], ragged: Sequence[FieldKey]
) -> dict[FieldKey, np.dtype[Any] | None]:
    """Return the dtype of each field; None for a field that becomes an array of objects."""
    keys = _fields_of(signatures)
    if keys is None:
        return {(): None}
    columns: dict[FieldKey, np.dtype[Any] | None] = {}
    for key in keys:
        types = {tuple(leaf_type) for signature in signatures for name, *leaf_type in signature if name == key}
        has_one_shape = key not in ragged and _ANY not in types and len({shape for _, _, shape in types}) == 1
        columns[key] = _common_dtype(types) if has_one_shape else None
    return columns


def _fields_of(signatures: Sequence[_RowSignature]) -> tuple[FieldKey, ...] | None:
    """Return the fields that all rows have; None if some rows are trees and others are single objects."""
    keys = [tuple(key for key, *_ in signature) for signature in signatures]
    other = next((fields for fields in keys if set(fields) != set(keys[0])), None)
    if other is None:
        return keys[0]
    if any(fields == ((),) for fields in keys):
        return None
    raise SchemaError(
        f"sample: expected rows with the same fields, found rows with {list(keys[0])} and rows with {list(other)}; a "
        "collate_fn can make a batch of such rows"
    )


def _common_dtype(signatures: set[tuple[Any, ...]]) -> np.dtype[Any] | None:
    """Return the dtype that represents the values of all signatures without loss; None if no dtype represents all
    values.

    Python numbers are "weak": for 1.5 and float32 values, the result is float32. For int64 and float32 values, the
    result is None.
    """
    weak, strong = ({kind for name, kind, _ in signatures if name == strength} for strength in ("weak", "strong"))
    kinds = {number_kind(dtype) for dtype in strong}
    if len(kinds | weak) > 1 and (kinds | weak) & set("bmM"):
        return None
    if not strong:
        return _DTYPES["f" if "f" in weak else weak.pop()]
    joined: np.dtype[Any] = np.result_type(*strong) if len(strong) > 1 else strong.pop()
    # None where values would be rounded: integers whose common dtype is a float, and Python floats beside integers.
    rounded = number_kind(joined) not in kinds or ("f" in weak and number_kind(joined) in "iu")
    return None if rounded else joined


class ListStorage(RingStorage):
    """A storage of arbitrary Python objects.

    Arrays and tensors, and the dicts, lists, tuples and dataclasses that contain arrays or tensors, are copied when
    they are written and when they are read. Objects of all other types are stored as references, without a copy.

    A batch has one field for each leaf of nested dicts, tuples and lists of arrays. A field is an array in every batch
    if all rows in the storage have numbers of equal shape in this field; otherwise the field is a list. A field whose
    rows are lists of different lengths is a list in every batch.

    Args:
        capacity: The largest number of rows.
        alignment: "arrived" if a row's action, reward and done led to the row's observation; "outgoing" if the action,
            reward and done follow the observation, as in rows that are transitions. None: "outgoing".
        ragged: The fields that are lists in every batch, even if all rows have values of equal shape.

    Raises:
        ConfigError: `capacity` is below 1.
    """

    def __init__(
        self, capacity: int = 1000, *, alignment: Alignment | None = None, ragged: Iterable[FieldKey] = ()
    ) -> None:
        super().__init__(capacity, 1, alignment, ragged)
        self._signatures = Signatures(self._ragged)
        self._items: list[Any] = []

    def __repr__(self) -> str:
        return f"ListStorage({len(self)} of {self.capacity} rows)"

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Append objects; a full storage overwrites its oldest rows. See ``Storage.append``.

        Args:
            rows: A single object if ``one`` is True; else a list of objects, or a tree of arrays ``[n, ...]``, which is
                split into ``n`` rows.
            one: Whether ``rows`` is a single object.
        """
        items = [copied(item) for item in self._checked(rows, one=one)]
        for number, item in enumerate(items, self.written):
            self._set(number % self.capacity, item)
        return self._appended(len(items)), len(items)

    def _checked(self, rows: Any, *, one: bool = False) -> list[Any]:
        items = [rows] if one else split_rows(rows, self._ragged)
        for item in items:
            _check_row(item)
        return items

    def _set(self, slot: int, item: Any) -> None:
        if slot == len(self._items):
            self._items.append(item)
        else:
            self._items[slot] = item
        self._signatures.mark_changed(slot)

    def check(self, rows: Any) -> None:
        """Raise the errors of ``append(rows)`` without writing."""
        self._checked(rows)

    def put(self, slots: Slots, rows: Any) -> None:
        """Replace the objects in ``slots``; see ``append`` for ``rows``."""
        self._check_slots(slots)
        items = self._checked(rows)
        check_put(slots, len(items))
        for slot, item in zip(slots.reshape(-1).tolist(), [copied(item) for item in items], strict=True):
            self._set(slot, item)
        self.changes += 1

    def get(self, slots: Slots) -> list[Any]:
        """Return the objects in ``slots`` as a list; for slots ``[B, S]``, a list of B lists."""
        self._check_slots(slots)
        if slots.ndim > 1:
            return [self.get(window) for window in slots]
        return [copied(self._items[slot]) for slot in slots.tolist()]

    def batch(self, slots: Slots) -> Any:
        """Return the objects in ``slots`` as one tree of arrays; fields that differ in shape become arrays of
        objects.
        """
        self._check_slots(slots)
        return self._signatures.gather(self._items, slots)

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """Return one field of the objects in ``slots``, which must be nested dicts or tuples."""
        if isinstance(slots, slice):
            slots = np.arange(len(self._items), dtype=np.int64)[slots]
        leaves = [find(self._items[slot], key) for slot in slots.reshape(-1).tolist()]
        try:
            values = np.array(leaves)
        except ValueError:  # rows of differing length
            values = object_array(leaves, (len(leaves),))
        if is_varying(values):
            values = object_array([copied(value) for value in values.reshape(-1)], values.shape)
        return values.reshape(*slots.shape, *values.shape[1:])

    def empty(self) -> None:
        """Remove all objects."""
        super().empty()
        self._items = []
        self._signatures = Signatures(self._ragged)

    def state(self) -> dict[str, Any]:
        """Return the pickled objects and the number of rows ever written."""
        try:
            pickled = pickle.dumps(self._items, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise DataError(f"ListStorage: expected objects that can be pickled, found {error}") from error
        return {
            "kind": "objects",
            "capacity": self.capacity,
            "alignment": self.alignment,
            "size": len(self._items),
            "written": self.written,
            "items": np.frombuffer(pickled, np.uint8),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``. Pickled objects can run code: load only states that you trust."""
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
            self._signatures.mark_changed(slot)
        self.written, self._size = int(state["written"]), len(items)
        self.changes += 1


def _check_row(tree: Any) -> None:
    """Raise DataError for a masked array with a masked value, and SchemaError for a field name that is not Unicode
    text.
    """
    if not is_node(tree):
        refuse_hidden(tree)
        return
    for name, child in children_of(tree):
        if isinstance(name, str) and not is_text(name):
            raise SchemaError(f"rows: expected names of fields as Unicode text, found {name!r}")
        _check_row(child)


def split_rows(rows: Any, ragged: Collection[FieldKey] = ()) -> list[Any]:
    """Split a tree of arrays ``[n, ...]`` into ``n`` rows; a list is returned unchanged. Fields in ``ragged`` may be
    lists.
    """
    if isinstance(rows, list):
        return rows
    rows = opened(rows, 1, ragged)
    leaves = flatten(rows)
    single = next((leaf for leaf in leaves.values() if not _has_rows(leaf)), None)
    if single is not None:
        raise DataError(f"rows: expected a list of rows, or arrays [n, ...], found {type(single).__name__}")
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) != 1:
        raise DataError(f"rows: expected leaves of equal length, found {sorted(lengths)}")
    return [map_tree(operator.itemgetter(number), rows) for number in range(lengths.pop())]


def _has_rows(leaf: Any) -> bool:
    """Whether a leaf is an array or a list with one value for each row; a text counts as one value."""
    return hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__") and not isinstance(leaf, str | bytes)
