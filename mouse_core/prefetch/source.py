"""Source, the interface through which a loader gets batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.dtypes import RowError, convert
from mouse_core.errors import ConfigError, DataError
from mouse_core.sampling.plan import MASK
from mouse_core.spec import FieldSpec, Spec, replaced_by

if TYPE_CHECKING:
    from mouse_core.ranks import Shard, Uneven

# Number of batches whose window counts are remembered.
_SIZES_KEPT = 256


@runtime_checkable
class Source(Protocol):
    """Interface of an object that returns batches by index. A ``BatchSource`` is a ``Source``; a user's own object is a
    ``Source`` if it has the four members ``spec``, ``fingerprint``, ``__len__`` and ``__getitem__``.

    Batch ``index`` is a pure function of the index: it is the same in any process, for any order of calls, and in
    concurrent threads. If the data of a source grow, create a new source. ``mouse_core.testing.SourceConformance``
    tests this contract.
    """

    @property
    def spec(self) -> Spec:
        """The fields of a batch in order, each with its dtype and the shape of one step."""

    @property
    def fingerprint(self) -> str:
        """A text that identifies the data and all options that determine a batch. If batches change, this text changes
        too.

        A loader accepts only states with the fingerprint of its source.
        """

    def __len__(self) -> int:
        """Return the number of batches in an epoch, at least 1."""

    def __getitem__(self, index: int) -> Any:
        """Return batch ``index`` (an integer of at least 0), ``{field: ndarray [B, S, *shape]}``. After the last batch
        of an epoch, the next index belongs to the next epoch, without end.

        If ``spec.batch_dims`` is 1, fields are ``[B, *shape]`` without an axis of steps, or ``[T, *shape]`` if windows
        are packed.

        The caller owns the arrays: the source never writes to their memory again. A tuple of such dicts is a batch with
        several views.
        """


class _Around:
    """Base class of sources that change the batches of another source, but not the data or the number of batches."""

    source: Source

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the wrapped source. The fingerprint does not depend on delivered dtypes and shards."""
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return repr(self.source)


