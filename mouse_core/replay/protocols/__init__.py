"""The protocols of a replay buffer's parts: storage, writer, sampler and transform, and the values between them.

Rows are numbered as they are written: row 0, 1, 2, ..., never reused. A *slot* is where a row lies, ``0 <= slot <
capacity``; slots fill up from 0, so those in use are always ``0 .. len(storage) - 1``. Under a ring row ``n`` lies in
slot ``n % capacity``. With ``ndim=2`` a storage is ``[time, env]``: slot ``time * num_envs + env``, so the rows of one
stream lie ``num_envs`` apart.

A field is named by its name at the root of a row, and by a tuple of names where it is nested: ``"reward"``, ``("next",
"reward")``. Rows that are a tuple have fields ``(0,)``, ``(1,)``; rows that are one array have the field ``()``.
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
"""The fields that are not 0 in the last row of an episode: the first of these groups of which one is there."""

EPISODE: FieldKey = ("snapshot", "episode")
"""The number of each row's episode, where rows are those of a store, which knows where its episodes begin."""

TRAJ_KEYS: tuple[FieldKey, ...] = (EPISODE, ("collector", "traj_ids"), "episode", "traj_id", "traj_ids", "traj")
"""The fields with the number of each row's trajectory: the first of them that is there."""

TRANSFORM_CALLS = 1 << 32
"""The first ``call`` of the keys that transforms draw from; samplers use those below."""


@dataclass(slots=True)
class Draw:
    """A sampler's decision about a batch.

    Args:
        index: Slots, int64: ``[batch]`` for rows, ``[B, S]`` for slices. Every one of them is in use,
            also where ``mask`` is False.
        mask: The valid slots, bool, the shape of ``index``; None: all.
        priority_weight: Importance weights, float32, the shape of ``index`` or ``[B]``.
        pad: The value of all fields where ``mask`` is False; None keeps the values at ``index``.
        extra: Further fields of the batch by name, such as ``traj_id``; their first axes are those of ``index``.
    """

    index: Slots
    mask: npt.NDArray[np.bool_] | None = None
    priority_weight: npt.NDArray[np.float32] | None = None
    pad: float | None = None
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Write(NamedTuple):
    """The notice of a write that a sampler receives.

    Attributes:
        slots: The slots written, int64 ``[n]``, in the order of the rows. Under a ring the rows are ``first .. first +
            n - 1`` in the slots ``row % capacity``, never more than ``capacity`` of them.
        first: The number of the first row; None where rows that exist were changed in place (``buf[i] = x``).
        read: The values of a field of these rows, ``[n, ...]``, as ``read(key)``; valid during the call.
    """

    slots: Slots
    first: int | None
    read: Callable[[FieldKey], npt.NDArray[Any]]


@runtime_checkable
class Storage(Protocol):
    """The storage of rows. It is not thread-safe: the buffer holds its lock around every call.

    It may have ``oldest_begins(ends, ids)``: the time steps with which the oldest episodes of its environments began,
    int64 ``[E]``, also where rows were written over them; None where it does not know. ``ends`` are fields that are not
    0 in an episode's last row, and ``ids``, which may be None, is one that changes with the episode.

    A method that raises leaves the storage as it was.
    """

    @property
    def capacity(self) -> int:
        """The capacity in rows: all time steps of all environments, a multiple of their number."""

    @property
    def ndim(self) -> int:
        """1, or 2 for ``[time, env]``."""

    @property
    def num_envs(self) -> int:
        """Streams of rows that lie side by side: 1 for ``ndim=1``; 1 until the first write for ``ndim=2``."""

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""

    @property
    def writable(self) -> bool:
        """Whether rows may be written."""

    @property
    def written(self) -> int:
        """The number of rows ever appended, by any process; the next one has this number. At least ``len``."""

    @property
    def changes(self) -> int:
        """The number of changes to rows other than ``append``, by any process."""

    def __len__(self) -> int:
        """Rows there are, in the slots ``0 .. len - 1``."""

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write rows behind the last, over the oldest where there is no room.

        Args:
            rows: ``[n, ...]`` in every leaf, ``[time, env, ...]`` for ``ndim=2``; or a list of single rows.
            one: ``rows`` is a single row, or for ``ndim=2`` a single time step, without the first axis.

        Returns:
            The number of the first row, and how many rows there were. Of more than ``capacity`` only the last are
            there afterwards.
        """

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` (int64 ``[n]``) by ``rows``, as for ``append``.

        Raises:
            IndexError: A slot that is not in use.
        """

    def get(self, slots: Slots) -> Any:
        """The rows in ``slots``, of any shape, in fresh memory: a tree whose leaves are ``[*slots.shape, ...]``."""

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows in ``slots`` as a NumPy array ``[*slots.shape, ...]``, possibly a view.

        Raises:
            MissingFieldError: The rows have no such field.
        """

    def empty(self) -> None:
        """Forget all rows; the next one has number 0. What a row looks like stays known."""

    def lock(self) -> AbstractContextManager[Any] | None:
        """Return the lock for a draw and its gather if other processes write too; None for no lock."""

    def state(self) -> dict[str, Any]:
        """The rows and what describes them, as long as the data: nested dicts of plain values and NumPy arrays.

        Arrays may be views, valid until the next write.
        """

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken from.

        Raises:
            StateError: It is of a storage of another shape, or damaged.
        """


