"""What buffers and ensembles of them have in common: drawing batches by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

from mouse_core._base.locks import TurnLock
from mouse_core.digest.states import asked_for, digest_of, digest_state
from mouse_core.digest.stream import StreamDigest
from mouse_core.errors import ConfigError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.nested import as_lists, copied
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.replay.protocols import TRANSFORM_CALLS, Draw, Transform
from mouse_core.replay.transforms.compose import Compose, delivered_alignment
from mouse_core.spec import Alignment, check_count

Collate = Callable[[Sequence[Any]], Any]


@dataclass(slots=True)
class Drawn:
    """Rows that were drawn and gathered, and are not a batch yet.

    Args:
        rows: As the storage gave them; of an ensemble, a ``Drawn`` of each member that takes part.
        draw: What the sampler said; of an ensemble, which member each row is of.
        key: Names the random numbers of the transforms.
        written: How many rows had been written when they were drawn.
        updates: How often priorities had been updated then.
        settled: What the transforms were then that keep numbers of all rows; None: there are none.
    """

    rows: Any
    draw: Draw
    key: Key
    written: int
    updates: int
    settled: Mapping[str, Any] | None = None


class BaseBuffer:
    """What replay buffers and ensembles of them have in common: batches by number, from a seed.

    The buffers of a framework override two methods: ``_accept(rows)``, which makes trees of NumPy arrays of rows as
    users write them, and ``_deliver(batch)``, which makes a batch of the framework of a tree of NumPy arrays. An
    adapter has both in a class beside this one, for its buffer and its ensemble alike.

    Args:
        transform: What is done to batches: one callable, or several in a list.
        batch_size: Windows in a batch, B, where ``sample`` is not told.
        seed: In ``[0, 2**64)``.
        collate_fn: Makes one batch of parts.
        alignment: That of the rows before they are transformed.
        digest: Whether a digest of what is delivered runs along; see ``digest``.

    Raises:
        ConfigError: An argument out of range, or a transform that takes rows of another alignment.
    """

    def __init__(
        self,
        transform: Transform | Sequence[Transform] | None,
        batch_size: int | None,
        seed: int,
        collate_fn: Collate | None,
        alignment: Alignment,
        digest: bool = False,
    ) -> None:
        self._take_transform(transform, alignment)
        self._batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self._seed = check_seed(seed)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn: expected a function, found {collate_fn!r}")
        self._collate = collate_fn
        self._lock = TurnLock()
        self._samples = 0
        self._digest = StreamDigest() if digest else None

    def _take_transform(self, transform: Transform | Sequence[Transform] | None, alignment: Alignment) -> None:
        """Do this to batches of rows of this alignment."""
        transforms = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
        # Composed even where it is one: Compose knows what to do with rows that were read beyond those drawn.
        self._transform = Compose(*transforms) if transforms else None
        self._alignment = delivered_alignment(self._transform, alignment)

    @property
    def transform(self) -> Transform | None:
        """What is done to batches."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """Windows in a batch where ``sample`` is not told."""
        return self._batch_size

    @property
    def seed(self) -> int:
        """What the draws depend on."""
        return self._seed

    @property
    def alignment(self) -> Alignment:
        """Which transition the action, reward and done of a delivered row belong to."""
        return self._alignment

    @property
    def digest(self) -> StreamDigest:
        """What ``sample`` and iteration have delivered so far, in 128 bits: the batches with their numbers.

        It is ``StreamDigest.of(i, batch)`` added up over the samples, of which the buffer's first has ``i = 0``, and is
        equal in every framework. It is a part of the state and goes on from there. A loader draws ahead of what it
        delivers, and has a digest of its own (``PrefetchBatchifier(buffer, digest=True)``): what it draws has a number,
        and is not in this digest. The same holds for the buffers of an ensemble.

        Of several processes each has a buffer of its own, with rows of its own. The sum of their digests is that of
        all that was delivered, by whomever; it is equal in a second run of as many processes. It is no stream's that
        one process would deliver: that holds where ranks draw parts of one stream, as loaders over a store do.

        Raises:
            ConfigError: The buffer was made without ``digest=True``.
        """
        return asked_for(self._digest, "buffer")

    @property
    def counts(self) -> tuple[int, int]:
        """How many rows were ever written, and how often priorities were updated."""
        raise NotImplementedError

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last of its epoch; never with replacement."""
        raise NotImplementedError

    def sample(self, batch_size: int | None = None) -> Any:
        """The next batch.

        Args:
            batch_size: Windows in it: single rows, or slices; by default that of the buffer.

        Returns:
            ``{field: [batch_size, ...]}``, slices as ``[B, S, ...]``, nested as the rows are, in
            memory that is never written to again; with ``index``, and what the sampler adds (``priority_weight``,
            ``mask``, ``traj_id``). Rows that are no dict are the field ``data``.

        Raises:
            ConfigError: No batch size, an empty buffer, or more rows than there are without replacement.
        """
        return self._handed_out(self.draw(batch_size))

    def __iter__(self) -> Iterator[Any]:
        """Batches of ``batch_size``: of one epoch without replacement, without end otherwise.

        Raises:
            ConfigError: As ``sample``.
        """
        ends = False
        while not ends:
            drawn = self.draw(None)
            ends = self.ran_out
            yield self._handed_out(drawn)

    def refresh(self) -> None:
        """Take over the rows that a ``DatasetStore`` has now, where it is the storage; the next sample draws from them.

        Rows that were there keep their ``index`` and their priorities, and later ones have the largest priority, as
        rows that are written. An epoch without replacement begins anew. Where the store dropped its oldest rows, those
        that stay keep their priorities, and have an ``index`` that is smaller by as many: set the priorities of batches
        that were drawn before it first. Where it forgot all, as in ``clear()``, no priority is known. The number of the
        next sample goes on, and batches depend on where between two samples this was called, as they do on writes.

        Raises:
            ConfigError: No store: rows that are written, a snapshot or a dataset; of an ensemble, in all members.
        """
        with self._lock, self._shared():
            self._refresh()

    @property
    def _grows(self) -> bool:
        """Whether there is a store to take later rows from."""
        return bool(getattr(getattr(self, "storage", None), "grows", False))

    def _refresh(self) -> None:
        """See ``refresh``; the locks are held."""
        raise NotImplementedError

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """The first half of ``sample``: choose the next batch's rows and gather them, under the lock.

        Args:
            batch_size: As for ``sample``.
            seed: Another seed than the buffer's; an ensemble gives each of its members one.

        Raises:
            ConfigError: As ``sample``.
        """
        raise NotImplementedError

    def _mark(self) -> Any:
        """Where the draws are."""
        raise NotImplementedError

    def _rewind(self, mark: Any) -> None:
        """Forget the draws since ``_mark()``, as if they had not been made."""
        raise NotImplementedError

    def finish(self, drawn: Drawn) -> Any:
        """The second half of ``sample``: what ``draw`` gave, as a batch. Any thread may do it, and more than once."""
        return self._deliver(self.batch_of(drawn))

    def _handed_out(self, drawn: Drawn) -> Any:
        """What ``draw`` gave, as a batch that counts in the digest."""
        if self._digest is None:
            return self.finish(drawn)
        batch = self.batch_of(drawn)
        # First the digest, which is made on the host: what is delivered may be given away.
        part = StreamDigest.of(drawn.key.index, self._on_host(batch))
        delivered = self._deliver(batch)
        with self._lock:
            self._digest += part
        return delivered

    def batch_of(self, drawn: Drawn) -> Any:
        """What ``draw`` gave as a batch, transformed, before it is handed to a framework."""
        raise NotImplementedError

    def _transformed(self, batch: Any, drawn: Drawn) -> Any:
        if self._transform is None:
            return batch
        return self._transform.at(drawn.settled)(batch, drawn.key.with_call(TRANSFORM_CALLS))

    def _next_key(self, seed: int | None) -> Key:
        return Key(self._seed if seed is None else seed, Purpose.REPLAY, self._samples)

    def _size(self, batch_size: int | None) -> int:
        if batch_size is not None:
            return check_count("batch_size", batch_size)
        if self._batch_size is None:
            raise ConfigError("batch_size: expected one for the buffer or for this sample, found none")
        return self._batch_size

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All there is: rows, priorities, cursors, and the number of the next sample, as long as the data.

        Nested dicts of plain values and NumPy arrays, copied: what happens later does not show in it.
        """
        with self._lock, self._shared():
            state: dict[str, Any] = copied(self._state())
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state`` was taken: with its rows, its seed, and the sample that came next there.

        With ``digest=True`` the digest goes on, too; with a state that has none a new one begins.

        Raises:
            StateError: The state is of other parts, or damaged; nothing has changed then.
        """
        with self._lock, self._shared():
            self._load(state)

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save all there is to a file, as long as the data.

        It is written beside ``path`` and renamed, so that a crash or a full disk leaves the file that was there.

        Args:
            path: A file; or a directory that exists, in which it is called ``replay.mouse``.

        Raises:
            StorageError: The file cannot be written (also an OSError).
        """
        with self._lock, self._shared():
            write_checkpoint(path, self._state())

    def loads(self, path: str | PathLike[str]) -> None:
        """Go on exactly where ``dumps`` was called.

        Raises:
            StateError: The file is damaged, or of other parts; nothing has changed then.
            StorageError: It cannot be read (also an OSError).
        """
        self.load_state_dict(read_checkpoint(path))

    def __len__(self) -> int:
        """Rows there are."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Numbers about what is there and was done."""
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        return {**self._own_state(), **digest_state(self._digest)}

    def _load(self, state: Mapping[str, Any]) -> None:
        digest = digest_of(state, self._digest) if isinstance(state, Mapping) else None
        self._load_own(state)
        self._digest = digest

    def _own_state(self) -> dict[str, Any]:
        """All that is to be saved but the digest."""
        raise NotImplementedError

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Take a state over, or raise StateError and leave all as it is."""
        raise NotImplementedError

    def _shared(self) -> AbstractContextManager[Any]:
        """What to hold beside the lock."""
        return nullcontext()

    # ------------------------------------------------------------------ frameworks

    def _accept(self, rows: Any) -> Any:
        """Rows of a framework as the storage takes them; for a subclass to override."""
        return rows

    def _on_host(self, batch: Any) -> Any:
        """A batch with the values that it will be delivered with, for a digest; for a subclass that narrows them."""
        return batch

    def _deliver(self, batch: Any) -> Any:
        """A batch, or rows, as a framework takes them; for a subclass to override."""
        return as_lists(batch)
