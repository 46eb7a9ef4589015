"""The options of a replay on a device, checked before compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import FieldKey
from mouse_core.replay.protocols import END_KEYS, TRAJ_KEYS
from mouse_core.replay.samplers.episodes import EpisodeFields
from mouse_core.replay.samplers.weighing import Priorities
from mouse_core.replay.transforms.compose import Compose, delivered_alignment
from mouse_core.replay.transforms.fields import Apply, Cast, Pad
from mouse_core.spec import Alignment, check_alignment, check_choice, check_count

Order = Literal["random", "epochs", "queue"]
"""In which order rows come: drawn from all, each once an epoch, or each once, the oldest first."""

# What 32 bits hold the sum of two of.
_MOST = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of consecutive rows of one episode, as those of ``mouse_core.replay.SliceSampler``.

    Args:
        sequence_length: Steps in a slice, S.
        pad: Whether episodes that are shorter than a slice come, filled up to S steps, with a field ``mask`` that says
            which are there. True repeats the nearest step that is; a number is what all fields become in the others.
            With False shorter episodes are left out.
        end_key, truncated_key, traj_key: The fields that say where episodes end; by default all that the rows have, as
            in ``SliceSampler``. Numbers of trajectories are integers.
        period: Only slices that begin at an episode's first step, still there or not, or so many steps behind another.

    Raises:
        ConfigError: An argument out of range.
    """

    sequence_length: int
    pad: bool | float = True
    end_key: FieldKey | None = None
    truncated_key: FieldKey | None = None
    traj_key: FieldKey | None = None
    period: int = 1
    _fills: bool = field(init=False, repr=False)
    """Whether pad is a number, by which 0 and False are two: who compiles for the one must not run it for the other."""

    def __post_init__(self) -> None:
        check_count("sequence_length", self.sequence_length)
        check_count("period", self.period)
        if not isinstance(self.pad, bool | int | float):
            raise ConfigError(f"pad: expected True, False or a number, found {self.pad!r}")
        vars(self)["_fills"] = not isinstance(self.pad, bool)


def check_rooms(capacity: int, batch_size: int, num_envs: int | None, slices: Slices | None) -> None:
    """ConfigError unless a replay can have these numbers of rows, which integers of 32 bits count, and slices."""
    check_count("capacity", capacity)
    check_count("batch_size", batch_size)
    if num_envs is not None and capacity % check_count("num_envs", num_envs):
        raise ConfigError(f"capacity: expected a multiple of the {num_envs} environments, found {capacity}")
    if capacity >= _MOST:
        raise ConfigError(f"capacity: expected less than 2**30 rows, found {capacity}")
    for name in () if slices is None else ("sequence_length", "period"):
        if getattr(slices, name) >= _MOST:
            raise ConfigError(f"{name}: expected less than 2**30, found {getattr(slices, name)}")
    steps = capacity // (num_envs or 1)
    if slices is not None and slices.pad is False and slices.sequence_length > steps:
        raise ConfigError(
            f"sequence_length: expected at most the {steps} time steps that the capacity has, as shorter slices are "
            f"left out with pad=False, found {slices.sequence_length}"
        )


def streams_of(num_envs: Any, slices: Slices | None, transform: Compose | None) -> int | None:
    """The number of environments; None: rows are one stream.

    Args:
        num_envs: As it was given; ``...``: it was not.
        slices: What a slice is, if batches are slices.
        transform: What is done to batches.

    Raises:
        ConfigError: It was not given, and batches pair rows of one environment. Eight rows ``[8, ...]`` of eight
            environments would be eight steps of one.
    """
    if num_envs is not ...:
        return num_envs  # type: ignore[no-any-return]
    if slices is None and not (transform is not None and transform.reach):
        return None
    looking = [] if transform is None else [part for part in transform.transforms if getattr(part, "reach", 0)]
    readers = [*(["slices"] if slices is not None else []), *(type(part).__name__ for part in looking)]
    raise ConfigError(
        "num_envs: expected the number of environments whose rows are written side by side, for "
        f"{' and '.join(readers)} of rows that follow each other, found none; num_envs=None is for one stream, whose "
        "rows [n, ...] are in the order of time"
    )


def check_order(
    order: Any, capacity: int, batch_size: int, slices: Slices | None, priorities: Priorities | None
) -> None:
    """ConfigError unless rows can come in this order."""
    check_choice("order", order, get_args(Order))
    if priorities is not None and order != "random":
        raise ConfigError(f"priorities: expected order='random', found {order!r}")
    if order == "random":
        return
    if slices is not None and order == "queue":
        raise ConfigError("order: expected 'random' or 'epochs' for slices, found 'queue', which is of single rows")
    if slices is not None and slices.period > 1:
        raise ConfigError(f"period: expected 1 for slices that lie side by side, found {slices.period}")
    if batch_size > capacity:
        raise ConfigError(
            f"batch_size: expected at most the {capacity} rows of the capacity, as each comes once, found {batch_size}"
        )


