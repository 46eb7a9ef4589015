"""Windows of random lengths, and packed sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.errors import ConfigError, DataError
from mouse_core.randomness import Key, Purpose, as_integers
from mouse_core.sampling.plan import MASK, Blocks, PaddedSampler, Sampling, WindowSampler
from mouse_core.spec import FieldSpec
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]

# Variable-length attention needs 32-bit offsets.
_MOST_ROWS = (1 << 31) - 1
_INT32: np.dtype[Any] = np.dtype(np.int32)


@dataclass(frozen=True)
class DrawnLengths:
    """A sampler that crops windows to random lengths, at a random position within the complete window.

    Example: a window of 8 steps begins at row 100, and its random length is 5. The cropped window begins at one of the
    rows 100..103 with equal probability. So all rows of an episode are equally likely, except rows near the ends of the
    episode, which are also less frequent in complete windows.

    Attributes that ``sampler`` also has, such as ``sequence_length``, describe complete windows.

    Args:
        sampler: The sampler of the complete windows.
        choices: The possible lengths, in ascending order; all are equally likely. A window that is shorter than its
            drawn length is not cropped.
        fill: The value of all fields in missing steps; None: copies of the last step.
    """

    sampler: WindowSampler
    choices: tuple[int, ...]
    fill: float | None = None

    # From Python 3.12 on, isinstance of a protocol sees no attributes that only ``__getattr__`` has.
    @property
    def sequence_length(self) -> int:
        """Number of steps in a complete window."""
        return self.sampler.sequence_length

    @property
    def batch_size(self) -> int:
        """Number of windows in a batch over all shards."""
        return self.sampler.batch_size

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the number of batches in an epoch; see ``WindowSampler.batches_per_epoch``."""
        return self.sampler.batches_per_epoch(snapshot)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """Return the first row of each complete window; see ``WindowSampler.starts``."""
        return self.sampler.starts(seed, index, snapshot, epoch_start)

    def __getattr__(self, name: str) -> Any:
        """Return an optional attribute of ``sampler``, such as ``starts_of_many``."""
        if name.startswith("_"):  # pickle looks for special methods before ``sampler`` is set
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """Return the number of steps of each window before cropping; see ``PaddedSampler.lengths``."""
        if isinstance(self.sampler, PaddedSampler):
            return self.sampler.lengths(starts, snapshot)
        return np.full(len(starts), self.sampler.sequence_length)

    def cut_many(
        self,
        seed: int,
        batches: Sequence[int],
        own: Sequence[slice],
        sizes: Sequence[int],
        starts: Int64s,
        snapshot: Snapshot,
    ) -> tuple[Int64s, Int64s]:
        """Return the first rows and the lengths of the cropped windows of several batches, int64 ``[n]`` each.

        Two random numbers for each window determine its length and its position.

        Args:
            seed: The seed.
            batches: Indices of the batches.
            own: The positions of the requested windows in each batch.
            sizes: The number of windows in each batch, over all shards.
            starts: The first rows of the complete windows, batch by batch, int64 ``[n]``.
            snapshot: The rows.
        """
        uniform = [
            Key(seed, Purpose.LENGTHS, index).uniform(2 * size).reshape(2, size)[:, part]
            for index, part, size in zip(batches, own, sizes, strict=True)
        ]
        of_length, of_place = np.concatenate(uniform, axis=1)
        lengths = self.lengths(starts, snapshot)
        left = np.minimum(np.array(self.choices)[as_integers(of_length, len(self.choices))], lengths)
        places: Any = lengths - left + 1
        return starts + as_integers(of_place, places), left


def cut_of(
    lengths: Iterable[int] | None,
    sampling: Sampling,
    sequence_length: int | None,
    pad: bool | float | None,
    *,
    padded: bool,
) -> tuple[Sampling, int | None, bool | float | None, Callable[[WindowSampler], Any]]:
    """Check the arguments of a source that crops windows; see ``BatchSource``.

    Args:
        lengths, sampling, sequence_length, pad: Arguments of the source.
        padded: Whether the complete windows may have missing steps.

    Returns:
        ``sampling``, ``sequence_length`` and ``pad`` for the complete windows, and the function that wraps their
        sampler in ``DrawnLengths``.

    Raises:
        ConfigError: ``lengths`` are not integers of at least 1, or windows cannot be cropped because the sampling must
            deliver every step.
    """
    if isinstance(sampling, DrawnLengths):
        if lengths is not None:
            raise ConfigError(f"lengths: with a sampler that draws lengths, expected None, found {lengths!r:.80}")
        return sampling.sampler, sequence_length, pad, partial(_cut, sampling.choices, sampling.fill)
    if not isinstance(sampling, str | Blocks):
        choices = _checked(lengths, sampling.sequence_length)
    else:
        choices = _checked(lengths, sequence_length)
        if sampling not in ("random", "blocks") and not isinstance(sampling, Blocks):
            wanted = "sampling='random' or 'blocks'"
            raise ConfigError(f"lengths: expected {wanted}, since shorter windows omit steps, found {sampling!r}")
        sequence_length = sequence_length or choices[-1]
    if pad is False and not padded:
        raise ConfigError("pad: with lengths, which omit steps, expected True or a fill number, found False")
    fill = None if pad is None or isinstance(pad, bool) else pad
    return sampling, sequence_length, pad if padded else None, partial(_cut, choices, fill)


