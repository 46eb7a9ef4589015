"""Opening what a command works on: recorded data of any format by their path, or a dataset of the Hub by its name."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mouse_core import formats
from mouse_core.errors import ConfigError, MouseError
from mouse_core.formats.converting import convert
from mouse_core.images.files import check_roots
from mouse_core.inspect.layout import costs, layout_of
from mouse_core.metadata import joined, read_metadata
from mouse_core.remote.clients import is_url, public_url
from mouse_core.spec import Alignment, check_choice
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.views import Store

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NETWORK = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")


@dataclass(frozen=True)
class Opened:
    """Recorded data that were opened.

    Args:
        name: As they were asked for.
        parts: Datasets by name, mapped from files.
        seconds: What opening took.
        alignment: Which transition a row's action, reward and done belong to.
        image_roots: Folders in which images may lie that rows name by path.
        costs: What the layout of the files costs, in sentences.
        folder: That of a store of many small record batches, which is read as it lies.
        store: The rows of data that are no datasets, as those elsewhere or with videos, or of several.
    """

    name: str
    parts: Mapping[str, Any]
    seconds: float
    alignment: Alignment = "arrived"
    image_roots: Sequence[str] = ()
    costs: Sequence[str] = ()
    folder: str | None = None
    store: Store | None = None

    @property
    def rows(self) -> int:
        """Steps in all."""
        if self.store is not None or self.folder is not None:
            return len(self.to_store())
        return sum(len(part) for part in self.parts.values())

    def to_store(self) -> Store:
        """A store of all parts, by reference."""
        if self.store is not None:
            return self.store
        if self.folder is not None:
            return DatasetStore.open(self.folder, image_roots=self.image_roots)
        return DatasetStore(alignment=self.alignment, image_roots=self.image_roots).from_dataset(dict(self.parts))


def mixed(parts: Sequence[Opened], weights: Sequence[float] | None = None) -> Opened:
    """Return several recordings as one: a mixture of their stores, which are named "0", "1" and so on.

    Args:
        parts: The recordings.
        weights: How often windows are of each, by their order; None: equally often.

    Raises:
        ConfigError: As ``Mixture``.
    """
    from mouse_core.mixtures import Mixture

    store = Mixture([part.to_store() for part in parts], weights)
    costs = [sentence for part in parts for sentence in part.costs]
    seconds = sum(part.seconds for part in parts)
    return Opened(" + ".join(part.name for part in parts), {}, seconds, parts[0].alignment, costs=costs, store=store)


@contextmanager
def open_data(
    path_or_name: str, splits: Sequence[str] | None = None, *, progress: bool = False, **options: Any
) -> Iterator[Opened]:
    """Recorded data as datasets that are mapped from files, for as long as they are needed.

    A LeRobotDataset, and TFDS in TFRecord files, are read where they lie. What else does not lie on disk as
    ``datasets`` writes it is converted into a temporary folder.

    Args:
        path_or_name: A file or folder of any format, or ``namespace/name`` of a dataset on the Hub, which is looked for
            only where no such path can be meant, or an id as ``formats.open`` takes it.
        splits: Names of the splits to take; by default all.
        progress: Whether a bar shows how far a conversion is.
        **options: As ``formats.open`` takes them.

    Raises:
        ConfigError: Nothing that can be opened, or a split that is not there.
        DataError: The data are damaged.
    """
    if is_url(path_or_name):
        began = time.perf_counter()
        store = formats.open(path_or_name, splits=splits, **options).to_store()
        yield Opened(public_url(path_or_name), {}, time.perf_counter() - began, store.alignment, store=store)
        return
    place, known = formats.opening.place(path_or_name, options.get("format"))
    path, options = Path(place), options | {"format": known}
    if not path.exists():
        yield _from_hub(path_or_name, splits, check_roots(options.get("image_roots", ()), where="--image-root"))
        return
    began = time.perf_counter()
    stream = formats.open(path, splits=splits, **options)
    layout = layout_of(stream)
    said = [sentence for _, sentence in costs(layout, str(path))]
    if layout is not None and layout.kind == "store" and layout.batches > len(os.listdir(path / "segments")):
        # As a table it would take more memory than it does.
        seconds = time.perf_counter() - began
        yield Opened(path_or_name, {}, seconds, stream.alignment, stream.image_folders(), said, str(path))
        return
    if stream.mapped is None and stream.opened is not None:
        store = stream.to_store()  # frames and records are read where they lie, as in training
        yield Opened(path_or_name, {}, time.perf_counter() - began, store.alignment, costs=said, store=store)
        return
    with tempfile.TemporaryDirectory(prefix="mouse-") as folder:
        if stream.mapped is None:
            convert(stream, Path(folder) / "rows", progress=progress)
            began = time.perf_counter()
            stream = formats.open(Path(folder) / "rows", image_roots=options.get("image_roots", ()))
        assert stream.mapped is not None  # that is what convert writes
        rows = stream.mapped()
        seconds = time.perf_counter() - began
        yield Opened(path_or_name, {"rows": rows}, seconds, stream.alignment, stream.image_folders(), said)


def _from_hub(name: str, splits: Sequence[str] | None, image_roots: Sequence[str]) -> Opened:
    # A path that was mistyped is no reason to ask the network for it.
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
    said = joined((f"split {split!r}", read_metadata(part)) for split, part in parts.items())
    return Opened(name, parts, time.perf_counter() - began, said.alignment or "arrived", image_roots)


def refusals_as_errors(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call, and turn what the Hub or the way to it refuses into an error of one line.

    Raises:
        ConfigError: It refuses, or cannot be reached.
    """
    try:
        return call(*arguments, **options)
    except MouseError:
        raise
    except Exception as error:
        # The Hub's client lets through what the library below it raises when there is no connection.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _NETWORK:
            raise
        shown = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"the Hub: {shown}") from error
