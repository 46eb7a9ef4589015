"""Where the oldest episodes of a ring of mapped rows began, when the rows of their first steps are overwritten.

No row that is there says it, and a sampler that has seen those rows may be in another process. So the folder keeps, for
each field of one number a row and each environment, the last overwritten step at which it was not 0, and the last one
at which it changed: whichever field says where episodes end, the oldest began one step behind the former, or with the
latter. Of a ring of 4 steps with 9 written, steps 5 to 8 are there; where ``done`` was 1 in steps 1 and 2, the oldest
episode began with step 3 and has lost two steps.

A ring has places for some rows more than it holds, so overwritten rows are looked at many at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.schema import RowSchema
from mouse_core.errors import StateError
from mouse_core.nested import FieldKey
from mouse_core.replay.storages._mapped import lengthen, map_file

Int64s = npt.NDArray[np.int64]
Read = Callable[[FieldKey, int, int], npt.NDArray[Any]]


class Begins:
    """The file with what overwritten rows said; all calls are made while the folder's lock is held.

    Args:
        file: Where it lies. What it holds stands there twice, and its first word says which of the two counts.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._words: Int64s | None = None

    def of(self, schema: RowSchema, ends: Sequence[FieldKey], ids: FieldKey | None, steps: range, read: Read) -> Any:
        """The first step of the oldest episode of each environment, int64 ``[E]``; None where a field is not kept.

        Args:
            schema: What a row is.
            ends, ids: The fields that say where episodes end: where they are not 0, and where it changes.
            steps: The steps that lie in the files, up to the oldest that is still there.
            read: The values of a field in the steps ``first .. last``, ``[n, E]``.
        """
        fields = _fields(schema)
        if any(key not in fields for key in (*ends, *(() if ids is None else (ids,)))):
            return None
        known = self.state(schema, steps, read)
        begins = [known[fields.index(key), 0] + 1 for key in ends]
        begins += [] if ids is None else [known[fields.index(ids), 1]]
        return np.max(begins, axis=0)

    def look(self, schema: RowSchema, steps: range, read: Read) -> None:
        """Take note of the rows before the last of some steps, which are about to be overwritten."""
        self._write(schema, steps[-1], self.state(schema, steps, read))

    def looked(self, schema: RowSchema) -> int:
        """The first step that was not looked at."""
        return int(self._of_file(schema)[0])

    def forget(self, schema: RowSchema, step: int, saved: Int64s | None = None) -> None:
        """Of the steps before one only ``saved`` is known, see ``checked``; an episode begins with step 0."""
        self._write(schema, step, _unknown(schema, step) if saved is None else saved)

    def state(self, schema: RowSchema, steps: range, read: Read) -> Int64s:
        """What is known at the last of some steps, ``[fields, 2, E]``: of those before it and of its changes."""
        first, known = self._of_file(schema)
        if not steps[0] <= first <= steps[-1] or (known[:, 0] >= first).any() or (known[:, 1] > first).any():
            first = steps[0]  # a crash of the machine took what was known of the steps before
            known = _unknown(schema, first)
        found, last = known.copy(), steps[-1]
        for number, key in enumerate(_fields(schema)):
            values = read(key, first, last)
            step = np.arange(first, last + 1)[:, None]
            found[number, 0] = np.maximum(
                found[number, 0], np.where(values[:-1] != 0, step[:-1], -1).max(0, initial=-1)
            )
            changed = np.where(values[1:] != values[:-1], step[1:], -1).max(0, initial=-1)
            found[number, 1] = np.maximum(found[number, 1], changed)
        return found

    def _of_file(self, schema: RowSchema) -> tuple[int, Int64s]:
        words, size = self._mapped(schema), 1 + _size(schema)
        copy = words[1 + int(words[0] & 1) * size :][:size]
        return int(copy[0]), copy[1:].reshape(-1, 2, schema.num_envs).copy()

    def _write(self, schema: RowSchema, step: int, known: Int64s) -> None:
        words, size = self._mapped(schema), 1 + _size(schema)
        other = 1 - int(words[0] & 1)
        copy = words[1 + other * size :][:size]
        copy[0], copy[1:] = step, known.reshape(-1)
        words[0] = other

    def _mapped(self, schema: RowSchema) -> Int64s:
        if self._words is None:
            nbytes = 8 * (1 + 2 * (1 + _size(schema)))
            new = not self._file.exists()
            lengthen(self._file, nbytes)
            self._words = map_file(self._file, nbytes).view(np.int64)
            if new:
                self.forget(schema, 0)
        return self._words


def checked(schema: RowSchema, step: int, saved: Any) -> Int64s | None:
    """What ``Begins.state`` returned for the oldest step ``step``, of a state; None where the state has none.

    Raises:
        StateError: The array does not fit the rows.
    """
    if saved is None:
        return None
    known, limit = np.asarray(saved), np.array([step, step + 1])[:, None]
    if known.dtype != np.int64 or known.shape != (len(_fields(schema)), 2, schema.num_envs) or (known >= limit).any():
        raise StateError(f"storage: begins: expected steps up to {step}, found {known.dtype} {list(known.shape)}")
    return known


def _fields(schema: RowSchema) -> list[FieldKey]:
    """The fields of one number a row."""
    plain = ((key, kind) for key, kind in schema.fields.items() if not kind.varies)
    return [key for key, kind in plain if kind.dtype.kind in "biuf" and np.prod(kind.shape) == 1]


def _size(schema: RowSchema) -> int:
    return 2 * schema.num_envs * len(_fields(schema))


def _unknown(schema: RowSchema, step: int) -> Int64s:
    return np.broadcast_to(np.array([step - 1, step])[:, None], (len(_fields(schema)), 2, schema.num_envs)).copy()
