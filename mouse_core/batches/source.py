"""BatchSource: a batch is a pure function of (seed, index, snapshot)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout
from mouse_core.batches import _options as asked
from mouse_core.batches._batch_layout import BatchForm, Chosen, copied_fields, form_of
from mouse_core.batches._pipeline import Batch, Pipeline
from mouse_core.batches._planner import Planner
from mouse_core.errors import ConfigError
from mouse_core.randomness import check_seed
from mouse_core.sampling.plan import PaddedSampler, Plan, Sampling, WindowSampler
from mouse_core.sampling.windows import Boundary, Weighting, sampler_of
from mouse_core.spec import Spec, check_count
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.augment.config import AugmentTokensConfig
    from mouse_core.batches._by_field import PipelineAround
    from mouse_core.batches._stages import Map
    from mouse_core.ranks import Ranks, Shard, Uneven
    from mouse_core.sampling.offsets import FieldWindows, Seconds
    from mouse_core.statistics.normalizer import Normalization, Normalizer


class BatchSource:
    """Batches of windows ``[B, S, ...]`` by index: ``source[i]`` is the same whoever asks, whenever, in any order.

    It works as a ``torch.utils.data.Dataset`` (with ``batch_size=None`` in the DataLoader) and as a source for
    grain. Both ask for the indices below ``len``, the first epoch, again and again; DataLoaders are warned of it. Use
    ``mouse_torch.DataLoader`` and ``mouse_jax.to_grain``, or indices of your own, for the epochs that follow. Pickling
    a source carries paths, not data, for datasets on disk.

    Args:
        store: A store, of which a snapshot is taken, or a snapshot.
        sequence_length: Steps in a window, S. None: 64; with ``windows`` there are no steps, and batches are
            ``[B, ...]``.
        batch_size: Windows in a whole batch, B, over all shards.
        sampling: "random", "last", "sequential", "batch", "blocks" or ``sampling.Blocks``, or a
            ``WindowSampler``.
        seed: In ``[0, 2**64)``.
        shard: ``(rank, count)``: rows ``[rank * B / count, (rank + 1) * B / count)`` of each batch, short ones too.
            "auto": those of this process, as ``mouse_core.ranks.find_ranks`` finds it, or of a ``Ranks``.
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
            ``mask``, bool ``[b, S]``, that says which steps are there; "task", or ``sampling.Column(name)``: the same
            within rows of one task (column ``task`` or ``task_index``, also with ``metadata_`` before it, and codes of
            ``done`` whose label has that word), or of one value of a column, over however many episodes. For a sampling
            that is a name.
        weighting: With "episode" and "random": "step", every window comes equally often, so long episodes come more
            often; or "trajectory", every episode does.
        pad: With "episode": whether windows may have fewer steps than S, as those of shorter episodes and the last ones
            of windows that lie side by side; otherwise these are left out. True repeats the last step that is there, a
            number is what all fields become in the others. None: True. With ``windows`` also what becomes of rows
            beyond an episode's ends; False leaves anchors out that have such.
        uneven: Of batches that the shards do not divide evenly: "refuse" them, or "pad" them, so that every shard gets
            ``ceil(b / count)`` of ``b`` windows: its own and, where those are fewer, the next one's first. Batches then
            have a field ``mask``, bool ``[b, S]``, in which that one is False; ``global_mean`` of the frameworks'
            packages takes it. No part of the fingerprint.
        windows: Which rows around an anchor fields deliver, by field: offsets in rows, or ``Seconds``. Every step of a
            window is an anchor. A field with K offsets comes as ``[B, S, K, ...]``, or ``[B, K, ...]``, and with it
            ``<field>_mask``, bool, of that shape up to K: which rows are there. None lies beyond the ends of the
            anchor's episode. Offset 0 is the anchor's own row; of action, reward and done (see ``Field.transition``) it
            is the transition that leaves the anchor's observation, in either alignment. ``{}``: rows, ``[B, ...]``.
        normalize: How fields are normalised, by field: "mean_std", "min_max" or "quantiles", by what the rows of the
            snapshot are; or a ``Normalizer``, whose numbers stay. Such fields come as float32 unless ``dtypes`` says
            otherwise, with the same bits in every framework. See ``statistics.Normalizer.of``.
        map: A function of one's own that is applied last, with the fields that it makes; see ``mouse_core.Map``.
        lengths: With "random" or "blocks", how many steps windows have, such as ``range(1, 65)``: each is cut to one of
            these, each as likely, at a place that is drawn, and has fewer where an episode ends. ``mask`` says which
            there are.
        packed: Whether windows lie one behind the other, without the steps that are not there: fields are ``[T, ...]``,
            and ``cu_seqlens``, ``position`` and ``sequence_id`` say of which window each row is. A number: as many rows
            in each batch, filled up with 0 and a ``mask``. It is done last, to what a batch is without it.

    Raises:
        ConfigError: An argument out of range, too few rows, an unknown sampling, a batch that shards do not divide.
        MissingFieldError: A field that is named and not there (also a KeyError).
    """

    def __init__(
        self,
        store: Store | Snapshot,
        sequence_length: int | None = None,
        batch_size: int = 32,
        sampling: Sampling = "random",
        seed: int = 0,
        shard: Shard = (0, 1),
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
        uneven: Uneven = "refuse",
        windows: Mapping[str, Iterable[int] | Seconds] | FieldWindows | None = None,
        normalize: Mapping[str, Normalization] | Normalizer | None = None,
        map: Map | None = None,
        lengths: Iterable[int] | None = None,
        packed: bool | int = False,
    ) -> None:
        snapshot = asked.snapshot_of(store)
        around = None
        sampling, sequence_length, pad, cut = asked.before_cutting(
            *(lengths, sampling, sequence_length, pad), boundary=boundary, windows=windows
        )
        if windows is None:
            length = 64 if sequence_length is None else sequence_length
            sampler = sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, pad)
        else:
            from mouse_core.batches._by_field import anchors_of  # loaded where fields have windows of their own

            sampler, around = anchors_of(
                *(windows, snapshot, sampling, sequence_length), batch_size, drop_last, boundary, weighting, pad
            )
        sampler = asked.cut_to(snapshot.sampled_by(sampler), cut)
        # Single rows have no steps that may be missing.
        has_steps = around is None or around.batch_dims == 2
        padded = sampler if isinstance(sampler, PaddedSampler) and has_steps else None
        names = None if fields is None else asked.as_names(fields)
        chosen = Chosen(
            names,
            asked.as_names(required_fields),
            dict(dtypes or {}),
            dict(replace_dtypes or {}),
            augment,
            views,
            around,
            asked.normalizer_of(normalize, snapshot),
            map,
            packed,
        )
        packs_first = asked.packs_first(chosen, cut, uneven)
        masked = (padded is not None and not packs_first) or uneven == "pad"
        readers = asked.choose_readers(snapshot, names, chosen.required_fields, masked=masked)
        if around is not None:
            from mouse_core.batches._by_field import readers_around

            readers = readers_around(readers, around, snapshot)
        ranks, own_shard = asked.ranks_and_shard(shard, sampler.batch_size, uneven)
        planner = Planner(
            sampler,
            snapshot,
            seed=check_seed(seed),
            shard=own_shard,
            epoch_start=check_count("epoch_start", epoch_start, lowest=0),
            windows=asked.planned_windows(
                readers, sampler.sequence_length, 0 if around is None else around.runs * sampler.sequence_length
            ),
            padded=padded,
            uneven=uneven,
            packed=packs_first,
        )
        planner.check()
        asked.check_map(map, planner.shard)
        form = _form(planner, readers, chosen)
        if around is None:
            copied = copied_fields(readers, form.shapes)
            self._set(Pipeline(planner, readers, form, fields=copied), chosen, ranks)
        else:
            from mouse_core.batches._by_field import PipelineAround

            self._set(PipelineAround.of(planner, readers, form, around), chosen, ranks)

    def _set(self, pipeline: Pipeline | PipelineAround, chosen: Chosen, ranks: Ranks | None) -> None:
        planner = pipeline.planner
        self.snapshot, self.sampler = planner.snapshot, planner.sampler
        self.seed, self.shard, self.epoch_start = planner.seed, planner.shard, planner.epoch_start
        self.views, self.ranks, self.uneven, self.packed = chosen.views, ranks, planner.uneven, chosen.packed
        self._pipeline, self._chosen = pipeline, chosen
        self._stages = pipeline.form.stages
        packed = chosen.packed is not False
        self._packing = asked.packing_of(chosen, from_steps=planner.packed) if packed else None

    def __repr__(self) -> str:
        size = f"sequence_length={self.sequence_length}, batch_size={self.batch_size}, shard={self.shard}"
        return (
            f"{type(self).__name__}(rows={self.snapshot.num_rows}, {size}, seed={self.seed}, fields={list(self.spec)})"
        )

    @memo
    def spec(self) -> Spec:
        """The fields of a batch, known before the first is made."""
        around, fields = self._chosen.windows, self._pipeline.form.fields
        if self._packing is not None:
            return Spec(self._packing.spec(fields), self.snapshot.alignment, 1)
        return Spec(fields, self.snapshot.alignment, 2 if around is None else around.batch_dims)

    @property
    def sequence_length(self) -> int:
        """Steps in a window."""
        return self.sampler.sequence_length

    @property
    def batch_size(self) -> int:
        """Windows in a whole batch, over all shards."""
        return self.sampler.batch_size

    @property
    def normalizer(self) -> Normalizer:
        """How its fields are normalised, with the numbers of now: for a policy, or ``normalize`` of another source."""
        from mouse_core.statistics.normalizer import Normalizer  # loaded where it is asked for

        return Normalizer({}) if self._chosen.normalize is None else self._chosen.normalize.fixed

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of all that decides about a batch, but for the seed and the delivered dtypes."""
        from mouse_core._base.identity import fingerprint_of  # loaded where it is asked for

        return fingerprint_of(self.identity)

    @property
    def identity(self) -> list[Any]:
        """What the fingerprint is a digest of: that of the data, the sampler, the fields, and any augmentation."""
        stages: tuple[Any, ...] = self._stages if self._packing is None else (*self._stages, self._packing)
        return asked.identity_of(self.snapshot, self.sampler, self._pipeline.readers, stages, self._chosen.windows)

    def __len__(self) -> int:
        """Batches in an epoch; ConfigError for whoever would shard a shard."""
        asked.check_sharded_once(self.shard)
        asked.warn_of_second_pass(self)
        return self._pipeline.planner.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the first epoch."""
        return (self[index] for index in range(self.epoch_start, self.epoch_start + len(self)))

    def __getitem__(self, index: int) -> Batch:
        """Batch ``index``, across epochs without end: ``{field: [b, S, ...]}`` in the dtypes of ``spec``.

        Without steps it is ``{field: [b, ...]}``, packed ``{field: [T, ...]}``, as ``spec.batch_dims`` says. With
        ``views=`` of 2 and more it is a tuple of so many.

        Raises:
            IndexError: The index lies before the first epoch.
            DataError: A value that its field does not allow; the message names field and row.
        """
        if not self._stages and self._packing is None:
            return self._pipeline.take(index)
        plan = self.plan(index)
        return self._staged(self._pipeline.take_of(plan), plan)

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Several batches, which is what a DataLoader without ``batch_size=None`` asks for; it warns."""
        asked.warn_of_collation(indices)
        return [self[index] for index in indices]

    def plan(self, index: int) -> Plan:
        """Which windows batch ``index`` consists of, cut to this shard."""
        return self._pipeline.plan(index)

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
        if plan.length != self.sequence_length:
            raise ConfigError(f"plan: expected windows of {self.sequence_length} steps, found {plan.length}")
        if not self._stages and self._packing is None:
            return self._pipeline.gather(plan, stored=stored, out=out)
        return self._staged(self._pipeline.gather(plan, stored=stored), plan, stored=stored, out=out)

    def _staged(self, batch: Batch, plan: Plan, *, stored: bool = False, out: Any = None) -> Batch:
        """What becomes of a batch that was gathered; see ``gather``."""
        from mouse_core.batches._stages import staged  # loaded where there are some

        # What a function of the user's gets does not depend on how it is moved later.
        stored = stored and self._chosen.map is None
        packing = self._packing
        made: Batch = staged(self._stages, batch, plan, stored=stored, out=out if packing is None else None)
        return made if packing is None else packing(made, asked.lengths_of(self.shard, plan), out)

    def layout(self, batch_size: int | Plan, *, stored: bool = False) -> BatchLayout:
        """Where the fields of so many windows, or of a plan, lie in one stretch of memory; ``stored`` as in ``gather``.

        Of windows that are packed only a plan says how many rows they have; ConfigError for a number.
        """
        size = asked.axes_of(self, batch_size, self._packing)
        dtypes = {name: field.stored_dtype if stored else field.dtype for name, field in self.spec.items()}
        return BatchLayout({name: ((*size[name], *field.shape), dtypes[name]) for name, field in self.spec.items()})

    def with_snapshot(self, snapshot: Snapshot, *, epoch_start: int, seed: int | None = None) -> BatchSource:
        """The same source over other rows, whose first epoch begins at ``epoch_start``."""
        seed = self.seed if seed is None else check_seed(seed)
        epoch_start = check_count("epoch_start", epoch_start, lowest=0)
        growth = snapshot.grown_from(self.snapshot)
        if growth is None or list(snapshot.readers) != list(self.snapshot.readers):
            options = self._options() | {"seed": seed, "epoch_start": epoch_start}
            source = _restore(snapshot, self.sampler, options)
        else:
            source = type(self).__new__(type(self))
            pipeline = self._pipeline.forward(snapshot, growth, seed=seed, epoch_start=epoch_start)
            chosen = self._chosen
            normalize = None if chosen.normalize is None else chosen.normalize.over(snapshot, grown=True)
            if normalize is not chosen.normalize:  # by what the rows are, which are more now
                chosen = chosen._replace(normalize=normalize)
                pipeline.form = _form(pipeline.planner, pipeline.readers, chosen)
            source._set(pipeline, chosen, self.ranks)
        # Whoever takes a new snapshot every so many batches will do so again.
        source._pipeline.begin_with(max(1, epoch_start - self.epoch_start))
        return source

    def with_options(self, **options: Any) -> BatchSource:
        """The same windows with other options: ``shard=``, ``replace_dtypes=`` and the like."""
        return _restore(self.snapshot, self.sampler, self._options() | options)

    def _options(self) -> dict[str, Any]:
        planned = {"seed": self.seed, "shard": self.ranks or self.shard, "epoch_start": self.epoch_start}
        return {**planned, "uneven": self.uneven, **self._chosen._asdict()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.snapshot, self.sampler, self._options())


def _form(planner: Planner, readers: Any, chosen: Chosen) -> BatchForm:
    """What batches of some fields are like."""
    actions = planner.snapshot.config.dims["max_action_dim"] or 0
    return form_of(readers, chosen, None if planner.packed else planner.padded, max_num_actions=actions)


def _restore(snapshot: Snapshot, sampler: WindowSampler, options: dict[str, Any]) -> BatchSource:
    return BatchSource(snapshot, sampling=sampler, **options)
