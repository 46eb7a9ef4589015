"""What derived fields are computed from: rows of whole episodes, and which transition each of them belongs to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import MissingFieldError
from mouse_core.spec import Alignment, FieldSpec, Spec, codes_called
from mouse_core.store.snapshot import Snapshot

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]

# Where codes have no labels.
_CODES = {"terminal": (1,), "truncated": (2,)}
# What is read of a snapshot at a time.
_LENGTH = 4096


class Derivation(Protocol):
    """How a field is computed from others: a pure function of whole episodes.

    Its ``repr`` stands for it in fingerprints, as that of a frozen dataclass does; where it has none of its own, or one
    that leaves values of arrays out, class and attributes do. What an episode's rows become must
    not depend on other episodes: rows are given some episodes at a time, and when a store grows only those anew that
    may have changed. Where the field belongs to transitions, as ``done`` does, and not to observations, an attribute
    ``transition`` says so; ``windows=`` of sources goes by it.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """The field: the dtype it is delivered in, the one it is kept in (``stored_dtype``) and the shape of a step.

        Args:
            name: What it is to be called.
            rows: The fields that there are.

        Raises:
            MissingFieldError: One is missing that it is computed from.
        """
        ...

    def compute(self, rows: EpisodeRows) -> Array:
        """Its values, ``[n, *shape]``, for rows of some whole episodes."""
        ...


class EpisodeRows:
    """Rows of some whole episodes, one behind the other, as a ``Derivation`` is given them.

    An episode that is not finished yet ends with the last row that there is.

    Args:
        snapshot: What they are read from.
        begin: The first row in it.
        lengths: How many rows each episode has, int64 ``[e]``.
    """

    def __init__(self, snapshot: Snapshot, begin: int, lengths: Int64s) -> None:
        self._snapshot, self._begin = snapshot, begin
        self.lengths = lengths
        self.num_rows = int(lengths.sum())
        self.fields_read: set[str] = set()

    def __len__(self) -> int:
        return self.num_rows

    @property
    def alignment(self) -> Alignment:
        """Which transition a row's action, reward and done belong to."""
        return self._snapshot.alignment

    @memo
    def first_rows(self) -> Int64s:
        """The first row of each episode, int64 ``[e]``."""
        found: Int64s = self.last_rows - self.lengths + 1
        return found

    @memo
    def last_rows(self) -> Int64s:
        """The last row of each episode, int64 ``[e]``."""
        return np.cumsum(self.lengths) - 1

    @memo
    def time(self) -> Int64s:
        """How many rows of its episode come before each row, int64 ``[n]``."""
        return np.arange(self.num_rows) - np.repeat(self.first_rows, self.lengths)

    @memo
    def steps_left(self) -> Int64s:
        """How many transitions follow each row's observation, int64 ``[n]``.

        The last row of an "arrived" episode holds the observation it ended with, which no transition leaves. That of an
        "outgoing" one holds the observation that the last transition leaves.
        """
        left: Int64s = np.repeat(self.last_rows, self.lengths) - np.arange(self.num_rows)
        if self.alignment == "outgoing":
            left += 1
        return left

    @memo
    def is_terminal(self) -> npt.NDArray[np.bool_]:
        """Whether each episode ended in a terminal state, bool ``[e]``: not where it was cut short or broken off."""
        return self.done_is("terminal")[self.last_rows]

    def done_is(self, word: str) -> npt.NDArray[np.bool_]:
        """Whether each row's ``done`` is a code whose label has a word in it, bool ``[n]``: "terminal", "truncated"."""
        codes = codes_called(self._snapshot.config.fields["done"], word) or _CODES[word]
        done = self.values("done")
        return done == codes[0] if len(codes) == 1 else np.isin(done, codes)

    def values(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """A field's values, ``[n, *shape]``, row by row.

        Args:
            field: Its name.
            dtype: What to give; by default what batches have.

        Raises:
            MissingFieldError: There is no such field.
            DataError: A value that it does not allow.
        """
        reader = self._snapshot.readers.get(field)
        self.fields_read.add(field)
        if reader is None:
            known = list(self._snapshot.readers)
            raise MissingFieldError(f"derived fields: expected a field {field!r} to compute from, found {known}")
        found = np.empty((self.num_rows, *reader.spec.shape), reader.spec.dtype if dtype is None else dtype)
        whole = self.num_rows // _LENGTH * _LENGTH
        for begin, end, length in ((0, whole, _LENGTH), (whole, self.num_rows, self.num_rows - whole)):
            if begin < end:
                windows = self._snapshot.locate(np.arange(begin, end, length) + self._begin, length).part(0)
                out = found[begin:end].reshape(-1, length, *reader.spec.shape)
                reader.read(windows, found.dtype, out)
        return found

    def leaving(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """Of each row's observation what belongs to the transition that leaves it: its action, reward, done.

        0 where none does, which is so in the last row of an "arrived" episode. Of a field of observations, what the row
        has itself.

        Args:
            field, dtype: As in ``values``.
        """
        values = self.values(field, dtype)
        if not self._is_arrived(field):
            return values
        following = np.zeros_like(values)
        following[:-1] = values[1:]
        following[self.last_rows] = 0
        return following

    def arriving(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """Of each row's observation what belongs to the transition that led to it: its action, reward, done.

        0 where none did, which is so in the first row of an episode. Of a field of observations, what the row before
        has.

        Args:
            field, dtype: As in ``values``.
        """
        values = self.values(field, dtype)
        if not self._is_arrived(field):
            before = np.zeros_like(values)
            before[1:] = values[:-1]
            values = before
        values[self.first_rows] = 0
        return values

    def _is_arrived(self, field: str) -> bool:
        """Whether a row's value belongs to the transition that led to the row's observation."""
        return self.alignment == "arrived" and self._snapshot.config.fields[field].is_of_transition


def digest_of(snapshot: Snapshot, field: str, begins: Int64s) -> str:
    """A digest of a field's values in all rows, as they are stored; "" of where episodes begin.

    Args:
        snapshot: The rows.
        field: Its name.
        begins: Rows at which what is read at a time begins, and the end, int64 ``[n]``.
    """
    import xxhash

    if not field:
        return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(snapshot.episode_starts).view(np.uint8).data))
    if field not in snapshot.readers:
        raise MissingFieldError(f"derived fields: expected a field {field!r}, found {list(snapshot.readers)}")
    reader = snapshot.readers[field]
    dtype = reader.stored_dtype(reader.spec.dtype)
    digest = xxhash.xxh3_128(f"{dtype.str} {reader.spec.shape}".encode())
    for begin, end in pairwise(begins.tolist()):
        values = EpisodeRows(snapshot, begin, np.array([end - begin])).values(field, dtype)
        digest.update(values.reshape(-1).view(np.uint8).data)
    return str(digest.hexdigest())


def known_field(rows: Spec, name: str, what: str) -> FieldSpec:
    """The field of that name.

    Raises:
        MissingFieldError: There is none.
    """
    if name not in rows:
        raise MissingFieldError(f"{what}: expected a field {name!r} to compute from, found {list(rows)}")
    return rows[name]
