"""RolloutStream: one rank's share of the batches of a RolloutBuffer, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError, StateError, TimedOutError
from mouse_core.groups._files.batches import read_examples, read_staleness
from mouse_core.groups._files.index import StoredBatch, Told, follow_batches
from mouse_core.groups._files.names import BATCHES
from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.examples.declared import Arrays
from mouse_core.groups.streams.balance import MicroBatch
from mouse_core.groups.streams.share import BatchShare
from mouse_core.groups.types.columns import Columns
from mouse_core.groups.types.example import RLExample
from mouse_core.ranks import Shard, check_shard, ranks_of
from mouse_core.spec import check_count


class StoredBatches(Protocol):
    """Batches by their number, as they were stored."""

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; None while there is none."""
        ...

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Its examples."""
        ...

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How many versions older than the newest each example is, float64 ``[B]``."""
        ...


class FolderBatches:
    """The batches of a folder that another process owns; nothing in it is changed.

    Args:
        root: The folder, which need not be there yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stored: list[StoredBatch] = []
        self._told: list[Told] = []
        self._position = 0

    def __repr__(self) -> str:
        return f"the folder {str(self._root)!r}, which has {len(self._stored)}"

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; None while it is not in the log."""
        if index >= len(self._stored):
            self._follow()
        return self._stored[index].batch_id if index < len(self._stored) else None

    def _follow(self) -> None:
        new, self._position = follow_batches(self._root, self._position)
        self._told += [one._replace(batches=one.batches + len(self._stored)) for one in new.told]
        self._stored += new.batches

    def _number(self, batch_id: str) -> int:
        numbers = range(len(self._stored) - 1, -1, -1)
        number = next((number for number in numbers if self._stored[number].batch_id == batch_id), None)
        if number is None:
            raise DataError(f"batch: expected one of {self!r}, found {batch_id!r}")
        return number

    def _path(self, batch_id: str) -> Path:
        return self._root / BATCHES / self._stored[self._number(batch_id)].name

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Its examples."""
        return read_examples(self._path(batch_id))

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How far each was behind."""
        self._follow()  # a trainer may have gone back since
        number = self._number(batch_id)
        return read_staleness(self._path(batch_id), [one.version for one in self._told if one.batches > number])


