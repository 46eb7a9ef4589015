"""Columns of rows that recipes make: ids filled up to one length, their masks, and what rows keep."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import Field, check_count, check_dtype
from mouse_core.text.encoding import Encoder

_Made = TypeVar("_Made")
_LARGEST_ID = 2**31 - 1
Ids = Sequence[int] | npt.NDArray[np.int64]


class InRow(DataError):
    """What is wrong with one of the rows that a recipe was given.

    Args:
        row: Which of them, from 0.
        message: What.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(row, message)
        self.row, self.message = row, message

    def __str__(self) -> str:
        return f"row {self.row}: {self.message}"


def each(call: Callable[[Any], _Made], values: Iterable[Any]) -> list[_Made]:
    """What is made of each row.

    Raises:
        InRow: Of the first that nothing can be made of.
    """
    made = []
    for row, value in enumerate(values):
        try:
            made.append(call(value))
        except (DataError, RecursionError) as error:
            raise InRow(row, str(error)) from error
    return made


def values_of(
    texts: pa.RecordBatch, column: str | None, *, may_be_text: bool = False, may_be_none: bool = False
) -> list[Any]:
    """What each row has in a column of JSON; None in each where there is no such column.

    Args:
        texts: The rows.
        column: The column, if there is one.
        may_be_text: Whether a text is one unless it is the JSON of messages; otherwise it is that of what is meant.
        may_be_none: Whether rows may have nothing there.

    Raises:
        InRow: Of the first row that has nothing there and must, or a text that is no JSON.
    """
    if column is None:
        return [None] * texts.num_rows

    def value(said: str | None) -> Any:
        read = None if said is None else _read(said, column)
        if isinstance(read, str):
            read = _chat_or_text(read) if may_be_text else _read(read, column)
        if read is None and not may_be_none:
            raise DataError(
                f"column {column!r}: expected {'a text or ' if may_be_text else ''}a list of messages, found None"
            )
        return read

    return each(value, texts[column].to_pylist())


def _read(text: str, column: str | None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"column {column!r}: expected JSON, found {text!r:.80}: {error}") from error


def _chat_or_text(text: str) -> Any:
    """Messages, of OpenAI's form or ShareGPT's, where a text is the JSON of one or more."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return text
    listed = read.get("conversations") if isinstance(read, dict) else read
    is_chat = isinstance(listed, list) and all(
        isinstance(one, dict) and ("role" in one or "from" in one) for one in listed
    )
    return read if is_chat and listed else text


def check_length(max_length: Any) -> None:
    check_count("max_length", max_length)


def check_id(name: str, token: Any) -> None:
    """That an id can be one of a token, where it is said."""
    if token is not None:
        check_count(name, token, 0)
        if token > _LARGEST_ID:
            raise ConfigError(f"{name}: expected at most {_LARGEST_ID}, found {token}")


def checked_keep(keep: Any, taken: Sequence[str | None]) -> dict[str, str]:
    """Columns to keep, none of which has a name that is taken."""
    if not isinstance(keep, Mapping):
        raise ConfigError(f"keep: expected dtypes by column, as in {{'rewards': 'float32'}}, found {keep!r:.80}")
    for name in keep:
        if name in taken or not isinstance(name, str):
            others = [one for one in taken if one is not None]
            raise ConfigError(f"keep: expected names of columns other than {others}, found {name!r}")
    return {name: str(check_dtype(dtype, where=f"keep[{name!r}]")) for name, dtype in sorted(keep.items())}


def kept_types(keep: Mapping[str, str]) -> dict[str, pa.DataType]:
    return {name: pa.from_numpy_dtype(np.dtype(dtype)) for name, dtype in keep.items()}


def kept_fields(keep: Mapping[str, str]) -> list[Field]:
    return [Field(name, dtype=dtype) for name, dtype in keep.items()]


def kept(texts: pa.RecordBatch, keep: Mapping[str, str]) -> list[pa.Array]:
    return [texts[name] for name in keep]


def padded_columns(before: str, length: int) -> list[tuple[str, pa.DataType]]:
    lists = pa.list_(pa.int32(), length), pa.list_(pa.uint8(), length)
    return [(f"{before}input_ids", lists[0]), (f"{before}attention_mask", lists[1])]


def padded_fields(before: str) -> list[Field]:
    return [Field(f"{before}{name}", dtype="int64") for name in ("input_ids", "attention_mask")]


def padding_of(told: int | None, encode: Encoder) -> int:
    found = next((one for one in (told, encode.pad_id, encode.eos_id) if one is not None), None)
    if found is None:
        raise ConfigError("pad_id: expected the id of padding, as the tokenizer says none, found None")
    return found


def flat_of(ids: Sequence[Ids]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """All ids one behind the other, and how many each text has."""
    try:
        wide = _joined(ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(f"tokenizer: expected integers [n] of each text, found others: {error}") from error
    narrow = wide.astype(np.int32)
    if (bad := (narrow != wide) | (narrow < 0)).any():
        raise DataError(f"tokenizer: expected ids from 0 that 32 bits hold, found {wide[bad][0]}")
    lengths = np.array([len(one) for one in ids], np.int64)
    return narrow, lengths


def _joined(ids: Sequence[Ids]) -> npt.NDArray[np.int64]:
    if all(isinstance(one, list) for one in ids):
        flat = array("q")
        for one in ids:
            flat.fromlist(one)  # type: ignore[arg-type]  # which takes integers only
        return np.array(flat, np.int64)
    arrays = [np.asarray(one) for one in ids]
    for one in arrays:
        if one.ndim != 1 or (one.size and one.dtype.kind not in "iu"):
            raise TypeError(f"{one.dtype} {list(one.shape)}")
    return np.concatenate([np.zeros(0, np.int64), *(one.astype(np.int64, copy=False) for one in arrays)])


def ended(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Of tokens one behind the other, 1 at the last one of each text."""
    done = np.zeros(int(lengths.sum()), np.int8)
    done[lengths.cumsum()[lengths > 0] - 1] = 1
    return done


def padded(ids: Sequence[Ids], length: int, pad_id: int, side: str) -> list[pa.Array]:
    """Ids ``[n, length]`` and their mask, as columns of lists."""
    flat, lengths = flat_of(ids)
    if lengths.size and lengths.max() > length:
        raise DataError(f"tokenizer: expected at most max_length={length} ids of a text, found {lengths.max()}")
    step = np.arange(length)
    # Of 2 ids in 5 places: steps 0 and 1 on the right side's rows, 3 and 4 on the left one's.
    there = step < lengths[:, None] if side == "right" else step >= length - lengths[:, None]
    made = np.full((len(ids), length), pad_id, np.int32)
    made[there] = flat
    values = pa.array(made.reshape(-1)), pa.array(there.reshape(-1).view(np.uint8))
    return [pa.FixedSizeListArray.from_arrays(one, length) for one in values]


def batch_of(schema: pa.Schema, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), schema=schema)
