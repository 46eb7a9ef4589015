"""Open data for a viewer: stores, sources of batches, and recorded data of any format, in place if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._base.locks import ProcessLock
from mouse_core.about.dataset import read_about
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError, MouseError
from mouse_core.files.arrow import is_stream, mapped
from mouse_core.files.reading import reading
from mouse_core.formats.base import RowStream
from mouse_core.formats.sources import stream_of
from mouse_core.remote.clients import is_url
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.disk.manifest import looks_like_store
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store
from mouse_core.view._inspecting import Inspection
from mouse_core.view.rows.counting import EpisodeList


@contextmanager
def opened_store(source: str, *, progress: bool = False, **options: Any) -> Iterator[DatasetStore]:
    """Recorded data as a store, for as long as it is needed.

    Of a store in a folder files are not held against their digests, for which all of each would be read, and rows that
    come are seen. Parquet is read through its address, LeRobotDatasets with their videos in place. What cannot be read
    in place is converted into a temporary folder.

    Args:
        source: As ``bench.opening.opened`` takes it.
        progress: Whether a bar shows how far a conversion is.
        **options: As ``formats.open`` takes them.

    Raises:
        ConfigError: Nothing that can be opened.
        DataError: The data are damaged.
    """
    found = None if is_url(source) else _in_place(Path(source), options)
    if found is not None:
        yield found
        return
    from mouse_core.bench.opening import open_data

    with open_data(source, progress=progress, **options) as converted:
        store = converted.to_store()
        assert isinstance(store, DatasetStore)  # of one source
        yield store


def _in_place(path: Path, options: dict[str, Any]) -> DatasetStore | None:
    """The store of what lies on this machine; None where it is to be opened in another way."""
    as_store = {"alignment": options.get("alignment"), "image_roots": options.get("image_roots", ())}
    name = options.get("format")
    if not path.exists() or options.get("splits"):
        return None
    if name in (None, "store") and path.is_dir() and looks_like_store(path):
        return DatasetStore.open(path, verify=False, **as_store)
    if name in (None, "rows") and _is_parquet(path):
        try:
            return DatasetStore.open(path.resolve().as_uri(), **as_store)
        except (MouseError, ImportError):
            return None  # read in the common way, which says what is wrong
    if name in (None, "rows") and path.is_file() and path.suffix in (".arrow", ".feather") and not is_stream(path):
        return _mapped(path, as_store)
    if name in (None, "lerobot") and (path / "meta" / "info.json").is_file():
        from mouse_core import formats

        stream = formats.open(path, **options)
        return stream.to_store() if stream.opened is not None else None
    return None


def _mapped(path: Path, as_store: dict[str, Any]) -> DatasetStore | None:
    """The store of a file in Arrow's file format, mapped; None where its values are compressed."""
    with reading(path), mapped(path) as (source, _):
        reader = pa.ipc.open_file(source)
        before = pa.total_allocated_bytes()
        first = reader.get_batch(0) if reader.num_record_batches else None
        if first is not None and pa.total_allocated_bytes() - before > first.nbytes // 2:
            return None
        table = reader.read_all()
    said = {"alignment": read_about(table, label=str(path)).alignment or "arrived"}
    return DatasetStore(**as_store | ({} if as_store["alignment"] else said)).from_dataset(table)


def _is_parquet(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".parquet"
    return any(path.glob("*.parquet")) and not any(one.is_dir() or one.suffix == ".arrow" for one in path.iterdir())


@dataclass(eq=False)
class Shown:
    """A store that is shown.

    Args:
        name: What it is called, by itself among all that are shown.
        store: It; None for a source of batches, whose snapshot does not change.
        batches: The source of batches to show beside its episodes, as it was given; None: those that the page asks for.
        fixed: The snapshot of ``batches``.
        stream: Gives all rows to those who inspect them; None: the store does, where there is one.
        ignore: Codes of findings of which nothing is said.
    """

    name: str
    store: Store | None
    batches: BatchSource | None = None
    fixed: Snapshot | None = None
    stream: Callable[[], RowStream] | None = None
    ignore: Sequence[str] = ()
    lock: ProcessLock = field(default_factory=ProcessLock, repr=False)
    generation: int = 0
    made: dict[Any, BatchSource] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        tasks = {} if self.store is None else self.store.about.tasks
        self.episodes = EpisodeList(self._now(), tasks)
        rows = partial(stream_of, self.store) if self.store is not None else None
        self.inspection = None if rows is None else Inspection(self.stream or rows, self.ignore)

    def _now(self) -> Snapshot:
        if self.store is not None:
            return self.store.snapshot()
        assert self.fixed is not None
        return self.fixed

    def refresh(self) -> None:
        """Take in rows that came; where those that were there are others now, what was counted begins anew."""
        snapshot = self._now()
        with self.lock:
            if snapshot is not self.episodes.snapshot:
                self.made.clear()
                if not self.episodes.take(snapshot):
                    self.generation += 1
                    self.episodes.mark(None)
                    if self.inspection is not None:
                        self.inspection.forget()

    @property
    def snapshot(self) -> Snapshot:
        """The rows of now."""
        return self.episodes.snapshot


def rows_of(source: str, store: DatasetStore, **options: Any) -> RowStream:
    """The rows of recorded data as ``mouse inspect`` reads them, with all that their format says of them.

    Args:
        source: As ``opened_store`` takes it.
        store: What that gave.
        **options: As ``formats.open`` takes them.
    """
    from mouse_core import formats

    try:
        return formats.open(source, **options)
    except MouseError:
        return stream_of(store)  # a dataset of the Hub, which has no path


def shown_of(
    given: Iterable[tuple[str, Any]], streams: Sequence[Callable[[], RowStream]] = (), *, ignore: Sequence[str] = ()
) -> list[Shown]:
    """Stores, or sources of batches, as they are shown, each under a name of its own.

    Args:
        given: Name and store, or source of batches.
        streams: What gives the rows of each to those who inspect them; by default the stores do.
        ignore: Codes of findings of which nothing is said.

    Raises:
        ConfigError: None is given, or one is neither.
    """
    found: list[Shown] = []
    for place, (name, one) in enumerate(given):
        name, number = name or "store", 2
        while name in {other.name for other in found}:
            name, number = f"{name.rsplit(' (', 1)[0]} ({number})", number + 1
        if isinstance(one, BatchSource):
            found.append(Shown(name, None, one, one.snapshot))
        elif isinstance(one, Store):
            found.append(Shown(name, one, stream=streams[place] if place < len(streams) else None, ignore=ignore))
        else:
            raise ConfigError(f"view: expected a store or a BatchSource, found {type(one).__name__}")
    if not found:
        raise ConfigError("view: expected a store or several, found none")
    return found
