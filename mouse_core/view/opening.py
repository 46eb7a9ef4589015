"""Opens the data that a viewer shows: stores, sources of batches, and data of any format; sorts and filters the list of
their episodes. Data are converted only if necessary.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import formats
from mouse_core._base.locks import ProcessLock
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError, MouseError
from mouse_core.files.arrow import is_stream, mapped
from mouse_core.files.reading import reading
from mouse_core.formats.converting import convert
from mouse_core.images.files import check_roots
from mouse_core.metadata import joined, read_metadata
from mouse_core.remote.clients import is_url
from mouse_core.spec import check_choice
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.disk.folder import looks_like_store
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """The filter and the order of a list of episodes.

    Args:
        sort: The column by which episodes are sorted.
        down: Whether the largest values come first.
        low, high: Smallest and largest allowed value by column, as numbers or texts; for ``done``, the label of a code
            is also accepted. An episode that has no value in a filtered column does not pass the filter.
        has: A dict from column to a text that the column's value must contain; case is ignored. A number is searched in
            its shortest text form.
    """

    sort: str = "episode"
    down: bool = False
    low: Mapping[str, float | str] = field(default_factory=dict)
    high: Mapping[str, float | str] = field(default_factory=dict)
    has: Mapping[str, str] = field(default_factory=dict)


class EpisodeList:
    """The episodes of a store as columns for sorting and filtering.

    Args:
        table: The episodes, as ``Store.episodes`` returns them. Columns of lists, such as the returns of vector
            rewards, are left out.
        labels: The labels of done codes.
    """

    def __init__(self, table: pa.Table, labels: Sequence[str] = ()) -> None:
        self.table, self._labels = table, list(labels)
        self.names = [one.name for one in table.schema if not pa.types.is_nested(one.type)]
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._last: tuple[Query, Int64s] | None = None  # a page that is scrolled repeats its query

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a column: integers, or float64 with NaN for missing values, ``[n]``; or texts ``[n]``,
        with None for missing values.

        Raises:
            ConfigError: The column does not exist.
        """
        check_choice("column", name, self.names)
        if name not in self._columns:
            self._columns[name] = _as_array(self.table.column(name).combine_chunks())
        return self._columns[name]

    def order(self, query: Query) -> Int64s:
        """Return the indices of the episodes that pass the filter of a query, in the query's order.

        Episodes without a value are last.

        Raises:
            ConfigError: A column does not exist, or a limit for a numeric column is not a number.
        """
        last = self._last
        if last is not None and last[0] == query:
            return last[1]
        kept = np.ones(len(self), np.bool_)
        for name, text in query.has.items():
            kept &= _contains(self.values(name), text)
        for limits, meets in ((query.low, np.greater_equal), (query.high, np.less_equal)):
            for name, limit in limits.items():
                values = self.values(name)
                if values.dtype == object:
                    shown = np.array([shortest(value) for value in values.tolist()], np.str_)
                    kept &= (shown != "") & meets(shown, str(limit))
                else:
                    kept &= meets(values, self._limit(name, limit))
        (found,) = np.nonzero(kept)
        order = _sorted(found, self.values(query.sort), query.down)
        self._last = query, order
        return order

    def _limit(self, name: str, given: float | str) -> float:
        labels = self._labels if name == "done" else []
        try:
            return labels.index(str(given)) if given in labels else float(given)
        except ValueError:
            wanted = f"a number or one of {labels}" if labels else "a number"
            raise ConfigError(f"{name}: expected {wanted} as a limit, found {given!r:.80}") from None


