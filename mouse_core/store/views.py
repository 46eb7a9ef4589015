"""Store: what batches are drawn from, whatever its rows come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from mouse_core.spec import Alignment
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.about.dataset import About


class Store(ABC):
    """Steps in an order, of which there may be more later: what sources, loaders, buffers and writers take.

    A ``DatasetStore`` is one. One of your own derives from this class and says what its ``snapshot`` is: a ``Snapshot``
    of other stores' segments copies no step.
    """

    @abstractmethod
    def snapshot(self, rows: int | None = None) -> Snapshot:
        """An immutable view of the rows there are now, or of those that there were; it copies no steps.

        Args:
            rows: The ``store_rows`` of the snapshot to give again; None: there are now.

        Raises:
            ConfigError: There are fewer rows.
        """

    def __len__(self) -> int:
        return self.snapshot().num_rows

    @property
    def alignment(self) -> Alignment:
        """Which transition a row's action, reward and done belong to."""
        return self.snapshot().alignment

    @property
    def about(self) -> About:
        """What is known of the rows; the alignment is None where "arrived" is only taken for granted."""
        from mouse_core.about.dataset import About

        return About("outgoing" if self.alignment == "outgoing" else None)
