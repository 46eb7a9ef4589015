"""What each of the processes that share a mirror has for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mouse_core._base.locks import forks
from mouse_core.remote.mirror.counters import Counters
from mouse_core.remote.mirror.fetching import Fetcher
from mouse_core.remote.mirror.keeping import Keeper, Limits
from mouse_core.remote.mirror.objects import Known
from mouse_core.remote.mirror.pace import Pace
from mouse_core.remote.mirror.shared.sharers import Sharer
from mouse_core.remote.mirror.shared.sparse import SparseFile
from mouse_core.remote.mirror.shared.table import Table


class Process:
    """What a process that shares a mirror has of its own."""

    def __init__(self, inside: Path, table: Table, file: SparseFile, memory: Any, known: Known, limits: Limits) -> None:
        self.sharer, self.counters, self.pace = Sharer(inside / "sharers"), Counters(), Pace()
        self.keeper = Keeper(table, file, memory, known, self.sharer, limits, self.counters)
        self.fetcher = Fetcher(self.keeper, self.pace)
        self._forks, self.together = forks(), 0  # how many blocks were read at once, at most

    def end(self) -> None:
        """Fetch nothing more, and share nothing; of a parent's, a forked child has nothing to end."""
        if self._forks != forks():
            return
        self.fetcher.close()
        self.sharer.leave()
