"""Conversion of rollouts to examples, and of examples to training arrays: padded, packed or concatenated."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import StreamDigest
from mouse_core.errors import DataError
from mouse_core.groups.records import (
    Columns,
    RLExample,
    RolloutRecord,
    Turn,
    common_columns,
    refuse_undeclared,
    unchecked,
)
from mouse_core.sampling.lengths import sequence_fields
from mouse_core.spec import check_count

Arrays = dict[str, npt.NDArray[Any]]
"""Arrays by name."""


def _columns_of_examples(
    rollouts: Sequence[RolloutRecord],
    turns: Sequence[Turn],
    ends: npt.NDArray[np.int64],
    longest: int,
    declared: Columns,
) -> list[Arrays]:
    """Return the declared columns of each rollout's example; missing values become the column's fill.

    Args:
        rollouts: The rollouts.
        turns: The turns of all rollouts, concatenated.
        ends: For ``n`` rollouts, 0 and the number of tokens up to the end of each rollout, ``[n + 1]``.
        longest: The largest number of tokens in a turn.
        declared: The declared columns.
    """
    found: list[Arrays] = [{} for _ in rollouts]
    for name, column in declared.items():
        if column.per == "example":
            for values, rollout in zip(found, rollouts, strict=True):
                values[name] = rollout.columns[name] if name in rollout.columns else column.filled()
            continue
        nothing = column.filled(longest)
        parts = [turn.columns[name] if name in turn.columns else nothing[: len(turn.tokens)] for turn in turns]
        whole = np.concatenate(parts)
        whole.flags.writeable = False
        for values, (begin, end) in zip(found, pairwise(ends.tolist()), strict=True):
            values[name] = whole[begin:end]
    return found


FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "advantage": np.float32,
    "generator_log_probs": np.float32,
}
"""The arrays of every example, by name, with their dtypes."""

Fields = dict[str, Sequence[npt.NDArray[Any]]]

# Bytes per token of the arrays of packed rows.
_BYTES = 22
# From this size on, NumPy allocates large pages, and copying takes most of the time.
_MANY_BYTES = 4 << 20


class Layout:
    """The positions of examples in rows. Adjacent examples are copied together, and the gaps between examples are
    filled.

    Args:
        shape: The number of rows, and of tokens in a row.
        row_of, begin_of: The row of each example, and the position of its first token in the row, ``[n]``.
        sizes: The number of tokens of each example, ``[n]``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        row_of: npt.NDArray[np.int64],
        begin_of: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
    ) -> None:
        self._shape = shape
        begins = row_of * shape[1] + begin_of
        # An example without tokens may begin where another one begins.
        order = np.argsort(2 * begins + (sizes > 0), kind="stable")
        begins = begins[order]
        # For each example in this order: its number of tokens, and the length of the gap after it.
        counts = np.empty((len(order), 2), np.int64)
        counts[:, 0] = sizes[order]
        ends = begins + counts[:, 0]
        counts[:-1, 1], counts[-1, 1] = begins[1:], shape[0] * shape[1]
        counts[:, 1] -= ends
        behind = counts[:, 1] > 0
        self._filled: list[int] = counts[behind, 1].tolist()
        self._gap_begins: list[int] = ends[behind].tolist()
        # The pieces in order: examples by number, and gaps, whose numbers follow those of the examples. With
        # 2 examples and a gap after each: 0, 2, 1, 3.
        sequence = np.empty(counts.shape, np.int64)
        sequence[:, 0], sequence[:, 1] = order, len(order) - 1 + np.cumsum(behind)
        pieces = sequence[counts > 0].tolist()
        self._pick = itemgetter(*pieces) if len(pieces) > 1 else tuple
        self._order, self._counts, self._row_of = order, counts.reshape(-1), row_of
        self._nothing: dict[tuple[Any, ...], list[npt.NDArray[Any]]] = {}

    def place(self, values: Sequence[npt.NDArray[Any]], fill: float) -> npt.NDArray[Any]:
        """Return an array with the values of each example at its position, and ``fill`` elsewhere.

        Args:
            values: The values of each example, ``[tokens, *shape]``.
            fill: The value for the gaps between examples.
        """
        inner, dtype = values[0].shape[1:], values[0].dtype
        shape = (*self._shape, *inner)
        pieces = self._pick([*values, *self._nothing_of(inner, dtype, fill)])
        return side_by_side(pieces, math.prod(shape) * dtype.itemsize).reshape(shape)

    def _nothing_of(self, inner: tuple[int, ...], dtype: np.dtype[Any], fill: float) -> list[npt.NDArray[Any]]:
        """Return an array of ``fill`` for each gap."""
        key = (inner, dtype, float(fill))
        found = self._nothing.get(key)
        if found is None:
            widest = np.full((max(self._filled, default=0), *inner), fill, dtype)
            self._nothing[key] = found = [widest[:gap] for gap in self._filled]
        return found

    def place_all(self, fields: Fields, pad_token: int) -> Arrays:
        """Return all arrays of ``FIELDS`` in rows."""
        # Fresh memory from the system costs as much as the copy. malloc keeps memory that was freed in one piece, so
        # that the next batch reuses it.
        np.empty(math.prod(self._shape) * _BYTES, np.uint8)
        return {name: self.place(values, pad_token if name == "tokens" else 0) for name, values in fields.items()}

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return a mask that is True for tokens of examples."""
        return self._repeat(np.ones_like(self._row_of), np.bool_)

    def segments(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return two arrays: for each example, its index in its row, counted from 1, ``[n]``; and for each position of
        the rows, the index of the example at this position, or 0 for padding.
        """
        rows = self._row_of[self._order]
        numbers = np.empty_like(rows)
        numbers[self._order] = np.arange(1, len(rows) + 1) - np.searchsorted(rows, rows)
        return numbers, self._repeat(numbers, np.int32)

    def positions(self, begin_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the position of each token in its example, int32; 0 for padding."""
        places = self._repeat(begin_of, np.int32)
        np.subtract(np.arange(self._shape[1], dtype=np.int32), places, out=places)
        flat = places.reshape(-1)
        for begin, gap in zip(self._gap_begins, self._filled, strict=True):
            flat[begin : begin + gap] = 0
        return places

    def place_columns(
        self,
        examples: Sequence[RLExample],
        segment_of: npt.NDArray[np.int64] | None = None,
        *,
        max_examples: int | None = None,
    ) -> Arrays:
        """Return the declared columns of examples.

        Args:
            examples: ``n`` examples.
            segment_of: The index of each example in its row, from 0, ``[n]``; None: one example per row.
            max_examples: The number of examples per row for which the arrays have space; None: the largest number of
                examples in a row.

        Raises:
            ConfigError: ``max_examples`` is below 1.
            DataError: Examples have different columns, or a row has more examples than ``max_examples``.
        """
        arrays: Arrays = {}
        for name, column in common_columns(examples).items():
            own = [example.columns[name] for example in examples]
            if column.per == "token":
                arrays[name] = self.place(own, column.fill)
            elif segment_of is None:
                arrays[name] = np.stack(own)
            else:
                arrays[name] = column.filled(self._shape[0], _places(segment_of, max_examples))
                arrays[name][self._row_of, segment_of] = np.stack(own)
        return arrays

    def _repeat(self, numbers: npt.NDArray[np.int64], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Repeat the number of each example for all tokens of the example; padding gets 0."""
        each = np.zeros(len(self._counts), dtype)
        each[::2] = numbers[self._order]
        return np.repeat(each, self._counts).reshape(self._shape)


def _places(segments: npt.NDArray[np.int64], most: int | None) -> int:
    """Return the number of examples per row for which arrays have space: ``most`` or, if it is None, the largest number
    of examples in a row.
    """
    needed = int(segments.max()) + 1
    if most is not None and check_count("max_examples", most) < needed:
        raise DataError(f"max_examples: expected at least {needed} for these examples, found {most}")
    return needed if most is None else most


def fields_of(examples: Sequence[RLExample]) -> Fields:
    """Return, for each field of ``FIELDS``, the arrays of all examples."""
    return {  # written out, as ``getattr`` with a name takes three times as long
        "tokens": [example.tokens for example in examples],
        "loss_mask": [example.loss_mask for example in examples],
        "advantage": [example.advantage for example in examples],
        "generator_log_probs": [example.generator_log_probs for example in examples],
    }


def side_by_side(arrays: Sequence[npt.NDArray[Any]], nbytes: int) -> npt.NDArray[Any]:
    """Concatenate arrays of equal dtype, like ``np.concatenate``.

    For many short arrays, joining their bytes takes less than half the time of ``np.concatenate``.

    Args:
        arrays: The arrays.
        nbytes: The total size in bytes.
    """
    if 0 < nbytes < _MANY_BYTES:
        pieces: Any = arrays
        try:
            return np.frombuffer(bytearray().join(pieces), arrays[0].dtype).reshape(-1, *arrays[0].shape[1:])
        except TypeError:
            pass  # an array is not contiguous
    return np.concatenate(arrays)


def best_fit(sizes: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Assign examples to rows (best-fit decreasing); return the row of each example and its start in the row, ``[n]``
    each. The longest example of a row is first.
    """
    order = np.argsort(-sizes, kind="stable")
    bits = len(sizes).bit_length()
    # A room is ``free tokens << bits | row``: with 3 bits, 5 free tokens in row 2 are 42. ``most`` is the largest room,
    # and ``rooms`` are the others, ascending, without those too small for every example. -1 and -2 stand for no room.
    most, rooms, fresh = -1, [-2], length << bits
    taken = []
    needs = (sizes[order] << bits).tolist()
    for needed in needs:
        if most < needed:
            room = fresh
            fresh += 1
        elif rooms[-1] < needed:
            room = most
            most = rooms.pop()
        else:
            room = rooms.pop(bisect_left(rooms, needed))
        taken.append(room)
        room -= needed
        if room > most:
            rooms.append(most)
            most = room
        elif room >= needs[-1]:
            insort(rooms, room)
    held = np.empty_like(sizes)
    held[order] = np.fromiter(taken, np.int64, len(taken))
    return held & ((1 << bits) - 1), length - (held >> bits)


_example = unchecked(RLExample)


def make_examples(
    rollouts: Sequence[RolloutRecord], advantages: npt.ArrayLike | Sequence[npt.ArrayLike]
) -> list[RLExample]:
    """Convert every rollout to an example with all its tokens; the loss mask marks the tokens that the policy wrote.

    A turn is in the loss if its role is "assistant" and its log-probabilities are known.

    Args:
        rollouts: ``n`` rollouts.
        advantages: The advantage of each rollout, ``[n]``; or a sequence that has, for each rollout, a number or an
            array with a number for each token.

    Returns:
        The examples in the order of the rollouts. The arrays of the examples are views of four long arrays.

    Raises:
        DataError: The number of advantages differs from ``n``, an advantage is not finite, ``rollouts`` is empty, or a
            rollout has columns that were not declared.
    """
    for place, rollout in enumerate(rollouts):
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"rollouts: expected a RolloutRecord at index {place}, found {rollout!r:.100}")
        refuse_undeclared(rollout)
    turns = list(chain.from_iterable(rollout.turns for rollout in rollouts))
    if not turns:
        return []
    sizes = np.fromiter((len(turn.tokens) for turn in turns), np.int64, len(turns))
    turn_ends = np.concatenate([[0], np.cumsum(sizes)])
    last_turns = np.cumsum([len(rollout.turns) for rollout in rollouts])
    ends = turn_ends[np.concatenate([[0], last_turns])]
    trained = np.fromiter((turn.is_trained for turn in turns), np.bool_, len(turns))
    nothing = np.zeros(int(sizes.max()), np.float32)
    declared = common_columns(rollouts)

    tokens = np.concatenate([turn.tokens for turn in turns])
    mask = np.repeat(trained, sizes)
    pairs = zip(turns, trained.tolist(), strict=True)
    logprobs = np.concatenate([turn.logprobs if own else nothing[: len(turn.tokens)] for turn, own in pairs])
    advantage = _worth(rollouts, advantages, np.diff(ends))
    advantage[~mask] = 0.0
    for values in (tokens, mask, advantage, logprobs):
        values.flags.writeable = False
    own = _columns_of_examples(rollouts, turns, ends, len(nothing), declared)
    bounds = zip(rollouts, own, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return [
        _example(
            tokens[a:b],
            mask[a:b],
            advantage[a:b],
            logprobs[a:b],
            rollout.rollout_uid,
            rollout.environment,
            rollout.policy_version,
            columns,
            declared,
        )
        for rollout, columns, a, b in bounds
    ]


def _worth(rollouts: Sequence[RolloutRecord], advantages: Any, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the advantages of all tokens, float32."""
    if isinstance(advantages, np.ndarray) and advantages.shape == (len(rollouts),) and np.isfinite(advantages).all():
        return np.repeat(advantages.astype(np.float32), sizes)
    values = [np.asarray(one, np.float64) for one in advantages]
    if len(values) != len(rollouts):
        raise DataError(f"advantages: expected one advantage for each of {len(rollouts)} rollouts, found {len(values)}")
    for value, size, rollout in zip(values, sizes.tolist(), rollouts, strict=True):
        if value.shape not in ((), (size,)) or not np.isfinite(value).all():
            raise DataError(
                f"advantages: rollout {rollout.rollout_uid!r}: expected a finite number, or a finite number for each "
                f"of {size} tokens, found {value!r:.100}"
            )
    if any(value.ndim for value in values):
        return np.concatenate([np.broadcast_to(v, n) for v, n in zip(values, sizes, strict=True)]).astype(np.float32)
    return np.repeat(np.array(values, np.float64).astype(np.float32), sizes)


def pad(
    examples: Sequence[RLExample],
    length: int | None = None,
    *,
    pad_token: int = 0,
    pad_to_multiple_of: int = 1,
) -> Arrays:
    """Create arrays with one example in each row, padded at the end.

    Args:
        examples: ``B`` examples.
        length: Number of tokens in a row, ``L``; by default the length of the longest example. A fixed length avoids
            recompilation.
        pad_token: The token that pads rows.
        pad_to_multiple_of: ``L`` is rounded up to a multiple of this number.

    Returns:
        ``tokens`` int32, ``loss_mask`` bool, ``advantage`` float32, ``generator_log_probs`` float32, and ``mask`` bool,
        which is True for tokens of examples; all ``[B, L]``. Padding is ``pad_token``, 0 and False. Declared columns
        are ``[B, L, *shape]`` with a value per token, padded with their fill, and ``[B, *shape]`` per example.

    Raises:
        ConfigError: ``length`` or ``pad_to_multiple_of`` is below 1.
        DataError: ``examples`` is empty or contains other objects, or an example is longer than ``length``.
    """
    fields = _fields(examples)
    sizes = _sizes(fields)
    longest = _multiple(_length(sizes, length), pad_to_multiple_of)
    rows = np.arange(len(examples))
    layout = Layout((len(examples), longest), rows, np.zeros_like(rows), sizes)
    arrays = {**layout.place_all(fields, pad_token), "mask": layout.mask()}
    return arrays | layout.place_columns(examples)


def pack(
    examples: Sequence[RLExample],
    length: int,
    *,
    num_rows: int | None = None,
    pad_token: int = 0,
    pad_to_multiple_of: int = 1,
    max_examples: int | None = None,
) -> Arrays:
    """Create arrays with several examples in each row, one after another, to reduce padding.

    Each example, longest first, is placed in the row with the least sufficient free space (best-fit decreasing).

    Args:
        examples: At least one example.
        length: Number of tokens in a row, ``L``.
        num_rows: The number of rows, ``R``; by default as many rows as the examples need. A fixed number avoids
            recompilation.
        pad_token, pad_to_multiple_of: See ``pad``.
        max_examples: Number of examples per row, ``E``, for which the arrays have space; by default the largest number
            of examples in a row. A fixed number avoids recompilation.

    Returns:
        The arrays of ``pad``, and two more arrays, all ``[R, L]``. ``segment_ids``, int32, counts the examples of a row
        from 1 and is 0 for padding. ``positions``, int32, is the position of a token in its example. A token attends
        only to tokens of its own segment. Columns with a value per example are ``[R, E, *shape]``, and the value of a
        token is at the index ``segment_ids - 1``.

    Raises:
        ConfigError: ``length``, ``num_rows``, ``pad_to_multiple_of`` or ``max_examples`` is below 1.
        DataError: An error of ``pad``, or more rows or examples are needed than ``num_rows`` or ``max_examples`` allow.
    """
    fields = _fields(examples)
    sizes = _sizes(fields)
    length = _multiple(_length(sizes, check_count("length", length)), pad_to_multiple_of)
    row_of, begin_of = best_fit(sizes, length)
    needed = int(row_of.max()) + 1
    rows = needed if num_rows is None else check_count("num_rows", num_rows)
    if rows < needed:
        raise DataError(f"num_rows: expected at least {needed} rows of {length} for these examples, found {rows}")
    layout = Layout((rows, length), row_of, begin_of, sizes)
    arrays = {**layout.place_all(fields, pad_token), "mask": layout.mask()}
    segment_of, arrays["segment_ids"] = layout.segments()
    arrays["positions"] = layout.positions(begin_of)
    return arrays | layout.place_columns(examples, segment_of - 1, max_examples=max_examples)


def concatenate(
    examples: Sequence[RLExample],
    capacity: int | None = None,
    *,
    pad_token: int = 0,
) -> Arrays:
    """Concatenate all examples to one row without padding, for variable-length attention.

    Args:
        examples: ``n`` examples; their order is kept.
        capacity: The length of the arrays in tokens, which are padded at the end; None: T, the total number of tokens
            of the examples. A fixed number avoids recompilation.
        pad_token: The token that pads the row.

    Returns:
        The arrays of ``pad``, all ``[T]``, and ``cu_seqlens`` int32 ``[n + 1]``: example k has the tokens
        ``cu_seqlens[k] .. cu_seqlens[k + 1] - 1``, as in flash-attention. ``position`` int32 is the position of a token
        in its example, and ``sequence_id`` int32 is the index of the token's example. With a capacity the arrays are
        ``[capacity]``, and ``mask`` bool is False after the last example, where ``position`` is 0 and ``sequence_id``
        is n. Declared columns are ``[T, *shape]`` with a value per token, and ``[n, *shape]`` per example.

    Raises:
        ConfigError: ``capacity`` is below 1.
        DataError: ``examples`` is empty or contains other objects, or has more tokens than the capacity.

    Example:
        >>> three = [RLExample([n] * n, [True] * n, [1.0] * n, [0.0] * n) for n in (3, 1, 2)]
        >>> packed = concatenate(three)
        >>> packed["tokens"].tolist(), packed["cu_seqlens"].tolist()
        ([3, 3, 3, 1, 2, 2], [0, 3, 4, 6])
    """
    fields = _fields(examples)
    sizes = _sizes(fields)
    where = sequence_fields(sizes, None if capacity is None else check_count("capacity", capacity))
    length = len(where["position"])
    if length == where["cu_seqlens"][-1] and not common_columns(examples):  # nothing is filled up
        itemsizes = {name: np.dtype(dtype).itemsize for name, dtype in FIELDS.items()}
        return {name: side_by_side(values, length * itemsizes[name]) for name, values in fields.items()} | where
    # One row, whose first axis goes.
    layout = Layout((1, length), np.zeros_like(sizes), np.cumsum(sizes) - sizes, sizes)
    arrays = layout.place_all(fields, pad_token)
    arrays |= layout.place_columns(examples, np.arange(len(examples)))
    return {name: values[0] for name, values in arrays.items()} | where


def examples_digest(index: int, examples: Sequence[RLExample], first_row: int = 0) -> StreamDigest:
    """Return the digest of the tokens, loss masks, advantages and log-probabilities in a batch. Each example counts as
    one window.

    The digest equals ``StreamDigest.of(index, arrays)`` if all examples have equal lengths, and does not depend on
    padding or packing. Declared columns are part of the digest; uids, environments and versions are not.

    Args:
        index: The index of the batch.
        examples: The complete batch, or a rank's share of it.
        first_row: The index of the first given example in the complete batch.
    """
    windows = [
        {name: getattr(example, name)[None] for name in FIELDS}
        | {name: values[None] for name, values in example.columns.items()}
        for example in examples
    ]
    digests = [StreamDigest.of(index, window, first_row + row) for row, window in enumerate(windows)]
    return sum(digests, StreamDigest())


def _fields(examples: Sequence[RLExample]) -> Fields:
    if not examples:
        raise DataError("examples: expected at least one, found none")
    if set(map(type, examples)) != {RLExample}:
        for number, example in enumerate(examples):
            if not isinstance(example, RLExample):
                raise DataError(f"examples: expected an RLExample at index {number}, found {example!r:.100}")
    return fields_of(examples)


def _sizes(fields: Fields) -> npt.NDArray[np.int64]:
    return np.array(list(map(len, fields["tokens"])), np.int64)


def _length(sizes: npt.NDArray[np.int64], length: int | None) -> int:
    longest = int(sizes.max())
    if length is None:
        return max(1, longest)
    if longest > check_count("length", length):
        raise DataError(f"examples: expected at most {length} tokens, found {longest} at index {int(sizes.argmax())}")
    return int(length)


def _multiple(length: int, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``length``."""
    size = check_count("pad_to_multiple_of", of)
    return -(-length // size) * size
