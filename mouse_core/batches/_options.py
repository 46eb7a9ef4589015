"""What a batch source is asked for, checked: fields, dtypes, numbers and shards."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import recipe
from mouse_core.batches._batch_layout import Chosen, MaskReader, Readers
from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.sampling.plan import MASK, PaddedSampler, Plan, Sampling, WindowSampler
from mouse_core.spec import replaced_by
from mouse_core.store.fields import FieldReader, meant_by
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.batches._mask import Packing
    from mouse_core.ranks import Ranks, Uneven
    from mouse_core.sampling.lengths import Cut
    from mouse_core.sampling.offsets import FieldWindows
    from mouse_core.statistics.normalizer import Normalizer


class _Identified(Protocol):
    """What says of itself what decides about batches."""

    @property
    def identity(self) -> list[Any]: ...


# Windows that are located together take about so many bytes.
_PLANNED_BYTES = 11 << 18


def snapshot_of(store: Store | Snapshot) -> Snapshot:
    """The snapshot that is given, or one of a store that has rows."""
    if not isinstance(store, Store | Snapshot):
        raise ConfigError(f"store: expected a DatasetStore or a Snapshot, found {type(store).__name__}")
    snapshot = store.snapshot() if isinstance(store, Store) else store
    if not snapshot.num_rows:
        raise ConfigError(snapshot.if_empty)
    return snapshot


def normalizer_of(normalize: Any, snapshot: Snapshot) -> Normalizer | None:
    """How a snapshot's fields are normalised: by what is given, or by what its own rows are."""
    if not normalize:
        return None
    from mouse_core.statistics.normalizer import Normalizer, follow  # loaded where batches are normalised

    return normalize.over(snapshot) if isinstance(normalize, Normalizer) else follow(snapshot, normalize)


def check_map(chosen: Any, shard: tuple[int, int]) -> None:
    """See that there is no function of one's own, or one that this shard's rows of a batch can be given to.

    Raises:
        ConfigError: Something else, or a function of whole batches.
    """
    if chosen is None:
        return
    from mouse_core.batches._stages import Map  # loaded where there is something to do to batches

    if not isinstance(chosen, Map):
        raise ConfigError(f"map: expected a mouse_core.Map, found {chosen!r:.80}")
    if shard[1] > 1 and chosen.per == "batch":
        raise ConfigError(
            f"map: {chosen.version!r}: expected per='window' or per='rows' with a shard, which has some rows of each "
            f"batch, found per='batch' with shard {shard}"
        )


def planned_windows(readers: Readers, length: int, around: int = 0) -> int:
    """How many windows to locate together: the hundred array operations it takes cost nearly the same for few.

    A window takes 32 bytes, and 24 for each field; 8 where it is as short as a number. ``around`` is how many others
    are read around its steps, for a field each.
    """
    numbers = sum(length == 1 and not reader.spec.shape for reader in readers.values())
    most = _PLANNED_BYTES // (32 + 24 * len(readers) - 16 * numbers + 56 * around)
    return max(1 if around else 1024, most)


def as_names(names: Sequence[str]) -> tuple[str, ...]:
    """Several names, or a single one."""
    return (names,) if isinstance(names, str) else tuple(names)


def choose_readers(
    snapshot: Snapshot, fields: tuple[str, ...] | None, required: tuple[str, ...], *, masked: bool
) -> dict[str, FieldReader | MaskReader]:
    """Readers of the fields that were asked for, and of ``mask``, where steps or windows may be missing.

    Raises:
        MissingFieldError: A field that is named and not there, or that one of the store's datasets lacks, where nothing
            fills its nulls.
        ConfigError: A stored field of the name that the mask has.
    """
    readers: dict[str, FieldReader | MaskReader] = {**snapshot.readers}
    if masked:
        if MASK in readers:
            raise ConfigError(
                f"boundary, uneven: expected a store without a field {MASK!r}, which batches get, found one"
            )
        readers[MASK] = MaskReader()
    for option, names in (("required_fields", required), ("fields", fields or ())):
        for name in names:
            if name not in readers:
                raise _missing(snapshot, option, name, readers)
    chosen = {name: reader for name, reader in readers.items() if fields is None or name in (*fields, MASK)}
    for name in dict.fromkeys([*required, *chosen]):
        reader = readers[name]
        if isinstance(reader, FieldReader):
            _check_parts(snapshot, reader, "required_fields" if name in required else "fields")
    return chosen


