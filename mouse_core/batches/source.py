"""BatchSource, which computes each batch by a pure function of (seed, index, snapshot)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memory import BatchLayout
from mouse_core.batches._pipeline import Batch, Pipeline
from mouse_core.batches._plan import BatchPlan, Readers, choose_readers, planned_windows
from mouse_core.batches._planner import Planner
from mouse_core.errors import ConfigError
from mouse_core.randomness import check_seed
from mouse_core.sampling.plan import PaddedSampler, Plan, Sampling, WindowSampler
from mouse_core.sampling.windows import Boundary, Weighting, sampler_of
from mouse_core.spec import Layout, Spec, check_count
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.augment.config import AugmentTokensConfig
    from mouse_core.batches._by_field import OffsetPipeline
    from mouse_core.batches._stages import Map
    from mouse_core.ranks import Shard, Uneven
    from mouse_core.sampling.offsets import FieldWindows, Seconds
    from mouse_core.statistics.normalizer import Normalization, Normalizer


class BatchSource:
    """Batches of windows ``[B, S, ...]`` by index: ``source[i]`` returns the same batch in every process and for any
    order of calls.

    A source works as a ``torch.utils.data.Dataset`` (with ``batch_size=None`` in the DataLoader) and as a source for
    grain. Both libraries read only the indices ``0 <= i < len(source)``, so every pass delivers the first epoch; with a
    DataLoader, the second pass causes a warning. For later epochs, use ``mouse_torch.DataLoader``,
    ``mouse_jax.to_grain`` or your own indices. A pickled source of datasets on disk contains paths, not data.

    Args:
        store: A store, from which the source takes a snapshot, or a snapshot.
        sequence_length: Number of steps in a window, S. None means 64; with ``windows``, None means batches ``[B,
            ...]`` without an axis of steps.
        batch_size: Number of windows in a batch, B, over all shards.
        sampling: "random", "last", "sequential", "batch", "blocks" or ``sampling.Blocks``, or a
            ``WindowSampler``.
        seed: An integer in ``[0, 2**64)``.
        shard: ``(rank, count)``: this source delivers the rows ``[rank * B / count, (rank + 1) * B / count)`` of each
            batch, including short batches. "auto": the shard of this process according to
            ``mouse_core.ranks.find_ranks``. A ``Ranks`` object: the shard of its rank.
        dtypes: A dict from field to delivered dtype; all other fields have the dtypes of the store's spec.
        replace_dtypes: A dict from each dtype that a framework lacks to the dtype that replaces it, applied after
            ``dtypes``; a value that the new dtype cannot represent raises DataError.
        required_fields: Fields that must exist; a missing field raises MissingFieldError.
        fields: Names of the fields to deliver; by default all fields.
        drop_last: With the sampling "sequential": whether the last windows of an epoch are dropped if these windows do
            not fill a batch; otherwise, the last batch of the epoch is short.
        epoch_start: The index at which the first epoch over this snapshot begins.
        augment: The augmentation of batches; its random numbers depend only on the seed and the index of the batch.
        views: Number of views of each batch. If ``views`` is above 1, a batch is a tuple of views in separate arrays:
            permutations, crops, scales and shifts are equal in all views, and only masks differ.
        boundary: "stream": windows cross the ends of episodes. "episode": each window lies in one episode, and batches
            have a field ``mask``, bool ``[b, S]``: whether each step is present. "task": all rows of a window belong to
            the same task, in any number of episodes. The task is read from the column ``task`` or ``task_index``, also
            with the prefix ``metadata_``, and from codes of ``done`` whose label contains "task".
            ``sampling.Column(name)``: all rows of a window have the same value in the column. If the boundary is not
            "stream", ``sampling`` must be a name.
        weighting: The probability of windows, with the boundary "episode" and the sampling "random". "step": every
            window is equally likely, so long episodes are more frequent. "trajectory": every episode is equally likely.
        pad: With the boundary "episode": whether windows may have missing steps, in short episodes and, for windows
            without overlap, at the end of each episode. With False, such windows are not drawn. With True, copies of
            the last present step replace missing steps; a number is the value of all fields in missing steps. None
            means True. With ``windows``, ``pad`` also applies to rows beyond the ends of an episode; with False,
            anchors with such rows are not drawn.
        uneven: What happens if the windows of a batch cannot be divided evenly among the shards. "refuse": ConfigError
            is raised. "pad": every shard gets ``ceil(b / count)`` of ``b`` windows; a shard with fewer windows also
            gets the first window of the next shard. Batches then have a field ``mask``, bool ``[b, S]``, which is False
            in the additional window; pass the mask to ``global_mean`` of the framework's package. ``uneven`` is not
            part of the fingerprint.
        windows: A dict from field to the rows that are delivered around each anchor: offsets in rows, or ``Seconds``.
            Every step of a window is an anchor. A field with K offsets has the shape ``[B, S, K, ...]``, or ``[B, K,
            ...]``. A second field ``<field>_mask``, bool, ``[B, S, K]`` or ``[B, K]``, marks present rows. Rows beyond
            the ends of the anchor's episode are missing. Offset 0 is the anchor's row; for action, reward and done (see
            ``Field.transition``), offset 0 is the transition that leaves the anchor's observation, in either alignment.
            With ``{}``, single rows are delivered, ``[B, ...]``.
        normalize: A dict from field to "mean_std", "min_max" or "quantiles", for which statistics of the snapshot's
            rows are computed; or a ``Normalizer``, whose statistics do not change with the snapshot. Normalised fields
            are float32 unless ``dtypes`` has another dtype; their values are bit-identical in every framework. See
            ``statistics.Normalizer.of``.
        map: A ``mouse_core.Map``, which contains a user's function and the fields that this function returns. The
            function is applied after all other changes except ``replace_dtypes`` and packing.
        lengths: The possible lengths of windows, such as ``range(1, 65)``, with the sampling "random" or "blocks". Each
            window is cropped to a random length at a random position; all lengths are equally likely. A window is
            shorter if its episode ends earlier. ``mask`` marks the present steps.
        packed: Whether to concatenate windows without missing steps: fields are ``[T, ...]``, and ``cu_seqlens``,
            ``position`` and ``sequence_id`` locate each row's window. If ``packed`` is a number, each batch is padded
            with zeros to this number of rows and has a ``mask``. Packing is the last change of a batch.
        layout: The names, dtypes and shapes of delivered fields. "stored": each column under its own name, in its dtype
            and shape, such as ``uint8 [B, S, H, W, C]``. "mouse": the fields of MOUSE's documents, such as int64
            ``obs_image``. None: "mouse" if the first rows were added by ``from_dataset`` or ``append`` without other
            metadata; "stored" for rows from ``add_episode``, recorders and readers of formats.
        transitions: Whether batches consist of transitions, for either alignment of the store: the observation, the
            ``action``, its ``reward``, whether it ``terminated`` or ``truncated`` the episode, and the next
            observation. Each field whose name begins with "obs" has a second field ``next_<name>``. If
            ``sequence_length`` is None, a batch is ``[B, ...]``; otherwise, a batch has windows ``[B, S, ...]`` of
            consecutive transitions of one episode. ``mask``, bool, is True for present transitions: all transitions in
            batches ``[B, ...]``, and the transitions before the end of the episode in windows. The options ``dtypes``
            and ``normalize`` of a field are also used for its field ``next_<name>``.

    Raises:
        ConfigError: An argument is out of range, the store has too few rows, the sampling is unknown, or a batch cannot
            be divided evenly among the shards.
        MissingFieldError: A named field does not exist (the error is also a KeyError).
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
        layout: Layout | None = None,
        transitions: bool = False,
    ) -> None:
        if not isinstance(store, Store | Snapshot):
            raise ConfigError(f"store: expected a DatasetStore or a Snapshot, found {type(store).__name__}")
        snapshot = store.snapshot() if isinstance(store, Store) else store
        if not snapshot.num_rows:
            raise ConfigError(snapshot.if_empty)
        snapshot = snapshot.delivering(layout, transitions=transitions)
        around = cut = None
        if lengths is not None or hasattr(sampling, "cut_many"):
            from mouse_core.sampling.lengths import cut_of  # loaded on demand

            padded_before = boundary != "stream" or windows is not None
            sampling, sequence_length, pad, cut = cut_of(lengths, sampling, sequence_length, pad, padded=padded_before)
        if transitions and (lengths is not None or packed is not False):
            option = "lengths" if lengths is not None else "packed"
            raise ConfigError(f"{option}: cannot be combined with transitions=True")
        if windows is None and not transitions:
            length = 64 if sequence_length is None else sequence_length
            sampler = sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, pad)
        else:
            from mouse_core.batches._by_field import anchors_of  # loaded on demand

            how = batch_size, drop_last, boundary, weighting, pad
            sampler, around = anchors_of(windows, snapshot, sampling, sequence_length, *how, transitions=transitions)
        sampler = snapshot.sampled_by(sampler)
        sampler = sampler if cut is None else cut(sampler)
        has_steps = around is None or around.batch_dims == 2
        if not has_steps and (packed is not False or cut is not None):
            option = "lengths" if packed is False else "packed"
            raise ConfigError(f"{option}: with windows=, expected a sequence_length, since single rows have no steps")
        is_augmented = augment is not None or views != 1
        # Missing steps are not read if no other option depends on a step's position; otherwise packing is the last
        # change.
        packs_first = packed is not False and around is None and map is None and not is_augmented and uneven == "refuse"
        # Without an axis of steps, no step can be missing.
        padded = sampler if isinstance(sampler, PaddedSampler) and has_steps else None
        names = None if fields is None else (fields,) if isinstance(fields, str) else tuple(fields)
        required = (required_fields,) if isinstance(required_fields, str) else tuple(required_fields)
        masked = (padded is not None and not packs_first) or uneven == "pad"
        readers: Readers
        if around is not None and transitions:
            from mouse_core.batches._by_field import also_next, transition_readers

            readers = transition_readers(snapshot, names, required, around)
            dtypes, normalize = (also_next(given, readers) for given in (dtypes or {}, normalize or {}))
        else:
            readers = choose_readers(snapshot, names, required, masked=masked)
        normalizer = None
        if normalize:
            from mouse_core.statistics.normalizer import Normalizer, follow  # loaded on demand

            if isinstance(normalize, Normalizer):
                normalizer = normalize.over(snapshot)
            else:
                normalizer = follow(snapshot, normalize)
        if around is not None and not transitions:
            from mouse_core.batches._by_field import readers_around

            readers = readers_around(readers, around, snapshot)
        ranks, own_shard = None, (0, 1)
        if uneven != "refuse" or repr(shard) != "(0, 1)":
            from mouse_core.ranks import check_shard, ranks_of  # loaded on demand

            ranks = ranks_of(shard)
            own_shard = check_shard(shard if ranks is None else ranks.shard, sampler.batch_size, uneven)
        length, runs = sampler.sequence_length, 0 if around is None else around.runs
        planner = Planner(
            sampler,
            snapshot,
            seed=check_seed(seed),
            shard=own_shard,
            epoch_start=check_count("epoch_start", epoch_start, lowest=0),
            windows=planned_windows(readers, length, runs * length),
            padded=padded,
            uneven=uneven,
            packed=packs_first,
        )
        planner.check()
        if map is not None:
            from mouse_core.batches._stages import check_map  # loaded on demand

            check_map(map, own_shard)
        plan = BatchPlan(
            planner=planner,
            readers=readers,
            ranks=ranks,
            windows=around,
            fields=names,
            required_fields=required,
            dtypes=dict(dtypes or {}),
            replace_dtypes=dict(replace_dtypes or {}),
            augment=augment,
            views=views,
            normalize=normalizer,
            map=map,
            packed=packed,
            layout=layout,
            transitions=transitions,
        )
        if around is None:
            self._set(plan, Pipeline(planner, readers, plan.form))
        else:
            from mouse_core.batches._by_field import OffsetPipeline, TransitionPipeline

            kind = TransitionPipeline if transitions else OffsetPipeline
            self._set(plan, kind.of(planner, readers, plan.form, around))

    def _set(self, plan: BatchPlan, pipeline: Pipeline | OffsetPipeline) -> None:
        planner = plan.planner
        self.snapshot, self.sampler = planner.snapshot, planner.sampler
        self.sequence_length, self.batch_size = self.sampler.sequence_length, self.sampler.batch_size
        self.seed, self.shard, self.epoch_start = planner.seed, planner.shard, planner.epoch_start
        self.views, self.ranks, self.uneven, self.packed = plan.views, plan.ranks, planner.uneven, plan.packed
        self.batch_plan, self._pipeline = plan, pipeline
        self._is_gathered_only = not plan.stages and plan.packing is None

    def __repr__(self) -> str:
        size = f"sequence_length={self.sequence_length}, batch_size={self.batch_size}, shard={self.shard}"
        return (
            f"{type(self).__name__}(rows={self.snapshot.num_rows}, {size}, seed={self.seed}, fields={list(self.spec)})"
        )

    @property
    def spec(self) -> Spec:
        """The spec of a batch, available before the first batch is read."""
        return self.batch_plan.spec

    @property
    def normalizer(self) -> Normalizer:
        """The normalisation of the fields, for use in a policy or as ``normalize`` of another source."""
        from mouse_core.statistics.normalizer import Normalizer  # loaded on demand

        normalize = self.batch_plan.normalize
        return Normalizer({}) if normalize is None else normalize.fixed

    @property
    def fingerprint(self) -> str:
        """A digest of the data and all options that determine a batch, except the seed, the delivered dtypes, and the
        padding of packed batches."""
        from mouse_core._base.identity import fingerprint_of  # loaded on demand

        return fingerprint_of(self.identity)

    @property
    def identity(self) -> list[Any]:
        """The values from which the fingerprint is computed: the identities of the data, the sampler, the fields, and
        each stage.
        """
        return self.batch_plan.identity

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raise ConfigError if the caller would shard a sharded source
        again.
        """
        if self.shard[1] > 1:
            from mouse_core.ranks import check_sharded_once  # loaded on demand

            check_sharded_once(self.shard)
        _warn_of_second_pass(self)
        return self._pipeline.planner.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the first epoch."""
        return (self[index] for index in range(self.epoch_start, self.epoch_start + len(self)))

    def __getitem__(self, index: int) -> Batch:
        """Return batch ``index``, ``{field: [b, S, ...]}`` in the dtypes of ``spec``. There is no last epoch, so
        ``index`` has no upper limit.

        A batch without an axis of steps is ``{field: [b, ...]}``, and a packed batch is ``{field: [T, ...]}``; see
        ``spec.batch_dims``. With ``views`` above 1, the result is a tuple of batches.

        Raises:
            IndexError: The index lies before the first epoch.
            DataError: A value is outside the bounds of its field; the message names field and row.
        """
        if self._is_gathered_only:
            return self._pipeline.take(index)
        plan = self.plan(index)
        return self._staged(self._pipeline.take_of(plan), plan)

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Return several batches, and warn, because only a DataLoader that was created without ``batch_size=None``
        calls this method.
        """
        warnings.warn(
            f"a DataLoader requests a list of {len(indices)} batches, to stack them into [{len(indices)}, B, S, ...]; "
            "a source returns whole batches: write DataLoader(source, batch_size=None), or take a "
            "mouse_torch.WindowDataset, which returns single windows",
            UserWarning,
            stacklevel=2,
        )
        return [self[index] for index in indices]

    def plan(self, index: int) -> Plan:
        """Return the plan of batch ``index`` with the windows of this shard."""
        return self._pipeline.plan(index)

    def gather(self, plan: Plan, out: Any = None, *, stored: bool = False) -> Batch:
        """Return the batch of a plan after all stages; with several views, a tuple of batches.

        Args:
            plan: A plan of this source.
            out: A dict from field to a C-contiguous array ``[b, S, ...]`` to which the field is written, or a sequence
                of such dicts, one for each view; by default new arrays.
            stored: Whether to return fields in the stored dtypes (``spec[name].stored_dtype``), which have the fewest
                bytes to transfer; the caller later converts fields to ``spec[name].dtype``.

        Raises:
            DataError: A value is outside the bounds of its field; the message names field and row.
        """
        if plan.length != self.sequence_length:
            raise ConfigError(f"plan: expected windows of {self.sequence_length} steps, found {plan.length}")
        if self._is_gathered_only:
            return self._pipeline.gather(plan, stored=stored, out=out)
        return self._staged(self._pipeline.gather(plan, stored=stored), plan, stored=stored, out=out)

    def _staged(self, batch: Batch, plan: Plan, *, stored: bool = False, out: Any = None) -> Batch:
        """Return a gathered batch, or a tuple of its views, after all stages and packing; see ``gather``."""
        stages, packing = self.batch_plan.stages, self.batch_plan.packing
        # The input of a user's function does not depend on a later transfer.
        stored, targets = stored and self.batch_plan.map is None, out if packing is None else None
        views: tuple[Batch, ...] = (batch,)
        for stage in stages:
            views = stage(views, plan, stored=stored, apart=targets is None or stage is not stages[-1])
        if targets is not None:
            several = (targets,) if isinstance(targets, Mapping) else targets
            for view, target in zip(views, several, strict=True):
                for name, values in view.items():
                    np.copyto(target[name], values, casting="no")
            views = tuple(dict(target) for target in several)
        made: Any = views[0] if len(views) == 1 else views
        packed: Batch = made if packing is None else packing(made, self.batch_plan.planner.lengths(plan), out)
        return packed

    def layout(self, batch_size: int | Plan, *, stored: bool = False) -> BatchLayout:
        """Return the layout of one contiguous buffer for all fields of a batch. ``batch_size`` is the number of
        windows, or a plan.

        See ``gather`` for ``stored``. With packed windows, the number of rows depends on the plan, so passing a number
        of windows raises ConfigError.
        """
        spec, packing = self.spec, self.batch_plan.packing
        if packing is None:
            windows = len(batch_size.starts) if isinstance(batch_size, Plan) else batch_size
            size = dict.fromkeys(spec, (windows, self.sequence_length)[: spec.batch_dims])
        elif isinstance(batch_size, Plan):
            lengths = self.batch_plan.planner.lengths(batch_size)
            rows = packing.rows(lengths)
            size = {name: (len(lengths) + 1 if one.per_sequence else rows,) for name, one in spec.items()}
        else:
            raise ConfigError(
                f"layout: expected a plan, since the number of rows of packed windows varies, found {batch_size!r}"
            )
        dtypes = {name: field.stored_dtype if stored else field.dtype for name, field in spec.items()}
        return BatchLayout({name: ((*size[name], *field.shape), dtypes[name]) for name, field in spec.items()})

    def with_snapshot(self, snapshot: Snapshot, *, epoch_start: int, seed: int | None = None) -> BatchSource:
        """Return a source with the same options over another snapshot; the first epoch over this snapshot begins at
        batch ``epoch_start``.
        """
        seed = self.seed if seed is None else check_seed(seed)
        epoch_start = check_count("epoch_start", epoch_start, lowest=0)
        plan = self.batch_plan
        snapshot = snapshot.delivering(plan.layout, transitions=plan.transitions)
        growth = snapshot.grown_from(self.snapshot)
        if growth is None or list(snapshot.readers) != list(self.snapshot.readers):
            source = _restore(snapshot, self.sampler, plan.arguments() | {"seed": seed, "epoch_start": epoch_start})
        else:
            source = type(self).__new__(type(self))
            pipeline = self._pipeline.forward(snapshot, growth, seed=seed, epoch_start=epoch_start)
            source._set(plan.forward(pipeline.planner, pipeline.readers), pipeline)
            pipeline.form = source.batch_plan.form
        # A caller that takes a new snapshot after n batches will probably do so again, so n batches are planned
        # together.
        source._pipeline.blocks.begin_with = max(1, epoch_start - self.epoch_start)
        return source

    def with_options(self, **options: Any) -> BatchSource:
        """Return the source with other options, such as ``shard=`` and ``replace_dtypes=``."""
        return _restore(self.snapshot, self.sampler, self.batch_plan.arguments() | options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.snapshot, self.sampler, self.batch_plan.arguments())


def _restore(snapshot: Snapshot, sampler: WindowSampler, arguments: dict[str, Any]) -> BatchSource:
    return BatchSource(snapshot, sampling=sampler, **arguments)


# By module: the function in which a sampler of one epoch's indices begins a pass, and the name of its variable for the
# sampler.
_REPEATING = {
    "torch.utils.data.sampler": {"SequentialSampler.__iter__": "self", "RandomSampler.__iter__": "self"},
    "torchdata.stateful_dataloader.sampler": {"_StatefulRandomSamplerIterator.__init__": "sampler"},
}


def _warn_of_second_pass(source: object) -> None:
    """Warn if a sampler of torch's DataLoader begins a second pass over the indices of the first epoch.

    Such a sampler calls ``len(source)`` once in each pass; the call stack shows that the caller is a sampler. The
    number of passes is stored in the sampler, so that the passes of different loaders over the same source are counted
    separately.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_name == "__len__" and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    sampler = _REPEATING.get(frame.f_globals.get("__name__", ""), {}).get(frame.f_code.co_qualname)
    callers = [caller for caller in (frame.f_back, frame.f_back and frame.f_back.f_back) if caller is not None]
    if sampler is None or any(caller.f_locals.get("first_iter") for caller in callers):
        return  # ``passes`` ignores iterators with workers, which begin their first pass twice
    passes: dict[int, int] = vars(frame.f_locals[sampler]).setdefault("_mouse_passes", {})
    passes[id(source)] = passes.get(id(source), 0) + 1
    if passes[id(source)] != 2:
        return
    while frame.f_globals.get("__name__", "").startswith(("torch.", "torchdata.")) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "this DataLoader delivers the batches of the first epoch again, because torch's samplers end at "
        "len(source); mouse_torch.DataLoader(source) delivers the next epoch in every loop, sampler=range(begin, end) "
        "selects batches, and sampler=range(len(source)) repeats the first epoch without this warning",
        UserWarning,
        stacklevel=level + 1,
    )
