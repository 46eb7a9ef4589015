"""Records of language-model training: declared columns, policy versions, turns, rollouts and examples."""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.dtypes import RowError, convert, is_ml_float, refuse_hidden, to_numpy, widened
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import checksum

_MAX_TOKEN = 2**31 - 1
# Rounding errors: log-probabilities up to this number above 0 become 0.
_MOST_LOGPROB = 1e-4


def array_of(values: Any, where: str) -> npt.NDArray[Any]:
    """Convert values, including tensors on any device, with or without gradients, to a NumPy array. Narrow floats
    become float32.

    Raises:
        DataError: The values do not form an array; the message begins with ``where``.
    """
    try:
        array = to_numpy(widened(values.detach()).cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where} as an array, found {values!r:.80}: {error}") from error
    return widened(array) if is_ml_float(array.dtype) else array


def tokens_of(values: Any) -> npt.NDArray[np.int32]:
    """Convert token ids to int32 ``[n]``; raise DataError if a value is not a token id."""
    tokens = array_of(values, "tokens: expected integers [n]")
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"tokens: expected integers [n], found {tokens.dtype} {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > _MAX_TOKEN):
        wrong = int(np.flatnonzero((tokens < 0) | (tokens > _MAX_TOKEN))[0])
        raise DataError(f"tokens: expected 0..{_MAX_TOKEN}, found {tokens[wrong]} at index {wrong}")
    return own_array(tokens, np.int32, values)


