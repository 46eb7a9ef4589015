"""Writers, which choose the slots of rows that are added to a buffer."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import ring_slots
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError, DataError
from mouse_core.nested import as_array, find, flatten, map_tree, stack_leaves
from mouse_core.replay._assembly import REDUCTIONS
from mouse_core.replay.protocols import FieldKey, Sampler, Slots, Storage, Writer
from mouse_core.spec import check_choice

_NONE = np.empty(0, np.int64)


class RoundRobinWriter:
    """Writes rows in a ring: appends rows, and, if the storage is full, overwrites the oldest rows."""

    ordered = True

    def __repr__(self) -> str:
        return "RoundRobinWriter()"

    def write(self, storage: Storage, rows: Any, *, one: bool = False) -> tuple[Slots, Slots, int | None]:
        """Write rows; see ``Writer.write``."""
        first, n = storage.append(rows, one=one)
        capacity = storage.capacity
        slots = ring_slots(first, n, capacity)
        lost = max(0, n - capacity)  # of more rows than the capacity, only the last are kept
        return slots, slots[lost:], first + lost

    def reset(self, storage: Storage) -> None:
        """Do nothing, because a ring has no state."""


class ImmutableWriter:
    """A writer for buffers over recorded data; every write raises ConfigError."""

    ordered = True

    def __repr__(self) -> str:
        return "ImmutableWriter()"

    def write(self, storage: Storage, rows: Any, *, one: bool = False) -> tuple[Slots, Slots, int | None]:
        """Raise ConfigError: the buffer is read-only."""
        raise ConfigError("write: expected a writable buffer, found a read-only buffer (ImmutableWriter)")

    def reset(self, storage: Storage) -> None:
        """Do nothing, because the writer has no state."""


class MaxValueWriter:
    """Keeps the rows with the highest ranks: in a full storage, a new row with a higher rank replaces the row with the
    lowest rank.

    A new row whose rank equals the lowest rank is not kept. Of several rows with the lowest rank, the row in the
    highest slot is replaced first. A row that is not kept has the index -1.

    Args:
        rank_key: The field with the rank of a row.
        reduction: The name of the function that reduces several ranks of a row to one, for example if a row is a
            trajectory: "sum", "mean", "max", "min" or "median".

    Raises:
        ConfigError: The reduction is unknown.
    """

    ordered = False

    def __init__(self, rank_key: FieldKey = "reward", reduction: str = "sum") -> None:
        check_choice("reduction", reduction, REDUCTIONS)
        self.rank_key = rank_key
        self.reduction = reduction
        # A heap of (rank, -slot) of every row, lowest first; None if it must be rebuilt from the rows.
        self._heap: list[tuple[float, int]] | None = None

    def __repr__(self) -> str:
        return f"MaxValueWriter(rank_key={self.rank_key!r}, reduction={self.reduction!r})"

    def check(self, storage: Storage, rows: Any = None) -> None:
        """Check that the rows of ``storage`` and the new ``rows`` have valid ranks.

        Raises:
            ConfigError, MissingFieldError, DataError: See ``write``.
        """
        if storage.ndim != 1:
            raise ConfigError(f"MaxValueWriter: expected a storage with ndim=1, found ndim={storage.ndim}")
        if rows is not None:
            self._ranks(storage, rows)

    def write(self, storage: Storage, rows: Any, *, one: bool = False) -> tuple[Slots, Slots, int | None]:
        """Write the rows whose rank is high enough; see ``Writer.write``.

        Raises:
            ConfigError: The storage has ``ndim=2``, where single rows of a time step cannot be replaced.
            MissingFieldError: The rows lack the field ``rank_key``.
            DataError: A rank is NaN.
        """
        self.check(storage)
        many = [rows] if one else rows
        ranks = self._ranks(storage, many)
        heap, self._heap = self._known(storage), None  # known again when the rows are written
        slots = np.full(len(ranks), -1, np.int64)
        holders: dict[int, int] = {}  # which of these rows is in a slot
        for number, rank in enumerate(ranks.tolist()):
            if len(heap) < storage.capacity:
                slot = len(heap)
                heapq.heappush(heap, (rank, -slot))
            elif rank > heap[0][0]:
                slot = -heap[0][1]
                heapq.heapreplace(heap, (rank, -slot))
                if slot in holders:
                    slots[holders[slot]] = -1
            else:
                continue
            slots[number] = slot
            holders[slot] = number
        written = np.array(sorted(holders), np.int64)
        first = storage.written
        self._store(storage, many, written, np.array([holders[slot] for slot in sorted(holders)], np.int64))
        self._heap = heap
        return slots, written, first

    def _store(self, storage: Storage, rows: Any, slots: Slots, numbers: Slots) -> None:
        """Write the rows at the positions ``numbers`` to ``slots``, which are in ascending order."""
        check = getattr(storage, "check", None)
        if check is not None:  # rows that are not kept must be like the others too
            check(rows)
        old = slots < len(storage)
        if old.any():
            storage.put(slots[old], take(rows, numbers[old]))
        if not old.all():
            storage.append(take(rows, numbers[~old]))

    def _ranks(self, storage: Storage, rows: Any) -> npt.NDArray[np.float64]:
        """Return the rank of each of ``rows``, computed from values in the stored dtype."""
        if isinstance(rows, list):
            ranked = [find(item, self.rank_key) for item in rows]
            values = as_array(stack_leaves(self.rank_key, ranked), where=self._where) if rows else _NONE
        else:
            values = as_array(find(rows, self.rank_key), where=self._where)
            lengths = {key: len(np.atleast_1d(leaf)) for key, leaf in flatten(rows).items()}
            if values.ndim < 1 or len(set(lengths.values())) > 1:
                raise DataError(f"rows: expected the same number of rows in every field, found {lengths}")
        if len(storage):
            stored = storage.read(self.rank_key, slice(0, 0)).dtype
            if number_kind(stored) == "f" and number_kind(values.dtype) in "biuf":
                values = values.astype(stored)
        return self._reduce(values)

    @property
    def _where(self) -> str:
        return f"rows: field {self.rank_key!r}"

    def _reduce(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        if number_kind(values.dtype) not in "biuf":
            raise DataError(f"{self._where}: expected numbers to rank by, found {values.dtype}")
        flat = values.reshape(len(values), int(np.prod(values.shape[1:]))).astype(np.float64)
        if not flat.shape[1]:
            raise DataError(f"{self._where}: expected values to rank by, found none in a row")
        ranks: npt.NDArray[np.float64] = getattr(np, self.reduction)(flat, axis=1)
        if np.isnan(ranks).any():
            raise DataError(
                f"{self._where}: expected numbers to rank by, found NaN in row {int(np.isnan(ranks).argmax())}"
            )
        return ranks

    def _known(self, storage: Storage) -> list[tuple[float, int]]:
        """Return the heap of ranks; if rows may have changed, the heap is built again from the rows."""
        if self._heap is not None and len(self._heap) == len(storage):
            return self._heap
        ranks = self._reduce(storage.read(self.rank_key, slice(0, len(storage)))) if len(storage) else _NONE
        heap = [(rank, -slot) for slot, rank in enumerate(ranks.tolist())]
        heapq.heapify(heap)
        return heap

    def reset(self, storage: Storage) -> None:
        """Mark the ranks as stale; the next write ranks all rows again."""
        self._heap = None


def check_writer(writer: Writer, storage: Storage, sampler: Sampler, transform: Any) -> None:
    """Raise ConfigError if a writer is incompatible with the storage, the sampler or the transform."""
    if not storage.writable and not isinstance(writer, ImmutableWriter):
        raise ConfigError(
            f"writer: expected an ImmutableWriter, as {storage!r:.80} cannot be written to, found {writer!r}"
        )
    if isinstance(writer, MaxValueWriter):
        writer.check(storage)
    looks = any(getattr(transform, name, None) for name in ("reach", "gather", "watchers"))
    if not writer.ordered and (sampler.needs_order or looks):
        part = sampler if sampler.needs_order else transform
        raise ConfigError(
            f"writer: expected a writer that keeps the order of rows, which {part!r} needs, found {writer!r}"
        )


def take(rows: Any, numbers: Slots) -> Any:
    """Return the rows at the positions ``numbers``."""
    if isinstance(rows, list):
        return [rows[number] for number in numbers.tolist()]
    return map_tree(lambda leaf: _pick(leaf, numbers), rows)


def _pick(leaf: Any, numbers: Slots) -> Any:
    return [leaf[number] for number in numbers.tolist()] if isinstance(leaf, list) else np.asarray(leaf)[numbers]
