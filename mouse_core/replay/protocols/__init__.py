"""The protocols of a replay buffer's parts (storage, writer, sampler, transform), and the values that they exchange.

Rows are numbered in the order of writing: row 0, 1, 2, ...; a number is never reused. A *slot* is a position for a row,
``0 <= slot < capacity``. Slots are filled from slot 0 on, so the slots in use are always ``0 .. len(storage) - 1``. In
a ring, row ``n`` lies in slot ``n % capacity``. With ``ndim=2`` a storage is ``[time, env]``: a row lies in slot ``time
* num_envs + env``, so the slots of consecutive rows of one stream differ by ``num_envs``.

A field at the root of a row is identified by its name, a nested field by a tuple of names: ``"reward"``, ``("next",
"reward")``. A row that is a tuple has the fields ``(0,)``, ``(1,)``; a row that is one array has the field ``()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import Slots as Slots
from mouse_core.nested import FieldKey as FieldKey
from mouse_core.randomness import Key
from mouse_core.spec import Alignment

END_KEYS: tuple[tuple[FieldKey, ...], ...] = (
    (("next", "done"), ("next", "terminated"), ("next", "truncated")),
    ("done", "terminated", "truncated"),
)
"""Groups of fields that are nonzero in the last row of an episode; the first group of which the rows have any field is
used.
"""

EPISODE: FieldKey = ("snapshot", "episode")
"""The name of the field with the episode number of each row of a store."""

TRAJ_KEYS: tuple[FieldKey, ...] = (EPISODE, ("collector", "traj_ids"), "episode", "traj_id", "traj_ids", "traj")
"""Fields with the trajectory number of each row; the first of these fields that the rows have is used."""

TRANSFORM_CALLS = 1 << 32
"""The smallest value of ``Key.call`` for transforms; samplers use smaller values."""


@dataclass(slots=True)
class Draw:
    """The result of a sampler's draw: the rows of a batch, and further fields of the batch.

    Args:
        index: Slots, int64: ``[batch]`` for rows, ``[B, S]`` for slices. Every slot must be in use, even where ``mask``
            is False.
        mask: Whether each slot is valid, bool, in the shape of ``index``; None: all are valid.
        priority_weight: Importance weights, float32, in the shape of ``index`` or ``[B]``.
        pad: The value of all fields where ``mask`` is False; None keeps the values at ``index``.
        extra: Further fields of the batch by name, such as ``traj_id``; their first axes are the axes of ``index``.
    """

    index: Slots
    mask: npt.NDArray[np.bool_] | None = None
    priority_weight: npt.NDArray[np.float32] | None = None
    pad: float | None = None
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Write(NamedTuple):
    """The report of a write; the buffer passes it to the sampler.

    Attributes:
        slots: The written slots, int64 ``[n]``, in the order of the rows. In a ring the rows are ``first .. first + n -
            1`` in the slots ``row % capacity``, and ``n`` is at most ``capacity``.
        first: The index of the first row in the order of writing; None if existing rows were changed in place (``buf[i]
            = x``).
        read: A function: ``read(key)`` returns a field's values in the written rows, ``[n, ...]``; valid only during
            the call.
        keeps_priority: Whether rows that were changed in place keep their priorities.
    """

    slots: Slots
    first: int | None
    read: Callable[[FieldKey], npt.NDArray[Any]]
    keeps_priority: bool = False


@runtime_checkable
class Storage(Protocol):
    """The storage of rows. A storage need not be thread-safe: the buffer holds its lock around every call.

    A storage may have two optional attributes. These attributes are used for windows whose positions are counted from
    an episode's first step, even if that step was overwritten. ``indexes`` is a set of the episode indexes of the rows:
    a new index copies the first steps of episodes from the other indexes. ``overwritten(key)`` returns a field of the
    most recently overwritten rows that can still be read, up to the oldest time step in use.

    After an error in a method the storage is unchanged.
    """

    @property
    def capacity(self) -> int:
        """The capacity in rows: all time steps of all environments, a multiple of the number of environments."""

    @property
    def ndim(self) -> int:
        """The number of batch axes of the rows: 1, or 2 for ``[time, env]``."""

    @property
    def num_envs(self) -> int:
        """The number of environments: 1 for ``ndim=1``; for ``ndim=2``, 1 until the first write."""

    @property
    def alignment(self) -> Alignment:
        """The alignment: "arrived" if a row's action, reward and done led to the row's observation, else "outgoing"."""

    @property
    def writable(self) -> bool:
        """Whether rows can be written."""

    @property
    def written(self) -> int:
        """The number of rows ever appended by any process, at least ``len``. The next row has this index in the order
        of writing.
        """

    @property
    def changes(self) -> int:
        """How often any process has changed rows by a call other than ``append``."""

    def __len__(self) -> int:
        """Return the number of rows, which lie in the slots ``0 .. len - 1``."""

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Append rows; a full storage overwrites its oldest rows.

        Args:
            rows: A tree of arrays ``[n, ...]``, for ``ndim=2`` ``[time, env, ...]``; or a list of single rows.
            one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step, without the first axis.

        Returns:
            The index of the first row in the order of writing, and how many rows were appended. If more than
            ``capacity`` rows are appended, only the last ``capacity`` rows remain.
        """

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` (int64 ``[n]``) with ``rows``; see ``append``.

        Raises:
            IndexError: A slot is not in use.
        """

    def get(self, slots: Slots) -> Any:
        """Return a copy of the rows in ``slots``, an array of any shape. The copy is a tree whose leaves are
        ``[*slots.shape, ...]``.
        """

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """Return one field of the rows in ``slots`` as a NumPy array ``[*slots.shape, ...]``, possibly a view.

        Raises:
            MissingFieldError: The rows lack the field.
        """

    def empty(self) -> None:
        """Remove all rows but not their schema; the next row has the index 0 in the order of writing."""

    def lock(self) -> AbstractContextManager[Any] | None:
        """Return the lock that the buffer holds while it draws and gathers a batch; None if no other process writes to
        the storage.
        """

    def state(self) -> dict[str, Any]:
        """Return the rows and their description as nested dicts of plain values and NumPy arrays; the result is as
        large as the data.

        Arrays may be views, valid until the next write.
        """

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the storage from ``state``.

        Raises:
            StateError: The state is damaged, or comes from a storage of another kind or size.
        """


@runtime_checkable
class Writer(Protocol):
    """Chooses the slots of written rows."""

    @property
    def ordered(self) -> bool:
        """Whether rows are stored in the order of writing (slot = index % capacity); slices require this order."""

    def write(self, storage: Storage, rows: Any, *, one: bool = False) -> tuple[Slots, Slots, int | None]:
        """Write rows; see ``Storage.append`` for the arguments.

        Returns:
            Three values: the slot of every row, int64 ``[n]``, -1 for a row that was not kept; the written slots,
            ``Write.slots``; and the index of the first row, ``Write.first``.
        """

    def reset(self, storage: Storage) -> None:
        """Discard cached values that were computed from rows; called when any row may have changed."""


@runtime_checkable
class Sampler(Protocol):
    """Chooses the rows of a batch. The buffer's lock is held around every call.

    A draw depends only on its key and on the earlier writes and draws. After an error in a method the sampler is
    unchanged. In a sampler without a state, ``wrote``, ``reset`` and ``load_state_dict`` can do nothing, and
    ``state_dict`` can return ``{}``.

    A sampler may have ``adds``: the names of the fields of its draws, without ``index`` and ``traj_id``. Stored rows
    cannot have fields with these names: with ``adds`` the error is raised when the rows are written, without ``adds``
    when a batch is drawn.

    In a buffer over a store, new rows of the store are reported by ``wrote``, like written rows. The capacity of such a
    storage is its number of rows, so the capacity increases with every report.

    A sampler may have a method ``dropped(storage, rows)``. A buffer calls ``dropped`` after its store has dropped the
    oldest ``rows`` rows. The remaining rows lie in the slots from 0 on. All later slots contain new rows, which
    ``wrote`` does not report. For a sampler without ``dropped`` the buffer calls ``reset``.

    A sampler with a priority for each row has a method ``update_priority(storage, index, priority)``. This method sets
    the priorities, float ``[...]``, of the rows in the slots ``index`` of the same shape; if a slot occurs twice, the
    last priority counts. ``update_priority`` raises DataError for a priority that is negative, NaN or infinite, and
    IndexError for a slot that is not in use. The sampler may also have a method ``check_update(storage, index,
    priority)``, which raises these errors without changing priorities; ``index`` is None for rows that are not written
    yet. A buffer calls ``check_update`` before it writes rows with a field of priorities.
    """

    @property
    def needs_order(self) -> bool:
        """Whether the sampler requires rows that are stored in the order of writing, as samplers of slices do."""

    def wrote(self, storage: Storage, write: Write) -> None:
        """Handle a report of written rows. The buffer calls this method often, so defer work to the next draw where
        possible.
        """

    def reset(self, storage: Storage) -> None:
        """Discard everything that was computed from rows, and read the rows again, now or at the next draw. The buffer
        is new or was emptied, or any rows may have changed.
        """

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw the next ``batch_size`` windows (rows, or slices ``[B, S]``), with random numbers from ``key``.

        ``key.call`` is 0; the sampler may use keys with a ``call`` below ``TRANSFORM_CALLS``.

        Raises:
            ConfigError: The storage has too few rows, or the sampler cannot draw a batch of this size.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which draws depend, without the rows. The state consists of plain values and NumPy
        arrays; an array may have one element for each row.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``. Before the next draw, the buffer restores the rows that belong to the state in the
        storage.

        Raises:
            StateError: The state is damaged, or comes from another sampler or configuration.
        """


class Transform(Protocol):
    """A transform of a delivered batch: any callable from a batch to a batch. A transform may have:

    - ``inverse(rows)``: converts rows before they are written: one row for ``append``, or many rows for ``extend``;
    - ``random = True``: the transform draws random numbers, and is called as ``transform(batch, key)`` with a ``Key``
      whose ``call`` is at least ``TRANSFORM_CALLS``;
    - ``takes``: "arrived" or "outgoing", the alignment of its input; a buffer with the other alignment raises
      ConfigError;
    - ``alignment``: "arrived" or "outgoing", the alignment of its output; None or absent: the alignment of its input;
    - ``gather(storage, index, episodes, key)``: called under the lock when a batch is drawn. The arguments are the
      storage, the drawn slots, the storage's episode index, and the key with which the transform is called later. The
      method returns further fields of the batch by name, computed from other rows of the same episodes. Such a
      transform has ``done``, the name of the field that marks where episodes end;
    - ``reach``: the number of rows that the transform needs after each drawn row. If single rows are drawn,
      the transform gets slices ``[batch, 1 + reach]`` that begin at these rows, a ``mask``, and the drawn ``index`` of
      shape ``[batch]``. The transform's result has only the first step of each slice.

    A transform with statistics of all rows (a running mean, as ``VecNorm``) has two more methods. ``settled(storage)``
    is called under the lock when a batch is drawn, and returns nested dicts of plain values and NumPy arrays.
    ``at(settled)`` returns the transform with these statistics, and the batch is passed to the returned transform. The
    buffer calls ``watch(storage)`` once, and reports writes by ``wrote``, ``reset`` and ``dropped``, as for a
    ``Sampler``. The result of ``state_dict()`` is saved in the buffer's state, and ``load_state_dict(state)`` restores
    it.

    A transform runs in a prefetching thread, outside the buffer's lock, so a transform must not use the buffer. A
    transform may change the batch's dict, but must not write to the arrays.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the transformed batch."""
