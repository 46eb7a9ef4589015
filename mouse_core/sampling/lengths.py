"""Windows of lengths that are drawn, and sequences of differing lengths one behind the other."""

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

# Variable-length attention takes 32 bits.
_MOST_ROWS = (1 << 31) - 1
_INT32: np.dtype[Any] = np.dtype(np.int32)


@dataclass(frozen=True)
class DrawnLengths:
    """Windows cut to drawn lengths, each at a drawn place within the window that it is cut from.

    A window of 8 steps begins at row 100, and 5 of its steps are to stay: the cut window begins at one of the rows
    100..103, each as likely. So all rows of an episode are equally likely, except those near its ends, which come less
    often without lengths, too.

    The class has all other attributes of ``sampler``, such as ``starts``, which are those of whole windows.

    Args:
        sampler: Draws the windows that are cut.
        choices: The lengths, each as likely, ascending; a shorter window stays as it is.
        fill: The value of all fields in missing steps; None: they repeat the last step.
    """

    sampler: WindowSampler
    choices: tuple[int, ...]
    fill: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle looks for special methods before there is a sampler
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """Return how many steps the windows have before they are cut; see ``PaddedSampler.lengths``."""
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
        """Return the starts and the lengths of the cut windows of several batches, int64 ``[n]`` each.

        Two random numbers for each window draw its length and its place.

        Args:
            seed: The seed.
            batches: Indices of the batches.
            own: The windows of each batch that are asked for.
            sizes: The number of windows in each whole batch.
            starts: Starts of the windows that are cut, batch by batch, int64 ``[n]``.
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
    """Check the arguments of a source that cuts windows; see ``BatchSource``.

    Args:
        lengths, sampling, sequence_length, pad: Arguments of the source.
        padded: Whether the windows that are cut may have missing steps themselves.

    Returns:
        ``sampling``, ``sequence_length`` and ``pad`` for the windows that are cut, and the function that makes
        ``DrawnLengths`` of their sampler.

    Raises:
        ConfigError: Lengths that are none, or of windows that are to cover all steps.
    """
    if isinstance(sampling, DrawnLengths):
        if lengths is not None:
            raise ConfigError(f"lengths: expected none with a sampler that draws them, found {lengths!r:.80}")
        return sampling.sampler, sequence_length, pad, partial(_cut, sampling.choices, sampling.fill)
    if not isinstance(sampling, str | Blocks):
        choices = _checked(lengths, sampling.sequence_length)
    else:
        choices = _checked(lengths, sequence_length)
        if sampling not in ("random", "blocks") and not isinstance(sampling, Blocks):
            wanted = "sampling='random' or 'blocks'"
            raise ConfigError(f"lengths: expected {wanted}, as steps are cut off, found {sampling!r}")
        sequence_length = sequence_length or choices[-1]
    if pad is False and not padded:
        raise ConfigError("pad: expected True or a number with lengths, which leave steps out, found False")
    fill = None if pad is None or isinstance(pad, bool) else pad
    return sampling, sequence_length, pad if padded else None, partial(_cut, choices, fill)


def _cut(choices: tuple[int, ...], fill: float | None, sampler: WindowSampler) -> DrawnLengths:
    """Return the cut windows of a sampler; a padded sampler has a fill of its own."""
    return DrawnLengths(sampler, choices, sampler.fill if isinstance(sampler, PaddedSampler) else fill)


def _checked(lengths: Any, sequence_length: int | None) -> tuple[int, ...]:
    """Return the requested lengths, ascending, or raise ConfigError."""
    try:
        found = list(lengths)
    except TypeError:
        found = []
    if not found or not all(is_whole(length) and length >= 1 for length in found):
        raise ConfigError(f"lengths: expected integers from 1, as in range(1, 65), found {lengths!r:.80}")
    if sequence_length is not None and max(found) > sequence_length:
        raise ConfigError(f"lengths: expected none beyond sequence_length {sequence_length}, found {max(found)}")
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
    """Return the fields that locate sequences in a batch without padding, for variable-length attention.

    Of lengths 3, 1 and 2 ``cu_seqlens`` is 0, 3, 4, 6: sequence k is in rows ``cu_seqlens[k] .. cu_seqlens[k + 1] - 1``
    (as in flash-attention and ``torch.nn.attention.varlen``). ``position`` is 0, 1, 2, 0, 0, 1 and ``sequence_id``
    0, 0, 0, 1, 2, 2. Filled up to a capacity of 8 the two rows behind have position 0 and sequence 3, which there is
    not: sums by sequence over 3 of them leave these rows out, as ``jax.ops.segment_sum`` does.

    Args:
        lengths: Rows of each sequence, from 0, int64 ``[n]``.
        capacity: How many rows there are to be; None: T, as many as the sequences have together.

    Returns:
        ``cu_seqlens`` int32 ``[n + 1]``, ``position`` and ``sequence_id`` int32 ``[T]`` or ``[capacity]``, and with a
        capacity ``mask`` bool ``[capacity]``: which rows are of a sequence.

    Raises:
        DataError: More rows than the capacity, or than 32 bits count.
    """
    ends = np.cumsum(lengths)
    total, count = int(ends[-1]) if len(ends) else 0, len(lengths)
    most = _MOST_ROWS if capacity is None else capacity
    if total > most:
        raise DataError(f"packed: expected at most {most} rows in a batch, found {total} in {count} sequences")
    rows = total if capacity is None else capacity
    bounds = np.zeros(count + 1, _INT32)
    bounds[1:] = ends
    # What is behind the last sequence is one more, of which all rows have position 0.
    sequence_id = np.repeat(np.arange(count + 1, dtype=_INT32), np.append(lengths, rows - total))
    position = np.arange(rows, dtype=_INT32)
    position -= bounds.take(sequence_id)
    position[total:] = 0
    found: Arrays = {"cu_seqlens": bounds, "position": position, "sequence_id": sequence_id}
    return found if capacity is None else {**found, MASK: np.arange(rows) < total}
