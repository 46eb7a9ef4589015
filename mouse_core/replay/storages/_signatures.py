"""What rows that are any objects have in common: what a field of a batch of them is, whichever rows are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import number_kind
from mouse_core.errors import DataError, SchemaError
from mouse_core.nested import copied, fit, flatten, structure_of, unflatten
from mouse_core.replay.ground.encoding import object_array
from mouse_core.replay.ground.protocols import FieldKey, Slots

_Signature = tuple[Any, ...]
"""Of a leaf: "strong", a dtype and a shape; "weak", one of Python's kinds of numbers, and a shape; "any"."""

_Leaves = tuple[tuple[Any, ...], ...]
"""The signatures of the leaves of an object, each behind its name."""

_ANY: _Signature = ("any",)
_WEAK = {bool: ("weak", "b", ()), int: ("weak", "i", ()), float: ("weak", "f", ())}
_DTYPES = {"b": np.dtype(bool), "i": np.dtype(np.int64), "f": np.dtype(np.float64)}


class Signatures:
    """What the objects in the slots of a storage look like; looked at when a batch is made, each once.

    Args:
        ragged: Fields that are lists in any case.
    """

    def __init__(self, ragged: Sequence[FieldKey] = ()) -> None:
        self._ragged = ragged
        # Of every slot: with lists of arrays as nodes, and as leaves.
        self._of: list[tuple[_Leaves, _Leaves] | None] = []
        self._unseen: list[int] = []
        self._counts: dict[tuple[_Leaves, _Leaves], int] = {}
        self._known: Columns | None = None

    def wrote(self, slot: int) -> None:
        """There is another object in a slot."""
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

    def columns(self, items: Sequence[Any]) -> Columns:
        """The fields of all ``items``.

        Raises:
            SchemaError: They have different fields.
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
            is_leaf = _is_none if len({_keys_of(leaves) for leaves in nodes}) < 2 else _is_none_or_list
            if is_leaf is _is_none_or_list:
                nodes = list({without: None for _, without in self._counts})
            self._known = Columns(_joined(nodes, self._ragged), is_leaf)
        return self._known


class Columns(NamedTuple):
    """The fields of all objects.

    Args:
        dtypes: Of each field that is an array of one shape in all objects; None for others.
        is_leaf: Which nodes of an object are leaves.
    """

    dtypes: dict[FieldKey, np.dtype[Any] | None]
    is_leaf: Callable[[Any], bool]


def _is_none(node: Any) -> bool:
    return node is None


def _is_none_or_list(node: Any) -> bool:
    return node is None or isinstance(node, list)


def gathered(items: Sequence[Any], slots: Slots, columns: Columns) -> Any:
    """The objects in ``slots`` as one tree; what is no array of numbers of one shape as object arrays."""
    drawn = [items[slot] for slot in slots.reshape(-1).tolist()]
    dtypes, is_leaf = columns
    if dtypes.keys() == {()}:
        return _column(drawn, dtypes[()], slots.shape, ())
    leaves = [flatten(item, leaf=is_leaf) for item in drawn]
    fields = {key: _column([found[key] for found in leaves], dtype, slots.shape, key) for key, dtype in dtypes.items()}
    return unflatten(structure_of(drawn[0], leaf=is_leaf), fields)


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
    """The signatures of the leaves of nested dicts, tuples and lists; of any other object, its own."""
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
    """What each field is to be, by how it looks in any row there is."""
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
    """The fields that all rows have; None where some rows have fields and others are objects of other kinds."""
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
    """The dtype of arrays of one shape that look like these; None where they cannot be one array without loss."""
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
