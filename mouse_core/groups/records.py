"""Rollouts of language models: turns, rollouts, groups of rollouts, and the examples that are trained on."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, refuse_hidden
from mouse_core.errors import DataError
from mouse_core.groups.columns import NO_COLUMNS, Columns, checked_columns, floats_of, logprobs_of, own_array, tokens_of

_DEEPEST = 100


def checked_metadata(values: Any, where: str) -> dict[str, Any]:
    """Return a copy of metadata; DataError, whose message ``where`` begins, for a value that cannot be stored."""
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
        example_id: Which of its problems.
        policy_version: Of the policy that sampled them.
    """

    environment: str
    example_id: str
    policy_version: str


class ByValue:
    """Base of types whose objects are equal if all attributes are equal, arrays and metadata included."""

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
        message: Its text.
        role: Who wrote it; "assistant" is the policy.
        tokens: Its token ids, int32 ``[n]``, each at least 0.
        logprobs: Log-probabilities of the tokens under the policy that sampled them, float32 ``[n]``, at most 0; what
            rounding leaves above, up to 1e-4, becomes 0. None where tokens were given, as in prompts.
        reward: For this turn alone, where there is one.
        metadata: Anything else: None, bool, int, float, str, bytes, NumPy numbers and arrays, and lists, tuples and
            dicts (with str keys) of these. It is copied.
        columns: By name what a ``RolloutColumn`` declares for each token, ``[n, *shape]``, or for each turn, ``shape``.

    Raises:
        DataError: Another type; tokens or logprobs out of range; logprobs of another length than tokens; NaN.
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
        """Whether its tokens belong into the loss: the policy wrote them, and their probabilities are known."""
        return self.logprobs is not None and self.role == "assistant"


@dataclass(frozen=True, eq=False, slots=True)
class RolloutRecord(ByValue):
    """One rollout: a conversation, its problem, its policy version and its reward.

    Args:
        environment: The environment's name, not empty.
        example_id: Which of its problems; an int becomes its decimal digits.
        policy_version: Of the policy that sampled it; an int becomes its decimal digits.
        rollout_uid: Names this rollout and no other, not empty.
        turns: Its messages in order, at least one.
        reward: What it earned altogether; None: the sum of its turns' rewards, or, where none has one, what is not
            known yet. Only a buffer with a late column "reward" takes such a rollout.
        created: When, in seconds since 1970; by default now.
        replica_id: Who sampled it.
        metadata: As in ``Turn``.
        columns: By name what a ``RolloutColumn`` declares for each example, ``shape``.
        declared: What its columns and those of its turns are; set by the buffer that takes it in.
        group_uid: Names the sealed group that it was read from; set by the buffer that sealed it, "" before.

    Raises:
        DataError: Another type, an empty name, no turns, NaN or infinity.
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
                raise DataError(f"rollout {self.rollout_uid!r}: expected {name} as a str, not empty, found {value!r}")

    @property
    def key(self) -> GroupKey:
        """The key of its group."""
        return GroupKey(self.environment, self.example_id, self.policy_version)


@dataclass(frozen=True, eq=False, slots=True)
class RolloutGroup(ByValue):
    """Rollouts of one policy version on one problem, which are scored against each other.

    Args:
        environment, example_id, policy_version: What they share.
        rollouts: At least one, each once.

    Raises:
        DataError: No rollout, one of another group, or one that is there twice.
    """

    environment: str
    example_id: str
    policy_version: str
    rollouts: tuple[RolloutRecord, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        if not self.rollouts:
            raise DataError(f"group {tuple(self.key)}: expected one or more rollouts, found none")
        for rollout in self.rollouts:
            if not isinstance(rollout, RolloutRecord) or rollout.key != self.key:
                raise DataError(f"group {tuple(self.key)}: expected rollouts of this group, found {rollout!r:.200}")
        if len({rollout.rollout_uid for rollout in self.rollouts}) < len(self.rollouts):
            raise DataError(f"group {tuple(self.key)}: expected every rollout once, found one twice")

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def key(self) -> GroupKey:
        """The key that its rollouts share."""
        return GroupKey(self.environment, self.example_id, self.policy_version)


def uids_of(given: Any) -> list[str]:
    """Return uids as a list; DataError for other types, as for a single uid."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DataError(f"rollout_uids: expected several uids, found {given!r:.100}")
    return list(given)