def _cut(choices: tuple[int, ...], fill: float | None, sampler: WindowSampler) -> DrawnLengths:
    """Return the sampler of cropped windows; if ``sampler`` is a padded sampler, its fill value is used."""
    return DrawnLengths(sampler, choices, sampler.fill if isinstance(sampler, PaddedSampler) else fill)


def _checked(lengths: Any, sequence_length: int | None) -> tuple[int, ...]:
    """Return the requested lengths in ascending order; raise ConfigError if they are invalid."""
    try:
        found = list(lengths)
    except TypeError:
        found = []
    if not found or not all(is_whole(length) and length >= 1 for length in found):
        raise ConfigError(f"lengths: expected integers of at least 1, as in range(1, 65), found {lengths!r:.80}")
    if sequence_length is not None and max(found) > sequence_length:
        raise ConfigError(f"lengths: expected no length above sequence_length {sequence_length}, found {max(found)}")
    return tuple(sorted(map(int, found)))


def sequence_specs(*, masked: bool) -> dict[str, FieldSpec]:
    """Return the specs of the fields that ``sequence_fields`` returns."""
    specs = [
        FieldSpec("cu_seqlens", _INT32, (), per_sequence=True),
        FieldSpec("position", _INT32, ()),
        FieldSpec("sequence_id", _INT32, ()),
    ]
    specs += [FieldSpec(MASK, np.dtype(np.bool_), ())] if masked else []
    return {spec.name: spec for spec in specs}


def sequence_fields(lengths: Int64s, capacity: int | None = None) -> Arrays:
    """Return the fields that describe where each sequence lies in a packed batch, for variable-length attention.

    For the lengths 3, 1 and 2, ``cu_seqlens`` is 0, 3, 4, 6: sequence k has the rows
    ``cu_seqlens[k] .. cu_seqlens[k + 1] - 1`` (as in flash-attention and ``torch.nn.attention.varlen``). ``position``
    is 0, 1, 2, 0, 0, 1 and ``sequence_id`` is 0, 0, 0, 1, 2, 2. With a capacity of 8, the two padding rows at the end
    have ``position`` 0 and ``sequence_id`` 3. No sequence 3 exists, so ``jax.ops.segment_sum`` over 3 sequences ignores
    the padding rows.

    Args:
        lengths: Number of rows of each sequence, at least 0, int64 ``[n]``.
        capacity: Number of rows of the batch, including padding; None: T, the number of rows of all sequences.

    Returns:
        ``cu_seqlens`` int32 ``[n + 1]``, ``position`` and ``sequence_id`` int32 ``[T]`` or ``[capacity]``. If a
        capacity is given, also ``mask``, bool ``[capacity]``: whether each row belongs to a sequence.

    Raises:
        DataError: The number of rows exceeds the capacity or 32 bits.
    """
    ends = np.cumsum(lengths)
    total, count = int(ends[-1]) if len(ends) else 0, len(lengths)
    most = _MOST_ROWS if capacity is None else capacity
    if total > most:
        raise DataError(f"packed: expected at most {most} rows in a batch, found {total} in {count} sequences")
    rows = total if capacity is None else capacity
    bounds = np.zeros(count + 1, _INT32)
    bounds[1:] = ends
    # The padding after the last sequence counts as one more sequence, whose rows all have position 0.
    sequence_id = np.repeat(np.arange(count + 1, dtype=_INT32), np.append(lengths, rows - total))
    position = np.arange(rows, dtype=_INT32)
    position -= bounds.take(sequence_id)
    position[total:] = 0
    found: Arrays = {"cu_seqlens": bounds, "position": position, "sequence_id": sequence_id}
    return found if capacity is None else {**found, MASK: np.arange(rows) < total}