def floats_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Convert finite numbers to float32 ``[length]``; raise DataError for other values, and begin the message with
    ``where``.
    """
    floats = array_of(values, where)
    if floats.shape != (length,):
        raise DataError(f"{where} for each of {length} tokens, found shape {list(floats.shape)}")
    if floats.size and floats.dtype.kind not in "iuf":
        raise DataError(f"{where} as numbers, found {floats.dtype}")
    narrow: npt.NDArray[np.float32] = own_array(floats, np.float32, values)
    finite = np.isfinite(narrow)
    if not finite.all():
        wrong = int(np.flatnonzero(~finite)[0])
        raise DataError(f"{where} as finite float32 numbers, found {floats[wrong]} at index {wrong}")
    return narrow


def logprobs_of(values: Any, length: int, where: str) -> npt.NDArray[np.float32]:
    """Convert log-probabilities to float32 ``[length]``; rounding errors up to 1e-4 above 0 become 0.

    Raises:
        DataError: A value is not a log-probability; the message begins with ``where``.
    """
    logprobs = floats_of(values, length, where)
    if length and (most := logprobs.max()) > 0:
        if most > _MOST_LOGPROB:
            wrong = int(logprobs.argmax())
            raise DataError(
                f"{where} as logarithms of probabilities, at most 0, found {logprobs[wrong]} at index {wrong}; "
                "compute them in float32, not in 16 bits"
            )
        logprobs = np.minimum(logprobs, np.float32(0))
        logprobs.flags.writeable = False
    return logprobs


def own_array(values: npt.NDArray[Any], dtype: Any, given: Any) -> npt.NDArray[Any]:
    """Convert values to a read-only array of a dtype; the array shares memory with ``given`` only if ``given`` is
    read-only.
    """
    shared = values.flags.writeable and not isinstance(given, list | tuple)
    with np.errstate(over="ignore"):
        own: npt.NDArray[Any] = values.astype(dtype, copy=shared)
    own.flags.writeable = False
    return own


_VERSION = 1
PER = ("token", "example")
"""Valid values of ``RolloutColumn.per``."""

# Reserved names, which rollouts, turns, examples and batches already use.
_OF_ROLLOUTS = ("environment", "example_id", "policy_version", "rollout_uid", "turns", "created", "replica_id")
_OF_PARTS = ("metadata", "message", "role", "reward", "tokens", "logprobs", "columns")
_OF_EXAMPLES = ("loss_mask", "advantage", "generator_log_probs", "staleness")
_OF_BATCHES = ("mask", "segment_ids", "positions", "cu_seqlens", "position", "sequence_id")
_TAKEN = {*_OF_ROLLOUTS, *_OF_PARTS, *_OF_EXAMPLES, *_OF_BATCHES}


@dataclass(frozen=True, eq=False)
class RolloutColumn:
    """The declaration of an additional column of rollouts.

    Args:
        name: A name of letters, digits and "_" that rollouts, examples and batches do not already use.
        per: "token": a value for each token; "example": a value for each rollout.
        dtype: The dtype of the values: bool, or a NumPy integer or float dtype.
        shape: The shape of every value, such as () for a number or (64, 64, 3) for an image. Pad values of different
            sizes to the largest size, and store the size in a second column, such as ``shape=(2,)``.
        fill: The value that replaces missing values and fills padding; NaN is allowed.
        finite: Whether NaN and infinite values raise DataError when they are added.

    Raises:
        ConfigError: An argument is invalid.
    """

    name: str
    per: str = "token"
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    fill: float = 0
    finite: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or not self.name.isascii():
            raise ConfigError(f"column: expected a name of letters, digits and '_', found {self.name!r:.80}")
        if self.name in _TAKEN:
            raise ConfigError(
                f"column: expected a name that no attribute of a rollout or of an example has, found {self.name!r}"
            )
        if self.per not in PER:
            raise ConfigError(f"column {self.name!r}: per: expected one of {list(PER)}, found {self.per!r:.80}")
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
                f"column {self.name!r}: expected a shape of positive sizes, found {self.shape!r:.80}; pad "
                "values of different sizes, such as images, to the largest, and store their sizes in another column"
            )
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "finite", bool(self.finite))
        fill = self.fill
        if kind.kind == "b" and fill in (0, 1):
            object.__setattr__(self, "fill", bool(fill))
        elif not isinstance(fill, bool | int | float | np.generic) or _converted(fill, kind) is None:
            raise ConfigError(f"column {self.name!r}: expected fill as a value of {kind.name}, found {fill!r:.80}")

    @property
    def _key(self) -> tuple[Any, ...]:
        # In the comparison key, NaN equals NaN.
        fill = repr(np.asarray(self.fill, self.dtype).item())
        return self.name, self.per, self.dtype, self.shape, fill, self.finite

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, RolloutColumn) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def filled(self, *counts: int) -> npt.NDArray[Any]:
        """Return an array ``[*counts, *shape]`` of the value ``fill``."""
        return np.full((*counts, *self.shape), self.fill, self.dtype)

    def taken(self, given: Any, count: int | None, where: str) -> npt.NDArray[Any]:
        """Convert values that a user passes; see ``values``. Unless ``finite=False``, NaN and infinity raise
        DataError.
        """
        values = self.values(given, count, where)
        if self.finite and values.dtype.kind == "f" and not (good := np.isfinite(values)).all():
            place = tuple(np.argwhere(~good)[0].tolist())
            at = f" at {list(place)}" if place else ""
            raise DataError(f"{where}: expected column {self.name!r} as finite numbers, found {values[place]}{at}")
        return values

    def values(self, given: Any, count: int | None, where: str) -> npt.NDArray[Any]:
        """Convert values to a read-only array of this column's dtype.

        Args:
            given: An array ``[count, *shape]``, or one value of the shape ``shape``.
            count: The expected number of values; None: one value.
            where: The text with which error messages begin.

        Raises:
            DataError: The shape or type is wrong, or the dtype cannot represent a value.
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

    Names, shapes and dtypes are checked when the object is added to a buffer.

    Raises:
        DataError: ``values`` is not a dict from names to arrays of numbers or bools; the message begins with ``where``.
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
    """Convert values to a dtype; return None if a value would change. Floats may lose precision, but not become
    infinite.
    """
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
    """Declared columns by name, in the order of declaration.

    Args:
        declared: The columns, each name once.

    Raises:
        ConfigError: An element is not a column, or a name occurs twice.
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
        """Return the columns with a value per "token" or per "example"."""
        return [column for column in self._columns.values() if column.per == per]

    def refuse_others(self, names: Iterable[str], per: str, where: str, remedy: str = "") -> None:
        """Raise DataError for a name that is not declared as a column of the kind ``per`` ("token" or "example")."""
        known = [one.name for one in self.of(per)]
        for name in names:
            if name not in known:
                raise DataError(
                    f"{where}: expected only columns that were declared with per={per!r}, {known}, found "
                    f"{name!r}{remedy}"
                )

    def with_more(self, others: Columns) -> Columns:
        """Return these columns, followed by the columns of ``others`` that are not declared yet.

        Raises:
            ConfigError: A column with the same name is declared differently in ``others``.
        """
        for name, column in others.items():
            if self.get(name, column) != column:
                raise ConfigError(
                    f"columns: expected {name!r} as it is declared in the folder, {self[name]}, found {column}"
                )
        return Columns({**self, **others}.values())

    def first(self, count: int) -> Columns:
        """Return the first ``count`` columns."""
        return self if count == len(self) else Columns(list(self._columns.values())[:count])

    def __hash__(self) -> int:
        return hash(tuple(self._columns.values()))

    def to_json(self) -> str:
        """Return the columns as a JSON text, which ``from_json`` reads."""
        columns = [asdict(column) for column in self._columns.values()]
        return json.dumps({"version": _VERSION, "columns": columns, "checksum": _checksum(columns)})

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Columns:
        """Parse a text of ``to_json``; error messages begin with ``where``.

        Raises:
            DataError: The text is invalid, or a newer version wrote it.
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
        except (ConfigError, *UNREADABLE) as error:
            raise DataError(f"{where}: expected the columns of rollouts, found: {error}") from error


