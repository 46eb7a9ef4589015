"""BatchSource: a batch is a pure function of (seed, index, snapshot)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from mouse_core._arrow.windows import Windows
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout, BatchMemory
from mouse_core.batches import _options as asked
from mouse_core.batches._mask import check_fill, fill_rest
from mouse_core.batches._planner import Planner
from mouse_core.errors import ConfigError
from mouse_core.randomness import check_seed
from mouse_core.sampling.episodes import Boundary, Weighting
from mouse_core.sampling.plan import PaddedSampler, Plan, WindowSampler
from mouse_core.spec import Spec
from mouse_core.store._fields import CopyPlan, plan_copying
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.augment.config import AugmentTokensConfig

Batch = dict[str, npt.NDArray[Any]]


class BatchSource:
    """Batches of windows ``[B, S, ...]`` by index: ``source[i]`` is the same whoever asks, whenever, in any order.

    It works as a ``torch.utils.data.Dataset`` (with ``batch_size=None`` in the DataLoader) and as a source for
    grain. Pickling it carries paths, not data, for datasets on disk.

    Args:
        store: A store, of which a snapshot is taken, or a snapshot.
        sequence_length: Steps in a window, S.
        batch_size: Windows in a whole batch, B, over all shards.
        sampling: "random", "last", "sequential", "batch", or a ``WindowSampler``.
        seed: In ``[0, 2**64)``.
        shard: ``(rank, count)``: rows ``[rank * B / count, (rank + 1) * B / count)`` of each batch, short ones too.
        dtypes: Delivered dtypes by field, instead of those of the spec.
        replace_dtypes: Dtypes that a framework cannot hold, and what is delivered instead, after ``dtypes``; a value
            that does not fit is a DataError.
        required_fields: Fields whose absence is an error.
        fields: Names of the fields to deliver; by default all there are.
        drop_last: For "sequential": whether the rest of an epoch is left out or makes a short batch.
        epoch_start: The index at which the first epoch over this snapshot begins.
        augment: How batches are augmented, with random numbers that depend on seed and index alone.
        views: How many views of each batch to deliver. With more than one, a batch is a tuple of so many, in arrays of
            their own: permutations and scalars are the same in all of them, and masks differ.
        boundary: "stream": windows cross the ends of episodes; "episode": each lies in one, and batches have a field
            ``mask``, bool ``[b, S]``, that says which steps are there. For a sampling that is a name.
        weighting: With "episode" and "random": "step", every window comes equally often, so long episodes come more
            often; or "trajectory", every episode does.
        pad: With "episode": whether windows may have fewer steps than S, as those of shorter episodes and the last ones
            of windows that lie side by side; otherwise these are left out. True repeats the last step that is there, a
            number is what all fields become in the others. None: True.

    Raises:
        ConfigError: An argument out of range, too few rows, an unknown sampling, a batch that shards do not divide.
        MissingFieldError: A field that is named and not there (also a KeyError).
    """

    def __init__(
        self,
        store: DatasetStore | Snapshot,
        sequence_length: int = 64,
        batch_size: int = 32,
        sampling: str | WindowSampler = "random",
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
        *,
        dtypes: Mapping[str, npt.DTypeLike] | None = None,
        replace_dtypes: Mapping[Any, npt.DTypeLike] | None = None,
        required_fields: Sequence[str] = (),
        fields: Sequence[str] | None = None,
        drop_last: bool = True,
        epoch_start: int = 0,
        augment: AugmentTokensConfig | None = None,
        views: int = 1,
        boundary: Boundary = "stream",
        weighting: Weighting = "step",
        pad: bool | float | None = None,
    ) -> None:
        if not isinstance(store, DatasetStore | Snapshot):
            raise ConfigError(f"store: expected a DatasetStore or a Snapshot, found {type(store).__name__}")
        self.snapshot = store.snapshot() if isinstance(store, DatasetStore) else store
        sampling = asked.choose_sampler(sampling, sequence_length, batch_size, drop_last, boundary, weighting, pad)
        self.sampler = sampling
        self.seed = check_seed(seed)
        self.shard = asked.check_shard(shard, sampling.batch_size)
        self.epoch_start = asked.check_integer("epoch_start", epoch_start, lowest=0)
        if not self.snapshot.num_rows:
            raise ConfigError("store: expected rows, found an empty store")
        self._batches_per_epoch = sampling.batches_per_epoch(self.snapshot)
        fields = None if fields is None else asked.as_names(fields)
        required_fields = asked.as_names(required_fields)
        dtypes, replace_dtypes = dict(dtypes or {}), dict(replace_dtypes or {})
        self._chosen: dict[str, Any] = {
            "fields": fields,
            "required_fields": required_fields,
            "dtypes": dtypes,
            "replace_dtypes": replace_dtypes,
            "augment": augment,
            "views": views,
        }
        padded = sampling if isinstance(sampling, PaddedSampler) else None
        self._readers = asked.choose_readers(self.snapshot, fields, required_fields, masked=padded is not None)
        self._planner = Planner(
            sampling,
            self.snapshot,
            seed=self.seed,
            shard=self.shard,
            epoch_start=self.epoch_start,
            windows=asked.planned_windows(self._readers, sampling.sequence_length),
        )
        self._planner.check_last()
        self._dtypes = asked.delivered_dtypes(self._readers, dtypes, replace_dtypes)
        self._stored_dtypes = {name: reader.stored_dtype(self._dtypes[name]) for name, reader in self._readers.items()}
        self._fields = {
            name: reader.spec.replace(dtype=self._dtypes[name], stored_dtype=self._stored_dtypes[name])
            for name, reader in self._readers.items()
        }
        self.views = views
        self._augment = asked.augmentation(
            augment,
            views,
            self._fields,
            asked.delivered_dtypes(self._readers, dtypes, {}),
            max_num_actions=self.snapshot.config.max_action_dim or 0,
        )
        if self._augment is not None:
            self._dtypes, self._stored_dtypes = (
                self._augment.arriving_dtypes(self._dtypes),
                self._augment.arriving_dtypes(self._stored_dtypes),
            )
        self._shapes = {name: spec.shape for name, spec in self._fields.items()}
        self._padded = padded is not None
        self._fill = None if padded is None else padded.fill
        if self._fill is not None:
            check_fill(self._fill, self._stored_dtypes)
            if self._augment is not None:
                raise ConfigError(f"pad: expected True or False with augment or views, found {self._fill}")
        if self._augment is not None:
            self._fields = self._augment.spec
        self._memory = BatchMemory()
        # Finished batches by index, each handed out once.
        self._ready: dict[int, Batch] = {}
        self._filling = ProcessLock()

    def __repr__(self) -> str:
        size = f"sequence_length={self.sequence_length}, batch_size={self.batch_size}, shard={self.shard}"
        return (
            f"{type(self).__name__}(rows={self.snapshot.num_rows}, {size}, seed={self.seed}, fields={list(self.spec)})"
        )

    @memo
    def spec(self) -> Spec:
        """The fields of a batch, known before the first is made."""
        return Spec(self._fields, self.snapshot.alignment)

    @property
    def sequence_length(self) -> int:
        """Steps in a window."""
        return self.sampler.sequence_length

    @property
    def batch_size(self) -> int:
        """Windows in a whole batch, over all shards."""
        return self.sampler.batch_size

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of all that decides about a batch, but for the seed and the delivered dtypes."""
        return hashlib.sha256(json.dumps(self.identity).encode()).hexdigest()[:32]

    @property
    def identity(self) -> list[Any]:
        """What the fingerprint is a digest of: that of the data, the sampler, the fields, and any augmentation."""
        return asked.identity_of(self.snapshot, self.sampler, self._readers, self._augment)

    def __len__(self) -> int:
        """Batches in an epoch; ConfigError for whoever would shard a shard."""
        asked.check_sharded_once(self.shard)
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the first epoch."""
        return (self[index] for index in range(self.epoch_start, self.epoch_start + len(self)))

    def __getitem__(self, index: int) -> Batch:
        """Batch ``index``, across epochs without end: ``{field: [b, S, ...]}`` in the dtypes of ``spec``.

        With ``views=`` of 2 and more it is a tuple of so many.

        Raises:
            IndexError: The index lies before the first epoch.
            DataError: A value that its field does not allow; the message names field and row.
        """
        ready = self._ready.pop(index, None)
        if ready is not None:
            return ready
        if self._augment is not None:
            return self.gather(self.plan(index))
        windows, number, step = self._planner.find(index)
        copier = self._copying[False].copier
        if not self._copying[False].copies_all(len(self._readers)) or copier.together(windows) == 1:
            return self._gather(windows, number, stored=False)
        with self._filling:
            ready = self._ready.pop(index, None)  # another thread may have put it here meanwhile
            if ready is None:
                if len(self._ready) > 2 * copier.together(windows):  # nobody came for them
                    self._ready.clear()
                ready = self._gather(windows, number, stored=False)
                for other, batch in copier.others(windows):
                    self._ready[index + (other - number) * step] = batch
                self._planner.reached(index + len(self._ready) * step)
        return ready

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Several batches, which is what a DataLoader without ``batch_size=None`` asks for; it warns."""
        asked.warn_of_collation(indices)
        return [self[index] for index in indices]

    def plan(self, index: int) -> Plan:
        """Which windows batch ``index`` consists of, cut to this shard."""
        return self._planner.plan(index)

    def gather(self, plan: Plan, out: Any = None, *, stored: bool = False) -> Batch:
        """The plan's windows, augmented; with several views a tuple of them.

        Args:
            plan: Of this source.
            out: Arrays ``[b, S, ...]`` by field to write to, C-contiguous, or a sequence of so many for each view; by
                default fresh ones.
            stored: Whether they come in the dtypes that they are stored and best moved in
                (``spec[name].stored_dtype``), for whoever makes ``spec[name].dtype`` of them later.

        Raises:
            DataError: A value that its field does not allow; the message names field and row.
        """
        windows = plan.windows
        if plan.length != self.sequence_length:
            raise ConfigError(f"plan: expected windows of {self.sequence_length} steps, found {plan.length}")
        if windows is None or not self.snapshot.has(windows.block):  # a plan from elsewhere
            windows = self._planner.locate(plan.starts).part(0)
        if self._augment is None:
            return self._gather(windows.block, windows.number, stored=stored, out=out)
        batch = self._gather(windows.block, windows.number, stored=stored)
        size = (plan.global_size, plan.length)
        views = self._augment(batch, plan.key, shape=size, first=plan.first, stored=stored, out=out)
        return views[0] if self.views == 1 else cast(Batch, views)

    def _gather(self, block: Windows, number: int, *, stored: bool, out: Mapping[str, Any] | None = None) -> Batch:
        """Batch ``number`` of a block, before it is augmented."""
        dtypes = self._stored_dtypes if stored else self._dtypes
        copier, unchecked, converted = self._copying[stored]
        if out is not None:
            windows = block.part(number)
            whole = {
                name: reader.read(windows, dtypes[name], out[name], copier) for name, reader in self._readers.items()
            }
        else:
            whole, clean = copier.take(block, number)
            if clean and len(whole) == len(self._readers) and not (unchecked or converted or self._padded):
                return whole
            windows = block.part(number)
            there = tuple(whole)
            rest = tuple(name for name in self._readers if name not in whole)
            memory = self._memory_for((*converted, *rest), len(windows), stored)
            for name in converted:
                if name in whole:
                    whole[name] = self._readers[name].convert(whole[name], windows, dtypes[name], memory.get(name))
            # If a code is not allowed, it may also be in another batch that was copied with this one.
            for name in there if not clean else unchecked:
                if name in there:
                    self._readers[name].check(whole[name], windows)
            for name in rest:
                whole[name] = self._readers[name].read(windows, dtypes[name], memory.get(name))
            if rest:
                whole = {name: whole[name] for name in self._readers}
        if self._padded:
            fill_rest(whole, windows, self._fill)
        return whole

    @memo
    def _copying(self) -> dict[bool, CopyPlan]:
        """How the plain columns are copied, by whether in the stored dtypes."""
        dtypes = {False: self._dtypes, True: self._stored_dtypes}
        return plan_copying(self._readers, self._shapes, self.sequence_length, dtypes)

    def _memory_for(self, names: tuple[str, ...], n: int, stored: bool) -> Batch:
        """Memory for fields of ``n`` windows, kept from batch to batch where it is large; else none."""
        dtypes, length = self._stored_dtypes if stored else self._dtypes, self.sequence_length
        return self._memory.take({name: ((n, length, *self._shapes[name]), dtypes[name]) for name in names})

    def layout(self, batch_size: int, *, stored: bool = False) -> BatchLayout:
        """Where the fields of ``batch_size`` windows lie in one stretch of memory; ``stored`` as in ``gather``."""
        size = (batch_size, self.sequence_length)
        dtypes = {name: spec.stored_dtype if stored else spec.dtype for name, spec in self._fields.items()}
        return BatchLayout({name: ((*size, *spec.shape), dtypes[name]) for name, spec in self._fields.items()})

    def with_snapshot(self, snapshot: Snapshot, *, epoch_start: int, seed: int | None = None) -> BatchSource:
        """The same source over other rows, whose first epoch begins at ``epoch_start``."""
        source = self._grown(snapshot) or _restore(snapshot, self.sampler, self._options())
        source.seed = self.seed if seed is None else check_seed(seed)
        source.epoch_start = asked.check_integer("epoch_start", epoch_start, lowest=0)
        source._planner = source._planner.over(snapshot, seed=source.seed, epoch_start=source.epoch_start)
        # Whoever takes a new snapshot every so many batches will do so again. Some may be ready that nobody took.
        source._planner.begin_with(max(1, self._planner.used - len(self._ready)))
        return source

    def _grown(self, snapshot: Snapshot) -> BatchSource | None:
        """The same source over the same rows and rows appended to them; None where it takes more than that."""
        growth = snapshot.grown_from(self.snapshot)
        if growth is None or list(snapshot.readers) != list(self.snapshot.readers):
            return None
        source = object.__new__(type(self))
        source.__dict__.update(self.__dict__)
        source.snapshot = snapshot
        source._batches_per_epoch = self.sampler.batches_per_epoch(snapshot)
        source._readers = {name: snapshot.readers.get(name, reader) for name, reader in self._readers.items()}
        source._ready = {}
        copying = source.__dict__.pop("_copying", None)
        if copying is not None:
            columns = {name: reader.column for name, reader in source._readers.items()}
            copier = copying[False].copier.over(columns, growth)
            source.__dict__["_copying"] = {stored: plan._replace(copier=copier) for stored, plan in copying.items()}
        return source

    def with_options(self, **options: Any) -> BatchSource:
        """The same windows with other options: ``shard=``, ``replace_dtypes=`` and the like."""
        return _restore(self.snapshot, self.sampler, self._options() | options)

    def _options(self) -> dict[str, Any]:
        return {"seed": self.seed, "shard": self.shard, "epoch_start": self.epoch_start, **self._chosen}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.snapshot, self.sampler, self._options())


def _restore(snapshot: Snapshot, sampler: WindowSampler, options: dict[str, Any]) -> BatchSource:
    return BatchSource(snapshot, sampling=sampler, **options)
