"""A rank's share of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import StreamDigest
from mouse_core.errors import DataError
from mouse_core.groups.examples.batches import examples_digest
from mouse_core.groups.examples.declared import Arrays
from mouse_core.groups.streams.balance import MicroBatch, plan
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.versions import version_number


class BatchShare:
    """What one rank trains on of a batch: a sequence of micro-batches, as many as every other rank has.

    A micro-batch is the arrays of ``pack``, ``pad`` or ``concatenate``, all of one shape, made when it is asked for.
    One that has no examples, as there were too few, is there all the same, and nothing in it is in the loss.

    Attributes:
        index: The batch's number.
        batch_id: Its id in the buffer.
        examples: Those of this rank, micro-batch after micro-batch.
        places: Which examples of the whole batch these are, int64 ``[k]``.
        staleness: How many versions older than the newest each was when the batch was made, float64 ``[k]``; NaN where
            nothing is known of it.
        first: The micro-batch that iterating begins with; 0, unless a state was loaded that stands within the batch.
        report: Of the whole batch, the same on every rank: "index", "batch_id", "examples", "tokens", "loss_tokens" (to
            divide a loss by that ranks add up), "skipped" (how many examples nobody trains on, as they are longer than
            a row; the numbers before it are of the others), "micro_batches", "rank_tokens" (a list), "staleness_mean"
            and "staleness_max" (None where nothing is known), and with ``token_versions`` "token_staleness_mean" and
            "token_staleness_max" of the tokens in the loss.
    """

    def __init__(
        self,
        index: int,
        batch_id: str,
        batch: Sequence[RLExample],
        staleness: npt.NDArray[np.float64],
        kind: MicroBatch,
        shard: tuple[int, int],
        first: int,
        deliver: Callable[[Arrays, Columns], Any],
        *,
        skip_longer: bool = False,
        token_versions: str | None = None,
    ) -> None:
        self.index, self.batch_id, self.first = index, batch_id, first
        self._deliver = deliver
        sizes = [len(example) for example in batch]
        kept = [place for place, size in enumerate(sizes) if not skip_longer or size <= kind.row]
        planned = plan([sizes[place] for place in kept], shard[1], kind)
        ranks = [[[kept[number] for number in numbers] for numbers in one] for one in planned]
        own = ranks[shard[0]]
        self.places = np.array([place for places in own for place in places], np.int64)
        self.examples = [batch[place] for place in self.places.tolist()]
        self._kind, self._micro = kind, [[batch[place] for place in places] for places in own]
        self.staleness = staleness[self.places]
        self._empty = _empty(batch)
        behind = {"staleness": staleness[~np.isnan(staleness)]}
        if token_versions is not None:
            behind["token_staleness"] = _by_token(kept, batch, staleness, token_versions)
        self.report: Mapping[str, Any] = {
            "index": index,
            "batch_id": batch_id,
            "examples": len(kept),
            "tokens": sum(sizes[place] for place in kept),
            "loss_tokens": sum(int(np.count_nonzero(batch[place].loss_mask)) for place in kept),
            "skipped": len(batch) - len(kept),
            "micro_batches": len(self._micro),
            "rank_tokens": [sum(sizes[place] for places in one for place in places) for one in ranks],
        } | {
            f"{name}_{what}": float(getattr(known, what)()) if len(known) else None
            for name, known in behind.items()
            for what in ("mean", "max")
        }

    def __repr__(self) -> str:
        return f"BatchShare(index={self.index}, examples={len(self.examples)}, micro_batches={len(self)})"

    def __len__(self) -> int:
        return len(self._micro)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(self.first, len(self)))

    def __getitem__(self, number: Any) -> Any:
        """The arrays of a micro-batch, or a list of several."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return self._deliver(self._kind.arrays(self._micro[number], self._empty), self._empty.declared)

    @property
    def digest(self) -> StreamDigest:
        """That of the share; the ranks' add up to ``examples_digest(index, batch)`` of the whole batch, where none of
        its examples was skipped.
        """
        each = zip(self.places.tolist(), self.examples, strict=True)
        return sum((examples_digest(self.index, [example], place) for place, example in each), StreamDigest())


def _by_token(
    kept: Sequence[int], batch: Sequence[RLExample], staleness: npt.NDArray[np.float64], name: str
) -> npt.NDArray[np.float64]:
    """How many versions behind the newest each token in the loss is whose version is known.

    Version 7 of a rollout that is 2 behind says that the newest is 9: tokens of 7, 7, 8 are 2, 2, 1 behind.

    Raises:
        DataError: There is no such column.
    """
    declared = batch[0].declared if batch else NO_COLUMNS
    column = declared.get(name)
    if column is None or column.per != "token" or column.shape or np.dtype(column.dtype).kind not in "iu":
        known = [one.name for one in declared.of("token") if not one.shape and np.dtype(one.dtype).kind in "iu"]
        raise DataError(f"token_versions: expected a column of one integer per token, one of {known}, found {name!r}")
    numbers = [version_number(example.policy_version) for example in batch]
    newest = np.array([np.nan if one is None else float(one) for one in numbers]) + staleness
    tokens = [batch[place].columns[name][batch[place].loss_mask] for place in kept]
    own = np.concatenate([np.zeros(0), *tokens])
    # Of an example whose version is not known it is the newest that others know of.
    newest[np.isnan(newest)] = np.nanmax(newest, initial=-np.inf)
    latest = np.repeat(newest[kept], list(map(len, tokens)))
    there = np.isfinite(latest) & (own != column.fill if column.fill is not None else True)
    own = own[there]
    behind: npt.NDArray[np.float64] = np.maximum(latest[there], own.max(initial=-np.inf)) - own
    return behind


def _empty(batch: Sequence[RLExample]) -> RLExample:
    """An example of no tokens with the columns of the others."""
    declared = batch[0].declared if batch else NO_COLUMNS
    columns = {
        name: np.full(column.shape if column.per == "example" else (0, *column.shape), column.padding, column.dtype)
        for name, column in declared.items()
    }
    tokens, none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    ids = None if not batch or batch[0].turn_ids is None else tokens
    return RLExample(tokens, tokens > 0, none, none, columns=columns, turn_ids=ids, declared=declared)
