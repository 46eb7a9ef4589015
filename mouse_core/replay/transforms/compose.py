"""Compose, which applies transforms in order, and OnWrite, which applies a transform to written rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mouse_core.dtypes import namespace
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.nested import flatten, map_tree, structure_of, unflatten
from mouse_core.randomness import Key
from mouse_core.replay.protocols import TRANSFORM_CALLS, FieldKey
from mouse_core.replay.transforms.fields import Apply, Cast, as_array, find_any, runs
from mouse_core.replay.transforms.transitions import NextView
from mouse_core.spec import Alignment

Array = Any


@dataclass(frozen=True, init=False)
class Compose:
    """Applies transforms to batches in order; the inverses are applied to written rows in reverse order.

    A ``Compose`` is a transform. If single transitions are drawn and a transform needs the steps after each transition
    (``reach``), the buffer also reads these steps. The steps are removed after the last transform that needs the steps.

    Args:
        transforms: Callables from a batch to a batch.

    Raises:
        ConfigError: A transform is not callable, or the alignments of consecutive transforms differ.
    """

    transforms: tuple[Callable[..., Any], ...]

    def __init__(self, *transforms: Callable[..., Any]) -> None:
        flat: list[Callable[..., Any]] = []
        for transform in transforms:
            if not callable(transform):
                raise ConfigError(f"Compose: expected transforms that can be called, found {transform!r}")
            flat += transform.transforms if isinstance(transform, Compose) else [transform]
        vars(self).update(transforms=tuple(flat))
        if self.takes is not None:
            delivered_alignment(self, self.takes)

    def _attributes(self, name: str) -> list[Any]:
        """Return the values of an attribute, in order, from all transforms that have the attribute."""
        return [said for transform in self.transforms if (said := getattr(transform, name, None))]

    @property
    def random(self) -> bool:
        """Whether any transform draws random numbers."""
        return bool(self._attributes("random"))

    @property
    def takes(self) -> Alignment | None:
        """The alignment of the input: the alignment that the first transform with the attribute ``takes`` requires."""
        return next(iter(self._attributes("takes")), None)

    @property
    def alignment(self) -> Alignment | None:
        """The alignment of the output; None if the output has the alignment of the input."""
        return next(reversed(self._attributes("alignment")), None)

    @property
    def reach(self) -> int:
        """How many rows after each drawn row all transforms together need."""
        return sum(self._attributes("reach"))

    @property
    def _gathering(self) -> list[int]:
        """The positions of the transforms that have a method ``gather``."""
        return [at for at, step in enumerate(self.transforms) if getattr(step, "gather", None)]

    @property
    def gather(self) -> Callable[..., dict[str, Any]] | None:
        """Call each transform's ``gather`` with the random key of that transform, and return the results."""
        return self._gather if self._gathering else None

    def _gather(self, storage: Any, index: Any, episodes: Any, key: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in self._gathering:
            step: Any = self.transforms[number]
            found |= step.gather(storage, index, episodes, key.with_call(TRANSFORM_CALLS + number))
        return found

    @property
    def done(self) -> FieldKey:
        """The field that marks where episodes end, as named by the transforms with ``gather``, or, if no transform has
        ``gather``, by the transforms with ``reach``.
        """
        reaching = (at for at, step in enumerate(self.transforms) if getattr(step, "reach", 0))
        return next((getattr(self.transforms[at], "done", "done") for at in (*self._gathering, *reaching)), "done")

    @property
    def watchers(self) -> dict[str, Any]:
        """The transforms with statistics of all rows of a buffer, by position; see ``Transform``."""
        return {str(at): step for at, step in enumerate(self.transforms) if hasattr(step, "settled")}

    def at(self, settled: Mapping[str, Any] | None) -> Compose:
        """Return the transforms with the statistics ``settled``."""
        if settled is None:
            return self
        watchers = self.watchers
        steps: list[Callable[..., Any]] = [
            watchers[str(number)].at(settled[str(number)]) if str(number) in watchers else step
            for number, step in enumerate(self.transforms)
        ]
        made = object.__new__(Compose)
        vars(made).update(transforms=tuple(steps))
        return made

    def check_gather(self) -> None:
        """Raise ConfigError if a transform gathers stored values of a field that an earlier transform changes."""
        gathering = self._gathering
        looking = {*gathering, *map(int, self.watchers)}
        for number, other in enumerate(self.transforms[: max(looking, default=0)]):
            if number not in gathering and not isinstance(other, OnWrite | NextView):
                behind = self.transforms[min(at for at in looking if at > number)]
                raise ConfigError(
                    f"transform: expected {behind!r:.60}, which reads stored rows, before all transforms that can "
                    f"change the rows; only NextView can precede it, found {other!r:.60} before it"
                )
        for at in gathering:
            if getattr(self.transforms[at], "done", "done") != self.done:
                raise ConfigError(
                    f"transform: expected a single field that marks the ends of episodes, found {self.done!r} "
                    "and another field in "
                    f"{self.transforms[at]!r:.60}"
                )

    def __call__(self, batch: Any, key: Key | None = None) -> Any:
        """Apply all transforms; each transform derives its random numbers from ``key``.

        Raises:
            ConfigError: A transform draws random numbers and ``key`` is None, or a transform returned None.
        """
        behind = [getattr(transform, "reach", 0) for transform in self.transforms]
        read = _read_ahead(batch) if any(behind) else None
        for number, transform in enumerate(self.transforms):
            if read is not None and getattr(transform, "of_slices", False):
                raise SchemaError(
                    f"{type(transform).__name__}: expected slices, found single rows, with later rows that the buffer "
                    "read for another transform; a SliceSampler draws slices"
                )
            if hasattr(transform, "done"):
                batch = _by_name(batch)
            if getattr(transform, "random", False):
                if key is None:
                    raise ConfigError(f"Compose: expected a Key, as {transform!r} draws random numbers, found none")
                batch = transform(batch, replace(key, call=key.call + number))
            else:
                batch = transform(batch)
            if batch is None:
                raise ConfigError(f"transform: expected {transform!r} to return a batch, found None")
            if read is not None and not any(behind[number + 1 :]):
                batch, read = _first_steps(batch, *read), None
        return batch

    def inverse(self, rows: Any) -> Any:
        """Convert rows to their stored form; a list of rows is converted row by row."""
        if type(rows) is list:
            return [self.inverse(row) for row in rows]
        for transform in reversed(self.transforms):
            undo = getattr(transform, "inverse", None)
            if undo is not None:
                rows = undo(rows)
        return rows


def delivered_alignment(transform: Callable[..., Any] | None, alignment: Alignment) -> Alignment:
    """Return the alignment of a transform's output if the input has the alignment ``alignment``.

    Raises:
        ConfigError: The transform needs rows of the other alignment.
    """
    known, source = alignment, "the rows have"
    for step in getattr(transform, "transforms", (transform,)):
        takes = getattr(step, "takes", None)
        name = type(step).__name__
        if takes is not None and takes != known:
            raise ConfigError(
                f"transform: expected a transform for {known!r} rows, the alignment that {source}, found {name} with "
                f"takes={takes!r}; pass takes={known!r} to {name}, or convert the rows first"
            )
        gives: Alignment | None = getattr(step, "alignment", None)
        if gives is not None:
            known, source = gives, f"{name} delivers"
    return known


def _by_name(batch: Any) -> Any:
    """Convert a batch that is a named tuple to a dict, because transforms read fields by name."""
    rows = batch.get("data") if isinstance(batch, Mapping) else None
    if not hasattr(rows, "_asdict") or not rows._asdict().keys().isdisjoint(batch):  # type: ignore[union-attr]
        return batch
    return {**rows._asdict(), **{name: values for name, values in batch.items() if name != "data"}}  # type: ignore[union-attr]


def _read_ahead(batch: Any) -> tuple[int, frozenset[FieldKey]] | None:
    """Return the number of single transitions that have following steps, and the names of the fields that have no
    following steps.

    A field with following steps has one axis more than ``index``; if no field has following steps, the result is None.
    """
    index, mask = find_any(batch, "index"), find_any(batch, "mask")
    if index is None or mask is None or index.ndim != 1 or mask.ndim != 2:
        return None
    return len(index), frozenset(key for key, values in flatten(batch).items() if not runs(values, mask.shape))


def _first_steps(batch: Any, count: int, single: frozenset[FieldKey]) -> Any:
    """Remove the following steps of ``count`` transitions from the batch; the fields ``single`` have no following
    steps.
    """

    def first(key: FieldKey, values: Array) -> Array:
        if key in single or values.ndim < 2 or values.shape[0] != count:
            return values
        taken = values[:, 0]
        # A contiguous copy, which does not keep the following steps in memory.
        return (
            np.ascontiguousarray(taken) if isinstance(taken, np.ndarray) else namespace(taken).asarray(taken, copy=True)
        )

    return unflatten(structure_of(batch), {key: first(key, values) for key, values in flatten(batch).items()})


@dataclass(frozen=True)
class OnWrite:
    """Applies a transform to rows when they are written; batches stay unchanged.

    For example, ``OnWrite(ReturnsToGo(0.99))`` stores the returns of whole episodes, which cannot be computed later
    from a single transition. The transform receives the rows of one write as one slice, so pass whole episodes to
    ``extend``, as ``[time, ...]``.

    Args:
        transform: A transform that returns the same number of rows and draws no random numbers.

    Raises:
        ConfigError: The transform is not callable, draws random numbers, has statistics of all rows (``VecNorm``), or
            already changes written rows (an ``OnWrite``, or a ``Cast`` or ``Apply`` with ``stored``).
        SchemaError: A single row is written by ``append``, or the transform returns another number of rows.
    """

    transform: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.transform) or getattr(self.transform, "random", False):
            raise ConfigError(f"OnWrite: expected a transform without random numbers, found {self.transform!r}")
        for part in getattr(self.transform, "transforms", (self.transform,)):
            if hasattr(part, "settled"):
                raise ConfigError(f"OnWrite: expected a transform without statistics of all rows, found {part!r}")
            # These transforms convert written rows in ``inverse``; calling them would change nothing.
            if isinstance(part, OnWrite):
                raise ConfigError(f"OnWrite: expected a transform of batches, found {part!r}; remove one OnWrite")
            if isinstance(part, Cast | Apply) and part.stored:
                kind, stored = type(part).__name__, dict(part.stored)
                raise ConfigError(
                    f"OnWrite: expected {kind} without stored, found stored={stored}, which already "
                    "transforms rows when they are written: leave OnWrite out"
                )

    @property
    def takes(self) -> Alignment | None:
        """The alignment of the transform's input."""
        takes: Alignment | None = getattr(self.transform, "takes", None)
        return takes

    def __call__(self, batch: Any) -> Any:
        """Return the batch unchanged."""
        return batch

    def inverse(self, rows: Any) -> Any:
        """Apply the transform along the first axis of the rows."""
        arrays = map_tree(as_array, rows)
        lengths = {tuple(values.shape[:1]) for values in flatten(arrays).values()}
        if lengths == {()} or len(lengths) != 1:
            raise SchemaError(f"OnWrite: expected rows [time, ...] of one episode, found first axes {sorted(lengths)}")
        made = map_tree(lambda values: values[0], self.transform(map_tree(lambda values: values[None], arrays)))
        given = {tuple(values.shape[:1]) for values in flatten(made).values()}
        if given != lengths:
            raise SchemaError(
                f"OnWrite: expected {self.transform!r} to return as many rows as it receives, found {given}"
            )
        return made
