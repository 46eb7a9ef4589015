"""Examples made of rollouts, and arrays for training made of examples: one a row, several a row, or all in one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import StreamDigest
from mouse_core.errors import DataError
from mouse_core.groups.examples.declared import (
    Arrays,
    columns_of_examples,
    concatenate_columns,
    place_columns,
    turn_ids_of,
)
from mouse_core.groups.examples.placing import FIELDS, Fields, Layout, best_fit, fields_of, side_by_side
from mouse_core.groups.types.columns import common_columns
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord, refuse_undeclared, unchecked
from mouse_core.sampling.lengths import sequence_fields
from mouse_core.spec import check_count

_example = unchecked(RLExample)


def make_examples(
    rollouts: Sequence[RolloutRecord], advantages: npt.ArrayLike | Sequence[npt.ArrayLike]
) -> list[RLExample]:
    """An example of every rollout: all tokens of its turns, of which those that the policy wrote are in the loss.

    A turn is in the loss if its role is "assistant" and its log-probabilities are known.

    Args:
        rollouts: ``n`` of them.
        advantages: What each is worth, ``[n]``; or of each a number, or one for each of its tokens.

    Returns:
        The examples in the same order. Their arrays are parts of four long ones.

    Raises:
        DataError: Another number of advantages, or one that is not finite; no rollouts, or one with columns that were
            not declared.
    """
    for place, rollout in enumerate(rollouts):
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"rollouts: expected a RolloutRecord at {place}, found {rollout!r:.100}")
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
    own = columns_of_examples(rollouts, turns, sizes, declared)
    turn_ids = turn_ids_of(rollouts, sizes) if declared.of("turn") else None
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
            None if turn_ids is None else turn_ids[a:b],
            declared,
        )
        for rollout, columns, a, b in bounds
    ]


def _worth(rollouts: Sequence[RolloutRecord], advantages: Any, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """What all tokens are worth, float32."""
    if isinstance(advantages, np.ndarray) and advantages.shape == (len(rollouts),) and np.isfinite(advantages).all():
        return np.repeat(advantages.astype(np.float32), sizes)
    values = [np.asarray(one, np.float64) for one in advantages]
    if len(values) != len(rollouts):
        raise DataError(f"advantages: expected one for each of {len(rollouts)} rollouts, found {len(values)}")
    for value, size, rollout in zip(values, sizes.tolist(), rollouts, strict=True):
        if value.shape not in ((), (size,)) or not np.isfinite(value).all():
            raise DataError(
                f"advantages: expected a finite number, or one for each of {size} tokens, for rollout "
                f"{rollout.rollout_uid!r}, found {value!r:.100}"
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
    truncate: bool = False,
    max_turns: int | None = None,
) -> Arrays:
    """One example a row, filled up at the end.

    Args:
        examples: ``B`` of them.
        length: Tokens of a row, ``L``; by default those of the longest example. A fixed one spares compiling anew.
        pad_token: What rows are filled up with.
        pad_to_multiple_of: ``L`` is the next multiple of it.
        truncate: Whether longer examples are cut off at the end; otherwise they are an error.
        max_turns: Places for the values of turns, ``T``; by default as many as are needed. A fixed one spares compiling
            anew.

    Returns:
        ``tokens`` int32, ``loss_mask`` bool, ``advantage`` float32, ``generator_log_probs`` float32, and ``mask`` bool,
        which is True where there is a token; all ``[B, L]``. Beyond an example they are ``pad_token``, 0 and False.
        Columns that were declared are ``[B, L, *shape]`` with a value per token, ``[B, T, *shape]`` per turn, beside
        ``turn_ids`` int32 ``[B, L]``, which says of a token which turn it is of (-1: there is none), and
        ``[B, *shape]`` per example; they are filled up with their fill.

    Raises:
        ConfigError: ``length``, ``pad_to_multiple_of`` or ``max_turns`` is below 1.
        DataError: No examples, something else, or one that is longer than ``length`` or has more than ``max_turns``.
    """
    fields = _fields(examples)
    sizes = _sizes(fields)
    longest = _length(sizes, length, truncate)
    taken = np.minimum(sizes, longest)
    longest = _multiple(longest, pad_to_multiple_of)
    rows = np.arange(len(examples))
    layout = Layout((len(examples), longest), rows, np.zeros_like(rows), taken, cut=bool((taken < sizes).any()))
    arrays = layout.place_all(fields, pad_token)
    return arrays | place_columns(examples, layout.place, len(examples), rows, max_turns=max_turns)


def pack(
    examples: Sequence[RLExample],
    length: int,
    *,
    num_rows: int | None = None,
    pad_token: int = 0,
    pad_to_multiple_of: int = 1,
    truncate: bool = False,
    max_turns: int | None = None,
    max_examples: int | None = None,
) -> Arrays:
    """Several examples a row, one behind the other, so that little is left to fill up.

    Each goes, longest first, to the row that it fills best (best-fit decreasing).

    Args:
        examples: At least one.
        length: Tokens of a row, ``L``.
        num_rows: How many rows there are to be, ``R``; by default as many as are needed. A fixed one spares compiling
            anew.
        pad_token, pad_to_multiple_of, truncate: As in ``pad``.
        max_turns, max_examples: Places of a row for the values of turns, ``T``, and of examples, ``E``; by default as
            many as are needed. Fixed ones spare compiling anew.

    Returns:
        The arrays of ``pad``, all ``[R, L]``, and ``segment_ids`` int32, which counts the examples of a row from 1 and
        is 0 where there is no token, and ``positions`` int32, the place of a token in its example. Tokens attend to
        those of their own segment only. Columns with a value per example are ``[R, E, *shape]``, of which a token has
        that at ``segment_ids - 1``, and ``turn_ids`` count the turns of a row.

    Raises:
        ConfigError: ``length``, ``num_rows``, ``pad_to_multiple_of``, ``max_turns`` or ``max_examples`` is below 1.
        DataError: As ``pad``; more rows, or places, are needed than there are to be.
    """
    fields = _fields(examples)
    sizes = _sizes(fields)
    taken = np.minimum(sizes, _length(sizes, check_count("length", length), truncate))
    length = _multiple(length, pad_to_multiple_of)
    row_of, begin_of = best_fit(taken, length)
    needed = int(row_of.max()) + 1
    rows = needed if num_rows is None else check_count("num_rows", num_rows)
    if rows < needed:
        raise DataError(f"num_rows: expected at least {needed} rows of {length} for these examples, found {rows}")
    layout = Layout((rows, length), row_of, begin_of, taken, cut=bool((taken < sizes).any()))
    arrays = layout.place_all(fields, pad_token)
    segment_of, arrays["segment_ids"] = layout.segments()
    arrays["positions"] = layout.positions(begin_of)
    most = {"max_turns": max_turns, "max_examples": max_examples}
    return arrays | place_columns(examples, layout.place, rows, row_of, segment_of - 1, **most)


def concatenate(
    examples: Sequence[RLExample],
    capacity: int | None = None,
    *,
    pad_token: int = 0,
    max_turns: int | None = None,
) -> Arrays:
    """All examples one behind the other, without padding, for variable-length attention.

    Args:
        examples: ``n`` of them, which stay in order.
        capacity: How many tokens there are to be, filled up at the end; None: T, as many as the examples have. A fixed
            one spares compiling anew.
        pad_token: What is filled up with.
        max_turns: Places for the values of all turns; None: as many as there are.

    Returns:
        The arrays of ``pad``, all ``[T]``, and ``cu_seqlens`` int32 ``[n + 1]``: example k has the tokens
        ``cu_seqlens[k] .. cu_seqlens[k + 1] - 1``, as in flash-attention. ``position`` int32 is the place of a token in
        its example, and ``sequence_id`` int32 the number of the example, from 0. With a capacity they are
        ``[capacity]``; then there is ``mask`` bool, False behind the last example, where the position is 0 and the
        number n. Columns that were declared are ``[T, *shape]`` with a value per token, ``[n, *shape]`` per example,
        and per turn those of all turns, of which ``turn_ids`` says which one a token is of.

    Raises:
        ConfigError: ``capacity`` or ``max_turns`` is below 1.
        DataError: No examples, something else, more tokens than the capacity, or more turns than ``max_turns``.

    Example:
        >>> three = [RLExample([n] * n, [True] * n, [1.0] * n, [0.0] * n) for n in (3, 1, 2)]
        >>> packed = concatenate(three)
        >>> packed["tokens"].tolist(), packed["cu_seqlens"].tolist()
        ([3, 3, 3, 1, 2, 2], [0, 3, 4, 6])
    """
    fields = _fields(examples)
    where = sequence_fields(_sizes(fields), None if capacity is None else check_count("capacity", capacity))
    total = int(where["cu_seqlens"][-1])
    arrays: Arrays = {}
    for name, dtype in FIELDS.items():
        values = fields[name]
        if total < len(where["position"]):
            values = [*values, np.full(len(where["position"]) - total, pad_token if name == "tokens" else 0, dtype)]
        arrays[name] = side_by_side(values, len(where["position"]) * np.dtype(dtype).itemsize)
    return arrays | where | concatenate_columns(examples, len(where["position"]), max_turns)


def examples_digest(index: int, examples: Sequence[RLExample], first_row: int = 0) -> StreamDigest:
    """The digest of a batch of examples, each a window: tokens, which are in the loss, advantages, log-probabilities.

    It is that of ``StreamDigest.of(index, arrays)`` where all are equally long, and does not depend on how they are
    padded or packed. Columns that were declared are part of it; uids, environments and versions are not.

    Args:
        index: The batch's number.
        examples: All of it, or a rank's share.
        first_row: Which example of the whole batch the first one here is.
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
                raise DataError(f"examples: expected an RLExample at {number}, found {example!r:.100}")
    return fields_of(examples)


def _sizes(fields: Fields) -> npt.NDArray[np.int64]:
    return np.array(list(map(len, fields["tokens"])), np.int64)


def _length(sizes: npt.NDArray[np.int64], length: int | None, truncate: bool) -> int:
    longest = int(sizes.max())
    if length is None:
        return max(1, longest)
    if longest > check_count("length", length) and not truncate:
        raise DataError(
            f"examples: expected at most {length} tokens, found {longest} at {int(sizes.argmax())} "
            "(truncate=True cuts them off)"
        )
    return int(length)


def _multiple(length: int, of: int) -> int:
    """The next multiple."""
    size = check_count("pad_to_multiple_of", of)
    return -(-length // size) * size
