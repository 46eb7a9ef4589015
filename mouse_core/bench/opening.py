"""Opens recorded data of any format by path or address, or a dataset of the Hub by name."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mouse_core import formats
from mouse_core.errors import ConfigError, MouseError
from mouse_core.formats.converting import convert
from mouse_core.images.files import check_roots
from mouse_core.inspect.layout import costs, layout_of
from mouse_core.metadata import joined, read_metadata
from mouse_core.remote.clients import is_url, public_url
from mouse_core.spec import check_choice
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.views import Store

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NETWORK = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")


@dataclass(frozen=True)
class Opened:
    """Recorded data that were opened.

    Args:
        name: The name or path that the caller passed.
        to_store: Returns the rows as a store, by reference.
        seconds: Seconds for opening the data.
        costs: The costs of the files' layout, in sentences.
    """

    name: str
    to_store: Callable[[], Store] = field(repr=False)
    seconds: float
    costs: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """The number of steps."""
        return len(self.to_store())


def mixed(parts: Sequence[Opened], weights: Sequence[float] | None = None) -> Opened:
    """Return several recordings as one: a mixture of their stores, which are named "0", "1" and so on.

    Args:
        parts: The recordings.
        weights: The relative frequency of windows of each recording; None: all are equal.

    Raises:
        ConfigError: An error of ``Mixture``.
    """
    from mouse_core.mixtures import Mixture

    store = Mixture([part.to_store() for part in parts], weights)
    costs = [sentence for part in parts for sentence in part.costs]
    return Opened(" + ".join(part.name for part in parts), lambda: store, sum(part.seconds for part in parts), costs)


@contextmanager
def open_data(
    path_or_name: str, splits: Sequence[str] | None = None, *, progress: bool = False, **options: Any
) -> Iterator[Opened]:
    """Open recorded data as a store of mapped files, within a ``with`` block.

    Data that a store cannot read in place are converted into a temporary folder.

    Args:
        path_or_name: A file, folder or address of any format; an id as for ``formats.open``; or ``namespace/name`` of a
            dataset on the Hub, if it cannot be a path.
        splits: Names of the splits to read; by default all.
        progress: Whether a bar shows the progress of a conversion.
        **options: The options of ``formats.open``.

    Raises:
        ConfigError: The data cannot be opened, or a split is missing.
        DataError: The data are damaged.
    """
    name, source, costs_of_layout = public_url(path_or_name), path_or_name, list[str]()
    if not is_url(path_or_name):
        place, known = formats.opening.place(path_or_name, options.get("format"))
        name, source, options = path_or_name, place, options | {"format": known}
        if not Path(source).exists():
            yield _from_hub(path_or_name, splits, check_roots(options.get("image_roots", ()), where="--image-root"))
            return
    with tempfile.TemporaryDirectory(prefix="mouse-") as folder:
        began = time.perf_counter()
        stream = formats.open(source, splits=splits, **options)
        if not is_url(source):
            costs_of_layout = [sentence for _, sentence in costs(layout_of(stream), source)]
        if stream.mapped is None and stream.opened is None:
            convert(stream, Path(folder) / "rows", progress=progress)
            began = time.perf_counter()
            stream = formats.open(Path(folder) / "rows", image_roots=options.get("image_roots", ()))
        store = stream.to_store()
        # Opening in place a second time could read all files again, or send requests to a server.
        to_store = stream.to_store if stream.opened is None else lambda: store
        yield Opened(name, to_store, time.perf_counter() - began, costs_of_layout)


def _from_hub(name: str, splits: Sequence[str] | None, image_roots: Sequence[str]) -> Opened:
    # A mistyped path causes no network request.
    if not _HUB_NAME.fullmatch(name) or Path(name).parent.exists() or Path(name).suffix in (".arrow", ".parquet"):
        raise ConfigError(
            f"expected a file or folder, or namespace/name of a dataset on the Hub, found no file {name!r}"
        )
    import datasets

    began = time.perf_counter()
    found = refusals_as_errors(datasets.load_dataset, name)
    parts = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    for split in splits or ():
        check_choice("split", split, parts)
    parts = {split: parts[split] for split in splits} if splits else parts
    metadata = joined((f"split {split!r}", read_metadata(part)) for split, part in parts.items())

    def to_store() -> Store:
        return DatasetStore(alignment=metadata.alignment or "arrived", image_roots=image_roots).from_dataset(parts)

    return Opened(name, to_store, time.perf_counter() - began)


def refusals_as_errors(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the Hub's client, and convert its errors to errors of one line.

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