def _missing(snapshot: Snapshot, option: str, name: str, readers: Readers) -> MissingFieldError:
    """What is wrong with asking for a field that is not there."""
    fields = snapshot.config.fields
    if name in fields:
        column = fields[name].column
        said = recipe(snapshot.config.types, [column])
        hint = f"; {said}: rename it, or read it with Field({name!r}, column=...)" if said else ""
        return MissingFieldError(
            f"{option}: expected {name!r} (from a column {column!r} that is not null throughout), found "
            f"{list(readers)}{hint}"
        )
    hint = meant_by(name, readers, snapshot.config.types)
    return MissingFieldError(f"{option}: expected {name!r}, found {list(readers)}{hint}")


def _check_parts(snapshot: Snapshot, reader: FieldReader, option: str) -> None:
    """Raise MissingFieldError if a part of the store has no value of a field whose nulls are not filled.

    Its rows could never be read.
    """
    name = reader.spec.name
    where = snapshot.lacking(reader) if reader.field.fill is None else None
    if where is not None:
        raise MissingFieldError(
            f"{option}: expected {name!r} in all datasets of the store, found {where}; leave the field out with "
            f"fields=[...], or say what a null becomes with Field({name!r}, fill=...)"
        )


def ranks_and_shard(shard: Any, batch_size: int, uneven: Uneven) -> tuple[Ranks | None, tuple[int, int]]:
    """Who a shard is of, where that was found, and the shard as a pair of numbers; see ``ranks.check_shard``."""
    if type(shard) is tuple and uneven == "refuse" and shard == (0, 1) and all(type(part) is int for part in shard):
        return None, shard
    from mouse_core.ranks import check_shard, ranks_of  # loaded where there are others

    ranks = ranks_of(shard)
    return ranks, check_shard(shard if ranks is None else ranks.shard, batch_size, uneven)


def check_sharded_once(shard: tuple[int, int]) -> None:
    """See that nobody shards again what is a shard; see ``ranks.check_sharded_once``."""
    if shard[1] > 1:
        from mouse_core.ranks import check_sharded_once  # loaded where there are others

        check_sharded_once(shard)


def before_cutting(
    lengths: Iterable[int] | None,
    sampling: Sampling,
    sequence_length: int | None,
    pad: bool | float | None,
    *,
    boundary: Any,
    windows: Any,
) -> tuple[Sampling, int | None, bool | float | None, Cut | None]:
    """What draws windows before they are cut to lengths that are drawn, their steps, their padding, and how to cut."""
    if lengths is None and not hasattr(sampling, "cut_many"):
        return sampling, sequence_length, pad, None
    from mouse_core.sampling.lengths import cut_of  # loaded where lengths are drawn

    cut = cut_of(lengths, sampling, sequence_length, pad, padded=boundary != "stream" or windows is not None)
    return cut.sampling, cut.sequence_length, cut.pad, cut


def cut_to(sampler: WindowSampler, cut: Cut | None) -> WindowSampler:
    """What draws windows that are cut, if they are."""
    return sampler if cut is None else cut.of(sampler)


def packs_first(chosen: Chosen, cut: Cut | None, uneven: Uneven) -> bool:
    """Whether the steps that are not there are left out before anything is read: else it is the last thing done.

    Raises:
        ConfigError: Lengths of windows that are single rows.
    """
    packed = chosen.packed is not False
    if chosen.windows is not None and chosen.windows.batch_dims == 1 and (packed or cut is not None):
        option = "packed" if packed else "lengths"
        raise ConfigError(
            f"{option}: expected a sequence_length with windows, as single rows have no steps, found none"
        )
    return packed and chosen.sees_values and uneven == "refuse"


def packing_of(chosen: Chosen, *, from_steps: bool) -> Packing:
    """How batches are packed."""
    from mouse_core.batches._mask import Packing, check_packed  # loaded where batches are packed

    return Packing(check_packed(chosen.packed), from_steps, replaced_by(chosen.replace_dtypes))


