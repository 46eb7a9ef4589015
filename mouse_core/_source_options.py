"""What a batch source is asked for, checked: fields, dtypes, numbers and shards."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._binding import FieldReader
from mouse_core._mask import MASK, MaskReader
from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.sampling.episodes import Boundary, Weighting, sampler_of
from mouse_core.sampling.plan import Sampler
from mouse_core.snapshot import Snapshot
from mouse_core.spec import check_dtype

# Windows that are located together take about so many bytes.
_PLANNED_BYTES = 11 << 18


def choose_sampler(
    sampling: str | Sampler,
    sequence_length: int,
    batch_size: int,
    drop_last: bool,
    boundary: Boundary,
    weighting: Weighting,
    pad: bool | float | None,
) -> Sampler:
    """The sampler of a name, or the one that is given; see ``BatchSource``.

    Raises:
        ConfigError: An unknown name, or options that belong to names.
    """
    if isinstance(sampling, str):
        return sampler_of(
            sampling,
            sequence_length=check_integer("sequence_length", sequence_length, lowest=1),
            batch_size=check_integer("batch_size", batch_size, lowest=1),
            drop_last=drop_last,
            boundary=boundary,
            weighting=weighting,
            pad=pad,
        )
    if not isinstance(sampling, Sampler):
        raise ConfigError(f"sampling: expected a name or a Sampler, found {sampling!r}")
    if (boundary, weighting, pad) != ("stream", "step", None):
        raise ConfigError(f"boundary, weighting, pad: expected them with the name of a sampling, found {sampling!r}")
    return sampling


def planned_windows(readers: Mapping[str, FieldReader], length: int) -> int:
    """How many windows to locate together: the hundred array operations it takes cost nearly the same for few.

    A window takes 32 bytes, and 24 for each field; 8 where it is as short as a number.
    """
    numbers = sum(length == 1 and not reader.spec.shape for reader in readers.values())
    return max(1024, _PLANNED_BYTES // (32 + 24 * len(readers) - 16 * numbers))


def as_names(names: Sequence[str]) -> tuple[str, ...]:
    """Several names, or a single one."""
    return (names,) if isinstance(names, str) else tuple(names)


def choose_readers(
    snapshot: Snapshot, fields: tuple[str, ...] | None, required: tuple[str, ...], *, masked: bool
) -> dict[str, FieldReader]:
    """Readers of the fields that were asked for, and of ``mask``, where windows may have fewer steps.

    Raises:
        MissingFieldError: A field that is named and not there.
        ConfigError: A stored field of the name that the mask has.
    """
    readers = dict(snapshot.readers)
    if masked:
        if MASK in readers:
            raise ConfigError(f"boundary: expected a store without a field {MASK!r}, which batches get, found one")
        readers[MASK] = MaskReader()
    for option, names in (("required_fields", required), ("fields", fields or ())):
        for name in names:
            if name not in readers:
                known = snapshot.config.fields.get(name)
                column = "" if known is None else f" (from a column {known.column!r} that is not null throughout)"
                raise MissingFieldError(f"{option}: expected {name!r}{column}, found {list(readers)}")
    return {name: reader for name, reader in readers.items() if fields is None or name in (*fields, MASK)}


def delivered_dtypes(
    readers: Mapping[str, FieldReader],
    dtypes: Mapping[str, npt.DTypeLike],
    narrow: Mapping[Any, npt.DTypeLike],
) -> dict[str, np.dtype[np.generic]]:
    """The dtypes that fields are delivered in; see ``BatchSource``."""
    for name in dtypes:
        if name not in readers:
            raise MissingFieldError(f"dtypes: expected fields among {list(readers)}, found {name!r}")
    table = {check_dtype(wide, where="narrow"): check_dtype(less, where="narrow") for wide, less in narrow.items()}
    chosen = {
        name: check_dtype(dtypes[name], where=f"dtypes[{name!r}]") if name in dtypes else reader.spec.dtype
        for name, reader in readers.items()
    }
    delivered = {name: table.get(dtype, dtype) for name, dtype in chosen.items()}
    for name, dtype in delivered.items():
        readers[name].check_fills(dtype)
    return delivered


def check_integer(name: str, value: Any, *, lowest: int) -> int:
    """``value`` if it is an integer from ``lowest``, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
        wanted = "a positive integer" if lowest == 1 else f"an integer from {lowest}"
        raise ConfigError(f"{name}: expected {wanted}, found {value!r}")
    return int(value)


def check_shard(shard: Any, batch_size: int) -> tuple[int, int]:
    """``shard`` if it is a pair that divides a batch, else ConfigError."""
    try:
        rank, count = (operator.index(part) for part in shard)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"shard: expected (rank, count), found {shard!r}") from error
    if not 0 <= rank < count:
        raise ConfigError(f"shard: expected 0 <= rank < count, found {(rank, count)}")
    if batch_size % count:
        raise ConfigError(f"shard: expected a count that divides batch_size {batch_size}, found {count}")
    return rank, count