def with_columns(rollout: RolloutRecord, declared: Columns) -> RolloutRecord:
    """Return a rollout with its columns converted to the declared types.

    Raises:
        DataError: A column that is not declared, or is late, or has other values.
    """
    where = f"rollout {rollout.rollout_uid!r}"
    if "reward" not in declared:
        check_rewarded(rollout)
    _refuse_others(rollout, declared)
    if rollout.group_uid:  # of the group that another buffer sealed
        rollout = of_group(rollout, "")
    if not declared:
        return rollout
    for name in (*rollout.columns, *(name for turn in rollout.turns for name in turn.columns)):
        if declared[name].late:
            raise DataError(f"{where}: expected the late column {name!r} by add_column, found it in the rollout")
    own = {name: declared[name].taken(given, None, where) for name, given in rollout.columns.items()}
    turns = tuple(
        [
            _with(turn, columns=_of_turn(turn, declared, f"{where}, turn {place}")) if turn.columns else turn
            for place, turn in enumerate(rollout.turns)
        ]
    )
    made: RolloutRecord = _with(rollout, turns=turns, columns=own, declared=declared)
    return made


def of_group(rollout: RolloutRecord, group_uid: str) -> RolloutRecord:
    """Return a rollout with the uid of its sealed group."""
    made: RolloutRecord = rollout if rollout.group_uid == group_uid else _with(rollout, group_uid=group_uid)
    return made


def refuse_undeclared(rollout: RolloutRecord) -> None:
    """Raise DataError for a rollout with columns that were not declared, which its example would lack."""
    _refuse_others(rollout, rollout.declared, "; a RolloutBuffer declares columns")


def _refuse_others(rollout: RolloutRecord, declared: Columns, remedy: str = "") -> None:
    where = f"rollout {rollout.rollout_uid!r}"
    if rollout.columns:
        declared.refuse_others(rollout.columns, ("example",), where, remedy)
    for turn in rollout.turns:
        if turn.columns:
            declared.refuse_others(turn.columns, ("token", "turn"), where, remedy)


def with_late(rollout: RolloutRecord, late: Mapping[str, npt.NDArray[Any]], declared: Columns) -> RolloutRecord:
    """Return a rollout with late columns, which are checked already; values per token go over all turns."""
    own = {name: values for name, values in late.items() if declared[name].per == "example"}
    parts: list[dict[str, npt.NDArray[Any]]] = [dict(turn.columns) for turn in rollout.turns]
    begin = 0
    for place, (turn, columns) in enumerate(zip(rollout.turns, parts, strict=True)):
        end = begin + len(turn.tokens)
        for name, values in late.items():
            if name not in own:
                columns[name] = values[begin:end] if declared[name].per == "token" else values[place]
        begin = end
    turns = rollout.turns
    if len(own) < len(late):
        turns = tuple([_with(turn, columns=columns) for turn, columns in zip(turns, parts, strict=True)])
    reward = rollout.reward
    if "reward" in declared:
        if reward is None and "reward" in own:
            reward = float(own["reward"])
        elif reward is not None:  # an example made of it has the column whenever the reward came
            own["reward"] = np.asarray(reward, declared["reward"].dtype)
    made: RolloutRecord = _with(
        rollout, turns=turns, columns={**rollout.columns, **own}, reward=reward, declared=declared
    )
    return made


def _of_turn(turn: Turn, declared: Columns, where: str) -> dict[str, npt.NDArray[Any]]:
    counts = {"token": len(turn.tokens), "turn": None}
    columns = ((declared[name], given) for name, given in turn.columns.items())
    return {column.name: column.taken(given, counts[column.per], where) for column, given in columns}


def _with(item: Any, **changed: Any) -> Any:
    """Return a copy of a turn or a rollout with some attributes changed, without checking them again."""
    kind = type(item)
    made = object.__new__(kind)
    for name in kind.__dataclass_fields__:
        object.__setattr__(made, name, changed[name] if name in changed else getattr(item, name))
    return made


