"""BatchSource: a batch is a pure function of (seed, index, snapshot)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mouse_core._base.memory import BatchLayout
from mouse_core.batches._pipeline import Batch, Pipeline
from mouse_core.batches._plan import BatchPlan, Readers, choose_readers, copied_fields, planned_windows
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
        layout: How columns are delivered. "stored": each by its own name, in its dtype and shape, as ``uint8
            [B, S, H, W, C]``; "mouse": the columns of MOUSE's documents as its fields, as int64 ``obs_image``. None:
            "stored" for rows that ``add_episode`` added first, else "mouse".
        transitions: Whether batches are of transitions, whatever the alignment of the store: the observation, the
            ``action`` that was taken there, its ``reward``, whether it ``terminated`` or ``truncated`` the episode, and
            the next observation; fields whose name begins with "obs" have another one ``next_<name>``. Without a
            ``sequence_length`` a batch is ``[B, ...]``; with one it has windows ``[B, S, ...]`` of transitions that
            follow each other in one episode. ``mask``, bool, says which are there: all of ``[B]``, and of windows
            those before the episode's end. What is given for a field in ``dtypes`` and ``normalize`` holds for its
            next one.

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
            from mouse_core.sampling.lengths import cut_of  # loaded where lengths are drawn

            padded_before = boundary != "stream" or windows is not None
            sampling, sequence_length, pad, cut = cut_of(lengths, sampling, sequence_length, pad, padded=padded_before)
        if transitions:
            from mouse_core.batches._transitions import transition_anchors  # loaded where there are some

            if lengths is not None or packed is not False:
                option = "lengths" if lengths is not None else "packed"
                raise ConfigError(f"{option}: expected none with transitions, found some")
            sampler, around = transition_anchors(
                *(windows, snapshot, sampling, sequence_length), batch_size, drop_last, boundary, weighting, pad
            )
        elif windows is None:
            length = 64 if sequence_length is None else sequence_length
            sampler = sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, pad)
        else:
            from mouse_core.batches._by_field import anchors_of  # loaded where fields have windows of their own

            sampler, around = anchors_of(
                *(windows, snapshot, sampling, sequence_length), batch_size, drop_last, boundary, weighting, pad
            )
        sampler = snapshot.sampled_by(sampler)
        sampler = sampler if cut is None else cut(sampler)
        has_steps = around is None or around.batch_dims == 2
        if not has_steps and (packed is not False or cut is not None):
            option = "lengths" if packed is False else "packed"
            raise ConfigError(
                f"{option}: expected a sequence_length with windows, as single rows have no steps, found none"
            )
        is_augmented = augment is not None or views != 1
        # Missing steps are not even read where nothing else looks at a step's place; else packing comes last.
        packs_first = packed is not False and around is None and map is None and not is_augmented and uneven == "refuse"
        # Single rows have no steps that may be missing.
        padded = sampler if isinstance(sampler, PaddedSampler) and has_steps else None
        names = None if fields is None else (fields,) if isinstance(fields, str) else tuple(fields)
        required = (required_fields,) if isinstance(required_fields, str) else tuple(required_fields)
        masked = (padded is not None and not packs_first) or uneven == "pad"
        readers: Readers
        read: Readers = {}
        if transitions:
            from mouse_core.batches._transitions import also_next, transition_readers

            assert around is not None
            readers, read = transition_readers(snapshot, names, required, around)
            dtypes, normalize = (also_next(given, readers) for given in (dtypes or {}, normalize or {}))
        else:
            readers = choose_readers(snapshot, names, required, masked=masked)
        normalizer = None
        if normalize:
            from mouse_core.statistics.normalizer import Normalizer, follow  # loaded where batches are normalised

            if isinstance(normalize, Normalizer):
                normalizer = normalize.over(snapshot)
            else:
                normalizer = follow(snapshot, normalize)
        if around is not None and not transitions:
            from mouse_core.batches._by_field import readers_around

            readers = readers_around(readers, around, snapshot)
        ranks, own_shard = None, (0, 1)
        if uneven != "refuse" or repr(shard) != "(0, 1)":
            from mouse_core.ranks import check_shard, ranks_of  # loaded where there are others

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
            from mouse_core.batches._stages import check_map  # loaded where there is something to do to batches

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
            copied = copied_fields(readers, plan.form.shapes)
            self._set(plan, Pipeline(planner, readers, plan.form, fields=copied))
        elif transitions:
            from mouse_core.batches._transitions import TransitionPipeline

            self._set(plan, TransitionPipeline.of_transitions(planner, readers, read, plan.form, around))
        else:
            from mouse_core.batches._by_field import OffsetPipeline

            self._set(plan, OffsetPipeline.of(planner, readers, plan.form, around))

    def _set(self, plan: BatchPlan, pipeline: Pipeline | OffsetPipeline) -> None:
        planner = plan.planner
        self.snapshot, self.sampler = planner.snapshot, planner.sampler
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
        """The fields of a batch, known before the first is made."""
        return self.batch_plan.spec

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
        """The current normalization of the fields: for a policy, or ``normalize`` of another source."""
        from mouse_core.statistics.normalizer import Normalizer  # loaded where it is asked for

        normalize = self.batch_plan.normalize
        return Normalizer({}) if normalize is None else normalize.fixed

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of all that decides about a batch, but for the seed and the delivered dtypes."""
        from mouse_core._base.identity import fingerprint_of  # loaded where it is asked for

        return fingerprint_of(self.identity)

    @property
    def identity(self) -> list[Any]:
        """The content of the fingerprint: identities of the data, the sampler, the fields, and each stage."""
        return self.batch_plan.identity

    def __len__(self) -> int:
        """Batches in an epoch; ConfigError for whoever would shard a shard."""
        if self.shard[1] > 1:
            from mouse_core.ranks import check_sharded_once  # loaded where there are others

            check_sharded_once(self.shard)
        _warn_of_second_pass(self)
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
        if self._is_gathered_only:
            return self._pipeline.take(index)
        plan = self.plan(index)
        return self._staged(self._pipeline.take_of(plan), plan)

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Several batches, which is what a DataLoader without ``batch_size=None`` asks for; it warns."""
        warnings.warn(
            f"a DataLoader asks for a list of {len(indices)} batches, to stack them into [{len(indices)}, B, S, ...]; "
            "a source gives whole batches: write DataLoader(source, batch_size=None)",
            UserWarning,
            stacklevel=2,
        )
        return [self[index] for index in indices]

    def plan(self, index: int) -> Plan:
        """Return the windows of batch ``index``, cut to this shard."""
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
        if self._is_gathered_only:
            return self._pipeline.gather(plan, stored=stored, out=out)
        return self._staged(self._pipeline.gather(plan, stored=stored), plan, stored=stored, out=out)

    def _staged(self, batch: Batch, plan: Plan, *, stored: bool = False, out: Any = None) -> Batch:
        """Return a gathered batch after all stages and packing; see ``gather``."""
        from mouse_core.batches._stages import staged  # loaded where there are some

        made_of = self.batch_plan
        # What a function of the user's gets does not depend on how it is moved later.
        stored, packing = stored and made_of.map is None, made_of.packing
        made: Batch = staged(made_of.stages, batch, plan, stored=stored, out=out if packing is None else None)
        return made if packing is None else packing(made, made_of.planner.lengths(plan), out)

    def layout(self, batch_size: int | Plan, *, stored: bool = False) -> BatchLayout:
        """Return the layout of one contiguous memory for the fields of a number of windows, or of a plan.

        ``stored`` is as in ``gather``. For packed windows only a plan has a number of rows; a number of windows raises
        ConfigError.
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
                f"layout: expected a plan, as packed windows have as many rows as there are, found {batch_size!r}"
            )
        dtypes = {name: field.stored_dtype if stored else field.dtype for name, field in spec.items()}
        return BatchLayout({name: ((*size[name], *field.shape), dtypes[name]) for name, field in spec.items()})

    def with_snapshot(self, snapshot: Snapshot, *, epoch_start: int, seed: int | None = None) -> BatchSource:
        """Return the source over other rows, whose first epoch begins at ``epoch_start``."""
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
        # A caller that takes a new snapshot after some batches will probably do so again: plan that many together.
        source._pipeline.blocks.begin_with = max(1, epoch_start - self.epoch_start)
        return source

    def with_options(self, **options: Any) -> BatchSource:
        """Return the source with other options: ``shard=``, ``replace_dtypes=`` and the like."""
        return _restore(self.snapshot, self.sampler, self.batch_plan.arguments() | options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.snapshot, self.sampler, self.batch_plan.arguments())


def _restore(snapshot: Snapshot, sampler: WindowSampler, arguments: dict[str, Any]) -> BatchSource:
    return BatchSource(snapshot, sampling=sampler, **arguments)


# Where samplers whose indices are those of one epoch begin a pass, by module, and the sampler's name there.
_REPEATING = {
    "torch.utils.data.sampler": {"SequentialSampler.__iter__": "self", "RandomSampler.__iter__": "self"},
    "torchdata.stateful_dataloader.sampler": {"_StatefulRandomSamplerIterator.__init__": "sampler"},
}


def _warn_of_second_pass(source: object) -> None:
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