def _checksum(columns: Any) -> int:
    return checksum(json.dumps(columns).encode())


def common_columns(items: Sequence[Any]) -> Columns:
    """Return the declared columns that all rollouts or examples share; raise DataError if they differ."""
    declared: Columns = items[0].declared if items else NO_COLUMNS
    for place, item in enumerate(items):
        if item.declared is not declared and item.declared != declared:
            raise DataError(
                f"examples: expected the columns of the first example, {list(declared)}, "
                f"found {list(item.declared)} at index {place}"
            )
    return declared


NO_COLUMNS = Columns()
"""The declaration of no columns."""


_LAST = "\U0010ffff"  # behind all versions
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def version_name(version: Any) -> str:
    """Convert a version to text; raise DataError unless it is an int or a non-empty str."""
    if isinstance(version, int | np.integer) and not isinstance(version, bool):
        return str(int(version))
    if not isinstance(version, str) or not version:
        raise DataError(f"set_policy_version: expected a non-empty str or an int, found {version!r:.80}")
    return version


def version_number(version: str) -> Decimal | None:
    """Return a version as a number; None if the text is not a number."""
    text = version.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent that is too large
        return None


def version_order(version: str) -> tuple[Any, ...]:
    """Return the sort key of a version: numeric versions are sorted by value, after versions that are not numbers.

    Digits inside versions that are not numbers are compared by value, too: "step-9" comes before "step-10".

    Example:
        >>> sorted(["10", "9", "step-10", "step-9", "9.5"], key=version_order)
        ['step-9', 'step-10', '9', '9.5', '10']
    """
    number = version_number(version)
    if number is not None:
        return (1, number)
    pieces = re.split(r"([0-9]+)", version)
    # Parts alternate between text and digits, beginning with text, so parts of the same kind are compared.
    return (0, tuple(int(piece) if index % 2 else piece for index, piece in enumerate(pieces)), version)


