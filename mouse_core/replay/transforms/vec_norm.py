"""VecNorm: normalises fields by the mean and standard deviation of all written rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole, part_of, state_number
from mouse_core.columns.memory import ring_pieces
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError, MissingFieldError, MouseError, SchemaError, StateError
from mouse_core.nested import key_of, path_of
from mouse_core.replay.protocols import FieldKey, Storage, Write
from mouse_core.replay.transforms.fields import NEXT, at_the_root, check_keys, find_any, replaced
from mouse_core.spec import check_number, check_unit
from mouse_core.statistics import Normalizer, Scaling

Floats = npt.NDArray[np.float64]

# Number of rows that are counted together.
_COUNTED = 1 << 16


class VecNorm:
    """Normalises fields by the running mean and standard deviation of all rows ever written (``(x - mean) / std``).

    Every written row counts once, even if the row is overwritten later. Rows that exist when a buffer is created also
    count. Rows that another process or buffer writes count at the next draw or write of this buffer, if they still
    exist. Rows that are overwritten by the same write, and changes in place (``buffer[i] = row``), do not count. NaN
    and infinite values are ignored. A batch is normalised by the statistics at the time of its draw, also if several
    threads apply the transform. The current statistics are saved in the buffer's state. The statistics are computed on
    the host in float64, so that all frameworks get equal values.

    ``VecNorm`` must precede other transforms that change its fields. The exceptions are ``NextView``,
    ``HindsightRelabel`` and a ``CatFrames`` of vectors, which may precede ``VecNorm``. A field under ``next`` is
    normalised by the statistics of the same field at the root, so ``keys`` need not contain the field under ``next``.

    The statistics of two groups of rows are merged as in Chan, Golub and LeVeque (1979), with weights: a row that was
    written ``n`` rows before the newest row has the weight ``decay**n``.

    Args:
        keys: Fields of numbers, at the root or under ``next``.
        decay: The weight of a row divided by the weight of the row that is written next, in ``(0, 1]``; with 1 all rows
            have equal weights.
        eps: The smallest divisor; a smaller standard deviation is replaced by ``eps``. If a field is constant, only its
            mean is subtracted.

    Raises:
        ConfigError: No field is given, ``decay`` or ``eps`` is out of range, or the transform is used in an ensemble,
            in a buffer whose writer does not keep rows in order, or in several buffers over different storages.
        MissingFieldError: The rows lack one of the named fields.
        SchemaError: A field does not contain numbers.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import ArrayStorage, ReplayBuffer, VecNorm
        >>> norm = VecNorm("obs")
        >>> buffer = ReplayBuffer(ArrayStorage(100), transform=norm, batch_size=4)
        >>> index = buffer.extend({"obs": np.array([1.0, 3.0, 1.0, 3.0])})
        >>> sorted(set(buffer.sample()["obs"].tolist()))
        [-1.0, 1.0]
        >>> norm.normalizer["obs"].apply(np.array(5.0))
        array(3., dtype=float32)
    """

    def __init__(self, *keys: FieldKey, decay: float = 1.0, eps: float = 1e-4) -> None:
        if not keys:
            raise ConfigError("VecNorm: expected at least one field, found none")
        self.keys = at_the_root(check_keys(keys, where="VecNorm"))
        self.decay = float(check_unit("VecNorm: decay", decay))
        if not self.decay:
            raise ConfigError("VecNorm: decay: expected a number above 0, found 0")
        self.eps = check_number("VecNorm: eps", eps, above=True)
        self._storage: Storage | None = None
        self._next = 0
        self._moments: dict[FieldKey, _Moments] = {}
        # The moments and the statistics computed from them, so that statistics of older moments are recognised.
        self._settled: tuple[Any, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"VecNorm({', '.join(map(repr, self.keys))}, decay={self.decay}, eps={self.eps})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}  # a copy keeps the statistics without the rows

    # ------------------------------------------------------------------ rows

    def watch(self, storage: Storage) -> None:
        """Connect the transform to a buffer over ``storage``; see ``Transform``."""
        if self._storage is not None and self._storage is not storage:
            raise ConfigError(
                "VecNorm: expected one storage, found a second storage; create one VecNorm for each buffer"
            )
        self._storage = storage

    def wrote(self, storage: Storage, write: Write) -> None:
        """Add written rows to the statistics."""
        if write.first is not None:
            self.reset(storage)

    def reset(self, storage: Storage) -> None:
        """Add all rows in the storage that were not counted yet to the statistics."""
        try:
            self._count(storage)
        except MouseError:
            pass  # the rows are written; the next draw raises the error

    def dropped(self, storage: Storage, rows: int) -> None:
        """Adjust the counters of rows after the oldest rows were dropped; the remaining rows are counted from 0."""
        self._next = max(self._next - rows, 0)
        self.reset(storage)

    def _count(self, storage: Storage) -> None:
        written = storage.written
        if written < self._next:  # the storage was emptied, and row numbers begin at 0 again
            self._next = 0
        if written == self._next:
            return
        first = max(self._next, written - len(storage))
        moments = dict(self._moments)
        for slot, _, n in ring_pieces(first, written - first, storage.capacity):
            for begin in range(slot, slot + n, _COUNTED):
                rows = slice(begin, min(begin + _COUNTED, slot + n))
                for key in self.keys:
                    moments[key] = _moments_of(key, _numbers(storage, key, rows), moments.get(key), self.decay)
        self._moments, self._next = moments, written

    # ------------------------------------------------------------------ batches

    def settled(self, storage: Storage) -> dict[str, Any]:
        """Return the current statistics, for batches that are drawn now; the arrays are never modified."""
        self._count(storage)
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        kept, moments = self._settled, self._moments
        if kept is not None and kept[0] is moments:
            return kept[1]
        found: dict[str, Any] = {}
        for place, key in enumerate(self.keys):
            if key not in moments:
                raise ConfigError(
                    f"VecNorm: {key!r}: expected statistics of at least one row, found none; write rows first"
                )
            centre, spread = moments[key].scale(self.eps)
            found[str(place)] = {"centre": centre, "spread": spread}
        self._settled = moments, found
        return found

    @property
    def normalizer(self) -> Normalizer:
        """The current scaling of each field, to normalise values outside the buffer, such as an observation for a
        policy.

        Raises:
            ConfigError: No row was counted yet.
        """
        return Normalizer(self.at(self._numbers()).scalings)

    def at(self, settled: Mapping[str, Any]) -> _Normalize:
        """Return the transform with the statistics ``settled``."""
        scalings: dict[Any, Scaling] = {}
        for place, key in enumerate(self.keys):
            centre, spread = (np.asarray(settled[str(place)][name], np.float64) for name in ("centre", "spread"))
            # Vectors are scaled like channels, so that concatenated frames of vectors are normalised one by one.
            scalings[key] = Scaling("mean_std", centre, spread, is_image=centre.ndim == 1)
        return _Normalize(scalings)

    def __call__(self, batch: Any) -> Any:
        """Normalise the batch by the current statistics; return the normalised fields in float32."""
        return self.at(self._numbers())(batch)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of the counted rows as plain values and NumPy arrays; the keys are the positions of the
        fields in ``keys``.
        """
        fields = {str(place): self._moments[key].state() for place, key in enumerate(self.keys) if key in self._moments}
        return {"transform": repr(self), "next": self._next, "fields": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; ``{}`` means that no row was counted.

        Raises:
            StateError: The state is damaged or comes from another transform; the transform is unchanged.
        """
        moments: dict[FieldKey, _Moments] = {}
        following = 0
        if state:
            part_of({"transform": state}, "transform", {"transform": repr(self)})
            fields = part_of(state, "fields", {})
            moments = {key: _Moments.of(fields[str(at)]) for at, key in enumerate(self.keys) if str(at) in fields}
            following = state_number("next", state.get("next"), where="VecNorm")
        self._moments, self._next = moments, following


@dataclass(frozen=True)
class _Normalize:
    """A function that normalises fields with fixed scalings, at the root and under ``next``."""

    scalings: Mapping[Any, Scaling]

    def __call__(self, batch: Any) -> Any:
        changes: dict[FieldKey, Any] = {}
        for key, scaling in self.scalings.items():
            places = [place for place in (key, (NEXT, *path_of(key))) if find_any(batch, place) is not None]
            if not places:
                raise MissingFieldError(f"VecNorm: expected a field {key!r}, found none")
            changes |= {place: scaling.apply(find_any(batch, place)) for place in places}
        return replaced(batch, changes)


@dataclass(frozen=True)
class _Moments:
    """The total weight, mean and sum of squared deviations of the counted rows, float64 ``[width]``, for steps of equal
    shape.
    """

    shape: tuple[int, ...]
    weight: Floats = field(default_factory=lambda: np.zeros(1))
    mean: Floats = field(default_factory=lambda: np.zeros(1))
    squares: Floats = field(default_factory=lambda: np.zeros(1))

    def scale(self, eps: float) -> tuple[Floats, Floats]:
        """Return the mean and the standard deviation, in the shape of a step."""
        deviation = np.sqrt(self.squares / np.where(self.weight > 0, self.weight, 1.0))
        spread = np.where(deviation > 0, np.maximum(deviation, eps), 1.0)
        return self.mean.reshape(self.shape), spread.reshape(self.shape)

    def state(self) -> dict[str, Any]:
        return {"shape": np.array(self.shape, np.int64)} | {name: getattr(self, name) for name in _SUMS}

    @classmethod
    def of(cls, state: Any) -> _Moments:
        if not isinstance(state, Mapping) or not {"shape", *_SUMS} <= state.keys():
            raise StateError(f"VecNorm: expected saved statistics of a field, found {state!r:.80}")
        shape = tuple(np.asarray(state["shape"]).reshape(-1).tolist())
        sums = [np.asarray(state[name]).copy() for name in _SUMS]
        sound = all(is_whole(size) and size >= 0 for size in shape) and all(
            one.dtype == np.float64 and one.shape == (int(np.prod(shape)),) and np.isfinite(one).all() for one in sums
        )
        if not sound or (sums[0] < 0).any() or (sums[2] < 0).any():
            raise StateError(
                "VecNorm: expected saved statistics as finite arrays for steps of "
                f"shape {list(shape)}, found {sums!r:.200}"
            )
        return cls(shape, *sums)


_SUMS = ("weight", "mean", "squares")


def _moments_of(key: FieldKey, rows: npt.NDArray[Any], known: _Moments | None, decay: float) -> _Moments:
    """Return the moments of all earlier counted rows (``known``) and of the new rows ``[n, *shape]``.

    Example: with a decay of 0.5, the rows 4 and 2 have the weights 0.5 and 1, a total weight of 1.5 and a mean of 8/3.
    The weight of an earlier counted row decreases from 1 to 0.25.
    """
    shape = rows.shape[1:]
    if known is None:
        known = _Moments(shape, *(np.zeros(int(np.prod(shape))) for _ in _SUMS))
    elif known.shape != shape:
        raise SchemaError(f"VecNorm: {key!r}: expected rows of shape {list(known.shape)}, found {list(shape)}")
    numbers = rows.reshape(len(rows), -1).astype(np.float64)
    finite = np.isfinite(numbers)
    before = known.weight * decay ** len(rows)
    if decay == 1 and finite.all():  # the most frequent case; three times as fast
        weight = np.full(numbers.shape[1], float(len(rows)))
        mean = numbers.mean(axis=0)
        numbers -= mean
        squares = (numbers * numbers).sum(axis=0)
    else:
        weights = decay ** np.arange(len(rows) - 1, -1, -1.0)[:, None] * finite
        weight, numbers = weights.sum(axis=0), np.where(finite, numbers, 0.0)
        mean = (weights * numbers).sum(axis=0) / np.where(weight > 0, weight, 1.0)
        squares = (weights * (numbers - mean) ** 2).sum(axis=0)
    total = before + weight
    share, change = weight / np.where(total > 0, total, 1.0), np.where(weight > 0, mean - known.mean, 0.0)
    squares += known.squares * decay ** len(rows) + change**2 * before * share
    return _Moments(shape, total, known.mean + change * share, squares)


def _numbers(storage: Storage, key: FieldKey, rows: slice) -> npt.NDArray[Any]:
    """Return a field of rows, at the root or under ``next``."""
    try:
        values = storage.read(key, rows)
    except MissingFieldError:
        values = storage.read(key_of((NEXT, *path_of(key))), rows)
    if number_kind(values.dtype) not in "biuf":
        raise SchemaError(f"VecNorm: {key!r}: expected a numeric array, found an array of dtype {values.dtype}")
    return values
