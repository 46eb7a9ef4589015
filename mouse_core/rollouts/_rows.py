"""The rows of a rollout: arrays that are filled step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace

from mouse_core._base.tracing import refuse_traced
from mouse_core.errors import ConfigError, MissingFieldError, RolloutError, RolloutFullError, SchemaError
from mouse_core.randomness import check_seed
from mouse_core.rollouts import checks, policy_states
from mouse_core.rollouts.amp import find_extractors
from mouse_core.rollouts.fields import (
    ALIASES,
    COMPUTED,
    KNOWN,
    RolloutField,
    TrainingType,
    complete_fields,
    stored_spec,
)
from mouse_core.rollouts.mini_batches import check_count
from mouse_core.rollouts.trajectories import episode_starts
from mouse_core.rollouts.transition import Transition as _Transition
from mouse_core.rollouts.transition import fields_of

Array = Any


class RolloutRows:
    """What a ``RolloutStorage`` holds, and how it is filled; see there."""

    Transition: ClassVar[type[_Transition]] = _Transition
    training_type: TrainingType | None = None
    device: Any

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        fields: Mapping[str, RolloutField | Sequence[int]],
        seed: int = 0,
        *,
        amp_cfg: Any = None,
        device: Any = None,
        hidden_axis: int | None = None,
        validate: bool | None = None,
    ) -> None:
        check_count("num_envs", num_envs)
        check_count("num_transitions_per_env", num_transitions_per_env)
        self.num_envs, self.num_transitions_per_env = int(num_envs), int(num_transitions_per_env)
        self._fields = complete_fields(fields)
        self.seed = check_seed(seed)
        self._extractors = find_extractors(amp_cfg, self._fields)
        self.device = self._find_device(device)
        self._hidden_axis = policy_states.check_axis(hidden_axis)
        self._validate = self._on_host() if validate is None else validate
        self.epoch = 0
        self.spec = stored_spec(self._fields)
        self._arrays: dict[str, Array] = {}
        for name, field in self._fields.items():
            if field.mask or not field.optional:
                self._allocate(name)
        for name in COMPUTED if "values" in self._fields else ():
            self._allocate(name)
        # (actor, critic): memory, and whether the rows of this rollout have states.
        self._hidden: list[Any] = [None, None]
        self._version = 0
        self.clear()

    # ------------------------------------------------------------------ what it holds

    def __repr__(self) -> str:
        rows = f"{self._step} of {self.num_transitions_per_env} rows, num_envs={self.num_envs}"
        return f"{type(self).__name__}({rows}, fields={list(self._fields)}, seed={self.seed})"

    def __getitem__(self, name: str) -> Array:
        """The array of a field, ``[T, N, ...]``."""
        try:
            return self._arrays[ALIASES.get(name, name)]
        except KeyError:
            raise MissingFieldError(f"rollout: expected one of {list(self._arrays)}, found {name!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __getattr__(self, name: str) -> Array:
        # Only for what is no attribute. Private names come here while an instance is being unpickled.
        if not name.startswith("_"):
            canonical = ALIASES.get(name, name)
            if canonical in self._arrays:
                return self._arrays[canonical]
            if canonical in KNOWN or canonical in self.spec:
                return None
        raise AttributeError(f"{type(self).__name__}: no attribute or field {name!r}")

    @property
    def hidden_states(self) -> Any:
        """``(actor, critic)``, arrays ``[T, ...]`` in the structure in which they came; None if none came."""
        if not any(self._stated):
            return None
        return tuple(memory if stated else None for memory, stated in zip(self._hidden, self._stated, strict=True))

    @property
    def step(self) -> int:
        """The number of rows that are filled."""
        return self._step

    # ------------------------------------------------------------------ filling it

    def add_transitions(self, transition: _Transition | Mapping[str, Any]) -> None:
        """Copy one step of all environments into row ``step``.

        Args:
            transition: Arrays ``[N, ...]`` by name; one number for each environment may be ``[N]`` or ``[N, 1]``. A
                field with a mask may come as ``(data, mask)``; without one it is available everywhere.
                ``hidden_states`` is ``(actor, critic)``, each an array, a tuple of arrays (LSTM), or None: the state
                *before* the step. None in the first rows, where a policy has no state before its first step, stands
                for zeros once a state comes.

        Raises:
            RolloutFullError: There is no row left (also an OverflowError).
            SchemaError, MissingFieldError: Names, shapes or dtypes that are not those of the fields.
            DataError: Rewards, values or log-probabilities that are not finite, or done codes other than 0, 1, 2.
                In each case nothing has changed.
        """
        refuse_traced("add_transitions")
        if self._step >= self.num_transitions_per_env:
            raise RolloutFullError(
                f"add_transitions: expected at most {self.num_transitions_per_env} rows, found one more; clear() first"
            )
        given = fields_of(transition)
        checks.drop_stand_ins(given, self.spec)
        checks.check_names(given, self._fields)
        rows = self._checked_rows(given)
        hidden, told = self._checked_hidden(given.get("hidden_states"))
        for name in rows.keys() - self._arrays.keys():
            self._allocate(name)
        for name, row in rows.items():
            self._arrays[name][self._step] = row
        for place, states in enumerate(hidden):
            if states is not None:
                if not self._stated[place]:
                    self._hidden[place], self._stated[place] = self._hidden_arrays(states, self._hidden[place]), True
                policy_states.tree_map(self._copy_hidden, states, self._hidden[place])
        if not told:
            self._told = False
        self._present |= set(rows)
        self._step += 1
        self._version += 1

    def clear(self) -> None:
        """Begin a new rollout; the order of rows in mini-batches goes on being new in every epoch."""
        self._step = 0
        self._computed = False
        self._stated = [False, False]
        # Whether all rows have said what the hidden states are, if only (None, None).
        self._told = True
        self._present: set[str] = set()
        self._version += 1

    def get_statistics(self) -> tuple[Any, Any]:
        """The mean length of trajectories, which the end of the rollout cuts, and the mean reward; changes nothing.

        Raises:
            RolloutError: There is no row yet.
        """
        if not self._step:
            raise RolloutError("get_statistics: expected at least one row, found none")
        dones, rewards = self._arrays["dones"][: self._step], self._arrays["rewards"][: self._step]
        xp = array_namespace(rewards)
        starts = episode_starts(dones)
        number = xp.sum(xp.astype(starts, xp.int64))
        return self._step * self.num_envs / number, xp.mean(rewards)

    # ------------------------------------------------------------------ for other kinds of arrays

    def _find_device(self, device: Any) -> Any:
        if device is not None and str(device) != "cpu":
            raise ConfigError(f"device: expected 'cpu' or None for NumPy arrays, found {device!r}")
        return "cpu"

    def _on_host(self) -> bool:
        return True

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros of a NumPy dtype, or one of this kind of arrays, that may be written to anywhere."""
        return np.zeros(shape, dtype)

    def _array(self, value: Any) -> Array:
        """A value as an array of this kind, on this device."""
        return np.asarray(value)

    def _index(self, rows: npt.NDArray[np.int64]) -> Array:
        """Row numbers as an array of this kind, on this device."""
        return rows

    # ------------------------------------------------------------------ details

    def _allocate(self, name: str) -> None:
        data = name.removesuffix("_mask")
        owned = data in self._fields and self._fields[data].mask
        for each in (data, f"{data}_mask") if owned else (name,):
            spec = self.spec[each]
            shape = (self.num_transitions_per_env, self.num_envs, *spec.shape)
            self._arrays[each] = self._zeros(shape, spec.dtype)

    def _as(self, name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | None) -> Array:
        """A value as an array of a shape, which may lack a last 1, and, if one is given, able to be of a dtype."""
        try:
            made = self._array(value)
            kind = checks.is_of(made, ("bool", "integral", "real floating"))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SchemaError(
                f"{name}: expected an array of shape {list(shape)}, found {type(value).__name__}"
            ) from error
        if not kind:
            raise SchemaError(f"{name}: expected numbers, found {made.dtype}")
        made = checks.check_shape(name, made, shape)
        if dtype is not None:
            checks.check_dtype(name, made, dtype, on_host=self._validate)
        return made

    def _checked_rows(self, given: Mapping[str, Any]) -> dict[str, Array]:
        """The rows to copy, by the names of arrays; nothing is changed yet."""
        rows: dict[str, Array] = {}
        for name, field in self._fields.items():
            value, mask = given.get(name), given.get(f"{name}_mask") if field.mask else None
            if field.mask:
                value, mask = checks.split_mask(name, value, mask)
            if value is None:
                self._check_absent(name, field)
                if field.mask:
                    rows |= {
                        key: self._zeros((self.num_envs, *self.spec[key].shape), self.spec[key].dtype)
                        for key in (name, f"{name}_mask")
                    }
                continue
            if field.optional and not field.mask and self._step and name not in self._present:
                raise SchemaError(f"{name}: expected it in every row or in none, found it first in row {self._step}")
            dtype = np.dtype(field.dtype)
            row = self._as(name, value, (self.num_envs, *field.shape), dtype)
            if self._validate:
                checks.check_values(name, row, largest_done=1 if dtype.kind == "b" else 2, step=self._step)
            rows[name] = row
            if field.mask:
                rows[f"{name}_mask"] = self._checked_mask(f"{name}_mask", mask)
        return rows

    def _checked_mask(self, name: str, mask: Any) -> Array:
        if mask is None:
            return self._zeros((self.num_envs,), np.dtype(bool)) == 0
        made = self._as(name, mask, (self.num_envs, 1), None)
        if self._validate:
            checks.refuse(name, made, (made == 0) | (made == 1), "True or False", self._step)
        return made[:, 0] != 0

    def _check_absent(self, name: str, field: RolloutField) -> None:
        if not field.mask and name in self._present:
            raise MissingFieldError(f"{name}: expected it in every row or in none, found none in row {self._step}")

    def _checked_hidden(self, hidden: Any) -> tuple[list[Any], bool]:
        """The hidden states to copy, ``[actor, critic]`` as arrays, and whether the transition said what they are."""
        told = isinstance(hidden, tuple | list) and len(hidden) == 2
        if not told and not policy_states.is_empty(hidden):
            raise SchemaError(f"hidden_states: expected (actor, critic), found {type(hidden).__name__}")
        row: list[Any] = [None, None]
        for place, states in enumerate(hidden if told else row):
            path = f"hidden_states[{place}]"
            if policy_states.is_empty(states):
                if self._stated[place]:
                    raise MissingFieldError(f"{path}: expected it in every row, found none in row {self._step}")
                continue
            row[place] = policy_states.tree_map(self._checked_state, states, path=path)
            if self._stated[place]:
                policy_states.tree_map(_check_same, row[place], self._hidden[place], path=path)
            elif not self._told:
                raise SchemaError(
                    f"hidden_states: expected them in every row, found them first in row {self._step}; where a policy "
                    "has no state yet, (None, None) says so"
                )
        return row, told

    def _checked_state(self, path: str, leaf: Any) -> Array:
        made = self._array(leaf)
        axis = policy_states.env_axis(tuple(made.shape), self._hidden_axis)
        if made.ndim <= axis or made.shape[axis] != self.num_envs:
            raise SchemaError(
                f"{path}: expected {self.num_envs} environments on axis {axis}, found shape {list(made.shape)}; "
                "hidden_axis says on which axis they are"
            )
        return made

    def _hidden_arrays(self, states: Any, memory: Any) -> Any:
        """Memory for the hidden states of a rollout, that of the last one if it fits; zeros in the rows before."""

        def forget(path: str, array: Array) -> Array:
            array[: self._step] = 0
            return array

        def make(path: str, leaf: Array) -> Array:
            return self._zeros((self.num_transitions_per_env, *leaf.shape), leaf.dtype)

        try:
            policy_states.tree_map(_check_same, states, memory)
        except SchemaError:
            return policy_states.tree_map(make, states)
        return policy_states.tree_map(forget, memory)

    def _copy_hidden(self, path: str, row: Array, array: Array) -> None:
        array[self._step] = row


def _check_same(path: str, row: Array, array: Array) -> None:
    if row.shape != array.shape[1:] or row.dtype != array.dtype:
        raise SchemaError(
            f"{path}: expected {array.dtype} {list(array.shape[1:])} as in the rows before, "
            f"found {row.dtype} {list(row.shape)}"
        )