class RecastSource(_Around):
    """A source that converts the batches of another source to dtypes that a framework supports.

    Args:
        source: The source of the original batches.
        replace_dtypes: Dtypes that the framework lacks, with their replacements.

    Raises:
        ConfigError: A dtype is invalid.
    """

    def __init__(self, source: Source, replace_dtypes: Mapping[Any, npt.DTypeLike]) -> None:
        table = replaced_by(replace_dtypes)
        fields = source.spec
        self.source = source
        self._dtypes = {name: table[np.dtype(one.dtype)] for name, one in fields.items() if one.dtype in table}
        recast = {name: fields[name].replace(dtype=dtype) for name, dtype in self._dtypes.items()}
        self.spec = Spec({**fields, **recast}, fields.alignment, fields.batch_dims)

    def __getitem__(self, index: int) -> Any:
        """Return batch ``index``; raise DataError if a value does not fit."""
        batch = self.source[index]
        return tuple(map(self._recast, batch)) if isinstance(batch, tuple) else self._recast(batch)

    def _recast(self, batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        made = dict(batch)
        for name, dtype in self._dtypes.items():
            try:
                made[name] = convert(made[name], dtype)
            except RowError as error:
                raise DataError(f"field {name!r}, row {error.row} of the batch: {error}") from error
        return made


class ShardSource(_Around):
    """A source that delivers one shard of the batches of another source. Each complete batch is computed, and then
    reduced to the rows of the shard.

    Args:
        source: The source of complete batches, ``[B, ...]`` in every field.
        shard: The shard; see ``BatchSource``.
        uneven: What happens if the windows of a batch cannot be divided evenly among the shards; see ``BatchSource``.

    Raises:
        ConfigError: The shard is invalid, the source is already sharded, or its windows are packed.
    """

    def __init__(self, source: Source, shard: Shard, uneven: Uneven = "refuse") -> None:
        from mouse_core.ranks import check_shard, ranks_of  # loaded on demand

        spec, cut = source.spec, getattr(source, "shard", (0, 1))
        if cut != (0, 1):
            raise ConfigError(f"shard: expected a source without a shard, found shard {cut} of {source!r:.80}")
        if spec.is_packed:
            raise ConfigError("shard: expected windows of equal length, found a source of packed windows")
        self.ranks, self.uneven = ranks_of(shard), uneven
        chosen = shard if self.ranks is None else self.ranks.shard
        self.shard = check_shard(chosen, 0, uneven)  # 0: the batch size is unknown
        self.masks_shares_only = uneven == "pad" and MASK not in spec
        masks = {MASK: FieldSpec(MASK, np.dtype(np.bool_), ())} if self.masks_shares_only else {}
        self.spec = Spec({**spec, **masks}, spec.alignment, spec.batch_dims)
        self.source = source
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._lock = ProcessLock()

    def __len__(self) -> int:
        from mouse_core.ranks import check_sharded_once

        check_sharded_once(self.shard)
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """Return this shard's rows of batch ``index``; raise ConfigError if the shards do not divide the batch."""
        whole = self.source[index]
        views = whole if isinstance(whole, tuple) else (whole,)
        size = len(next(iter(views[0].values())))
        if size % self.shard[1]:
            from mouse_core.ranks import check_even

            check_even(self.shard, self.uneven, index, size)
        with self._lock:
            self._sizes[index] = size
            if len(self._sizes) > _SIZES_KEPT:
                self._sizes.popitem(last=False)
        cut = tuple(self._cut(view, size) for view in views)
        return cut if isinstance(whole, tuple) else cut[0]

    def own_rows(self, index: int) -> range:
        """Return the range of this shard's rows in batch ``index``, without a padding row."""
        with self._lock:
            size = self._sizes.get(index)
        if size is None:
            whole = self.source[index]
            size = len(next(iter((whole[0] if isinstance(whole, tuple) else whole).values())))
        return self._own(size)

    def with_options(self, *, shard: Shard) -> ShardSource:
        """Return a source of the same batches with other options, such as another shard."""
        return ShardSource(self.source, shard, self.uneven)

    def _own(self, size: int) -> range:
        rank, count = self.shard
        return range(size * rank // count, size * (rank + 1) // count)

    def _cut(self, view: Mapping[str, npt.NDArray[Any]], size: int) -> dict[str, npt.NDArray[Any]]:
        """Return this shard's rows of a view in new memory.

        Example: of 8 windows, three shards get the windows 0..1, 2..4 and 5..7. With ``uneven="pad"``, each shard gets
        3 windows: the first shard gets 0..2, and its window 2 is masked.
        """
        own = self._own(size)
        end = own.start - -size // self.shard[1] if self.uneven == "pad" else own.stop
        batch = {name: np.array(values[own.start : end]) for name, values in view.items()}
        if self.masks_shares_only:
            steps = next(iter(view.values())).shape[1 : self.spec.batch_dims]
            batch[MASK] = np.ones((end - own.start, *steps), np.bool_)
        if self.uneven == "pad":
            batch[MASK][len(own) :] = 0
        return batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r}, shard={self.shard})"


def checked_source(source: Any) -> Source:
    """Check that ``source`` implements ``Source``, and return it.

    Raises:
        ConfigError: A member of ``Source`` is missing or has a wrong type.
    """
    if not isinstance(source, Source):
        raise ConfigError(
            "store: expected a DatasetStore, a Snapshot, a replay buffer, or a source with spec, fingerprint, a length "
            f"and batches by index, found {type(source).__name__}"
        )
    if not isinstance(source.spec, Spec):
        raise ConfigError(f"source: expected a mouse_core.Spec as spec, found {source.spec!r:.80}")
    if not isinstance(source.fingerprint, str):
        raise ConfigError(f"source: expected a text as fingerprint, found {source.fingerprint!r:.80}")
    if len(source) < 1:
        raise ConfigError("source: expected batches, found a length of 0")
    return source