class Versions:
    """The versions seen so far, and the distance of each version from the newest version.

    The newest version is the argument of the last call of ``set_latest``; if ``set_latest`` was never called, the
    newest version seen.

    Example:
        >>> versions = Versions(["3", "5", "7", "step-9", "step-10"])
        >>> versions.behind("3"), versions.behind("step-9")
        (4, 4)
        >>> versions.set_latest("7"), versions.set_latest("3"), versions.behind("3"), versions.is_ahead("5")
        (False, True, 0, True)
        >>> versions.set_latest("7")
        False

    Attributes:
        latest: The argument of the last ``set_latest``; None without a call.
    """

    def __init__(self, seen: Iterable[str] = (), latest: str | None = None) -> None:
        self.latest = latest
        self._seen: list[tuple[tuple[Any, ...], str]] = []  # in their order, of equal ones the first
        self._places: dict[str, int] = {}
        for version in seen:
            self.note(version)

    def note(self, version: str) -> bool:
        """Add a version; return whether it is the newest version so far."""
        entry = (version_order(version), version)
        place = bisect_right(self._seen, entry)
        if place and self._seen[place - 1][0] == entry[0]:
            return False
        insort(self._seen, entry)
        return place == len(self._seen) - 1

    def set_latest(self, version: str) -> bool:
        """Set the latest version; return True if a newer version is known already.

        Newer versions are removed, because the same version numbers may occur again for another policy.
        """
        order = version_order(version)
        goes_back = self.latest is not None and order < version_order(self.latest)
        self.latest = version
        self.note(version)
        there = bisect_right(self._seen, (order, _LAST))
        goes_back |= there < len(self._seen)
        del self._seen[there:]
        return goes_back

    def behind(self, version: str) -> int:
        """Return how many versions ``version`` is behind the newest version; 0 if it is not behind. The result is the
        difference of both versions, rounded up, if they are numeric, else the number of later versions that were seen.
        """
        newer = self._seen[-1][1] if self.latest is None else self.latest
        numbers = version_number(newer), version_number(version)
        if numbers[0] is not None and numbers[1] is not None:
            return max(0, min(math.ceil(numbers[0] - numbers[1]), 1 << 62))
        return max(0, self._place(newer) - self._place(version))

    def _place(self, version: str) -> int:
        return bisect_right(self._seen, (version_order(version), _LAST))

    def is_ahead(self, version: str) -> bool:
        """Whether a version is newer than the version of the last ``set_latest``."""
        return self.latest is not None and version_order(version) > version_order(self.latest)

    def refuse_ahead(self, version: str, rollout_uid: str) -> None:
        """Raise DataError if a rollout's version is newer than the version of the last ``set_latest``."""
        if self.is_ahead(version):
            raise DataError(
                f"rollout {rollout_uid!r}: expected a version up to {self.latest!r}, the latest version that was set, "
                f"found {version!r}"
            )

    def place(self, version: str) -> int:
        """Return the index of a version in the order in which versions were added, from 0."""
        return self._places.setdefault(version, len(self._places))

    def all_behind(self) -> npt.NDArray[np.int64]:
        """Return the result of ``behind`` for every version, in the order of ``place``."""
        return np.array([self.behind(version) for version in self._places], np.int64)


_DEEPEST = 100


def checked_metadata(values: Any, where: str) -> dict[str, Any]:
    """Return a copy of metadata; raise DataError, with a message that begins with ``where``, if a value cannot be
    stored.
    """
    if not isinstance(values, Mapping):
        raise DataError(f"{where}: expected metadata as a dict, found {values!r:.100}")
    return {_key(key, where): _copy(value, f"{where}: metadata[{key!r}]", 1) for key, value in values.items()}


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise DataError(f"{where}: expected keys of metadata as str, found {key!r:.100}")
    return key


