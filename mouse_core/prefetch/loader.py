"""The base class of the loaders of all frameworks, and feeds. A feed adapts a loader to one kind of source, and creates
and validates the states of the loader.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from mouse_core._base.checks import state_number
from mouse_core._base.tracing import refuse_traced
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ClosedError, ConfigError, ForkError, StateError, WorkerError
from mouse_core.prefetch.prefetcher import Delivery, OrderedPrefetcher
from mouse_core.randomness import check_seed
from mouse_core.sampling import SAMPLERS, EpisodeWindows
from mouse_core.sampling.plan import MASK
from mouse_core.spec import Spec, check_count
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.digest import StreamDigest
    from mouse_core.prefetch._agreement import Agreement

_CONFIGURATION = "configuration"
# The key of the decoder version, which affects the last bits of pixels; only streams with videos have it.
_DECODER = "decoder"
_LONGEST_TEXT, _MOST_ENTRIES = 60, 32
# Options that are compared for every sampling.
_ALWAYS_COMPARED = ("sampling", "boundary", "normalize", "augment", "map", "lengths", "packed")
# The largest depth of nested mixtures.
_MOST_LEVELS = 16


class Feed:
    """Adapts a loader to a user-defined source. The data of such a source never change."""

    def __init__(self, source: Any) -> None:
        self.source = source
        #: The index of the first batch of the first epoch.
        self.first_index: int = getattr(source, "epoch_start", 0)

    def prepare(self, index: int, *, first: bool) -> bool:
        """Prepare batch ``index`` in the caller's thread; ``first`` is True for the first batch of this feed.

        Returns:
            Whether the threads must restart, because a thread could have requested batch ``index`` before the batch was
            drawn.
        """
        if first:
            len(self.source)  # raises ConfigError if the caller shards a sharded source again
        return False

    def delivered(self, index: int) -> None:
        """Record that batch ``index`` was delivered."""

    def ends_at(self, index: int) -> bool:
        """Return whether an epoch ended with batch ``index - 1``."""
        return (index - self.first_index) % len(self.source) == 0

    def state(self, next_index: int) -> dict[str, Any]:
        """Return the state of a loader whose next batch is ``next_index``."""
        return {"next_index": next_index, "fingerprint": self.source.fingerprint}

    def restored(self, state: Mapping[str, Any]) -> tuple[Any, int]:
        """Return the feed that ``state`` describes, and the index of its next batch.

        Raises:
            StateError: The state is damaged or belongs to another source.
        """
        numbers = numbers_of(state, "next_index")
        if state["fingerprint"] != self.source.fingerprint:
            raise StateError(
                f"state: expected the fingerprint {self.source.fingerprint!r:.80} of this source, found "
                f"{state['fingerprint']!r:.80}"
            )
        return type(self)(self.source), numbers["next_index"]

    def refreshed(self, next_index: int) -> Any:
        """Return a feed with the store's current rows; the first epoch of the feed begins at ``next_index``.

        Raises:
            ConfigError: The feed has no store.
        """
        raise ConfigError(
            "refresh: expected a loader over a DatasetStore, found a loader over a snapshot, a replay buffer or "
            "a source"
        )


class StoreFeed(Feed):
    """Adapts a loader to the batches of a snapshot, and can take new snapshots of the store.

    Args:
        source: The source over the snapshot.
        store: The store to refresh from, or None.
    """

    source: BatchSource

    def __init__(self, source: BatchSource, store: Store | None) -> None:
        super().__init__(source)
        self._store = store

    def state(self, next_index: int) -> dict[str, Any]:
        """Return the state of a loader whose next batch is ``next_index``."""
        source = self.source
        return {
            "seed": source.seed,
            "next_index": next_index,
            "rows": source.snapshot.store_rows,
            "epoch_start": source.epoch_start,
            "fingerprint": source.fingerprint,
            _CONFIGURATION: json.dumps(_configuration(source), separators=(",", ":")),
            **_decoder_of(source),
        }

    def restored(self, state: Mapping[str, Any]) -> tuple[Any, int]:
        """Return a feed with the seed and the rows of a state; see ``Feed``."""
        numbers = numbers_of(state, "seed", "next_index", "epoch_start", others=("rows",))
        if numbers["next_index"] < numbers["epoch_start"]:
            raise StateError(f"state: expected next_index at or after epoch_start, found {numbers}")
        try:
            seed, begin = check_seed(numbers["seed"]), numbers["epoch_start"]
            rows = rows_of(state["rows"])
            snapshot = self.source.snapshot.of_rows(rows) if self._store is None else self._store.snapshot(rows)
            source = self.source.with_snapshot(snapshot, epoch_start=begin, seed=seed)
        except (ConfigError, KeyError) as error:
            raise StateError(
                f"state: expected a state of this dataset and configuration, found: {error}{dropped_of(self._store)}"
            ) from error
        check_source(source, state, dropped_of(self._store))
        check_decoder(source, state)
        return StoreFeed(source, self._store), numbers["next_index"]

    def refreshed(self, next_index: int) -> Any:
        """Return a feed with the current rows of the store; see ``Feed``."""
        if self._store is None:
            return super().refreshed(next_index)
        source = self.source.with_snapshot(self._store.snapshot(), epoch_start=next_index)
        return StoreFeed(source, self._store)


# ------------------------------------------------------------------ states of loaders over stores


def _decoder_of(source: BatchSource) -> dict[str, str]:
    known = source.snapshot.readers
    readings = (known[name].column.reading for name in source.spec if name in known)
    decoders = [reading.decoder for reading in readings if reading.kind.kind == "video"]
    if not decoders:
        return {}
    from mouse_core.video import decoder_version  # loaded on demand

    versions = [decoder_version() if decoder is None else decoder.version for decoder in decoders]
    return {_DECODER: ", ".join(dict.fromkeys(versions))}


def check_decoder(source: BatchSource, state: Mapping[str, Any]) -> None:
    """Raise StateError if the decoder version in the state differs from the installed version."""
    here = _decoder_of(source).get(_DECODER)
    if here is not None and state.get(_DECODER, here) != here:
        raise StateError(
            f"state: expected batches decoded by {here}, found {state[_DECODER]!r:.80}; pixels may differ in their "
            "last bits; load_state_dict(state, accept_decoder=True) continues with the same frames"
        )


def numbers_of(state: Any, *names: str, others: Sequence[str] = ()) -> dict[str, int]:
    """Return the numbers of a state by name.

    Raises:
        StateError: The state is not a dict with exactly the expected names, or a number is not an integer.
    """
    keys = {*names, *others, "fingerprint"}
    if not isinstance(state, Mapping) or state.keys() - {_CONFIGURATION, _DECODER} != keys:
        raise StateError(f"state: expected a dict with the keys {sorted(keys)}, found {state!r:.200}")
    return {name: state_number(name, state[name]) for name in names}


def rows_of(rows: Any, levels: int = _MOST_LEVELS) -> Any:
    """Return the saved number of rows of a store. For a mixture, return the number of rows of each member by name;
    mixtures can be nested up to ``levels`` deep.

    Raises:
        StateError: A number is not an integer of at least 0, or mixtures are nested more than ``levels`` deep.
    """
    if isinstance(rows, Mapping):
        if not levels:
            raise StateError(f"state: expected mixtures nested in at most {_MOST_LEVELS} levels, found more")
        return {name: rows_of(some, levels - 1) for name, some in rows.items()}
    return state_number("rows", rows)


def dropped_of(store: Any) -> str:
    """Return a hint for an error message if the store has dropped rows; otherwise ""."""
    from mouse_core.store import DatasetStore

    gone = store.written - len(store) if isinstance(store, DatasetStore) else 0
    if not gone:
        return ""
    return (
        f"; the store has dropped its {gone:,} oldest rows (max_rows, max_bytes or clear), so an earlier state "
        "cannot be loaded: keep a snapshot with these rows, or start again"
    )


def check_source(source: BatchSource, state: Mapping[str, Any], remark: str = "") -> None:
    """Raise StateError with a list of differences if ``state`` does not belong to the source; the message ends with
    ``remark``.
    """
    if state["fingerprint"] == source.fingerprint:
        return
    try:
        found = json.loads(state.get(_CONFIGURATION, "{}"))
        differing = _differing(_configuration(source), found) if found else []
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        differing = []
    if differing:
        raise StateError(f"state: expected a state of this dataset and configuration; {'; '.join(differing)}{remark}")
    raise StateError(
        f"state: expected the fingerprint {source.fingerprint} of this dataset and configuration (rows, "
        f"fields, sampling, sequence_length, batch_size, augmentation), found {state['fingerprint']!r:.80}{remark}"
    )


def _configuration(source: BatchSource) -> dict[str, Any]:
    """Return the values that determine the fingerprint, by name; long texts are replaced by digests."""
    data, sampler, fields, *stages = source.identity
    snapshot = source.snapshot
    kinds = {reader.spec.column: str(reader.column.kind) for reader in snapshot.readers.values()}
    said: dict[str, Any] = {
        "windows": {name: rest[5] for name, *rest in fields if len(rest) > 5 and rest[5]},
        "derived": dict(snapshot.config.made),
        **_sampler_in_words(source.sampler, sampler),
        "data": data[:12],
        "alignment": snapshot.alignment,
        "columns": kinds,
        "fields": {name: _field_in_words(*rest[:5]) for name, *rest in fields},
        **_stages_in_words(stages),
    }
    return {name: _shortened(value) for name, value in said.items()}


def _sampler_in_words(made: Any, identity: str) -> dict[str, Any]:
    """If the sampler's identity consists of its options, return the sampling and the boundary as the caller would pass
    them.
    """
    said: dict[str, Any] = {}
    is_shown = dataclasses.is_dataclass(made) and identity == repr(made)
    if hasattr(made, "cut_many"):
        said["lengths"], made = json.dumps(made.choices), made.sampler
    if not is_shown or not dataclasses.is_dataclass(made):
        return {**said, "sampling": identity}
    options = [item.name for item in dataclasses.fields(made) if item.repr and not item.name.startswith("_")]
    said |= {"sampling": type(made).__name__, **{name: repr(getattr(made, name)) for name in options}}
    if type(made) in SAMPLERS.values():
        return {"boundary": "'stream'", **said, "sampling": repr(made.name)}  # type: ignore[union-attr]
    if "column" in said:
        column = said.pop("column")
        return {"boundary": "'task'" if column == "''" else f"Column({column})", **said}
    if "behind" in said:  # anchors of `windows=` with pad=False; "before" and "behind" follow from the offsets
        return {name: value for name, value in said.items() if name not in ("before", "behind")}
    return {"boundary": "'episode'", **said} if isinstance(made, EpisodeWindows) else said


def _stages_in_words(stages: Sequence[list[Any]]) -> dict[str, Any]:
    """Return descriptions of the stages: the normalisation and augmentation of fields, the user's functions, and
    packing.
    """
    said: dict[str, Any] = {}
    for _, scalings in (stage for stage in stages if stage[0] == "normalize"):
        numbers = {name: f"{kind} by numbers {digest}" for name, (kind, digest) in scalings.items()}
        said["normalize"] = {**said.get("normalize", {}), **numbers}
    augment = [stage for stage in stages if stage[0] not in ("map", "normalize", "packed")]
    if augment:
        said["augment"] = json.dumps(augment)
    for _, version, per, shapes, dropped in (stage for stage in stages if stage[0] == "map"):
        said["map"] = {"version": version, "per": per, "fields": json.dumps(shapes), "drop": json.dumps(dropped)}
    if ["packed"] in stages:
        said["packed"] = "True"
    return said


def _field_in_words(
    column: str = "", shape: Any = (), image_shape: Any = None, fill: str = "None", pad: str = "None"
) -> str:
    """Return a description of a field's identity that does not mention the offsets of rows."""
    said = [f"column {column!r} as {list(image_shape or shape)}"]
    said += [f"{name} {value}" for name, value in (("fill", fill), ("pad", pad)) if value != "None"]
    return ", ".join(said)


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return (
            {name: _shortened(one) for name, one in value.items()}
            if len(value) <= _MOST_ENTRIES
            else _shortened(json.dumps(value))
        )
    return value if len(value) <= _LONGEST_TEXT else f"#{hashlib.sha256(value.encode()).hexdigest()[:12]}"


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference between two configurations."""
    said: list[str] = []
    if any(expected.get(name) != found.get(name) for name in ("boundary", "lengths", "packed")):
        # Within episodes, and with random lengths without packing, batches have a mask.
        expected, found = ({**one, "fields": _without_mask(one["fields"])} for one in (expected, found))
    boundaries = expected.get("boundary"), found.get("boundary")
    same_sampling = expected["sampling"] == found["sampling"] and boundaries[0] == boundaries[1]
    for name in dict.fromkeys([*expected, *found]):
        # Options of different samplings are not compared, and the boundary of anchors is unknown.
        is_of_both = (name in expected and name in found) or name in _ALWAYS_COMPARED
        if name == "data" or not (same_sampling or is_of_both) or (name == "boundary" and None in boundaries):
            continue
        wanted, has = expected.get(name), found.get(name)
        if wanted != has:
            parts = isinstance(wanted, Mapping) and isinstance(has, Mapping)
            said += _differing_parts(name, wanted, has) if parts else [_expected_and_found(name, wanted, has)]
    # Other columns, another alignment or other derived fields also change the digest of the data.
    explained = any(line.startswith(("columns", "alignment", "derived")) for line in said)
    if expected["data"] != found.get("data") and not explained:
        said.append(
            "data: expected a state of these rows, found a state of other rows, other values or other selected episodes"
        )
    return said


def _without_mask(fields: Any) -> Any:
    return {name: value for name, value in fields.items() if name != MASK} if isinstance(fields, Mapping) else fields


def _differing_parts(name: str, wanted: Any, has: Any) -> list[str]:
    """Return descriptions of the differences between the fields, or the columns, of two configurations."""
    said = [f"{name}: expected {part!r}, found none" for part in wanted if part not in has]
    said += [f"{name}: expected no {part!r}, found one" for part in has if part not in wanted]
    both = [part for part in wanted if part in has and has[part] != wanted[part]]
    said += [_expected_and_found(f"{name}: {part}", wanted[part], has[part]) for part in both]
    if list(wanted) != list(has) and wanted.keys() == has.keys():
        said.append(f"{name}: expected the order {list(wanted)}, found {list(has)}")
    return said


def _expected_and_found(name: str, wanted: Any, found: Any) -> str:
    if any(isinstance(value, str) and value.startswith("#") for value in (wanted, found)):
        return f"{name} differs"
    return f"{name}: expected {'none' if wanted is None else wanted}, found {'none' if found is None else found}"


T = TypeVar("T")


class Loader(Generic[T]):
    """Computes batches of a source ahead of time, and delivers the batches in index order; the subclass ``Batchifier``
    creates the source from arguments.

    Args:
        source: A ``Source``, or for a replay buffer a ``BufferSource``.
        store: The store to refresh from, or None.
        delivery: The functions that compute and deliver batches.
        prefetch: Number of batches to compute ahead.
        num_workers: Number of threads that compute batches; 0: the calling thread computes them.
        digest: Whether the loader computes a digest of the delivered batches; see ``digest``.

    Raises:
        ConfigError: ``prefetch`` or ``num_workers`` is out of range.
    """

    #: The framework whose ranks are searched first, for ``shard="auto"``; see ``find_ranks``.
    framework = "torch"

    def __init__(
        self,
        source: Any,
        store: Store | None = None,
        *,
        delivery: Delivery[T],
        prefetch: int = 4,
        num_workers: int = 2,
        digest: bool = False,
    ) -> None:
        self._feed: Any = source  # a BufferSource is a feed
        if not hasattr(source, "prepare"):
            self._feed = StoreFeed(source, store) if isinstance(source, BatchSource) else Feed(source)
        self._delivery = delivery
        self._prefetch = check_count("prefetch", prefetch, lowest=1)
        self._num_workers = 0 if delivery.in_caller else check_count("num_workers", num_workers, lowest=0)
        self._next_index = self._feed.first_index
        self._make: Callable[[int], Any] | None = None
        self._ahead: OrderedPrefetcher[Any] | None = None
        self._failure: WorkerError | None = None
        self._digest: StreamDigest | None = None
        if digest:
            from mouse_core.digest import StreamDigest

            self._digest = StreamDigest()
        self._closed = False
        self._process: int | None = None
        self._agreement: Agreement | None = None
        ranks = delivery.ranks or getattr(source, "ranks", None)
        if ranks is not None:
            from mouse_core.prefetch._agreement import Agreement  # loaded on demand

            self._agreement = Agreement(ranks, self.framework)

    # ------------------------------------------------------------------ batches

    def next_batch(self) -> T:
        """Return the next batch, in index order.

        Raises:
            WorkerError: Computing the batch failed; the cause is chained. Every later call raises the same error, and
                the loader's state stays at the failed index.
            ClosedError: ``close()`` was called.
            ForkError: The caller is a forked child of the process that first used the loader.
            ConfigError: JAX traces the calling function, so the compiled function would always use the same batch. Or,
                with ``shard="auto"`` and before the first batch, another rank would deliver other batches.
        """
        self._check_usable()
        if self._failure is not None:
            raise self._failure
        if self._agreement is not None:
            self._agreement.deliver(self._feed, self._next_index)
        if self._feed.prepare(self._next_index, first=self._make is None):
            self._drop_prefetched()
        try:
            made = self._next_result()
            made, digest = made if self._digest is not None else (made, None)
            batch: T = made if self._delivery.hand_over is None else self._delivery.hand_over(made)
        except ClosedError:
            raise
        except Exception as error:
            message = f"batch {self._next_index}: {type(error).__name__}: {error}"
            self._failure = WorkerError(message)
            raise self._failure from error
        self._feed.delivered(self._next_index)
        self._next_index += 1
        if digest is not None and self._digest is not None:
            self._digest += digest
        return batch

    @property
    def digest(self) -> StreamDigest:
        """The digest of all batches delivered so far, 128 bits; the sum of all ranks' digests is the stream's digest.

        The digest is equal in every framework and for every number of workers. The state contains the digest, and a
        resumed loader continues the digest; with several ranks, this requires the joint state of all ranks, see
        ``load_state_dict``. The thread that computes a batch also computes its digest, before the transfer to a device.
        With ``uneven="pad"``, the digest does not include padding windows, or a mask that only marks padding windows.
        So the digest is the same for any number of ranks.

        Raises:
            ConfigError: The loader was created without ``digest=True``.
        """
        if self._digest is None:
            raise ConfigError("digest: expected a loader made with digest=True, found a loader without a digest")
        return self._digest

    def _batch_function(self) -> Callable[[int], Any]:
        """Return the function that computes the source's batches, with their digests if requested."""
        make = self._delivery.maker(self._feed.source)
        if self._digest is not None:
            from mouse_core.prefetch._digesting import digesting

            make = digesting(make, self._feed.source)
        return make

    def _next_result(self) -> Any:
        """Return the next batch, with its digest if requested."""
        if self._process is None:
            self._process = os.getpid()
        if self._make is None:
            self._make = self._batch_function()
            if self._ahead is not None:
                self._ahead.begin(self._make, self._next_index)
        if not self._num_workers:
            return self._make(self._next_index)
        ahead = self._ahead
        if ahead is not None and ahead.next_index != self._next_index:
            # Ctrl-C was pressed after an item was removed from the queue and before it was counted.
            ahead.close()
            ahead = None
        if ahead is None:
            workers, prefetch = self._num_workers, self._prefetch
            self._ahead = ahead = OrderedPrefetcher(self._make, self._next_index, workers=workers, ahead=prefetch)
            if self._closed:  # another thread closed the loader
                ahead.close()
        return ahead.get()

    def __iter__(self) -> Iterator[T]:
        """Yield the batches up to the end of the current epoch; the next ``for`` loop yields the next epoch.

        If ``refresh()`` is called within a loop, the loop ends when the epoch that began at the refresh ends.
        """
        ends = False
        while not ends:
            feed = self._feed
            yield self.next_batch()
            ends = self._feed is feed and feed.ends_at(self._next_index)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._feed.source)

    def __repr__(self) -> str:
        package = type(self).__module__.partition(".")[0]
        return f"{package}.{type(self).__name__}({self._feed.source!r}, at={self._next_index})"

    @property
    def source(self) -> Any:
        """The source of the batches: a ``BatchSource``, a ``BufferSource``, or a user's own source."""
        return self._feed.source

    @property
    def spec(self) -> Spec:
        """The spec of a batch.

        Raises:
            ConfigError: The loader is over a replay buffer, whose fields are unknown before its first rows.
        """
        if not hasattr(self.source, "spec"):
            raise ConfigError("spec: expected a loader over a store, found a loader over a replay buffer")
        spec: Spec = self.source.spec
        return spec

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the state for continuing with the next batch in any process: integers and strings.

        The keys are ``seed``; ``next_index``; ``rows``, the number of rows of the snapshot (for a mixture, a dict by
        the members' names); ``epoch_start``, the index of the first batch of the first epoch over the snapshot;
        ``fingerprint`` of the data and the configuration; ``configuration`` as readable text; and, if there are videos,
        ``decoder``. The state is equal for every framework, shard and number of workers.

        Over a user-defined source, the keys are ``next_index`` and ``fingerprint``. Over a replay buffer, the state has
        ``next_index`` and, as arrays, the batches that were drawn but not delivered; the buffer has its own state.

        With ``digest=True`` the state also has ``digest``, the only value that differs between ranks.
        """
        state: dict[str, Any] = self._feed.state(self._next_index)
        if self._digest is not None:
            from mouse_core.digest import KEY, rank_state
            from mouse_core.prefetch._digesting import shard_of

            state[KEY] = rank_state(self._digest, shard_of(self._feed.source, self._delivery.ranks))
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, accept_decoder: bool = False) -> None:
        """Continue exactly at the position in the stream that ``state`` contains, with the seed in ``state``. The store
        can have more rows than at the time when the state was saved.

        The digest continues if the state has the digest of a complete stream: from one process, or from all ranks
        together (``mouse_core.digest.whole_state``). With several ranks, rank 0 continues the digest and the other
        ranks begin with a digest of zero, so that the sum is the stream's digest. If ``state`` comes from only one of
        several ranks, all ranks begin with a digest of zero.

        Frames of videos must be decoded by the decoder version that the state names
        (``mouse_core.video.decoder_version``). ``accept_decoder=True`` also accepts other versions, whose pixels can
        differ in their last bits.

        Raises:
            StateError: The state is damaged, or belongs to another dataset, configuration or decoder; the loader is
                unchanged.
            ConfigError: With ``shard="auto"``, the ranks load different states; the loader is unchanged.
            ClosedError, ForkError: See ``next_batch``.
        """
        self._check_usable()
        digest = None
        if isinstance(state, Mapping):
            state = dict(state)
            digest = state.pop("digest", None)
            if accept_decoder:
                state.pop("decoder", None)
        feed, next_index = self._feed.restored(state)
        if self._agreement is not None:
            self._agreement.hold("load_state_dict()", feed, next_index, self._next_index)
        if self._digest is not None:
            from mouse_core.digest import rank_digest
            from mouse_core.prefetch._digesting import shard_of

            self._digest = rank_digest(digest, shard_of(feed.source, self._delivery.ranks))
        self._restart(feed, next_index)

    def refresh(self) -> None:
        """Take a new snapshot of the store; the next batch begins an epoch over the snapshot.

        Raises:
            ConfigError: The loader was created from a snapshot, not from a store. Or, with ``shard="auto"``, another
                rank has other rows or continues without a refresh; the loader is unchanged.
            ClosedError, ForkError: See ``next_batch``.
        """
        self._check_usable()
        feed = self._feed.refreshed(self._next_index)
        if self._agreement is not None:
            self._agreement.hold("refresh()", feed, self._next_index, self._next_index)
        self._restart(feed, self._next_index)

    def _restart(self, feed: Any, next_index: int) -> None:
        self._feed, self._next_index = feed, next_index
        self._failure = None
        self._drop_prefetched()

    def _drop_prefetched(self) -> None:
        """Drop the results and errors of threads; the request of the next batch restarts the threads."""
        if self._ahead is not None:
            self._ahead.pause()
        self._make = None

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stop the threads and drop prefetched batches; later calls of ``next_batch`` raise ClosedError. A second call
        does nothing.
        """
        self._closed = True
        if self._ahead is not None and self._process == os.getpid():
            self._ahead.close()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        refuse_traced("loader")
        if self._closed:
            raise ClosedError("loader: expected an open loader, found a closed loader")
        if self._process is not None and self._process != os.getpid():
            raise ForkError(
                f"loader: expected a call in process {self._process}, found a call in the forked child {os.getpid()}; "
                "create a loader in the child"
            )
