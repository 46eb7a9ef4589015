"""Rows as any Python objects."""

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
from mouse_core.replay.storages.ring import RingStorage, check_put, check_state
from mouse_core.spec import Alignment

_Signature = tuple[Any, ...]
"""The signature of a leaf: "strong", a dtype and a shape; "weak", a kind of Python's numbers, and a shape; or "any"."""

_Leaves = tuple[tuple[Any, ...], ...]
"""The signatures of the leaves of an object, each behind its name."""

_ANY: _Signature = ("any",)
_WEAK = {bool: ("weak", "b", ()), int: ("weak", "i", ()), float: ("weak", "f", ())}
_DTYPES = {"b": np.dtype(bool), "i": np.dtype(np.int64), "f": np.dtype(np.float64)}


class Signatures:
    """The dtypes and shapes of the objects in a storage, each looked at once, when a batch is made.

    Args:
        ragged: Fields that are lists in any case.
    """

    def __init__(self, ragged: Sequence[FieldKey] = ()) -> None:
        self._ragged = ragged
        # The signatures of each slot: with lists of arrays as nodes, and as leaves.
        self._of: list[tuple[_Leaves, _Leaves] | None] = []
        self._unseen: list[int] = []
        self._counts: dict[tuple[_Leaves, _Leaves], int] = {}
        # The dtype of each field that is an array of one shape in all objects, and which nodes are leaves.
        self._known: tuple[dict[FieldKey, np.dtype[Any] | None], Callable[[Any], bool]] | None = None

    def wrote(self, slot: int) -> None:
        """Note that there is another object in a slot."""
        if slot == len(self._of):
            self._of.append(None)
        else:
            before = self._of[slot]
            if before is None:
                return  # it is among the unseen
            self._of[slot] = None
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
                self._known = None
        self._unseen.append(slot)

    def gather(self, items: Sequence[Any], slots: Slots) -> Any:
        """Return the objects in ``slots`` as one tree, whose leaves are arrays: of numbers of one shape, or of objects.

        Args:
            items: All objects of the storage, by slot.
            slots: Slots, of any shape.

        Raises:
            SchemaError: The objects have different fields.
        """
        for slot in self._unseen:
            item = items[slot]
            signature = (_signatures_of(item, _is_none), _signatures_of(item, _is_none_or_list))
            self._of[slot] = signature
            if signature not in self._counts:
                self._known = None
            self._counts[signature] = self._counts.get(signature, 0) + 1
        self._unseen.clear()
        if self._known is None:
            nodes = [with_nodes for with_nodes, _ in self._counts]
            # Lists of arrays that differ in length from row to row are no nodes.
            if len({_keys_of(leaves) for leaves in nodes}) < 2:
                self._known = _joined(nodes, self._ragged), _is_none
            else:
                nodes = list({without: None for _, without in self._counts})
                self._known = _joined(nodes, self._ragged), _is_none_or_list
        dtypes, is_leaf = self._known
        drawn = [items[slot] for slot in slots.reshape(-1).tolist()]
        if dtypes.keys() == {()}:
            return _column(drawn, dtypes[()], slots.shape, ())
        leaves = [flatten(item, leaf=is_leaf) for item in drawn]
        columns = {key: _column([found[key] for found in leaves], dtypes[key], slots.shape, key) for key in dtypes}
        return unflatten(structure_of(drawn[0], leaf=is_leaf), columns)


def _is_none(node: Any) -> bool:
    return node is None


def _is_none_or_list(node: Any) -> bool:
    return node is None or isinstance(node, list)


def _column(values: list[Any], dtype: np.dtype[Any] | None, shape: tuple[int, ...], key: FieldKey) -> npt.NDArray[Any]:
    if dtype is None:
        return object_array([copied(value) for value in values], shape)
    try:
        arrays = [
            value if isinstance(value, np.ndarray | np.generic) else fit(value, dtype, where=f"rows: field {key!r}")
            for value in values
        ]
        stacked = np.stack(arrays).astype(dtype, copy=False)
    except OverflowError as error:
        raise DataError(f"rows: field {key!r}: expected values that {dtype} holds, found {error}") from error
    return stacked.reshape(*shape, *stacked.shape[1:])


