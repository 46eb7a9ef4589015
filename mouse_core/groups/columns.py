"""Declared columns: values of every token, turn or rollout beside the columns of all rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, convert, is_ml_float, to_numpy, widened
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import checksum

_MAX_TOKEN = 2**31 - 1
# Rounding to float32 may leave log-probabilities this far above 0; they become 0.
_MOST_LOGPROB = 1e-4


def array_of(values: Any, where: str) -> npt.NDArray[Any]:
    """Convert values to a NumPy array: also tensors on any device, with or without gradients; narrow floats to float32.

    Raises:
        DataError: They are no array; ``where`` begins the message.
    """
    try:
        array = to_numpy(widened(values.detach()).cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where} as an array, found {values!r:.80}: {error}") from error
    return widened(array) if is_ml_float(array.dtype) else array


def tokens_of(values: Any) -> npt.NDArray[np.int32]:
    """Convert token ids to int32 ``[n]``; DataError: values that are no token ids."""
    tokens = array_of(values, "tokens: expected integers [n]")
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"tokens: expected integers [n], found {tokens.dtype} {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > _MAX_TOKEN):
        wrong = int(np.flatnonzero((tokens < 0) | (tokens > _MAX_TOKEN))[0])
        raise DataError(f"tokens: expected 0..{_MAX_TOKEN}, found {tokens[wrong]} at {wrong}")
    return own_array(tokens, np.int32, values)


def floats_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Convert finite numbers to float32 ``[length]``; DataError, whose message ``where`` begins: other values."""
    floats = array_of(values, where)
    if floats.shape != (length,):
        raise DataError(f"{where} for each of {length} tokens, found shape {list(floats.shape)}")
    if floats.size and floats.dtype.kind not in "iuf":
        raise DataError(f"{where} as numbers, found {floats.dtype}")
    narrow: npt.NDArray[np.float32] = own_array(floats, np.float32, values)
    finite = np.isfinite(narrow)
    if not finite.all():
        wrong = int(np.flatnonzero(~finite)[0])
        raise DataError(f"{where} as finite float32 numbers, found {floats[wrong]} at {wrong}")
    return narrow


