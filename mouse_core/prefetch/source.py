"""Source: what a loader needs to know of where batches come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, convert
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import Spec, replaced_by


@runtime_checkable
class Source(Protocol):
    """Batches by number. A ``BatchSource`` is one, and so is any object of yours with these four.

    Batch ``index`` is a pure function of the index: the same whoever asks, whenever, in any order, from several threads
    at once. A source that has one batch only knows it under many numbers, and one whose data grow is a new source.
    ``mouse_core.testing.SourceConformance`` holds that as tests.
    """

    @property
    def spec(self) -> Spec:
        """The fields of a batch, in their order, with their dtypes and the shapes of a step."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that differs where batches do: of the data, and of all that decides about a batch.

        A loader's state is taken over by a loader over the same fingerprint alone.
        """
        ...

    def __len__(self) -> int:
        """Batches in an epoch, at least one."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Batch ``index``, an integer from 0, across epochs without end: ``{field: ndarray [B, S, *shape]}``.

        Where ``spec.batch_dims`` is 1 there are no steps: ``[B, *shape]``; or windows are packed: ``[T, *shape]``.

        Its arrays are the caller's, in memory that is never written to again. A tuple of such dicts is a batch in
        several views.
        """
        ...


class RecastSource:
    """A source in the dtypes that a framework can hold.

    Args:
        source: Where batches come from.
        replace_dtypes: Dtypes that the framework lacks, and what is delivered instead.

    Raises:
        ConfigError: Dtypes that are none.
    """

    def __init__(self, source: Source, replace_dtypes: Mapping[Any, npt.DTypeLike]) -> None:
        table = replaced_by(replace_dtypes)
        fields = source.spec
        self._source = source
        self._dtypes = {name: table[np.dtype(one.dtype)] for name, one in fields.items() if one.dtype in table}
        recast = {name: fields[name].replace(dtype=dtype) for name, dtype in self._dtypes.items()}
        self.spec = Spec({**fields, **recast}, fields.alignment, fields.batch_dims)

    @property
    def fingerprint(self) -> str:
        """That of the source: delivered dtypes are no part of it."""
        return self._source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        """Batch ``index``; DataError where a value does not fit."""
        batch = self._source[index]
        return tuple(map(self._recast, batch)) if isinstance(batch, tuple) else self._recast(batch)

    def _recast(self, batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        made = dict(batch)
        for name, dtype in self._dtypes.items():
            try:
                made[name] = convert(made[name], dtype)
            except RowError as error:
                raise DataError(f"field {name!r}, row {error.row} of the batch: {error}") from error
        return made

    def __repr__(self) -> str:
        return repr(self._source)


def checked_source(source: Any) -> Source:
    """A source, or ConfigError where it is none.

    Raises:
        ConfigError: A part of ``Source`` is missing, or is not what it should be.
    """
    if not isinstance(source, Source):
        raise ConfigError(
            "store: expected a DatasetStore, a Snapshot, a replay buffer, or a source with spec, fingerprint, a length "
            f"and batches by number, found {type(source).__name__}"
        )
    if not isinstance(source.spec, Spec):
        raise ConfigError(f"source: expected a mouse_core.Spec as spec, found {source.spec!r:.80}")
    if not isinstance(source.fingerprint, str):
        raise ConfigError(f"source: expected a text as fingerprint, found {source.fingerprint!r:.80}")
    if len(source) < 1:
        raise ConfigError("source: expected batches, found a length of 0")
    return source