def lengths_of(shard: tuple[int, int], plan: Plan) -> npt.NDArray[np.int64]:
    """How many steps of each window of a plan are there and are this shard's, int64 ``[b]``."""
    lengths = np.full(len(plan.starts), plan.length) if plan.lengths is None else plan.lengths
    rank, count = shard
    own = plan.global_size * (rank + 1) // count - plan.first
    return lengths if own == len(lengths) else np.where(np.arange(len(lengths)) < own, lengths, 0)


def axes_of(source: Any, batch: int | Plan, packing: Packing | None) -> dict[str, tuple[int, ...]]:
    """The axes before those of each field of a BatchSource, of so many windows or those of a plan."""
    if packing is None:
        windows = len(batch.starts) if isinstance(batch, Plan) else batch
        return dict.fromkeys(source.spec, (windows, source.sequence_length)[: source.spec.batch_dims])
    if not isinstance(batch, Plan):
        raise ConfigError(f"layout: expected a plan, as packed windows have as many rows as there are, found {batch!r}")
    lengths = lengths_of(source.shard, batch)
    rows = packing.rows(lengths)
    return {name: (len(lengths) + 1 if one.per_sequence else rows,) for name, one in source.spec.items()}


def warn_of_collation(indices: Sequence[int]) -> None:
    """Say that somebody is about to stack batches, as a DataLoader does unless it is told not to."""
    warnings.warn(
        f"a DataLoader asks for a list of {len(indices)} batches, to stack them into [{len(indices)}, B, S, ...]; a "
        "source gives whole batches: write DataLoader(source, batch_size=None)",
        UserWarning,
        stacklevel=3,
    )


# Where samplers whose indices are those of one epoch begin a pass, by module, and the sampler's name there.
_REPEATING = {
    "torch.utils.data.sampler": {"SequentialSampler.__iter__": "self", "RandomSampler.__iter__": "self"},
    "torchdata.stateful_dataloader.sampler": {"_StatefulRandomSamplerIterator.__init__": "sampler"},
}


def warn_of_second_pass(source: object) -> None:
    """Warn if a sampler of torch's DataLoader begins a second pass over the indices of the first epoch.

    Such a sampler asks for the length of ``source`` once in each pass. Only the stack says who asks. The sampler keeps
    how many passes there were: another loader over the same source begins with its first one.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_name == "__len__" and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    sampler = _REPEATING.get(frame.f_globals.get("__name__", ""), {}).get(frame.f_code.co_qualname)
    callers = [caller for caller in (frame.f_back, frame.f_back and frame.f_back.f_back) if caller is not None]
    if sampler is None or any(caller.f_locals.get("first_iter") for caller in callers):
        return  # the latter is an iterator with workers, which begins its first pass twice
    passes: dict[int, int] = vars(frame.f_locals[sampler]).setdefault("_mouse_passes", {})
    passes[id(source)] = passes.get(id(source), 0) + 1
    if passes[id(source)] != 2:
        return
    while frame.f_globals.get("__name__", "").startswith(("torch.", "torchdata.")) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "a DataLoader asks for the batches of the first epoch a second time: a source goes on beyond its length, a "
        "sampler of torch does not; mouse_torch.DataLoader(source) delivers the next epoch in every loop, "
        "sampler=range(begin, end) delivers any batches, and range(len(source)) the same ones again",
        UserWarning,
        stacklevel=level + 1,
    )


def identity_of(
    snapshot: Snapshot,
    sampler: object,
    readers: Readers,
    stages: Sequence[_Identified],
    windows: FieldWindows | None,
) -> list[Any]:
    """What decides about batches, but for the seed, the delivered dtypes, and what shards deliver of a batch."""
    from mouse_core._base.identity import sampler_identity

    masked = isinstance(sampler, PaddedSampler)
    fields = [
        reader.identity
        for name, reader in readers.items()
        if not isinstance(reader, MaskReader) or (masked and name == MASK)
    ]
    if windows is not None and not windows.offsets and windows.batch_dims == 1:
        fields.append(["[B]"])  # rows alone: no field says that there is no axis of steps
    return [snapshot.fingerprint, sampler_identity(sampler), fields, *(stage.identity for stage in stages)]