def _as_array(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.array([None if one is None else str(one) for one in column.to_pylist()], object)


def _contains(values: npt.NDArray[Any], text: str) -> npt.NDArray[np.bool_]:
    wanted = text.casefold()
    shown = {value: wanted in shortest(value).casefold() for value in set(values.tolist())}
    return np.array([shown[value] for value in values.tolist()], np.bool_)


def shortest(value: Any) -> str:
    """Return a value as text: integers without a decimal point, missing values as an empty text."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _sorted(found: Int64s, values: npt.NDArray[Any], down: bool) -> Int64s:
    chosen = values[found]
    if chosen.dtype == object:
        missing = np.array([value is None for value in chosen.tolist()], np.bool_)
        texts = np.array(["" if value is None else value for value in chosen.tolist()], np.str_)
        _, ranks = np.unique(texts, return_inverse=True)
    else:
        missing = np.isnan(chosen) if chosen.dtype.kind == "f" else np.zeros(len(chosen), np.bool_)
        ranks = np.where(missing, 0, chosen)
    # Stable in both directions: equal episodes stay in the order of the store.
    order = np.lexsort((found, -ranks if down else ranks, missing))
    result: Int64s = found[order]
    return result


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NETWORK = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")


@contextmanager
def opened_store(source: str, *, progress: bool = False, **options: Any) -> Iterator[DatasetStore]:
    """Context manager that opens recorded data as a store.

    The files of a store in a folder are not compared with their digests, because this would read every file completely.
    Rows that are added to the store later become visible. The videos of LeRobotDatasets are read in place. Other data
    that cannot be read in place are converted into a temporary folder, or read into memory if they have videos.

    Args:
        source: A file, folder or address of any format; an id as for ``formats.open``; or the name ``namespace/name``
            of a dataset on the Hub, if no such path exists.
        progress: Whether a bar shows the progress of a conversion.
        **options: The options of ``formats.open``.

    Raises:
        ConfigError: The source cannot be opened, or a split is missing.
        DataError: The data are damaged.
    """
    in_place = None if is_url(source) else _open_in_place(Path(source), options)
    if in_place is not None:
        yield in_place
        return
    place = source
    if not is_url(source):
        place, options["format"] = formats.opening.place(source, options.get("format"))
        if not Path(place).exists():
            roots = check_roots(options.get("image_roots", ()), where="--image-root")
            yield _from_hub(source, options.get("splits"), roots)
            return
    with tempfile.TemporaryDirectory(prefix="mouse-") as folder:
        stream = formats.open(place, **options)
        # A conversion could copy the videos to another file system.
        if stream.mapped is None and stream.opened is None and not stream.metadata.videos:
            convert(stream, Path(folder) / "rows", progress=progress)
            stream = formats.open(Path(folder) / "rows", image_roots=options.get("image_roots", ()))
        yield stream.to_store()


def _from_hub(name: str, splits: Sequence[str] | None, image_roots: Sequence[str]) -> DatasetStore:
    # A mistyped path causes no network request.
    if not _HUB_NAME.fullmatch(name) or Path(name).parent.exists() or Path(name).suffix in (".arrow", ".parquet"):
        raise ConfigError(
            f"expected a file or folder, or namespace/name of a dataset on the Hub, found no file {name!r}"
        )
    import datasets

    found = refusals_as_errors(datasets.load_dataset, name)
    parts = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    for split in splits or ():
        check_choice("split", split, parts)
    parts = {split: parts[split] for split in splits} if splits else parts
    metadata = joined((f"split {split!r}", read_metadata(part)) for split, part in parts.items())
    return DatasetStore(alignment=metadata.alignment or "arrived", image_roots=image_roots).from_dataset(parts)


def refusals_as_errors(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the Hub's client, and convert its errors to a ConfigError with a single line.

    Raises:
        ConfigError: The Hub reports an error, or cannot be reached.
    """
    try:
        return call(*arguments, **options)
    except MouseError:
        raise
    except Exception as error:
        # Without a connection, the Hub's client raises errors of its HTTP library.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _NETWORK:
            raise
        shown = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"the Hub: {shown}") from error