class BufferBatches:
    """The batches of a buffer, made when they are asked for.

    Args:
        buffer: It.
        batch_size: How many examples; None: no batches are made.
    """

    def __init__(self, buffer: RolloutBuffer, batch_size: int | None) -> None:
        self._buffer, self._size = buffer, batch_size

    def __repr__(self) -> str:
        return repr(self._buffer)

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; made if it comes next; None while there are too few rollouts."""
        return self._buffer.batch_at(index, self._size)

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Its examples."""
        return self._buffer.read_batch(batch_id)

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How far each was behind."""
        return self._buffer.batch_staleness(batch_id)


# A batch that is not there yet is looked for again after the first of these, then less and less often.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_FORMAT = 1


class RolloutStream:
    """This rank's share of a buffer's stored batches, batch after batch, for ever.

    The batches and the order of their examples are the buffer's; how many ranks there are only says who gets which
    examples. ``plan_micro_batches`` says how: all ranks get about as many tokens, and equally many micro-batches, so
    that collective operations meet. One process has the buffer and makes batches as they are asked for; the others
    read them from the folder. A batch that is not there yet is waited for.

    Args:
        batches: A ``RolloutBuffer``; the path of the folder of one that another process has; or another object with
            ``batch_at``, ``read_batch`` and ``batch_staleness``, such as ``mouse_ray.ActorBatches``.
        max_tokens: The most tokens of a micro-batch, padding included.
        shard: ``(rank, count)``, or "auto": as ``mouse_core.ranks.find_ranks`` finds it.
        batch_size: With a buffer, how many examples the batches have that are made; None: none are made.
        collate, length, max_examples: As in ``plan_micro_batches``. With these all micro-batches have one shape, if
            columns per turn come with ``max_turns``, and packed columns per example, or concatenated examples, with
            ``max_examples``.
        pad_token: What is filled up with.
        max_turns: Places for the values of turns: of a row, or of all where examples are concatenated.
        skip_longer: Whether examples that are longer than a row are left out, on all ranks, and counted in a share's
            ``report``; otherwise a batch that has one is an error. ``Lengths`` as a maker's ``retention`` keeps them
            out of batches.
        timeout: Seconds to wait for a batch.
        token_versions: The name of a column of integers per token that says which version of the policy sampled it, as
            where weights change in flight: a share's ``report`` says then how stale tokens are, too. Tokens that have
            the column's ``fill``, if one was said, are left out.

    Raises:
        ConfigError: An argument that cannot be used.

    Example:
        stream = RolloutStream("rollouts", 4096, shard=(rank, count))
        for share in stream:
            for arrays in share:
                ...  # forward and backward
            ...  # the optimizer's step
            save(stream.state_dict())
    """

    def __init__(
        self,
        batches: str | Path | RolloutBuffer | StoredBatches,
        max_tokens: int,
        *,
        shard: Shard = (0, 1),
        batch_size: int | None = None,
        collate: str = "pack",
        length: int | None = None,
        max_examples: int | None = None,
        pad_token: int = 0,
        max_turns: int | None = None,
        skip_longer: bool = False,
        timeout: float = 600.0,
        token_versions: str | None = None,
    ) -> None:
        ranks = ranks_of(shard)
        self.shard = check_shard(shard if ranks is None else ranks.shard, 0, "pad")
        self._kind = MicroBatch(max_tokens, collate, length, max_examples, int(pad_token), max_turns)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise ConfigError(f"timeout: expected seconds, at least 0, found {timeout!r}")
        if token_versions is not None and not isinstance(token_versions, str):
            raise ConfigError(f"token_versions: expected the name of a column or None, found {token_versions!r:.80}")
        self._timeout, self._skip_longer, self._token_versions = float(timeout), bool(skip_longer), token_versions
        self._batches = _feed(batches, batch_size)
        # Where the next batch stands, the micro-batch to begin with, and the id of the batch before it.
        self._next, self._first, self._after = 0, 0, ""
        # The same of the batch that was delivered last, and how many micro-batches that has.
        self._last: tuple[int, str, int] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batches!r}, shard={self.shard}, at={self._next})"

    def __iter__(self) -> Iterator[BatchShare]:
        return self

    def __next__(self) -> BatchShare:
        """The share of the next batch.

        Raises:
            TimedOutError: It was not made in time; the next call waits for it again.
            StateError: The batch before it is another one than that of the state that was loaded.
            DataError: Its file is damaged, it has no column as ``token_versions`` says, or it has an example longer
                than a micro-batch's row; ``skip_longer`` passes over such examples.
            StorageError: It cannot be read.
        """
        index = self._next
        batch_id = self._wait(index)
        self._check_before(index)
        share = BatchShare(
            index,
            batch_id,
            self._batches.read_batch(batch_id),
            self._batches.batch_staleness(batch_id),
            self._kind,
            self.shard,
            self._first,
            self._deliver,
            skip_longer=self._skip_longer,
            token_versions=self._token_versions,
        )
        self._last = index, self._after, len(share)
        self._next, self._first, self._after = index + 1, 0, batch_id
        return share

    def _deliver(self, arrays: Arrays, declared: Columns) -> Any:
        """A micro-batch as it is wanted, with the columns that were declared; frameworks put it on a device."""
        return arrays

    def _wait(self, index: int) -> str:
        """The id of a batch, once it is there."""
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while (batch_id := self._batches.batch_at(index)) is None:
            self._check_before(index, may_come=True)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOutError(
                    f"batch {index}: expected within {self._timeout:g} s, found none in {self._batches!r}; whoever has "
                    "the buffer makes batches, where there are enough rollouts that can be drawn"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return batch_id

    def _check_before(self, index: int, *, may_come: bool = False) -> None:
        """Raise StateError where another batch stands before one than when the state was saved."""
        before = self._batches.batch_at(index - 1) if index else ""
        if before != self._after and not (may_come and before is None):
            raise StateError(
                f"batch {index - 1}: expected {self._after!r}, as when the state was saved, found {before!r}"
            )

    # ------------------------------------------------------------------ state

    def state_dict(self, *, micro_batches: int | None = None) -> dict[str, Any]:
        """Where the stream stands: numbers and text, the same on every rank.

        Args:
            micro_batches: How many micro-batches of the last batch are done, where it is not all of them. Only
                as many ranks with equal options can go on within a batch; between batches any number can.

        Raises:
            ConfigError: More micro-batches than the last batch has.
        """
        index, after, within = self._next, self._after, self._first
        if micro_batches is not None:
            done = check_count("micro_batches", micro_batches, 0)
            if self._last is None or done > self._last[2]:
                there = 0 if self._last is None else self._last[2]
                raise ConfigError(f"micro_batches: expected at most the {there} of the last batch, found {done}")
            if done < self._last[2]:
                index, after, within = *self._last[:2], done
        state: dict[str, Any] = {"format": _FORMAT, "batch": index, "after": after, "within": within}
        return state | {"like": self._like()} if within else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, also with another number of ranks.

        Raises:
            StateError: Not a state of a stream; one of a newer version; or one within a batch, of another number of
                ranks or other micro-batches. Nothing has changed then.
        """
        form = state.get("format") if isinstance(state, Mapping) else None
        if form != _FORMAT:
            newer = ", of a newer version" if isinstance(form, int) and form > _FORMAT else ""
            raise StateError(
                f"state: expected one of a RolloutStream in format {_FORMAT}, found format {form!r}{newer}"
            )
        index, after, within = (state.get(name) for name in ("batch", "after", "within"))
        if not (_is_count(index) and _is_count(within) and isinstance(after, str) and bool(after) == bool(index)):
            raise StateError(f"state: expected the number of a batch and of a micro-batch, found {dict(state)!r:.200}")
        if within and list(state.get("like", ())) != self._like():
            raise StateError(
                f"state: expected one within a batch to be of {self._like()} (ranks, max_tokens, collate, length, "
                f"max_examples, skip_longer), found {state.get('like')}; between batches these may change"
            )
        self._next, self._after, self._first, self._last = int(index), after, int(within), None  # type: ignore[arg-type]

    def _like(self) -> list[Any]:
        kind = self._kind
        options = [self.shard[1], kind.max_tokens, kind.collate, kind.length, kind.max_examples]
        return [*options, *(["skip_longer"] if self._skip_longer else [])]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _feed(batches: Any, batch_size: int | None) -> StoredBatches:
    size = None if batch_size is None else check_count("batch_size", batch_size)
    if isinstance(batches, RolloutBuffer):
        return BufferBatches(batches, size)
    if size is not None:
        raise ConfigError(f"batch_size: expected None, as only who has the buffer makes batches, found {size}")
    if isinstance(batches, str | Path):
        return FolderBatches(Path(batches))
    if not hasattr(batches, "batch_at"):
        raise ConfigError(f"batches: expected a RolloutBuffer or the path of its folder, found {batches!r:.100}")
    feed: StoredBatches = batches
    return feed