def composed(transform: Any, alignment: Alignment) -> Compose | None:
    """One transform of those that are given, which look at the batch alone; None where there are none.

    Raises:
        ConfigError: One that draws random numbers, reads other rows, keeps numbers of all rows or changes rows that are
            written; or rows of the other alignment.
    """
    check_alignment(alignment)
    given = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
    if not given:
        return None
    made = Compose(*given)
    delivered_alignment(made, alignment)
    for part in made.transforms:
        inverse = getattr(part, "inverse", None)
        refused = {
            "draws random numbers": getattr(part, "random", False),
            "reads other rows": getattr(part, "gather", None),
            "keeps numbers of all rows": getattr(part, "settled", None),
            # Those of which nothing is stored leave rows alone.
            "changes rows that are written": part.stored if isinstance(part, Cast | Apply) else inverse,
            "makes one shape of rows that differ in length, which are not on a device": isinstance(part, Pad),
        }
        means = next((what for what, is_so in refused.items() if is_so), None)
        if means is not None:
            raise ConfigError(f"transform: expected one that looks at the batch alone, found {part!r}, which {means}")
    return made


def find_marks(fields: Mapping[FieldKey, Any], slices: Slices, is_integer: Callable[[Any], bool]) -> EpisodeFields:
    """Return the fields of a row that mark the ends of episodes.

    Args:
        fields: Arrays, or anything with a ``shape`` and a ``dtype``, of one row.
        slices: The slice options.
        is_integer: Whether a dtype is one of integers.

    Raises:
        MissingFieldError: No such field exists, or a named one is missing.
        SchemaError: A field has several values per row, or trajectory numbers are no integers.
    """
    ends = tuple(key for key in (slices.end_key, slices.truncated_key) if key is not None)
    ids = slices.traj_key
    if ends or ids is not None:
        marks = EpisodeFields(ends, ids, True)
    else:
        ends = next(filter(None, (tuple(key for key in group if key in fields) for group in END_KEYS)), ())
        ids = next((key for key in TRAJ_KEYS if key in fields), None)
        marks = EpisodeFields(ends, ids, not ends)
    if not ends and ids is None:
        raise MissingFieldError(
            f"slices: expected end_key=, truncated_key= or traj_key=, or a field 'done', found {list(fields)}"
        )
    for key in (*ends, *(() if ids is None else (ids,))):
        if key not in fields:
            raise MissingFieldError(f"slices: expected one of {list(fields)}, found {key!r}")
        if prod(fields[key].shape) != 1:
            raise SchemaError(f"slices: {key!r}: expected one value a row, found {list(fields[key].shape)}")
    if ids is not None and not is_integer(fields[ids].dtype):
        raise SchemaError(
            f"slices: {ids!r}: expected integers as numbers of trajectories, found {fields[ids].dtype}; end_key= or "
            "traj_key= names the fields that count"
        )
    return marks


def check_names(row: Any, transform: Compose | None, slices: Slices | None, priorities: Priorities | None) -> None:
    """SchemaError where a row, a tree, has fields that batches need."""
    taken = {"index"} if priorities is None else {"index", "priority_weight"}
    if (transform is not None and transform.reach and slices is None) or (
        slices is not None and slices.pad is not False
    ):
        taken |= {"mask"}
    if isinstance(row, Mapping) and not taken.isdisjoint(row):
        raise SchemaError(f"init: expected rows without the fields {sorted(taken & row.keys())}, which batches have")


def check_rows(
    caller: str,
    given: Mapping[FieldKey, Any],
    held: Mapping[FieldKey, tuple[tuple[int, ...], Any]],
    num_envs: int | None,
    steps: int,
    fits: Callable[[FieldKey, Any], bool],
) -> tuple[bool, int]:
    """Check rows that are to be written: whether they lack the axis of time, and how many time steps they are.

    Args:
        caller: Begins the errors.
        given: The rows by field, anything with a ``shape`` and a ``dtype``.
        held: The shape and dtype of one time step by field.
        num_envs: Environments, or None for one stream.
        steps: How many time steps fit.
        fits: Whether the values of a field become those of a dtype.

    Raises:
        SchemaError: Other fields, shapes or dtypes.
        ConfigError: More time steps than fit.
    """
    if given.keys() != held.keys():
        raise SchemaError(f"{caller}: expected rows with the fields {list(held)}, found {list(given)}")
    counts: dict[FieldKey, tuple[bool, int]] = {}
    for key, (shape, dtype) in held.items():
        found = tuple(given[key].shape)
        if found != shape and found[1:] != shape:
            what = "row" if num_envs is None else "time step"
            raise SchemaError(
                f"{caller}: field {key!r}: expected {[*shape]} for one {what} or {[None, *shape]} for some, found "
                f"{[*found]}"
            )
        if not fits(key, dtype):
            names = (str(kind).removeprefix("torch.") for kind in (dtype, given[key].dtype))
            raise SchemaError(f"{caller}: field {key!r}: expected {next(names)}, found {next(names)}")
        counts[key] = (True, 1) if found == shape else (False, found[0])
    if len(set(counts.values())) > 1:
        numbers = {key: count for key, (_, count) in counts.items()}
        raise SchemaError(f"{caller}: expected as many rows in every field, found {numbers}")
    is_one, count = next(iter(counts.values()))
    if count > steps:
        raise ConfigError(f"{caller}: expected at most {steps} time steps at once, found {count}")
    return is_one, count