def _copy(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if depth > _DEEPEST:
        raise DataError(f"{where}: expected at most {_DEEPEST} levels of metadata, found more")
    if isinstance(value, Mapping):
        return {_key(key, where): _copy(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_copy(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value))
    if isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "biufc":
        try:
            refuse_hidden(value)
        except RowError as error:
            raise DataError(f"{where}: {error}") from error
        return np.array(value, order="C") if isinstance(value, np.ndarray) else value
    raise DataError(
        f"{where}: expected None, bool, int, float, str, bytes, numeric NumPy values, or lists, tuples and dicts of "
        f"these, found {kind.__name__}"
    )


class GroupKey(NamedTuple):
    """The environment, problem and policy version that the rollouts of a group share.

    Args:
        environment: The environment's name.
        example_id: The id of the problem in the environment.
        policy_version: The version of the policy that sampled the rollouts.
    """

    environment: str
    example_id: str
    policy_version: str


class ByValue:
    """Base class whose objects are equal if all attributes are equal, including arrays and metadata."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        fields: Mapping[str, Any] = self.__dataclass_fields__  # type: ignore[attr-defined]
        names = [name for name, one in fields.items() if one.compare]
        return all(same_values(getattr(self, name), getattr(other, name)) for name in names)


@dataclass(frozen=True, eq=False, slots=True)
class Turn(ByValue):
    """One message of a rollout.

    Args:
        message: The text of the message.
        role: The author of the message; "assistant" is the policy.
        tokens: The token ids, int32 ``[n]``, each at least 0.
        logprobs: Log-probabilities of the tokens under the policy that sampled them, float32 ``[n]``, at most 0;
            rounding errors up to 1e-4 above 0 become 0. None for tokens that were not sampled, such as prompts.
        reward: The reward of this turn; None without a reward.
        metadata: Additional values: None, bool, int, float, str, bytes, NumPy numbers and arrays, and lists, tuples and
            dicts (with str keys) of these. The metadata is copied.
        columns: The values of declared columns with a value per token by name, each an array ``[n, *shape]``.

    Raises:
        DataError: A type is wrong; tokens or logprobs are out of range; the lengths of logprobs and tokens differ; a
            value is NaN.
    """

    message: str
    role: str
    tokens: npt.NDArray[np.int32] = ()  # type: ignore[assignment]
    logprobs: npt.NDArray[np.float32] | None = None
    reward: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("message", "role"):
            if not isinstance(getattr(self, name), str):
                raise DataError(f"turn: expected {name} as a str, found {getattr(self, name)!r:.100}")
        object.__setattr__(self, "tokens", tokens_of(self.tokens))
        if self.logprobs is not None:
            logprobs = logprobs_of(self.logprobs, len(self.tokens), "turn: expected logprobs")
            object.__setattr__(self, "logprobs", logprobs)
        if self.reward is not None:
            object.__setattr__(self, "reward", _finite(self.reward, "turn: expected reward"))
        object.__setattr__(self, "metadata", checked_metadata(self.metadata, "turn"))
        object.__setattr__(self, "columns", checked_columns(self.columns, "turn"))

    @property
    def is_trained(self) -> bool:
        """Whether the turn's tokens are in the loss: the policy wrote them, and their log-probabilities are known."""
        return self.logprobs is not None and self.role == "assistant"


@dataclass(frozen=True, eq=False, slots=True)
class RolloutRecord(ByValue):
    """One rollout: a conversation, its problem, its policy version and its reward.

    Args:
        environment: The environment's name, not empty.
        example_id: The id of the problem in the environment; an int is converted to decimal digits.
        policy_version: The version of the policy that sampled the rollout; an int is converted to decimal digits.
        rollout_uid: The unique id of this rollout, not empty.
        turns: The messages in order, at least one.
        reward: The reward of the complete rollout. None: the sum of the turns' rewards; if no turn has a reward, the
            reward is unknown. A ``GrpoBatchMaker`` needs rewards.
        created: The time of creation, in seconds since 1970; by default now.
        replica_id: The id of the worker that sampled the rollout.
        metadata: See ``Turn``.
        columns: By name, the value of each declared column that has one value per rollout; a value has the column's
            ``shape``.
        declared: The declarations of the columns of the rollout and its turns; set by the buffer that stores the
            rollout.
        group_uid: The uid of the rollout's sealed group. The buffer sets the uid when it seals the group; before, the
            uid is "".

    Raises:
        DataError: A type is wrong, a name is empty, ``turns`` is empty, or a value is NaN or infinite.
    """

    environment: str
    example_id: str
    policy_version: str
    rollout_uid: str
    turns: tuple[Turn, ...]
    reward: float | None = None
    created: float = field(default_factory=time.time)
    replica_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    declared: Columns = field(default=NO_COLUMNS, repr=False, compare=False)
    group_uid: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_names()
        where = f"rollout {self.rollout_uid!r}: expected"
        given: Any = self.turns
        turns = tuple(given) if isinstance(given, Iterable) else ()
        if not turns or not all(isinstance(turn, Turn) for turn in turns):
            raise DataError(f"{where} one or more turns, found {self.turns!r:.200}")
        object.__setattr__(self, "turns", turns)
        reward = _earned(turns) if self.reward is None else self.reward
        object.__setattr__(self, "reward", None if reward is None else _finite(reward, f"{where} reward"))
        object.__setattr__(self, "created", _finite(self.created, f"{where} created"))
        object.__setattr__(self, "metadata", checked_metadata(self.metadata, f"rollout {self.rollout_uid!r}"))
        object.__setattr__(self, "columns", checked_columns(self.columns, f"rollout {self.rollout_uid!r}"))

    def _check_names(self) -> None:
        for name in ("example_id", "policy_version"):
            value = getattr(self, name)
            if isinstance(value, int | np.integer) and not isinstance(value, bool):
                object.__setattr__(self, name, str(int(value)))
        for name in ("environment", "example_id", "policy_version", "rollout_uid", "replica_id", "group_uid"):
            value = getattr(self, name)
            if not isinstance(value, str) or not (value or name in ("replica_id", "group_uid")):
                raise DataError(f"rollout {self.rollout_uid!r}: expected {name} as a non-empty str, found {value!r}")

    @property
    def key(self) -> GroupKey:
        """The key of the rollout's group."""
        return GroupKey(self.environment, self.example_id, self.policy_version)


def uids_of(given: Any) -> list[str]:
    """Return uids as a list; raise DataError for other types, such as a single uid."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DataError(f"rollout_uids: expected a list of uids, found {given!r:.100}")
    return list(given)


def with_columns(rollout: RolloutRecord, declared: Columns) -> RolloutRecord:
    """Return a rollout with its columns converted to the declared types.

    Raises:
        DataError: A column is not declared, or has invalid values.
    """
    where = f"rollout {rollout.rollout_uid!r}"
    _refuse_others(rollout, declared)
    if rollout.group_uid:  # of the group that another buffer sealed
        rollout = of_group(rollout, "")
    if not declared:
        return rollout
    own = {name: declared[name].taken(given, None, where) for name, given in rollout.columns.items()}
    turns = list(rollout.turns)
    for place, turn in enumerate(turns):
        if turn.columns:
            count, at = len(turn.tokens), f"{where}, turn {place}"
            columns = {name: declared[name].taken(given, count, at) for name, given in turn.columns.items()}
            turns[place] = _with(turn, columns=columns)
    made: RolloutRecord = _with(rollout, turns=tuple(turns), columns=own, declared=declared)
    return made


def of_group(rollout: RolloutRecord, group_uid: str) -> RolloutRecord:
    """Return a copy of a rollout that has the uid of its sealed group as ``group_uid``."""
    made: RolloutRecord = rollout if rollout.group_uid == group_uid else _with(rollout, group_uid=group_uid)
    return made


def refuse_undeclared(rollout: RolloutRecord) -> None:
    """Raise DataError for a rollout with undeclared columns, because the rollout's example would lack these columns."""
    _refuse_others(rollout, rollout.declared, "; a RolloutBuffer declares columns")


def _refuse_others(rollout: RolloutRecord, declared: Columns, remedy: str = "") -> None:
    where = f"rollout {rollout.rollout_uid!r}"
    if rollout.columns:
        declared.refuse_others(rollout.columns, "example", where, remedy)
    for turn in rollout.turns:
        if turn.columns:
            declared.refuse_others(turn.columns, "token", where, remedy)


def _with(item: Any, **changed: Any) -> Any:
    """Return a copy of a turn or a rollout with changed attributes, without checks."""
    kind = type(item)
    made = object.__new__(kind)
    for name in kind.__dataclass_fields__:
        object.__setattr__(made, name, changed[name] if name in changed else getattr(item, name))
    return made


def unchecked(kind: type[Any]) -> Callable[..., Any]:
    """Return a function that creates objects of a type from a value per field, without checks."""
    fill = [getattr(kind, name).__set__ for name in kind.__dataclass_fields__]

    def make(*values: Any) -> Any:
        made = object.__new__(kind)
        for put, value in zip(fill, values, strict=True):
            put(made, value)
        return made

    return make


def same_values(one: Any, other: Any) -> bool:
    """Whether two metadata values are equal, including their types; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, np.ndarray | np.generic):
        a, b = np.asarray(one), np.asarray(other)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(one == other or (one != one and other != other))


def _earned(turns: Iterable[Turn]) -> float | None:
    """Return the sum of the turns' rewards; None if no turn has a reward."""
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    return math.fsum(rewards) if rewards else None


def _finite(value: Any, where: str) -> float:
    try:
        refuse_hidden(value)
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(f"{where} as a number, found {value!r:.100}") from None
    if not math.isfinite(number):
        raise DataError(f"{where} as a finite number, found {number}")
    return number


@dataclass(frozen=True, eq=False, slots=True)
class RLExample(ByValue):
    """One sequence to train on, L tokens long.

    Args:
        tokens: int32 ``[L]``.
        loss_mask: The mask of the tokens in the loss, bool ``[L]``: the tokens that the policy wrote, never the prompt.
        advantage: The advantage of each token, float32 ``[L]``, 0 outside of the loss mask.
        generator_log_probs: Log-probabilities under the policy that sampled the tokens, float32 ``[L]``, 0 outside of
            the loss mask.
        rollout_uid, environment, policy_version: The values of the example's rollout; "" without a rollout.
        columns: The values of declared columns by name: ``[L, *shape]`` for a column per token, ``shape`` per example.

    Raises:
        DataError: Arrays have a wrong type or differ in length, a value is NaN, or a log-probability is above 0.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    advantage: npt.NDArray[np.float32]
    generator_log_probs: npt.NDArray[np.float32]
    rollout_uid: str = ""
    environment: str = ""
    policy_version: str = ""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    declared: Columns = field(default=NO_COLUMNS, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens = tokens_of(self.tokens)
        mask = np.asarray(self.loss_mask)
        if mask.dtype != bool or mask.shape != tokens.shape:
            raise DataError(
                f"example {self.rollout_uid!r}: expected loss_mask as bool {list(tokens.shape)}, "
                f"found {mask.dtype} {list(mask.shape)}"
            )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "loss_mask", own_array(mask, np.bool_, self.loss_mask))
        for name, of in (("advantage", floats_of), ("generator_log_probs", logprobs_of)):
            values = of(getattr(self, name), len(tokens), f"example {self.rollout_uid!r}: expected {name}")
            object.__setattr__(self, name, values)
        self._check_columns(f"example {self.rollout_uid!r}")

    def _check_columns(self, where: str) -> None:
        declared: Any = self.declared
        object.__setattr__(self, "declared", declared if isinstance(declared, Columns) else Columns(declared))
        columns = checked_columns(self.columns, where)
        if columns.keys() != self.declared.keys():
            raise DataError(
                f"{where}: expected the columns that were declared, {list(self.declared)}, found {list(columns)}"
            )
        for name, column in self.declared.items():
            count = len(self.tokens) if column.per == "token" else None
            columns[name] = column.values(columns[name], count, where)
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.tokens)


def refuse_other(rollout: RolloutRecord, there: RolloutRecord, caller: str) -> None:
    """Raise DataError if two rollouts with the same uid differ in more than ``replica_id`` and ``created``.

    Args:
        rollout: The new rollout.
        there: The earlier rollout.
        caller: The text with which the message begins.
    """
    if rollout is there:
        return
    compared = (*GroupKey._fields, "turns", "reward", "metadata", "columns")
    differing = [name for name in compared if not same_values(getattr(rollout, name), getattr(there, name))]
    if differing:
        raise other_one(rollout.rollout_uid, differing, caller)


def other_one(uid: str, differing: list[str], caller: str) -> DataError:
    """Return the error for a rollout whose uid was added with other content; ``differing`` names the different
    attributes.
    """
    return DataError(
        f"{caller}, rollout {uid!r}: expected the content that was added with this uid before, found different "
        f"{', '.join(differing)}"
    )


# Bytes of Python objects without array data: a rollout, a turn with two arrays, another value.
_ROLLOUT, _TURN, _VALUE = 300, 450, 64


def nbytes_of(rollout: RolloutRecord) -> int:
    """Return the approximate size of a rollout in memory in bytes, including columns and metadata."""
    total = _ROLLOUT
    items: tuple[Any, ...] = (rollout, *rollout.turns)
    for one in items:
        if one.columns or one.metadata:
            total += sum(map(_size, (*one.columns.values(), *one.metadata.values())))
    for turn in rollout.turns:
        total += _TURN + 8 * len(turn.tokens) + len(turn.message)
    return total


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray | np.generic):
        return _VALUE + value.nbytes
    if isinstance(value, str | bytes):
        return _VALUE + len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, Iterable) else ()
    return _VALUE + sum(map(_size, inner))
