"""How a loader goes along a source: where epochs end, what its state is, how it takes new rows over.

A feed is the one place that knows of which kind a source is; the loader knows feeds. What states need is loaded where
there are some.
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
    """A source that stays as it is: somebody's own."""

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
        """How old the last batch was."""
        from mouse_core.replay.source import Staleness

        return Staleness()

    def prepare(self, index: int, *, first: bool) -> bool:
        """In the caller's thread, before batch ``index`` is delivered, the first one of this feed or another.

        Returns:
            Whether there are batches now that threads may have asked for in vain.
        """
        if first:
            len(self.source)  # which sees that nobody shards a shard again
        return False

    def delivered(self, index: int) -> None:
        """Batch ``index`` is with the caller."""

    def ends_at(self, index: int) -> bool:
        """Whether an epoch ended with batch ``index - 1``."""
        return (index - self.first_index) % len(self.source) == 0

    def state(self, next_index: int) -> dict[str, Any]:
        """The state of a loader that delivers batch ``next_index`` next."""
        return {"next_index": next_index, "fingerprint": self.source.fingerprint}

    def restored(self, state: Mapping[str, Any]) -> tuple[Feed, int]:
        """A feed as ``state`` says, and the number of its next batch.

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
        """A feed with the rows that there are now, of which an epoch begins at ``next_index``.

        Raises:
            ConfigError: There is no store to take them from.
        """
        raise ConfigError(
            "refresh: expected a loader over a DatasetStore, found one over a snapshot, a replay buffer or a source"
        )


class StoreFeed(Feed):
    """The batches of a snapshot; where there is a store, it has others to take over.

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
    """The batches of a replay buffer, which draws them in the caller's thread, some batches ahead."""

    source: BufferSource  # type: ignore[assignment]  # not as others: without a spec, as it is not known

    def __init__(self, source: BufferSource) -> None:
        self.source = source

    @property
    def spec(self) -> Spec:
        """ConfigError: a buffer learns of its fields from what is written."""
        raise ConfigError("spec: expected a loader over a store, found one over a replay buffer")

    @property
    def staleness(self) -> Staleness:
        """How old the last batch was."""
        return self.source.staleness

    def prepare(self, index: int, *, first: bool) -> bool:
        """Draw what is to be drawn; an empty buffer is an error that passes."""
        return self.source.prepare(index)

    def delivered(self, index: int) -> None:
        """Batch ``index`` is with the caller."""
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
        """The same feed, of a buffer with the rows that its store has now; what was drawn ahead stays as it is."""
        self.source.buffer.refresh()
        return self


def feed_of(source: Any, store: Store | None) -> Feed:
    """How a loader goes along ``source``: a ``BatchSource`` of ``store``, a ``BufferSource``, or somebody's own."""
    if isinstance(source, BatchSource):
        return StoreFeed(source, store)
    return BufferFeed(source) if hasattr(source, "prepare") else Feed(source)