@runtime_checkable
class Writer(Protocol):
    """Decides where rows go."""

    @property
    def ordered(self) -> bool:
        """Whether rows lie in the order they were written (slot = number % capacity), as slices need it."""

    def write(self, storage: Storage, rows: Any, *, one: bool = False) -> tuple[Slots, Slots, int | None]:
        """Write rows; arguments as ``Storage.append``.

        Returns:
            For every row its slot, or -1 if it was not kept, int64 ``[n]``; and what ``Write`` wants: the slots that
            were written, and the number of the first row.
        """

    def reset(self, storage: Storage) -> None:
        """The rows may all be others: look at them again, now or at the next write."""


@runtime_checkable
class Sampler(Protocol):
    """Decides which rows a batch consists of. The buffer's lock is held around every call.

    A draw depends on its key and on what was written and drawn before, on nothing else. A method that raises leaves
    the sampler as it was. A sampler that keeps nothing has empty methods, and ``{}`` for a state.

    It may have ``adds``, the names of the fields of its draws beside ``index`` and ``traj_id``: rows that have one are
    then refused when they are written, otherwise when they are drawn.

    It may have ``grew(storage)``: the storage has a larger capacity now, and room behind its rows, none of which was
    ever overwritten; what came is told by ``wrote`` next. So it is where a buffer over a store takes later rows over.
    A sampler without it is told to ``reset``.

    It may have ``dropped(storage, rows)``: the first ``rows`` rows are gone, those that were behind them lie in the
    slots from 0 on, and what lies behind these is new, of which ``wrote`` tells nothing. So it is where the store of a
    buffer drops its oldest rows. A sampler without it is told to ``reset``.
    """

    @property
    def needs_order(self) -> bool:
        """Whether rows must lie in the order they were written, as for slices."""

    def wrote(self, storage: Storage, write: Write) -> None:
        """Rows were written. On the path of every ``append``: what can wait until the next draw, should."""

    def reset(self, storage: Storage) -> None:
        """The buffer was made, emptied, or all its rows may be others: look at them again, now or at the next draw."""

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """The next draw of ``batch_size`` windows (rows, or slices ``[B, S]``), with random numbers of ``key``.

        ``key.call`` is 0 and may be raised up to ``TRANSFORM_CALLS``.

        Raises:
            ConfigError: The storage has too few rows, or a batch size that the sampler cannot give.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that draws depend on beside the rows: plain values and NumPy arrays, as long as the data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. The rows of that time are in the storage when the next draw is made.

        Raises:
            StateError: The state is of another sampler or configuration, or damaged.
        """


@runtime_checkable
class PrioritySampler(Sampler, Protocol):
    """A sampler that is told how important rows are.

    It may have ``check_update(storage, index, priority)``, which raises what ``update_priority`` would and changes
    nothing; ``index`` is None for rows that are not written yet. A buffer asks it before it writes rows that bring
    their priorities along.
    """

    def update_priority(self, storage: Storage, index: Slots, priority: npt.NDArray[np.floating[Any]]) -> None:
        """Set the priorities of the rows in the slots ``index``, both of one shape.

        Of a slot that comes twice the last one counts.

        Raises:
            DataError: A priority that is negative, NaN or infinite.
            IndexError: A slot that is not in use.
        """


class Transform(Protocol):
    """A transform of a delivered batch: any callable from a batch to a batch. It may have

    - ``inverse(rows)``: what is done to rows on their way in, to one of ``append`` and to many of ``extend`` alike;
    - ``random = True``: it draws random numbers, and is called as ``transform(batch, key)`` with a ``Key`` whose
      ``call`` is ``TRANSFORM_CALLS`` or above;
    - ``takes``: "arrived" or "outgoing", the alignment of what it works on; a buffer of the other one refuses it;
    - ``alignment``: "arrived" or "outgoing", the alignment of what it gives; None or absent: that of what it takes;
    - ``gather(storage, index, episodes, key)``: called under the lock when a batch is drawn, with the slots drawn, the
      episodes of the storage's rows, and the key that the transform is called with later; gives further fields of the
      batch by name, made of other rows of the same episodes. It has ``done``, the field that says where they end;
    - ``reach``: how many rows behind a drawn one it needs. Single rows then arrive as slices ``[batch, 1 + reach]``,
      with a ``mask`` and with ``index`` as it was drawn, ``[batch]``; afterwards the first step of each is kept.

    One that keeps numbers of all rows (a running mean, as ``VecNorm``) has ``settled(storage)``, which is called under
    the lock when a batch is drawn and gives nested dicts of plain values and NumPy arrays; and ``at(settled)``, the
    transform by those, which is what the batch is passed to. It is told of writes as a ``Sampler``, by ``wrote``,
    ``reset`` and ``dropped``, and by ``watch(storage)`` of the buffer it is in; ``state_dict()`` and
    ``load_state_dict(state)`` are a part of the buffer's state.

    It runs in a prefetching thread, outside the buffer's lock: it must not touch the buffer. It may change the dict
    that it is given, and must not write to arrays in it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A batch out of a batch."""
