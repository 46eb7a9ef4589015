"""Feeds: how a loader follows a source. A feed knows where epochs end, its state, and how to take new rows over.

Only feeds know the kinds of sources: a store's, a replay buffer's, or one of the caller's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError, StateError
from mouse_core.prefetch.source import Source
from mouse_core.randomness import check_seed
from mouse_core.spec import Spec
from mouse_core.store.views import Store

if TYPE_CHECKING:  # buffers are loaded where there are some: `import mouse_core` is without them
    from mouse_core.replay.source import BufferSource, Staleness


class Feed:
    """Feed of a source of the caller's own, which never changes."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def first_index(self) -> int:
        """The number of the first batch of an epoch."""
        return 0

    @property
    def spec(self) -> Spec:
        """The fields of a batch."""
        return self.source.spec

    @property
    def has_images(self) -> bool | None:
        """Whether there are images to decode; None: unknown."""
        return None

    @property
    def staleness(self) -> Staleness:
        """Return the age of the last batch."""
        from mouse_core.replay.source import Staleness

        return Staleness()

    def prepare(self, index: int, *, first: bool) -> bool:
        """Prepare batch ``index`` in the caller's thread; ``first``: it is the first batch of this feed.

        Returns:
            Whether threads have to begin anew, as batches exist now that they may have missed.
        """
        if first:
            len(self.source)  # which sees that nobody shards a shard again
        return False

    def delivered(self, index: int) -> None:
        """Note that batch ``index`` was delivered."""

    def ends_at(self, index: int) -> bool:
        """Whether an epoch ended with batch ``index - 1``."""
        return (index - self.first_index) % len(self.source) == 0

    def state(self, next_index: int) -> dict[str, Any]:
        """The state of a loader that delivers batch ``next_index`` next."""
        return {"next_index": next_index, "fingerprint": self.source.fingerprint}

    def restored(self, state: Mapping[str, Any]) -> tuple[Feed, int]:
        """Return the feed that ``state`` describes, and the number of its next batch.

        Raises:
            StateError: The state is of another source, or damaged.
        """
        from mouse_core.prefetch._resuming import check_keys, index_of

        check_keys(state, {"next_index", "fingerprint"})
        if state["fingerprint"] != self.source.fingerprint:
            raise StateError(
                f"state: expected the fingerprint {self.source.fingerprint!r:.80} of this source, found "
                f"{state['fingerprint']!r:.80}"
            )
        return type(self)(self.source), index_of(state, "next_index")

    def refreshed(self, next_index: int) -> Feed:
        """Return a feed with the store's rows of now, whose first epoch begins at ``next_index``.

        Raises:
            ConfigError: There is no store to take them from.
        """
        raise ConfigError(
            "refresh: expected a loader over a DatasetStore, found one over a snapshot, a replay buffer or a source"
        )


class StoreFeed(Feed):
    """Feed of a snapshot's batches, which takes new snapshots of its store.

    Args:
        source: Of the snapshot.
        store: The store to refresh from; None where there is none.
    """

    source: BatchSource

    def __init__(self, source: BatchSource, store: Store | None) -> None:
        super().__init__(source)
        self._store = store

    @property
    def first_index(self) -> int:
        """The number of the first batch over this snapshot."""
        return self.source.epoch_start

    @property
    def has_images(self) -> bool:
        """Whether there are fields of images."""
        return any(field.image_shape is not None for field in self.spec.values())

    def state(self, next_index: int) -> dict[str, Any]:
        """The state of a loader that delivers batch ``next_index`` next."""
        from mouse_core.prefetch._resuming import state_of

        return state_of(self.source, next_index)

    def restored(self, state: Mapping[str, Any]) -> tuple[Feed, int]:
        """A feed with the seed and the rows of a state; see ``Feed``."""
        from mouse_core.prefetch._resuming import check_decoder, check_source, dropped_of, numbers_of, rows_of

        numbers = numbers_of(state)
        try:
            seed, begin = check_seed(numbers["seed"]), numbers["epoch_start"]
            rows = rows_of(state)
            snapshot = self.source.snapshot.of_rows(rows) if self._store is None else self._store.snapshot(rows)
            source = self.source.with_snapshot(snapshot, epoch_start=begin, seed=seed)
        except (ConfigError, KeyError) as error:
            raise StateError(
                f"state: expected one of this dataset and configuration, found: {error}{dropped_of(self._store)}"
            ) from error
        check_source(source, state, dropped_of(self._store))
        check_decoder(source, state)
        return StoreFeed(source, self._store), numbers["next_index"]

    def refreshed(self, next_index: int) -> Feed:
        """A feed with the rows that the store has now; see ``Feed``."""
        if self._store is None:
            return super().refreshed(next_index)
        source = self.source.with_snapshot(self._store.snapshot(), epoch_start=next_index)
        return StoreFeed(source, self._store)


class BufferFeed(Feed):
    """Feed of a replay buffer, which draws batches in the caller's thread, some batches ahead."""

    source: BufferSource  # type: ignore[assignment]  # not as others: without a spec, as it is not known

    def __init__(self, source: BufferSource) -> None:
        self.source = source

    @property
    def spec(self) -> Spec:
        """ConfigError: a buffer learns of its fields from what is written."""
        raise ConfigError("spec: expected a loader over a store, found one over a replay buffer")

    @property
    def staleness(self) -> Staleness:
        """Return the age of the last batch."""
        return self.source.staleness

    def prepare(self, index: int, *, first: bool) -> bool:
        """Draw what is to be drawn; an empty buffer is an error that passes."""
        return self.source.prepare(index)

    def delivered(self, index: int) -> None:
        """Note that batch ``index`` was delivered."""
        self.source.delivered(index)

    def ends_at(self, index: int) -> bool:
        """Whether an epoch ended with batch ``index - 1``."""
        return self.source.ends_at(index)

    def state(self, next_index: int) -> dict[str, Any]:
        """The number of the next batch, and what was drawn and not delivered."""
        return self.source.state(next_index)

    def restored(self, state: Mapping[str, Any]) -> tuple[Feed, int]:
        """A feed with the draws of a state; see ``Feed``."""
        source, next_index = self.source.restored(state)
        return BufferFeed(source), next_index

    def refreshed(self, next_index: int) -> Feed:
        """Refresh the buffer from its store and return the feed; prefetched draws stay unchanged."""
        self.source.buffer.refresh()
        return self


def feed_of(source: Any, store: Store | None) -> Feed:
    """Return the feed of ``source``, which may be a ``BatchSource`` of ``store`` or a ``BufferSource``."""
    if isinstance(source, BatchSource):
        return StoreFeed(source, store)
    return BufferFeed(source) if hasattr(source, "prepare") else Feed(source)
