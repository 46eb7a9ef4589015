"""What a batch must hold, worked out in plain Python from the documented table.

Nothing here touches mouse_core: rows are dicts of Python values in their order, null is None, and a column that a
row lacks is null in it.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rule:
    """One line of the table, or of a custom field: what its nulls and short rows become."""

    field: str
    column: str
    dtype: str
    vector_dtype: str = ""
    fill: float | None = None
    pad: float | None = None


TABLE = (
    Rule("action", "action", "int64", vector_dtype="float32"),
    Rule("reward", "reward", "float32"),
    Rule("xformed_reward", "xformed_reward", "float32"),
    Rule("done", "done", "int64"),
    Rule("time", "episode_step", "int64", fill=-1),
    Rule("q_star", "metadata_q_star", "float32", fill=-math.inf, pad=-math.inf),
    Rule("obs_continuous", "observation", "float64", pad=0),
    Rule("obs_discrete", "observation_discrete", "int64"),
    Rule("obs_image", "observation_image", "int64"),
)


def field_arrays(
    rows: Sequence[Row],
    *,
    widths: Mapping[str, int] | None = None,
    custom: Iterable[Rule] = (),
    dtypes: Mapping[str, str] | None = None,
) -> Batch:
    """Every field over all rows, ``[N, ...]``; a field whose column is null in all rows is absent."""
    arrays: Batch = {}
    for rule in (*TABLE, *custom):
        values = [row.get(rule.column) for row in rows]
        shape = next((np.shape(value) for value in values if value is not None), None)
        if shape is None:
            continue
        if rule.field == "obs_image":
            shape = (math.prod(shape),)
        elif widths and rule.field in widths:
            shape = (widths[rule.field],)
        dtype = rule.vector_dtype if shape and rule.vector_dtype else rule.dtype
        made = [_one(value, shape, rule) for value in values]
        # Through an array of objects, so that whole numbers beyond 2**53 stay what they are.
        exact = np.array(made, dtype=object).reshape(len(rows), *shape)
        wide = exact.astype("int64") if all(_whole(value) for value in exact.flat) else exact.astype("float64")
        arrays[rule.field] = wide.astype((dtypes or {}).get(rule.field, dtype))
    return arrays


def _one(value: Any, shape: tuple[int, ...], rule: Rule) -> Any:
    if value is None:
        assert rule.fill is not None, f"the oracle was given a null in {rule.column}"
        return _full(shape, rule.fill)
    if rule.field == "obs_image":
        return _flat(value)
    if len(shape) == 1:
        short = list(value) + [rule.pad] * (shape[0] - len(value))
        return [rule.fill if item is None else item for item in short]
    return value


def _full(shape: tuple[int, ...], value: float) -> Any:
    return [_full(shape[1:], value) for _ in range(shape[0])] if shape else value


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]


def _whole(value: Any) -> bool:
    return isinstance(value, int)


def windows(arrays: Mapping[str, np.ndarray], starts: Iterable[int], length: int) -> Batch:
    """The windows that begin at ``starts``: ``{field: [b, S, ...]}``."""
    begins = [int(start) for start in starts]
    return {
        name: np.stack([array[begin : begin + length] for begin in begins])
        if begins
        else np.empty((0, length, *array.shape[1:]), array.dtype)
        for name, array in arrays.items()
    }


def last_starts(rows: int, length: int, batch_size: int) -> list[int]:
    """The final windows, side by side up to the end, in ascending order."""
    return [rows - length * back for back in range(batch_size, 0, -1)]


def assert_same(found: Mapping[str, Any], expected: Mapping[str, np.ndarray], where: object = "") -> None:
    """Equal names in equal order, dtypes, shapes, and bytes."""
    assert list(found) == list(expected), (where, list(found), list(expected))
    for name, wanted in expected.items():
        array = found[name]
        assert isinstance(array, np.ndarray), (where, name, type(array))
        assert array.dtype == wanted.dtype, (where, name, array.dtype, wanted.dtype)
        assert array.shape == wanted.shape, (where, name, array.shape, wanted.shape)
        if np.ascontiguousarray(array).tobytes() != np.ascontiguousarray(wanted).tobytes():
            np.testing.assert_array_equal(array, wanted, err_msg=f"{where} {name}")
            raise AssertionError(f"{where} {name}: equal values, other bytes")


def digest(batches: Iterable[Mapping[str, Any]]) -> str:
    """A digest of names, dtypes, shapes and bytes, the same on every machine (of this byte order)."""
    total = hashlib.sha256()
    for batch in batches:
        for name, values in batch.items():
            array = np.ascontiguousarray(values)
            total.update(f"{name} {array.dtype.str} {array.shape}".encode())
            total.update(array.tobytes())
    return total.hexdigest()[:16]