def _signatures_of(item: Any, is_leaf: Callable[[Any], bool]) -> _Leaves:
    """Return the signatures of the leaves of nested dicts, tuples and lists; for any other object, its own."""
    try:
        leaves = flatten(item, leaf=is_leaf) if isinstance(item, Mapping | tuple | list) else {(): item}
    except SchemaError:
        leaves = {(): item}
    return tuple((key, *_signature_of(leaf)) for key, leaf in leaves.items())


def _keys_of(leaves: _Leaves) -> frozenset[FieldKey]:
    return frozenset(key for key, *_ in leaves)


def _signature_of(leaf: Any) -> _Signature:
    known = _WEAK.get(type(leaf))
    if known is not None:
        return known if type(leaf) is not int or -(2**63) <= leaf < 2**63 else _ANY
    if isinstance(leaf, np.ndarray | np.generic):
        return ("strong", leaf.dtype, leaf.shape) if number_kind(leaf.dtype) in "biufcmM" else _ANY
    if type(leaf) is list and leaf:
        try:
            array = np.asarray(leaf)
        except ValueError:
            return _ANY
        return ("weak", array.dtype.kind, array.shape) if array.dtype.kind in _DTYPES else _ANY
    return _ANY


def _joined(signatures: Sequence[_Leaves], ragged: Sequence[FieldKey]) -> dict[FieldKey, np.dtype[Any] | None]:
    """Return the dtype of each field that is one array in all rows, else None."""
    keys = _fields_of(signatures)
    if keys is None:
        return {(): None}
    columns: dict[FieldKey, np.dtype[Any] | None] = {}
    for key in keys:
        found = {tuple(rest) for signature in signatures for name, *rest in signature if name == key}
        alike = key not in ragged and _ANY not in found and len({shape for _, _, shape in found}) == 1
        columns[key] = _common(found) if alike else None
    return columns


def _fields_of(signatures: Sequence[_Leaves]) -> tuple[FieldKey, ...] | None:
    """Return the fields that all rows have; None if some rows have fields and others are objects."""
    keys = [tuple(key for key, *_ in signature) for signature in signatures]
    other = next((found for found in keys if set(found) != set(keys[0])), None)
    if other is None:
        return keys[0]
    if any(found == ((),) for found in keys):
        return None
    raise SchemaError(
        f"sample: expected rows of the same fields, found some with {list(keys[0])} and some with {list(other)}; a "
        "batch of such rows is made by a collate_fn"
    )


def _common(signatures: set[tuple[Any, ...]]) -> np.dtype[Any] | None:
    """Return the dtype that holds values of these signatures without loss; None if there is none."""
    weak, strong = ({kind for name, kind, _ in signatures if name == strength} for strength in ("weak", "strong"))
    kinds = {number_kind(dtype) for dtype in strong}
    if len(kinds | weak) > 1 and (kinds | weak) & set("bmM"):
        return None
    if not strong:
        return _DTYPES["f" if "f" in weak else weak.pop()]
    joined: np.dtype[Any] = np.result_type(*strong) if len(strong) > 1 else strong.pop()
    # Integers that only a float holds would be rounded, and so would Python's floats beside integers.
    rounded = number_kind(joined) not in kinds or ("f" in weak and number_kind(joined) in "iu")
    return None if rounded else joined


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
        super().__init__(capacity, 1, alignment, ragged)
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

    def check(self, rows: Any) -> None:
        """Raise what ``append(rows)`` would, and write nothing."""
        for item in take_apart(rows, self._ragged):
            _check(item)

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
        return self._signatures.gather(self._items, slots)

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
    """Return the rows of a list of rows, or of a tree of arrays ``[n, ...]``, whose ``ragged`` fields may be lists."""
    if isinstance(rows, list):
        return rows
    rows = opened(rows, 1, ragged)
    leaves = flatten(rows)
    single = next((leaf for leaf in leaves.values() if not _has_rows(leaf)), None)
    if single is not None:
        raise DataError(f"rows: expected a list of rows, or arrays [n, ...], found {type(single).__name__}")
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) != 1:
        raise DataError(f"rows: expected leaves of one length, found {sorted(lengths)}")
    return [map_tree(operator.itemgetter(number), rows) for number in range(lengths.pop())]


def _has_rows(leaf: Any) -> bool:
    """Whether a leaf is an array, or a list of the values of rows; a text would fall apart into letters."""
    return hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__") and not isinstance(leaf, str | bytes)
