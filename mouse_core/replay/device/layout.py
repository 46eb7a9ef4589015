"""The constants of a replay on a device, computed from the user's arguments after a check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np

from mouse_core.dtypes import kind_of
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import FieldKey, flatten
from mouse_core.replay._assembly import reserved_error
from mouse_core.replay.device.samplers import ByPriority, DeviceSampler, EpochSampler, QueueSampler, checked_sampler
from mouse_core.replay.device.sum_tree import SumTree
from mouse_core.replay.device.units import RowUnits, Slices, SliceUnits, Units
from mouse_core.replay.samplers.episodes import EpisodeFields, find_fields
from mouse_core.replay.samplers.weighing import Priorities
from mouse_core.replay.transforms.compose import Compose, delivered_alignment
from mouse_core.replay.transforms.fields import Apply, Cast, Pad
from mouse_core.spec import Alignment, check_alignment, check_choice, check_count

Order = Literal["random", "epochs", "queue"]
"""The order in which units (rows or slices) are drawn. "random": units are drawn from all units with replacement.
"epochs": each unit is drawn once per epoch. "queue": each unit is drawn once, the oldest first.
"""

# The sum of two numbers below fits into 32 bits.
_MOST = 1 << 30
_KINDS = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float32}


@dataclass(frozen=True)
class Layout:
    """The constants of a device replay.

    Args:
        capacity: The capacity in rows.
        num_envs: The number of environments E, or None for one stream.
        batch_size: The default number of rows or slices in a batch.
        sampler: The sampler, which chooses the rows of a batch.
        transform: The transform of batches, or None.
        alignment: "arrived" if the action, reward and done of a row led to the row's observation, else "outgoing".
        schedule: The exponent of importance weights as a function of the index of the sample, or None.
    """

    capacity: int
    num_envs: int | None
    batch_size: int
    sampler: DeviceSampler
    transform: Compose | None = None
    alignment: Alignment = "outgoing"
    schedule: Callable[[Any], Any] | None = None

    @property
    def steps(self) -> int:
        """The capacity in time steps, T."""
        return self.capacity // (self.num_envs or 1)

    @classmethod
    def of(
        cls,
        row: Any,
        capacity: int,
        batch_size: int,
        num_envs: Any,
        slices: Slices | None,
        transform: Any,
        alignment: Alignment,
        priorities: Priorities | None,
        order: Order,
        sampler: DeviceSampler | None,
    ) -> Self:
        """Check a user's arguments, and return the constants.

        Args:
            row: A tree of objects with the attributes ``shape`` and ``dtype``, and optionally ``held``, the dtype of
                the field in memory.
            capacity, batch_size, slices, priorities, order: The arguments of a replay.
            num_envs: The number of environments, or None for one stream; ``...`` if the caller did not pass
                ``num_envs``.
            transform: A transform or a sequence of transforms; the transforms may read only the batch.
            alignment: The alignment of the rows.
            sampler: A sampler; the call sets the sampler's ``units``. None: the sampler that the other options
                describe.

        Raises:
            ConfigError, SchemaError, MissingFieldError: An argument is out of range, or two arguments cannot be
                combined.
        """
        composition = _composed(transform, alignment)
        if num_envs is ...:
            # One step of eight environments, ``[8, ...]``, would count as eight steps of one environment.
            if slices is not None or (composition is not None and composition.reach):
                raise ConfigError(
                    "num_envs: expected the number of environments, which slices and transforms of following rows "
                    "need, found none; num_envs=None means a single stream: rows [n, ...] in the order of time"
                )
            num_envs = None
        _check_sizes(capacity, batch_size, num_envs, slices)
        _check_order(order, capacity, batch_size, slices, priorities)
        capacity, fields, reach = int(capacity), flatten(row), 0 if composition is None else composition.reach
        padded = slices is not None and slices.pad is not False
        taken = {"index"} | ({"priority_weight"} if priorities is not None else set())
        taken |= {"mask"} if padded or (slices is None and reach) else set()
        if isinstance(row, Mapping) and not taken.isdisjoint(row):
            raise reserved_error("init", taken & row.keys())
        units: Units = RowUnits(reach)
        if slices is not None:
            _check_pad(fields, slices)
            marks = _find_marks(fields, slices)
            ids = None if marks.ids is None else fields[marks.ids]
            kind = None if ids is None else str(getattr(ids, "held", ids.dtype)).removeprefix("torch.")
            units = SliceUnits(slices, marks, kind, tiled=order == "epochs")
        if sampler is not None:
            if priorities is not None or order != "random":
                raise ConfigError(f"sampler: expected no priorities or order with it, found {priorities}, {order!r}")
            draws = replace(checked_sampler(sampler), units=units)
        elif priorities is not None:
            alpha, eps = float(priorities.alpha), float(priorities.eps)
            draws = ByPriority(units=units, tree=SumTree(capacity, alpha, eps, slices is not None))
        else:
            draws = {"random": DeviceSampler, "epochs": EpochSampler, "queue": QueueSampler}[order](units=units)
        schedule = None if priorities is None or not callable(priorities.beta) else priorities.beta
        return cls(capacity, num_envs, int(batch_size), draws, composition, alignment, schedule)

    def check_rows(
        self,
        caller: str,
        given: Mapping[FieldKey, Any],
        held: Mapping[FieldKey, tuple[tuple[int, ...], Any]],
        weak: Collection[FieldKey],
        can_cast: Callable[[Any, Any], bool],
    ) -> tuple[bool, int]:
        """Check rows that will be written. Return two values: whether the rows lack the time axis, and the number of
        their time steps.

        Args:
            caller: The text with which error messages begin.
            given: The rows by field: any objects with the attributes ``shape`` and ``dtype``.
            held: The shape and dtype of one time step by field.
            weak: Names of the fields whose values are Python numbers.
            can_cast: Whether Python numbers that were already converted to arrays of one dtype can be converted to
                another dtype.

        Raises:
            SchemaError: The fields, shapes or dtypes of the rows differ from ``held``.
            ConfigError: The rows have more time steps than the capacity.
        """
        if given.keys() != held.keys():
            raise SchemaError(f"{caller}: expected rows with the fields {list(held)}, found {list(given)}")
        counts: dict[FieldKey, tuple[bool, int]] = {}
        for key, (shape, dtype) in held.items():
            found = tuple(given[key].shape)
            if found != shape and found[1:] != shape:
                what = "row" if self.num_envs is None else "time step"
                raise SchemaError(
                    f"{caller}: field {key!r}: expected shape {[*shape]} for one {what} or {[None, *shape]} for "
                    f"several, found {[*found]}"
                )
            if given[key].dtype != dtype and not (key in weak and can_cast(given[key].dtype, dtype)):
                names = (str(kind).removeprefix("torch.") for kind in (dtype, given[key].dtype))
                raise SchemaError(f"{caller}: field {key!r}: expected {next(names)}, found {next(names)}")
            counts[key] = (True, 1) if found == shape else (False, found[0])
        if len(set(counts.values())) > 1:
            numbers = {key: count for key, (_, count) in counts.items()}
            raise SchemaError(f"{caller}: expected the same number of rows in every field, found {numbers}")
        is_one, count = next(iter(counts.values()))
        if count > self.steps:
            raise ConfigError(f"{caller}: expected at most {self.steps} time steps at once, found {count}")
        return is_one, count


def _composed(transform: Any, alignment: Alignment) -> Compose | None:
    """Combine a transform or a sequence of transforms to one transform; return None if there are no transforms.

    Raises:
        ConfigError: A transform needs more than the batch, or rows of another alignment.
    """
    check_alignment(alignment)
    given = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
    if not given:
        return None
    made = Compose(*given)
    delivered_alignment(made, alignment)
    for part in made.transforms:
        refused = {
            "draws random numbers": getattr(part, "random", False),
            "reads other rows": getattr(part, "gather", None),
            "keeps statistics of all rows": getattr(part, "settled", None),
            # A Cast or Apply without ``stored`` does not change written rows.
            "changes rows that are written": (
                part.stored if isinstance(part, Cast | Apply) else getattr(part, "inverse", None)
            ),
            "pads rows of different lengths, which a device does not store": isinstance(part, Pad),
        }
        means = next((what for what, is_so in refused.items() if is_so), None)
        if means is not None:
            raise ConfigError(
                f"transform: expected a transform that needs only the batch, found {part!r}, which {means}"
            )
    return made


def _check_sizes(capacity: int, batch_size: int, num_envs: int | None, slices: Slices | None) -> None:
    """Raise ConfigError if a count is too large for 32-bit integers, or if slices are longer than the capacity."""
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
            f"sequence_length: expected at most {steps}, the capacity in time steps, because shorter slices are "
            f"left out with pad=False, found {slices.sequence_length}"
        )


def _check_order(
    order: Any, capacity: int, batch_size: int, slices: Slices | None, priorities: Priorities | None
) -> None:
    """Raise ConfigError if ``order`` cannot be combined with the other options."""
    check_choice("order", order, get_args(Order))
    if priorities is not None and order != "random":
        raise ConfigError(f"priorities: expected order='random', found {order!r}")
    if order == "random":
        return
    if slices is not None and order == "queue":
        raise ConfigError("order: expected 'random' or 'epochs' for slices, found 'queue', which draws single rows")
    if slices is not None and slices.period > 1:
        raise ConfigError(f"period: expected 1 for order={order!r}, whose slices do not overlap, found {slices.period}")
    if batch_size > capacity:
        raise ConfigError(
            f"batch_size: expected at most {capacity}, the capacity, since each row is drawn once, found {batch_size}"
        )


def _check_pad(fields: Mapping[FieldKey, Any], slices: Slices) -> None:
    """Raise ConfigError if the dtype of a field cannot represent the pad."""
    for key, leaf in () if isinstance(slices.pad, bool) else fields.items():
        kind = kind_of(leaf.dtype)
        if kind in "fc":
            continue
        name = str(leaf.dtype).removeprefix("torch.")
        dtype = leaf.dtype if isinstance(leaf.dtype, np.dtype) else None if kind == "V" else np.dtype(name)
        with np.errstate(invalid="ignore"):
            if dtype is None or np.asarray(slices.pad).astype(dtype) != slices.pad:
                raise ConfigError(
                    f"pad: expected a number that {name}, the dtype of field {key!r}, can represent, found {slices.pad}"
                )


def _find_marks(fields: Mapping[FieldKey, Any], slices: Slices) -> EpisodeFields:
    """Return the fields of a row that mark the ends of episodes.

    Raises:
        MissingFieldError: The row has no field that marks the ends of episodes, or lacks a field that the caller named.
        SchemaError: A field has several values per row, or trajectory numbers are not integers.
    """

    def example(key: FieldKey) -> Any:
        if key not in fields:
            raise MissingFieldError(f"slices: expected one of {list(fields)}, found {key!r}")
        return np.zeros((1, *fields[key].shape), _KINDS.get(kind_of(fields[key].dtype), object))

    named = tuple(key for key in (slices.end_key, slices.truncated_key) if key is not None)
    marks = find_fields(example, slices.traj_key, named)
    ids = marks.ids
    for key in (*marks.ends, *(() if ids is None else (ids,))):
        if example(key).size != 1:
            raise SchemaError(f"slices: {key!r}: expected one value per row, found {list(fields[key].shape)}")
    if ids is not None and kind_of(fields[ids].dtype) not in "iu":
        raise SchemaError(
            f"slices: {ids!r}: expected integers as trajectory ids, found {fields[ids].dtype}; end_key= or "
            "traj_key= selects another field"
        )
    return marks
