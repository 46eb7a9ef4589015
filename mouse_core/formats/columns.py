"""Conversions between values of other formats and columns of rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import ColumnType, column_type, is_list
from mouse_core._arrow.dense import plain
from mouse_core._base.checks import is_text
from mouse_core.columns.episode_rows import Columns, placeholder
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import reading
from mouse_core.images.pixels import decode_image

# Small batches are joined up to this size, since each batch takes time, however few rows it has.
_BLOCK_BYTES = 8 << 20
_BLOCK_ROWS = 1 << 16
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def check_batch_rows(batch_rows: int) -> None:
    """Raise ConfigError if ``batch_rows`` is below 1."""
    if batch_rows < 1:
        raise ConfigError(f"batch_rows: expected a positive number, found {batch_rows!r}")


def check_size(name: str, size: int | str) -> int:
    """Convert a size to a number of bytes.

    A size is a number, or a text such as "500MB" (500 * 10**6) or "2GiB" (2 * 2**30).

    Raises:
        ConfigError: The text is not a size, or the size is below one byte.
    """
    count = size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, prefix, binary = match.groups()
        count = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}: expected bytes or a text such as '500MB', found {size!r}")
    return count


def rows_at_once(row_bytes: int, *, most: int, budget: int = 32 << 20) -> int:
    """Return the number of rows that fit into ``budget`` bytes, but at least 1 and at most ``most``.

    With 10 bytes per row and a budget of 35 bytes, 3 rows fit, or 2 if ``most`` is 2.
    """
    return max(1, min(most, budget // max(1, row_bytes)))


def bytes_a_row(rows: pa.RecordBatch | pa.Table) -> int:
    """Return the average number of bytes of a row, at least 1."""
    return int(max(1, rows.nbytes // max(1, rows.num_rows)))


def blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about 8 MB: small batches are joined, large batches are split."""
    pending: list[pa.RecordBatch] = []
    pending_bytes = pending_rows = 0
    for batch in batches:
        row_bytes = bytes_a_row(batch)
        most = int(np.clip(4 * _BLOCK_BYTES // row_bytes, 1, _BLOCK_ROWS))
        for first in range(0, batch.num_rows, most):
            piece = batch.slice(first, most)
            pending.append(piece)
            pending_bytes, pending_rows = pending_bytes + piece.num_rows * row_bytes, pending_rows + piece.num_rows
            if pending_bytes >= _BLOCK_BYTES or pending_rows >= _BLOCK_ROWS:
                yield _concatenate(pending)
                pending, pending_bytes, pending_rows = [], 0, 0
    if pending:
        yield _concatenate(pending)


def _concatenate(pending: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pending[0] if len(pending) == 1 else pa.concat_batches(pending)


MISSING = "observation_missing"
"""Name of the column that marks rows whose observation is missing in the source."""


def travels_with_action(key: str) -> bool:
    """Whether a value of a step belongs to the step's action; the name of the value determines the result."""
    return key.split("/")[-1].startswith(("action", "policy", "log_prob"))


def is_metadata(name: str) -> bool:
    """Whether a column has metadata of steps or episodes (``metadata_<key>``) or infos (``info.<key>``)."""
    return name.startswith(("metadata_", "info."))


def metadata_column(path: str) -> str:
    """Return the column name of a value that is neither observation nor action: ``infos/a/b`` becomes ``info.a.b``."""
    first, *rest = path.split("/")
    if first in ("info", "infos", "env_infos") and rest:
        return ".".join(["info", *rest])
    return "metadata_" + path.replace("/", "_")


def flatten(name: str, value: Any, joint: str = "_") -> dict[str, Any]:
    """Return the leaves of a nested value by name. The name of a leaf is ``name`` followed by the keys of the leaf.

    Args:
        name: Beginning of all names.
        value: A mapping, a tuple (its items are named by their position), or a leaf.
        joint: The text between two keys in a name.
    """
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        for path, leaf in flatten(f"{name}{joint}{key}", item, joint).items():
            if path in leaves:
                raise SchemaError(f"{path}: when keys are joined by {joint!r}, two values of a step get this name")
            leaves[path] = leaf
    return leaves


def named(whole: str, value: Any) -> Columns:
    """Return observations or actions ``[n, ...]`` by column name.

    A single array gets the name in ``whole``, such as "observation"; nested arrays get names such as
    "observation.<key>".
    """
    return {name: np.asarray(leaf) for name, leaf in flatten(whole, value, ".").items()}


def nested(columns: Mapping[str, Any], whole: str) -> Any:
    """Return the column with the name ``whole`` or, if the values are nested, a nested mapping of the columns
    ``whole.<key>``.

    For example, ``whole.a.b`` is at ``result["a"]["b"]``.
    """
    kinds = ("", "_discrete", "_image", "_text")
    if len(columns) == 1 and next(iter(columns)) in [whole + kind for kind in kinds]:
        return next(iter(columns.values()))
    parts: dict[str, Any] = {}
    for name, value in columns.items():
        key = name[len(whole) + 1 :] or whole
        *keys, last = key.split(".") if name.startswith(f"{whole}.") else [key]
        if any(f"{whole}.{'.'.join(keys[:count])}" in columns for count in range(1, len(keys) + 1)):
            raise SchemaError(f"column {name!r}: expected a value or nested values, found that {keys[0]!r} has both")
        place = parts
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = value
    return parts


def belongs_to(name: str, whole: str) -> bool:
    """Whether a column is the observation or action ``whole``, or a part of it, such as ``action.grip``."""
    return name == whole or name.startswith((f"{whole}_", f"{whole}."))


def one_each(columns: Columns, name: str) -> npt.NDArray[Any]:
    """Reshape a column with one number per row from ``[n]``, ``[n, 1]`` and so on to ``[n]``.

    Raises:
        DataError: A row has no number, or several numbers.
    """
    values = columns[name]
    if values.size != len(values):
        raise DataError(f"{name}: expected one number per row, found shape {list(values.shape[1:])}")
    return values.reshape(len(values))


def to_arrow(values: npt.NDArray[Any], *, where: str) -> pa.Array:
    """Return rows ``[n, ...]`` of a column as an Arrow array, without a copy if the memory layout allows it.

    Args:
        values: Numbers, or strings or bytes ``[n]`` (arrays of objects or of NumPy's text types).
        where: Prefix of error messages.

    Raises:
        DataError: Values of this type cannot be a column.
    """
    if values.dtype.kind in "OSU":
        return _text(values, where=where)
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{where}: expected numbers or text, found {values.dtype}")
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        size = values.shape[axis]
        if size:
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        else:
            count = int(np.prod(values.shape[:axis], dtype=np.int64))
            flat = pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), flat[:0])
    return flat


def _text(values: npt.NDArray[Any], *, where: str) -> pa.Array:
    if values.ndim != 1:
        raise DataError(f"{where}: expected one text per step, found an array of shape {list(values.shape[1:])}")
    if values.dtype.kind == "S":
        values = values.astype(object)
    items = values.tolist()
    if not items:
        return pa.array([], pa.string())
    try:
        if any(isinstance(item, bytes) for item in items):
            try:
                return pa.array([item.decode() if isinstance(item, bytes) else item for item in items], pa.string())
            except UnicodeDecodeError:
                return pa.array(items, pa.binary())
        return pa.array(items)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: expected numbers or text, found {items[:1]!r:.80}") from error


def from_arrow(array: Any, *, where: str) -> npt.NDArray[Any]:
    """Return rows of a column as an array ``[n, ...]``.

    Lists of equal length become dimensions, and encoded images become pixels.

    Args:
        array: An Arrow array or chunked array.
        where: Prefix of the message.

    Raises:
        DataError: A value is null, lists have different lengths, or an image cannot be decoded.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    array = plain(array)
    if array.null_count:
        raise DataError(f"{where}: expected values, found {array.null_count} nulls among {len(array)} rows")
    kind = array.type
    if is_list(kind):
        if pa.types.is_fixed_size_list(kind):
            size = kind.list_size
        else:
            lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) > 1:
                raise DataError(f"{where}: expected lists of equal length, found lengths {lengths[:5].tolist()}")
            size = int(lengths[0]) if len(lengths) else 0
        inner = from_arrow(array.flatten(), where=where)
        return inner.reshape(len(array), size, *inner.shape[1:])
    if pa.types.is_struct(kind):
        try:
            return np.stack([decode_image(value) for value in array.to_pylist()])
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
    return np.asarray(array.to_numpy(zero_copy_only=False))


def ordered(columns: Columns) -> Columns:
    """Return columns in the order that all readers use: action, reward, done, step, observations, metadata."""
    fixed = ("reward", "done", "episode_step")
    actions = [name for name in columns if belongs_to(name, "action")]
    others = [name for name in columns if name not in fixed and name not in actions]
    others.sort(key=is_metadata)
    return {name: columns[name] for name in (*actions, *fixed, *others)}


def schema_of(columns: Mapping[str, npt.NDArray[Any]]) -> pa.Schema:
    """Return the schema of rows with these columns; raise DataError for a name that is not Unicode text."""
    _check_texts(columns)
    return pa.schema([(name, to_arrow(values, where=name).type) for name, values in columns.items()])


def typed(schema: pa.Schema, columns: Collection[str], kind: pa.DataType) -> pa.Schema:
    """Return a copy of a schema in which ``columns`` have the type ``kind``."""
    return pa.schema([pa.field(one.name, kind) if one.name in columns else one for one in schema])


def _check_texts(names: Iterable[str], where: str = "") -> None:
    for name in names:
        if not is_text(name):
            raise DataError(f"{where}{': ' * bool(where)}expected names of columns as Unicode text, found {name!r}")


def to_batch(columns: Mapping[str, npt.NDArray[Any]], schema: pa.Schema | None, *, where: str) -> pa.RecordBatch:
    """Return rows as a record batch; metadata columns that are missing become null.

    Args:
        columns: Values ``[n, ...]`` by name, all with the same ``n``.
        schema: Columns and types of the earlier rows; None allows any columns.
        where: Prefix of error messages, usually a file and an episode.

    Raises:
        DataError: Columns have different lengths, or names or types differ from the schema.
    """
    _check_texts(columns, where)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where}: expected columns of equal length, found {lengths}")
    arrays = {name: to_arrow(np.asarray(values), where=f"{where}: column {name!r}") for name, values in columns.items()}
    if schema is None:
        return pa.RecordBatch.from_pydict(arrays)
    for field in schema:
        if is_metadata(field.name) and field.name not in arrays:
            arrays[field.name] = pa.nulls(next(iter(lengths.values()), 0), field.type)
    if set(arrays) != set(schema.names):
        raise DataError(f"{where}: expected columns {schema.names}, found {list(arrays)}")
    for field in schema:
        found = arrays[field.name]
        if found.type == field.type:
            continue
        if pa.types.is_null(found.type) or (pa.types.is_string(found.type) and pa.types.is_binary(field.type)):
            arrays[field.name] = found.cast(field.type)
        else:
            raise DataError(f"{where}: column {field.name!r}: expected {field.type} per step, found {found.type}")
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def to_batches(rows: Iterable[Columns], schema: pa.Schema, *, where: str) -> Iterator[pa.RecordBatch]:
    """Convert rows to record batches with ``to_batch``; leave out batches without rows."""
    with reading(where):
        for columns in rows:
            if len(columns["done"]):
                yield to_batch(columns, schema, where=where)


FINAL = ("drop", "mark")
Bools = npt.NDArray[np.bool_]


def check_final(final: str | None, *, where: str, needed: bool = True) -> str | None:
    """Return ``final`` after checking its value.

    Args:
        final: "drop", "mark" or None.
        where: Prefix of the message, usually the file.
        needed: Whether ``final`` is required, because the source lacks the final observation of episodes.

    Raises:
        ConfigError: ``final`` is unknown, or is None although it is required. The message explains both choices.
    """
    if final is not None and final not in FINAL:
        raise ConfigError(f"final: expected one of {list(FINAL)} or None, found {final!r}")
    if needed and final is None:
        raise ConfigError(
            f"{where}: the final observations of episodes are not stored, so choose: final='drop' leaves out the last "
            "transition of every episode with its reward and done code, and the last remaining row has done 2 "
            f"(truncated); final='mark' keeps the last transition, with zeros as the final observation and a column "
            f"{MISSING!r} that is 1 in this row"
        )
    return final


def one_later(values: Columns, before: Columns, begins: Bools) -> Columns:
    """Move each value from the row of its action to the next row; the first row of an episode gets zeros (or "").

    For example, with actions 5 6 7, the action 4 before them, and an episode that begins at the third row, the result
    is 4 5 0.

    Args:
        values: Values in the rows of the actions, ``[n, ...]``.
        before: Values of the last row of the previous piece, ``[1, ...]``. The function replaces these values by the
            last row of the current piece.
        begins: Whether an episode begins at each row, ``[n]``.

    Raises:
        DataError: The shape changes within an episode.
    """
    later: Columns = {}
    for name, array in values.items():
        head = placeholder(array) if begins[0] else before[name]
        if head.shape[1:] != array.shape[1:]:
            raise DataError(f"{name}: expected shape {list(head.shape[1:])}, found {list(array.shape[1:])}")
        later[name] = np.concatenate([head, array[:-1]])
        later[name][begins] = placeholder(array)
        before[name] = array[-1:].copy()
    return later


def step_numbers(begins: Bools, before: int = 0) -> npt.NDArray[np.int64]:
    """Return the index of each row in its episode, int64 ``[n]``.

    For example, after 3 rows of an episode that continues, ``begins`` of 0 0 1 0 1 gives 3 4 0 1 0.

    Args:
        begins: Whether an episode begins at each row, ``[n]``.
        before: Number of earlier rows of the episode that continues.
    """
    first = np.flatnonzero(begins)
    latest = np.cumsum(begins) - 1  # the last begin up to each row, or -1
    origin = np.where(latest >= 0, first[latest] if len(first) else 0, -before)
    return (np.arange(len(begins)) - origin).astype(np.int64)


class TransitionRows:
    """Converts transitions, which are added in the order of time, to rows with the alignment "arrived".

    A transition is an observation, an action, and the values that arrived after the action. ``add`` accepts any number
    of transitions of any number of episodes; an episode can continue in the next call. ``finish`` returns the last
    rows.

    Args:
        final: Treatment of the last transition of an episode whose last observation is not stored ("drop" or "mark").
            ``final`` is unused if ``add`` gets ``following``.
        where: Prefix of error messages.
    """

    def __init__(self, *, final: str | None, where: str) -> None:
        self._final = final
        self._where = where
        self._step = 0
        self._begun = False
        self._held: dict[str, Columns] | None = None
        self._last: Columns | None = None

    def add(
        self,
        observations: Mapping[str, npt.NDArray[Any]],
        arriving: Mapping[str, npt.NDArray[Any]],
        begins: Bools,
        following: Mapping[str, npt.NDArray[Any]] | None = None,
        beside: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Columns:
        """Return rows for some transitions. The last transitions are kept until the next transitions are known.

        Args:
            observations: Columns of the observation before each transition, ``[T, ...]``.
            arriving: Columns of the transition's results: ``action``, ``reward``, ``done``, metadata, ``[T, ...]``.
            begins: Whether an episode begins with each transition, ``[T]``. The very first transition always begins an
                episode.
            following: The same columns as ``observations``, for the observation after each transition. If an
                observation differs from the next transition's observation, the recording was interrupted, and the next
                transition begins an episode.
            beside: Columns that belong to the observation before each transition, and are unknown in the last row of an
                episode. In the last row of an episode, floats of these columns are NaN, and integers and texts repeat
                the row before. If the last observation is missing, columns ``metadata_*`` in ``observations`` also
                repeat the previous row; for example, a task stays the same.

        Returns:
            Columns of rows; the arrays are empty if all transitions are kept for the next call.

        Raises:
            ConfigError: An episode's final observation is missing and no ``final`` was chosen.
            DataError: Columns have different lengths or shapes.
        """
        parts: dict[str, Columns] = {
            "observations": dict(observations),
            "arriving": dict(arriving),
            "following": dict(following or {}),
            "beside": dict(beside or {}),
            "begins": {"begins": np.array(begins, dtype=bool)},
        }
        lengths = {len(values) for part in parts.values() for values in part.values()}
        if len(lengths) > 1:
            raise DataError(f"{self._where}: expected columns of equal length, found lengths {sorted(lengths)}")
        if self._held is not None:
            parts = {name: self._joined(self._held[name], part) for name, part in parts.items()}
        self._mark_begins(parts)
        count = len(parts["begins"]["begins"])
        # The next transition shows whether a transition is the last of its episode. "drop" must also know whether the
        # next transition is the last.
        waiting = 2 if self._final == "drop" else 1
        if parts["following"]:
            # No transition is held back if all ends of episodes are known already.
            waiting = 1 if parts["beside"] else 0
            if count and not waiting:
                self._last = {name: values[-1:].copy() for name, values in parts["following"].items()}
        return self._take(parts, max(count - waiting, 0))

    def finish(self) -> Columns | None:
        """Return rows for the transitions that ``add`` kept; None if no transition was kept.

        The last of these transitions ends its episode.
        """
        if self._held is None or not len(self._held["begins"]["begins"]):
            return None
        return self._take(self._held, len(self._held["begins"]["begins"]))

    def _mark_begins(self, parts: dict[str, Columns]) -> None:
        """Mark the transitions at which episodes begin.

        An episode begins at the first transition, and at each transition whose observation differs from ``following``
        of the transition before.
        """
        begins = parts["begins"]["begins"]
        for name, values in parts["following"].items():
            begins[1:] |= differ(values[:-1], parts["observations"][name][1:])
            if self._last is not None:
                begins[:1] |= differ(self._last[name], parts["observations"][name][:1])
        if len(begins) and not self._begun:
            begins[0] = self._begun = True

    def _take(self, parts: dict[str, Columns], ready: int) -> Columns:
        """Return rows for the first ``ready`` transitions, and keep all other transitions for the next call."""
        flags = parts["begins"]["begins"]
        ends = np.concatenate([flags[1:], np.ones(1, bool)])[: len(flags)]
        last = ends[:ready]
        known = bool(parts["following"])
        if last.any() and self._final is None and not known:
            check_final(None, where=self._where)
        self._held = {
            name: {column: values[ready:].copy() for column, values in part.items()} for name, part in parts.items()
        }
        now = {name: {column: values[:ready] for column, values in part.items()} for name, part in parts.items()}
        brought = now["arriving"]
        kept = np.ones(ready, bool)
        if self._final == "drop" and not known:
            kept = ~last
            if "done" in brought:
                stops = kept & np.concatenate([ends[1:], np.zeros(1, bool)])[:ready]
                brought["done"] = np.where(stops & (brought["done"] == 0), 2, brought["done"])
        # Values that belong to the row that a transition leads to.
        then = {
            "observations": now["following"] if known else _next(parts["observations"], ready),
            "beside": _next(parts["beside"], ready),
        }
        return self._layout(now, then, kept, last, known)

    def _joined(self, held: Columns, values: Columns) -> Columns:
        for name in held.keys() - values.keys():
            raise DataError(f"{self._where}: column {name!r}: expected this column in all rows, found rows without it")
        for name, array in values.items():
            if name not in held or held[name].shape[1:] != array.shape[1:]:
                wanted = list(held[name].shape[1:]) if name in held else "no such column"
                raise DataError(f"{self._where}: column {name!r}: expected {wanted}, found {list(array.shape[1:])}")
        return {name: np.concatenate([held[name], array]) for name, array in values.items()}

    def _layout(
        self, now: dict[str, Columns], then: dict[str, Columns], kept: Bools, last: Bools, known: bool
    ) -> Columns:
        """Return the columns of rows for transitions.

        Each transition creates the row after it; the first transition of an episode also creates the row before it.

        The mask ``kept`` marks transitions with a row, and ``last`` marks transitions that end an episode. ``known``
        states whether the final observations of episodes are stored. ``then`` has the values of the rows that hold the
        next observations.
        """
        begins = now["begins"]["begins"]
        # Transition j leads to the row with this number: the rows of earlier transitions, plus the first rows of
        # episodes so far. Example: two episodes of two transitions are six rows; begins is 1 0 1 0. If all are kept,
        # the transitions lead to rows 1 2 4 5, and the episodes begin at rows 0 and 3.
        leads_to = np.cumsum(kept) - 1 + np.cumsum(begins)
        start_rows = leads_to[begins] - kept[begins]
        count = int(kept.sum() + begins.sum())
        ends_at = leads_to[last & kept]
        leads_to = leads_to[kept]
        rows: Columns = {}
        for name, values in now["arriving"].items():
            rows[name] = placeholder(values, count)
            rows[name][leads_to] = values[kept]
        for part, following in then.items():
            for name, values in now[part].items():
                rows[name] = placeholder(values, count)
                rows[name][start_rows] = values[begins]
                rows[name][leads_to] = following[name][kept]
                if part == "beside" and values.dtype.kind == "f":
                    rows[name][ends_at] = np.nan
                elif part == "beside" or (not known and is_metadata(name)):
                    rows[name][ends_at] = values[last & kept]
                elif not known:
                    rows[name][ends_at] = placeholder(values)
        if self._final == "mark" and not known:
            rows[MISSING] = np.zeros(count, np.int64)
            rows[MISSING][ends_at] = 1
        rows["episode_step"] = np.zeros(count, np.int64)
        if len(begins):
            numbers = step_numbers(begins, self._step) + 1  # row 0 has the observation that the first transition leaves
            rows["episode_step"][leads_to] = numbers[kept]
            self._step = int(numbers[-1])
        return rows


def transition_rows(parts: Iterable[tuple[Any, ...]], *, final: str | None, where: str) -> Iterator[Columns]:
    """Yield rows for all transitions; each item of ``parts`` contains the arguments for one call of
    ``TransitionRows.add``.
    """
    rows = TransitionRows(final=final, where=where)
    for part in parts:
        yield rows.add(*part)
    rest = rows.finish()
    if rest is not None:
        yield rest


def _next(columns: Columns, ready: int) -> Columns:
    """Return the rows ``1 .. ready``: for each of the first ``ready`` rows, the row after it.

    If row ``ready`` does not exist, its value is arbitrary.
    """
    return {
        name: values[1 : ready + 1] if ready < len(values) else np.roll(values, -1, axis=0)
        for name, values in columns.items()
    }


def differ(ones: npt.NDArray[Any], others: npt.NDArray[Any]) -> Bools:
    """Return a mask of the rows in which two arrays differ; NaN equals NaN."""
    unequal = ones != others
    if ones.dtype.kind == "f":
        unequal &= ~(np.isnan(ones) & np.isnan(others))
    return np.asarray(unequal.any(axis=tuple(range(1, unequal.ndim))))


@dataclass(frozen=True)
class Values:
    """The values of one column of a record batch.

    Args:
        kind: The column's type.
        rows: Number of rows.
        numbers: The values: ``[rows, ...]`` if all rows have the same shape and no row is null, else a flat array. None
            if the column has no numbers.
        shape: The shape of a row; None if rows differ in shape, or have no numbers.
        lengths: The number of values in each row, if rows differ in shape.
        present: Mask of the rows that are not null, bool ``[rows]``; None if no row is null.
        inner_nulls: Number of nulls inside rows.
        array: The Arrow values.
    """

    kind: ColumnType
    rows: int
    numbers: npt.NDArray[Any] | None
    shape: tuple[int, ...] | None
    lengths: npt.NDArray[np.int64] | None
    present: npt.NDArray[np.bool_] | None
    inner_nulls: int
    array: pa.Array

    @property
    def nulls(self) -> int:
        """Number of null rows, plus the number of nulls inside the other rows."""
        return self.inner_nulls + (0 if self.present is None else int((~self.present).sum()))


def read_values(array: pa.Array) -> Values:
    """Return the values of a column of a record batch. The column must have passed ``array.validate(full=True)``."""
    array = plain(array)
    kind = column_type(array.type)
    rows = len(array)
    present = None if not array.null_count else np.asarray(array.is_valid())
    if kind.kind not in ("scalar", "list"):
        return Values(kind, rows, None, None, None, present, 0, array)
    inner, shape, lengths = _without_lists(array)
    inner_nulls = inner.null_count if is_list(array.type) else 0
    if inner.null_count:
        inner, shape = inner.drop_null(), None
    numbers = np.asarray(inner.to_numpy(zero_copy_only=False))
    if shape is not None and rows:
        return Values(kind, rows, numbers.reshape(rows, *shape), shape, None, present, inner_nulls, array)
    return Values(kind, rows, numbers, None, lengths, present, inner_nulls, array)


def _without_lists(array: pa.Array) -> tuple[pa.Array, tuple[int, ...] | None, npt.NDArray[np.int64] | None]:
    """Return the values in a column's lists, the shape of a row (None if rows differ), and each row's number of values.

    For ``[[[1, 2], [3, 4]], [[5]]]`` the values are 1 to 5, and the rows have 4 values and 1 value.
    """
    shape: tuple[int, ...] | None = ()
    lengths: npt.NDArray[np.int64] | None = None
    while is_list(array.type):
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if lengths is None:
            lengths = counts
        else:  # for lists, the total number of values in each row
            lengths = np.diff(_ends(counts)[_ends(lengths)])
        same = len(counts) > 0 and not array.null_count and bool((counts == counts[0]).all())
        shape = (*shape, int(counts[0])) if same and shape is not None else None
        array = array.flatten()
    return array, shape, lengths


def _ends(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bounds of adjacent ranges that have the given lengths and begin at 0: lengths 2 3 give the bounds 0 2
    5.
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
