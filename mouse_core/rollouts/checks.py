"""Validation of a rollout storage's input: the steps of environments, and the inputs of returns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, check_exact, kind_of, largest_of, namespace, to_numpy, widened
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.rollouts.fields import COLUMNS, RolloutField, Transition, fields_of
from mouse_core.rollouts.returns import check_codes, check_truncation
from mouse_core.spec import Spec

Array = Any

# Values of one kind go into fields of the same rank or above: booleans, integers, floats.
_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2}
_SHOWN_TO_BOTH = ("observations", "reference_observations", "reference_observations_mask")


class HostArrays:
    """The arrays that a storage is made of: NumPy's. An adapter's class derives from this one, for its framework's.

    Args:
        device: Where they are: "cpu" or None, which is the same.

    Raises:
        ConfigError: Another device.
    """

    def __init__(self, device: Any = None) -> None:
        if device is not None and str(device) != "cpu":
            raise ConfigError(f"device: expected 'cpu' or None for NumPy arrays, found {device!r}")
        self.device: Any = "cpu"

    def array(self, value: Any) -> Array:
        """A value as an array of this kind, on this device."""
        return to_numpy(value)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros of a NumPy dtype, or one of this kind of arrays, that may be written to anywhere."""
        return np.zeros(shape, dtype)

    def index(self, rows: npt.NDArray[np.int64]) -> Array:
        """Row numbers as an array of this kind, on this device."""
        return rows

    def may_look(self, array: Array) -> bool:
        """Whether the values of an array are known, and looking at them waits for nothing."""
        return True

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context for calls of user functions that disables gradients, if the arrays have gradients."""
        return nullcontext()


class StepChecks:
    """Validator that converts one step of all environments to a row of a storage.

    Args:
        fields: As ``complete_fields`` returns them.
        num_envs: N.
        spec: The storage's fields from ``stored_spec``, in the storage's dtypes.
        arrays: The kind of arrays.
        validate: Whether values are checked; None checks those that ``arrays.may_look`` at.
    """

    def __init__(
        self,
        fields: Mapping[str, RolloutField],
        num_envs: int,
        spec: Spec,
        arrays: HostArrays,
        validate: bool | None = None,
    ) -> None:
        self._fields = dict(fields)
        self._arrays, self._validate = arrays, validate
        self._expected = {name: ((num_envs, *one.shape), np.dtype(one.dtype)) for name, one in spec.items()}
        self._given = [*fields, *(f"{name}_mask" for name, field in fields.items() if field.mask)]
        self._required = [name for name, field in fields.items() if not field.optional]

    def given(self, transition: Transition | Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a transition by field name.

        Raises:
            SchemaError: A name belongs to no field.
            MissingFieldError: A required field is missing.
            ConfigError: The argument is no transition.
        """
        given = fields_of(transition)
        for name in _SHOWN_TO_BOTH:
            # Training code without privileged observations gives its observations twice; the critic then sees those.
            privileged = f"privileged_{name}"
            if privileged in given and privileged not in self._expected and given[privileged] is given.get(name):
                del given[privileged]
        for name in given:
            if name not in self._given and name != "hidden_states":
                raise SchemaError(f"add_transitions: expected fields {self._given}, found also {name!r}")
        missing = [name for name in self._required if name not in given]
        if missing:
            raise MissingFieldError(
                f"add_transitions: expected fields {list(self._fields)}, found {list(given)}: {missing} missing"
            )
        return given

    def rows(self, given: Mapping[str, Any], step: int | None) -> dict[str, Array]:
        """The rows to copy, by the names of arrays, in their shapes; copying changes their dtypes where it must.

        Args:
            given: What ``given`` returned.
            step: Where they go, for messages; None where that is not known.

        Raises:
            SchemaError, MissingFieldError: Shapes or dtypes that are not those of the fields; a mask alone.
            DataError: Rewards, values or log-probabilities that are not finite, done codes that are none, integers that
                do not fit.
        """
        rows: dict[str, Array] = {}
        for name, field in self._fields.items():
            value, mask = given.get(name), None
            if field.mask:
                value, mask = _split_mask(name, value, given.get(f"{name}_mask"))
                rows[f"{name}_mask"] = self._mask(f"{name}_mask", mask, there=value is not None, step=step)
            if value is not None:
                rows[name] = self._row(name, value, step)
            elif field.mask:
                rows[name] = self._arrays.zeros(*self._expected[name])
        return rows

    def _row(self, name: str, value: Any, step: int | None) -> Array:
        shape, dtype = self._expected[name]
        row = self.as_array(name, value, shape, dtype)
        if name not in COLUMNS or not self._may_look(row):
            return row
        if name != "dones":
            _refuse(name, row, namespace(row).isfinite(row), "finite numbers", step)
        elif kind_of(row.dtype) != "b":
            largest = 1 if dtype.kind == "b" else 2
            wanted = "0 (alive), 1 (terminal) or 2 (truncated)" if largest == 2 else "0 or 1"
            _refuse(name, row, (row == 0) | (row == 1) | (row == largest), wanted, step)
        return row

    def _mask(self, name: str, mask: Any, *, there: bool, step: int | None) -> Array:
        (envs,), dtype = self._expected[name]
        if mask is None or not there:
            nowhere = self._arrays.zeros((envs,), dtype)
            return nowhere == 0 if there else nowhere
        made = self.as_array(name, mask, (envs, 1))
        if self._may_look(made):
            _refuse(name, made, (made == 0) | (made == 1), "True or False", step)
        return made[:, 0] != 0

    def as_array(self, name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
        """A value as an array of a shape, which may lack a last 1, and, if one is given, able to be of a dtype.

        Raises:
            SchemaError: It is none.
            DataError: A number that the dtype does not hold, where it may be looked at.
        """
        try:
            made = self._arrays.array(value)
            kind = kind_of(made.dtype)
        except RowError as error:
            raise DataError(f"{name}: {error}") from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise SchemaError(
                f"{name}: expected an array of shape {list(shape)}, found {type(value).__name__}"
            ) from error
        if kind not in _RANKS:
            raise SchemaError(f"{name}: expected numbers, found {made.dtype}")
        made = _in_shape(name, made, shape)
        if dtype is None or made.dtype == dtype:
            return made
        # Done codes may be of any kind, as long as they are 0, 1 or 2.
        if name != "dones" and _RANKS[kind] > _RANKS[kind_of(dtype)]:
            raise SchemaError(f"{name}: expected {dtype}, found {made.dtype}")
        if kind in "iu" and dtype.kind in "iu" and 0 not in made.shape and self._may_look(made):
            xp, bounds = namespace(made), np.iinfo(dtype)
            least, most = int(xp.min(made)), int(xp.max(made))
            if least < bounds.min or most > bounds.max:
                found = least if least < bounds.min else most
                raise DataError(f"{name}: expected {bounds.min}..{bounds.max} ({dtype}), found {found}")
        narrower = kind == kind_of(dtype) == "f" and dtype.itemsize < made.dtype.itemsize
        if narrower and 0 not in made.shape and self._may_look(made):
            xp, largest = namespace(made), largest_of(dtype)
            if not (-largest <= float(xp.min(made)) and float(xp.max(made)) <= largest):  # or there is a NaN
                beyond = xp.isfinite(made) & (xp.abs(made) > largest)
                if bool(xp.any(beyond)):
                    raise DataError(f"{name}: expected values that {dtype} holds, found {float(made[beyond][0])}")
        if kind in "iu" and dtype.kind == "f" and isinstance(made, np.ndarray):
            try:
                check_exact(made)
            except RowError as error:
                raise DataError(f"{name}: {error}") from error
        return made

    def ends(
        self, values: Array, dones: Array, last_values: Any, time_outs: Any, final_values: Any
    ) -> tuple[Array, Array | None, Array | None]:
        """Convert ``last_values``, ``time_outs`` and ``final_values``, which returns need beside the rows, to arrays.

        Args:
            values, dones: Of all rows, ``[T, N, 1]``.
            last_values, time_outs, final_values: As in ``RolloutStorage.compute_returns``.

        Raises:
            ConfigError: Only one of ``time_outs`` and ``final_values``; a row with code 2 in ``dones`` and no time-out.
            SchemaError: Shapes that are wrong.
            DataError: A value that is needed and not finite; a time-out where no episode ends.
        """
        check_truncation(time_outs, final_values)
        shape = tuple(values.shape)
        dtype = self._expected["values"][1]

        def of_values(name: str, value: Any, shape: tuple[int, ...]) -> Array:
            made = self.as_array(name, value, shape, dtype)
            return namespace(made).astype(made, values.dtype, copy=False)

        last = of_values("last_values", last_values, shape[1:])
        finals = None
        if time_outs is not None:
            time_outs = self.as_array("time_outs", time_outs, shape) != 0
            finals = of_values("final_values", final_values, shape)
        if all(array is None or self._may_look(array) for array in (dones, last, time_outs, finals)):
            _check_ends(dones, widened(last), time_outs, widened(finals))
        return last, time_outs, finals

    def _may_look(self, array: Array) -> bool:
        return self._arrays.may_look(array) if self._validate is None else self._validate


def _split_mask(name: str, value: Any, mask: Any) -> tuple[Any, Any]:
    """The data and the mask of a field that has one, which may come together, as ``(data, mask)``."""
    if isinstance(value, tuple) and len(value) == 2:
        if mask is not None:
            raise SchemaError(f"{name}: expected one mask, found {name}_mask beside (data, mask)")
        return value
    if value is None and mask is not None:
        raise MissingFieldError(f"add_transitions: expected {name} with {name}_mask, found the mask alone")
    return value, mask


def _in_shape(name: str, value: Array, expected: tuple[int, ...]) -> Array:
    """``value`` in its shape; ``[..., 1]`` may come as ``[...]``."""
    if tuple(value.shape) == expected:
        return value
    column = len(expected) > 1 and expected[-1] == 1
    if column and tuple(value.shape) == expected[:-1]:
        return namespace(value).reshape(value, expected)
    also = f" or {list(expected[:-1])}" if column else ""
    raise SchemaError(f"{name}: expected shape {list(expected)}{also}, found {list(value.shape)}")


def _refuse(name: str, value: Array, good: Array, wanted: str, step: int | None = None) -> None:
    """DataError that names the first value that is not good; ``[N, 1]`` of one step, or ``[T, N, 1]``."""
    xp = namespace(good)
    if bool(xp.all(good)):
        return
    # The first that is False. Of three rows of two environments, place 5 is environment 5 % 2 = 1 of row 5 // 2 = 2.
    place = int(xp.argmin(xp.astype(xp.reshape(good, (-1,)), xp.uint8)))
    found = xp.reshape(value, (-1,))[place]
    found = found.item() if hasattr(found, "item") else found
    envs = value.shape[-2]
    row = place // envs if step is None and value.ndim == 3 else step
    where = f"environment {place % envs}" + ("" if row is None else f", row {row}")
    raise DataError(f"{name}: expected {wanted}, found {found} at {where}")


def _check_ends(dones: Array, last_values: Array, time_outs: Array | None, final_values: Array | None) -> None:
    """See that what returns are made of at the ends of episodes and of the rollout is there, and finite.

    Raises:
        ConfigError: Truncated episodes without the values of their final observations.
        DataError: A time-out where no episode ends, or a value that is needed and not finite.
    """
    xp = namespace(dones)
    truncated = dones == 2
    check_codes(truncated if time_outs is None else truncated & ~time_outs, time_outs, where="compute_returns")
    if time_outs is not None and final_values is not None:
        _refuse("time_outs", time_outs, ~time_outs | (dones != 0), "one only where dones say that an episode ends")
        _refuse("final_values", final_values, ~time_outs | xp.isfinite(final_values), "finite numbers at time_outs")
    _refuse("last_values", last_values, (dones[-1] != 0) | xp.isfinite(last_values), "finite numbers")