def _open_in_place(path: Path, options: dict[str, Any]) -> DatasetStore | None:
    """Open data on this machine without a conversion; return None if the format needs a conversion."""
    as_store = {"alignment": options.get("alignment"), "image_roots": options.get("image_roots", ())}
    name = options.get("format")
    if not path.exists() or options.get("splits"):
        return None
    if name in (None, "store") and path.is_dir() and looks_like_store(path):
        return DatasetStore.open(path, verify=False, **as_store)
    if name in (None, "rows") and path.is_file() and path.suffix in (".arrow", ".feather") and not is_stream(path):
        return _open_mapped(path, as_store)
    return None


def _open_mapped(path: Path, as_store: dict[str, Any]) -> DatasetStore | None:
    """Open a file in Arrow's file format, memory-mapped; return None if its values are compressed."""
    with reading(path), mapped(path) as (source, _):
        reader = pa.ipc.open_file(source)
        # A batch of a compressed file is decompressed to new memory; a batch of any other file is a view of the map.
        allocated = pa.total_allocated_bytes()
        first = reader.get_batch(0) if reader.num_record_batches else None
        if first is not None and pa.total_allocated_bytes() - allocated > first.nbytes // 2:
            return None
        table = reader.read_all()
    stated = {"alignment": read_metadata(table, label=str(path)).alignment or "arrived"}
    return DatasetStore(**as_store | ({} if as_store["alignment"] else stated)).from_dataset(table)


class FixedStore(Store):
    """A store that always has the rows of one snapshot.

    Args:
        rows: The snapshot.
    """

    def __init__(self, rows: Snapshot) -> None:
        self._rows = rows

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """Return the snapshot."""
        return self._rows


@dataclass(eq=False)
class Shown:
    """A store, or a source of batches, that a viewer shows.

    Args:
        name: A unique name among the shown stores.
        store: The store; for a source of batches, a store with its snapshot.
        batches: The source of batches; None for a store.
        lock: Lock that is held while the rows are refreshed.
        generation: How many times rows that were already shown have been replaced.
    """

    name: str
    store: Store
    batches: BatchSource | None = None
    lock: ProcessLock = field(default_factory=ProcessLock, repr=False)
    generation: int = 0

    def __post_init__(self) -> None:
        self.snapshot = self.store.snapshot()
        self._listed: EpisodeList | None = None

    def refresh(self) -> None:
        """Include new rows."""
        snapshot = self.store.snapshot()
        with self.lock:
            before = self.snapshot
            if snapshot is not before:
                grown = snapshot.config == before.config and (snapshot.begins_as(before) or not before.num_rows)
                self.generation += not grown
                self.snapshot = snapshot

    def listed(self) -> EpisodeList:
        """Include new rows, and return the episodes."""
        table = self.store.episodes
        self.refresh()  # afterwards, so that the snapshot has all rows of the episodes
        with self.lock:
            if self._listed is None or self._listed.table is not table:
                done = self.snapshot.config.fields.get("done")
                self._listed = EpisodeList(table, () if done is None else done.labels)
            return self._listed


def shown_of(given: Iterable[tuple[str, Any]]) -> list[Shown]:
    """Prepare stores and sources of batches for a viewer. If a name is repeated, a number is added, as in "store (2)".

    Args:
        given: Pairs of a name and a store or source of batches.

    Raises:
        ConfigError: `given` is empty, or has an object that is neither a store nor a source of batches.
    """
    shown: list[Shown] = []
    for name, source in given:
        name, number = name or "store", 2
        while name in {other.name for other in shown}:
            name, number = f"{name.rsplit(' (', 1)[0]} ({number})", number + 1
        if isinstance(source, BatchSource):
            shown.append(Shown(name, FixedStore(source.snapshot), source))
        elif isinstance(source, Store):
            # A mixture has no table of episodes, but each of its snapshots has.
            shown.append(Shown(name, FixedStore(source.snapshot()) if source.has_shares else source))
        else:
            raise ConfigError(f"view: expected a store or a BatchSource, found {type(source).__name__}")
    if not shown:
        raise ConfigError("view: expected one or more stores, found none")
    return shown
