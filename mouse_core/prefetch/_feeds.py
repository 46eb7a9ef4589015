"""Feeds: how a loader follows a source. A feed knows where epochs end, its state, and how to take new rows over.

There is one for a source of the caller's, and one for the batches of a store; a ``BufferSource`` is a feed itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError, StateError
from mouse_core.randomness import check_seed
from mouse_core.store.views import Store

if TYPE_CHECKING:  # buffers are loaded where there are some: `import mouse_core` is without them
    from mouse_core.replay.source import Staleness


class Feed:
    """Feed of a source of the caller's own, which never changes."""

    #: Whether there are images to decode; None: unknown.
    has_images: bool | None = None

    def __init__(self, source: Any) -> None:
        self.source = source
        #: The number of the first batch of an epoch.
        self.first_index: int = getattr(source, "epoch_start", 0)

    @property
    def staleness(self) -> Staleness:
        """The age of the last batch."""
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

    def restored(self, state: Mapping[str, Any]) -> tuple[Any, int]:
        """Return the feed that ``state`` describes, and the number of its next batch.

        Raises:
            StateError: The state is of another source, or damaged.
        """
        from mouse_core.prefetch._resuming import numbers_of

        numbers = numbers_of(state, "next_index")
        if state["fingerprint"] != self.source.fingerprint:
            raise StateError(
                f"state: expected the fingerprint {self.source.fingerprint!r:.80} of this source, found "
                f"{state['fingerprint']!r:.80}"
            )
        return type(self)(self.source), numbers["next_index"]

    def refreshed(self, next_index: int) -> Any:
        """Return a feed with the store's current rows, whose first epoch begins at ``next_index``.

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
        self.has_images = any(field.image_shape is not None for field in source.spec.values())

    def state(self, next_index: int) -> dict[str, Any]:
        """The state of a loader that delivers batch ``next_index`` next."""
        from mouse_core.prefetch._resuming import state_of

        return state_of(self.source, next_index)

    def restored(self, state: Mapping[str, Any]) -> tuple[Any, int]:
        """A feed with the seed and the rows of a state; see ``Feed``."""
        from mouse_core.prefetch._resuming import check_decoder, check_source, dropped_of, numbers_of, rows_of

        numbers = numbers_of(state, "seed", "next_index", "epoch_start", others=("rows",))
        if numbers["next_index"] < numbers["epoch_start"]:
            raise StateError(f"state: expected next_index at or after epoch_start, found {numbers}")
        try:
            seed, begin = check_seed(numbers["seed"]), numbers["epoch_start"]
            rows = rows_of(state["rows"])
            snapshot = self.source.snapshot.of_rows(rows) if self._store is None else self._store.snapshot(rows)
            source = self.source.with_snapshot(snapshot, epoch_start=begin, seed=seed)
        except (ConfigError, KeyError) as error:
            raise StateError(
                f"state: expected one of this dataset and configuration, found: {error}{dropped_of(self._store)}"
            ) from error
        check_source(source, state, dropped_of(self._store))
        check_decoder(source, state)
        return StoreFeed(source, self._store), numbers["next_index"]

    def refreshed(self, next_index: int) -> Any:
        """A feed with the rows that the store has now; see ``Feed``."""
        if self._store is None:
            return super().refreshed(next_index)
        source = self.source.with_snapshot(self._store.snapshot(), epoch_start=next_index)
        return StoreFeed(source, self._store)


def feed_of(source: Any, store: Store | None) -> Any:
    """Return the feed of ``source``, which may be a ``BatchSource`` of ``store`` or a ``BufferSource``."""
    if isinstance(source, BatchSource):
        return StoreFeed(source, store)
    return source if hasattr(source, "prepare") else Feed(source)
