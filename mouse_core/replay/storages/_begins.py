"""The begins of a mapped ring's oldest episodes, after the rows of their first steps are overwritten.

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
        self._keys: list[FieldKey] = []
        self._copies = np.empty((2, 0), np.int64)  # a step, and the numbers of ``state`` there

    def of(self, schema: RowSchema, ends: Sequence[FieldKey], ids: FieldKey | None, steps: range, read: Read) -> Any:
        """Return the first step of the oldest episode of each environment, int64 ``[E]``; None if a field is not kept.

        Args:
            schema: The schema of the rows.
            ends: The fields that are not 0 where an episode ends.
            ids: The field that changes where an episode begins.
            steps: The steps that lie in the files, up to the oldest that is still there.
            read: Returns the values of a field in the steps ``first .. last``, ``[n, E]``.
        """
        keys = _keys(schema)
        if any(key not in keys for key in (*ends, *(() if ids is None else (ids,)))):
            return None
        known = self.state(schema, steps, read)
        begins = [known[keys.index(key), 0] + 1 for key in ends]
        begins += [] if ids is None else [known[keys.index(ids), 1]]
        return np.max(begins, axis=0)

    def look(self, schema: RowSchema, steps: range, read: Read) -> None:
        """Take note of the rows before the last of some steps, which are about to be overwritten."""
        self._write(schema, steps[-1], self.state(schema, steps, read))

    def looked(self, schema: RowSchema) -> int:
        """Return the first step that was not looked at."""
        return int(self._mapped(schema)[0])

    def forget(self, schema: RowSchema, step: int, saved: Int64s | None = None) -> None:
        """Know only ``saved`` of the steps before one, see ``checked``; without it, an episode begins with ``step``."""
        self._write(schema, step, _unknown(schema, step) if saved is None else saved)

    def state(self, schema: RowSchema, steps: range, read: Read) -> Int64s:
        """Return what is known at the last of some steps, ``[fields, 2, E]``: of the steps before it."""
        first, *numbers = self._mapped(schema).tolist()
        known = np.array(numbers, np.int64).reshape(-1, 2, schema.num_envs)
        if not steps[0] <= first <= steps[-1] or (known[:, 0] >= first).any() or (known[:, 1] > first).any():
            first = steps[0]  # a crash of the machine took what was known of the steps before
            known = _unknown(schema, first)
        last = steps[-1]
        for number, key in enumerate(self._keys):
            values = read(key, first, last)
            step = np.arange(first, last + 1)[:, None]
            ended = np.where(values[:-1] != 0, step[:-1], -1).max(0, initial=-1)
            changed = np.where(values[1:] != values[:-1], step[1:], -1).max(0, initial=-1)
            known[number] = np.maximum(known[number], [ended, changed])
        return known

    def _mapped(self, schema: RowSchema) -> Int64s:
        """Return the copy that counts."""
        if self._words is None:
            self._keys = _keys(schema)
            size = 1 + 2 * schema.num_envs * len(self._keys)
            is_new = not self._file.exists()
            lengthen(self._file, 8 * (1 + 2 * size))
            self._words = map_file(self._file, 8 * (1 + 2 * size)).view(np.int64)
            self._copies = self._words[1:].reshape(2, size)
            if is_new:
                self.forget(schema, 0)
        copy: Int64s = self._copies[int(self._words[0]) & 1]
        return copy

    def _write(self, schema: RowSchema, step: int, known: Int64s) -> None:
        self._mapped(schema)
        assert self._words is not None
        other = 1 - (int(self._words[0]) & 1)
        self._copies[other] = step, *known.reshape(-1)
        self._words[0] = other


def checked(schema: RowSchema, step: int, saved: Any) -> Int64s | None:
    """Check a saved value of ``Begins.state`` for the oldest step ``step``; None if the state has none.

    Raises:
        StateError: The array does not fit the rows.
    """
    if saved is None:
        return None
    known, limit = np.asarray(saved), np.array([step, step + 1])[:, None]
    if known.dtype != np.int64 or known.shape != (len(_keys(schema)), 2, schema.num_envs) or (known >= limit).any():
        raise StateError(f"storage: begins: expected steps up to {step}, found {known.dtype} {list(known.shape)}")
    return known


def _keys(schema: RowSchema) -> list[FieldKey]:
    """Return the fields of one number a row."""
    plain = ((key, kind) for key, kind in schema.fields.items() if not kind.varies)
    return [key for key, kind in plain if kind.dtype.kind in "biuf" and np.prod(kind.shape) == 1]


def _unknown(schema: RowSchema, step: int) -> Int64s:
    return np.broadcast_to(np.array([step - 1, step])[:, None], (len(_keys(schema)), 2, schema.num_envs)).copy()