def logprobs_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Convert log-probabilities to float32 ``[length]``; values up to 1e-4 above 0, which rounding left, become 0.

    Raises:
        DataError: They are none; ``where`` begins the message.
    """
    logprobs = floats_of(values, length, where)
    if length and (most := logprobs.max()) > 0:
        if most > _MOST_LOGPROB:
            wrong = int(logprobs.argmax())
            raise DataError(
                f"{where} as logarithms of probabilities, at most 0, found {logprobs[wrong]} at {wrong}; of 16 bits "
                "they are to be computed in float32"
            )
        logprobs = np.minimum(logprobs, np.float32(0))
        logprobs.flags.writeable = False
    return logprobs


def own_array(values: npt.NDArray[Any], dtype: Any, given: Any) -> npt.NDArray[Any]:
    """Convert values to a dtype, read-only; memory is shared with ``given`` only if ``given`` is read-only."""
    shared = values.flags.writeable and not isinstance(given, list | tuple)
    with np.errstate(over="ignore"):
        own: npt.NDArray[Any] = values.astype(dtype, copy=shared)
    own.flags.writeable = False
    return own


_VERSION = 1
PER = ("token", "turn", "example")
"""The choices of ``RolloutColumn.per``."""

# Names that rollouts, turns, examples, batches and concatenated batches have themselves.
_OF_ROLLOUTS = ("environment", "example_id", "policy_version", "rollout_uid", "turns", "created", "replica_id")
_OF_PARTS = ("metadata", "message", "role", "tokens", "logprobs", "columns")
_OF_EXAMPLES = ("loss_mask", "advantage", "generator_log_probs", "turn_ids", "staleness")
_OF_BATCHES = ("mask", "segment_ids", "positions", "cu_seqlens", "position", "sequence_id")
_TAKEN = {*_OF_ROLLOUTS, *_OF_PARTS, *_OF_EXAMPLES, *_OF_BATCHES}


@dataclass(frozen=True, eq=False)
class RolloutColumn:
    """Declare a column that rollouts have beside the columns of all rollouts.

    Args:
        name: Of letters, digits and "_", and none that rollouts, examples or batches have already.
        per: "token": a value for each token; "turn": one a turn; "example": one a rollout.
        dtype: Of the values: bool, an integer or a float of NumPy's.
        shape: Of one value; () is a number, (64, 64, 3) an image. All values have it: what differs in size is filled up
            to the largest, with its size in a column of its own, such as ``shape=(2,)``.
        late: Whether it is written after the rollout was added; a group waits until all its rollouts have it.
        fill: The value where none was given, and where batches are filled up, which may be NaN; None: 0. A late column
            that is declared for a folder whose groups are sealed wants one, as these do not wait for it.
        finite: Whether values of floats that are NaN or infinite are refused where they are taken in.

    Raises:
        ConfigError: One of them cannot be used.
    """

    name: str
    per: str = "token"
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    late: bool = False
    fill: float | None = None
    finite: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or not self.name.isascii():
            raise ConfigError(f"column: expected a name of letters, digits and '_', found {self.name!r:.80}")
        if self.name in _TAKEN:
            raise ConfigError(f"column: expected another name than those of all rollouts, found {self.name!r}")
        if self.name == "reward" and not (self.late and self.per == "example"):
            raise ConfigError("column 'reward': expected a late one per example, as rollouts and turns have rewards")
        if self.per not in PER:
            raise ConfigError(f"column {self.name!r}: expected per among {list(PER)}, found {self.per!r:.80}")
        try:
            kind = np.dtype(self.dtype)
        except TypeError:
            kind = np.dtype(object)
        if kind.kind not in "biuf" or kind.itemsize > 8:
            raise ConfigError(f"column {self.name!r}: expected the dtype of numbers or bool, found {self.dtype!r:.80}")
        object.__setattr__(self, "dtype", kind.name)
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (self.shape,)
        if not all(isinstance(size, int | np.integer) and size > 0 for size in shape):
            raise ConfigError(
                f"column {self.name!r}: expected a shape of sizes from 1, found {self.shape!r:.80}; what differs in "
                "size, as images, is filled up to the largest, with its size in a column of its own"
            )
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        if self.name == "reward" and (shape or kind.kind == "b"):
            raise ConfigError(f"column 'reward': expected one number, found {kind.name} of shape {list(shape)}")
        for name in ("late", "finite"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.name == "reward" and not self.finite:
            raise ConfigError(
                "column 'reward': expected finite=True, as nothing can be learnt from others, found False"
            )
        self._check_fill(kind)

    def _check_fill(self, kind: np.dtype[Any]) -> None:
        fill = self.fill
        if kind.kind == "b" and fill in (0, 1):
            object.__setattr__(self, "fill", bool(fill))
        elif fill is not None and (
            not isinstance(fill, bool | int | float | np.generic) or _converted(fill, kind) is None
        ):
            raise ConfigError(f"column {self.name!r}: expected fill as a value of {kind.name}, found {fill!r:.80}")

    @property
    def _key(self) -> tuple[Any, ...]:
        # NaN equals itself here, and a missing fill equals 0.
        fill = repr(np.asarray(self.padding, self.dtype).item())
        return self.name, self.per, self.dtype, self.shape, self.late, fill, self.finite

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, RolloutColumn) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def padding(self) -> float:
        """The fill; 0 where ``fill`` is None."""
        return 0 if self.fill is None else self.fill

    def filled(self, *counts: int) -> npt.NDArray[Any]:
        """Return an array ``[*counts, *shape]`` of the fill."""
        return np.full((*counts, *self.shape), self.padding, self.dtype)

    def taken(self, given: Any, count: int | None, where: str) -> npt.NDArray[Any]:
        """Return ``values`` that come from outside; DataError also for NaN or infinity, unless ``finite=False``."""
        values = self.values(given, count, where)
        if self.finite and values.dtype.kind == "f" and not (good := np.isfinite(values)).all():
            place = tuple(np.argwhere(~good)[0].tolist())
            at = f" at {list(place)}" if place else ""
            raise DataError(f"{where}: expected column {self.name!r} as finite numbers, found {values[place]}{at}")
        return values

    def values(self, given: Any, count: int | None, where: str) -> npt.NDArray[Any]:
        """Convert values to a read-only array of this column's dtype.

        Args:
            given: ``[count, *shape]``, or one value, ``shape``.
            count: How many there are to be; None: one value.
            where: Begins the message of an error.

        Raises:
            DataError: Another shape or type, or values that the dtype does not have.
        """
        array = array_of(given, f"{where}: expected column {self.name!r}")
        shape = self.shape if count is None else (count, *self.shape)
        if array.shape != shape:
            what = "one value" if count is None else f"a value for each of {count} {self.per}s"
            raise DataError(
                f"{where}: expected column {self.name!r} as {what}, {list(shape)}, found shape {list(array.shape)}"
            )
        converted = _converted(array, np.dtype(self.dtype))
        if converted is None:
            raise DataError(
                f"{where}: expected column {self.name!r} as {self.dtype}, found {array.dtype} {_shown(array)}"
            )
        if np.shares_memory(converted, array) and array.flags.writeable and not isinstance(given, list | tuple):
            converted = converted.copy()
        converted.flags.writeable = False
        return converted


def checked_columns(values: Any, where: str) -> dict[str, npt.NDArray[Any]]:
    """Convert the columns of a turn, a rollout or an example to read-only arrays.

    Which of them may be there, and of what shape and dtype, is said where they are taken in.

    Raises:
        DataError: Something else than a dict of arrays of numbers or bool by name; ``where`` begins the message.
    """
    if not isinstance(values, Mapping):
        raise DataError(f"{where}: expected columns as a dict, found {values!r:.100}")
    own: dict[str, npt.NDArray[Any]] = {}
    for name, given in values.items():
        array = array_of(given, f"{where}: expected column {name!r:.80}")
        if not isinstance(name, str) or (array.size and array.dtype.kind not in "biuf"):
            raise DataError(f"{where}: expected columns of numbers by name, found {name!r:.80}: {given!r:.80}")
        if array.flags.writeable and not isinstance(given, list | tuple):
            array = array.copy()
        array.flags.writeable = False
        own[name] = array
    return own


def _converted(given: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Convert values to a dtype; None where a value changes. Floats may lose precision, but not become infinite."""
    array = np.asarray(given)
    if array.dtype == dtype:
        return array
    if array.size and (array.dtype.kind not in "biuf" or (array.dtype.kind == "b") != (dtype.kind == "b")):
        return None
    try:
        return convert(array, dtype)
    except RowError:
        return None