def unchecked(kind: type[Any]) -> Callable[..., Any]:
    """Return a function that makes objects of a type from a value per field, without checking the values."""
    fill = [getattr(kind, name).__set__ for name in kind.__dataclass_fields__]

    def make(*values: Any) -> Any:
        made = object.__new__(kind)
        for put, value in zip(fill, values, strict=True):
            put(made, value)
        return made

    return make


def same_values(one: Any, other: Any) -> bool:
    """Whether two metadata values are equal, types, arrays and NaN included."""
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
    """Return the sum of the turns' rewards; None if no turn has one."""
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    return math.fsum(rewards) if rewards else None


def check_rewarded(rollout: RolloutRecord) -> float:
    """Return the rollout's reward; DataError: the rollout has none."""
    if rollout.reward is None:
        raise DataError(
            f"rollout {rollout.rollout_uid!r}: expected a reward of its own or of one of its turns, found none"
        )
    return rollout.reward


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
        loss_mask: Which tokens belong into the loss, bool ``[L]``: those that the policy wrote, never the prompt.
        advantage: float32 ``[L]``, 0 outside of the loss mask.
        generator_log_probs: Log-probabilities under the policy that sampled the tokens, float32 ``[L]``, 0 outside of
            the loss mask.
        rollout_uid, environment, policy_version: The rollout that it was made of, where it was made of one.
        columns: By name what a ``RolloutColumn`` declares: ``[L, *shape]`` with a value for each token, ``[T, *shape]``
            for each of T turns, ``shape`` for the example.

    Raises:
        DataError: Arrays of another type or of differing lengths, NaN, or log-probabilities above 0.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    advantage: npt.NDArray[np.float32]
    generator_log_probs: npt.NDArray[np.float32]
    rollout_uid: str = ""
    environment: str = ""
    policy_version: str = ""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    turn_ids: npt.NDArray[np.int32] | None = None
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
        turns = None
        if self.turn_ids is not None:
            ids = np.asarray(self.turn_ids)
            if ids.shape != self.tokens.shape or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0)):
                raise DataError(f"{where}: expected turn_ids from 0 for each of {len(self.tokens)} tokens")
            object.__setattr__(self, "turn_ids", own_array(ids, np.int32, self.turn_ids))
        for name, column in self.declared.items():
            count = {"token": len(self.tokens), "example": None, "turn": turns}[column.per]
            if column.per == "turn":
                turns = count = len(columns[name]) if turns is None else turns
                if self.turn_ids is None or (len(self.tokens) and int(self.turn_ids.max()) >= turns):
                    raise DataError(f"{where}: expected turn_ids below {turns}, as {name!r} has so many turns")
            columns[name] = column.values(columns[name], count, where)
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.tokens)


def refuse_other(rollout: RolloutRecord, there: RolloutRecord, caller: str) -> None:
    """Raise DataError if two rollouts of one uid differ in more than ``replica_id`` and ``created``.

    Args:
        rollout: The one that comes.
        there: The one that came before.
        caller: Begins the message.
    """
    if rollout is there:
        return
    compared = (*GroupKey._fields, "turns", "reward", "metadata", "columns")
    differing = [name for name in compared if not same_values(getattr(rollout, name), getattr(there, name))]
    if differing:
        raise other_one(rollout.rollout_uid, differing, caller)


def other_one(uid: str, differing: list[str], caller: str) -> DataError:
    """Return the error for a rollout that was added with other content before; ``differing`` names what differs."""
    return DataError(
        f"{caller}, rollout {uid!r}: expected what was added with this uid before, found other {', '.join(differing)}"
    )


# Bytes of the Python objects themselves: of a rollout, of a turn with two arrays, of another value.
_ROLLOUT, _TURN, _VALUE = 300, 450, 64


def nbytes_of(rollout: RolloutRecord) -> int:
    """Return the approximate bytes of a rollout in memory, including columns and metadata."""
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


def earned_of(rollout: RolloutRecord) -> int:
    """Return a fingerprint of the turns' rewards, rounding apart; 0 where no turn has a reward."""
    rewards = [round(turn.reward or 0.0, 14) for turn in rollout.turns]
    if not any(rewards):
        return 0
    earned = " ".join([f"{reward or 0.0:.6g}" for reward in rewards]).encode()
    return int.from_bytes(hashlib.blake2b(earned, digest_size=8).digest(), "little", signed=True)