def _shown(array: npt.NDArray[Any]) -> str:
    return f"{array.reshape(-1)[:4].tolist()!r:.80}"


class Columns(Mapping[str, RolloutColumn]):
    """Declared columns by name, in the order in which they were declared.

    Args:
        declared: Each name once.

    Raises:
        ConfigError: Something else than columns, or a name that is there twice.
    """

    def __init__(self, declared: Iterable[RolloutColumn] = ()) -> None:
        columns = tuple(declared)
        for column in columns:
            if not isinstance(column, RolloutColumn):
                raise ConfigError(f"columns: expected RolloutColumn(...), found {column!r:.100}")
        self._columns = {column.name: column for column in columns}
        if len(self._columns) < len(columns):
            raise ConfigError(f"columns: expected each name once, found {[column.name for column in columns]}")

    def __getitem__(self, name: str) -> RolloutColumn:
        return self._columns[name]

    def __iter__(self) -> Any:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Columns({list(self._columns.values())!r})"

    def of(self, per: str) -> list[RolloutColumn]:
        """Return the columns with a value per "token", "turn" or "example"."""
        return [column for column in self._columns.values() if column.per == per]

    @property
    def late(self) -> list[RolloutColumn]:
        """The columns that are written after a rollout was added."""
        return [column for column in self._columns.values() if column.late]

    def refuse_others(self, names: Iterable[str], pers: Sequence[str], where: str, remedy: str = "") -> None:
        """Raise DataError for a name that is not declared per one of ``pers``."""
        for name in names:
            if name not in self or self[name].per not in pers:
                known = [one.name for one in self.values() if one.per in pers]
                raise DataError(
                    f"{where}: expected columns that were declared for each {' or '.join(pers)}, {known}, "
                    f"found {name!r}{remedy}"
                )

    def with_more(self, others: Columns) -> Columns:
        """Return these columns, followed by those of ``others`` that are not among them.

        Raises:
            ConfigError: One of the others is declared otherwise.
        """
        for name, column in others.items():
            if self.get(name, column) != column:
                raise ConfigError(f"columns: expected {name!r} as the folder has it, {self[name]}, found {column}")
        return Columns({**self, **others}.values())

    def first(self, count: int) -> Columns:
        """Return the first ``count`` columns."""
        return self if count == len(self) else Columns(list(self._columns.values())[:count])

    def __hash__(self) -> int:
        return hash(tuple(self._columns.values()))

    def to_json(self) -> str:
        """Return a text that ``from_json`` reads."""
        columns = [asdict(column) for column in self._columns.values()]
        return json.dumps({"version": _VERSION, "columns": columns, "checksum": _checksum(columns)})

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Columns:
        """Read what ``to_json`` wrote; ``where`` begins the message of an error.

        Raises:
            DataError: Something else, or of a newer version.
        """
        try:
            said = json.loads(text)
            version = int(said["version"])
            if version > _VERSION:
                raise DataError(
                    f"{where}: expected columns of version {_VERSION}, found {version}: a newer release wrote it"
                )
            if said["checksum"] != _checksum(said["columns"]):
                raise DataError(f"{where}: expected the columns as they were written, found damage")
            return cls(RolloutColumn(**column) for column in said["columns"])
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{where}: expected the columns of rollouts, found: {error}") from error


def _checksum(columns: Any) -> int:
    return checksum(json.dumps(columns).encode())


def common_columns(items: Sequence[Any]) -> Columns:
    """Return the declared columns of rollouts or examples; DataError where these differ."""
    declared: Columns = items[0].declared if items else NO_COLUMNS
    for place, item in enumerate(items):
        if item.declared is not declared and item.declared != declared:
            raise DataError(
                f"examples: expected the same columns, {list(declared)} as the first has, "
                f"found {list(item.declared)} at {place}"
            )
    return declared


NO_COLUMNS = Columns()
"""Where nothing was declared."""
