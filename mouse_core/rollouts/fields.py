"""The fields of a rollout's rows, the alternative names of fields in training code, and the checks of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import as_record, check_choice, is_text, is_whole
from mouse_core.dtypes import RowError, check_exact, kind_of, largest_of, namespace, number_kind, to_numpy, widened
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.rollouts.returns import check_codes, check_truncation
from mouse_core.spec import FieldSpec, Spec, check_dtype

Array = Any

COLUMNS = ("rewards", "dones", "values", "actions_log_prob", "returns", "advantages")
"""The fields with one number for each row; their arrays are ``[T, N, 1]``. Rewards and values may also be vectors."""

COMPUTED = ("returns", "advantages")
"""The fields that the storage computes; transitions do not contain these fields."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "critic_observations": "privileged_observations",
        "critic_reference_observations": "privileged_reference_observations",
        "critic_reference_observations_mask": "privileged_reference_observations_mask",
        "action_mean": "mu",
        "action_sigma": "sigma",
    }
)
"""Alternative names of fields in transitions."""

KNOWN = (
    "observations",
    "reference_observations",
    "reference_observations_mask",
    "privileged_observations",
    "privileged_reference_observations",
    "privileged_reference_observations_mask",
    "actions",
    "privileged_actions",
    "dagger_actions",
    "rewards",
    "dones",
    "values",
    "actions_log_prob",
    "mu",
    "sigma",
    "rnd_state",
    "hidden_states",
    "returns",
    "advantages",
)
"""The names of the fields of ``RolloutStorage.motion_mimic``. The attribute of a field that is not configured is
None.
"""


@dataclass(frozen=True)
class RolloutField:
    """The declaration of a field of a rollout's rows.

    Args:
        shape: The shape in one environment; the storage has an array ``[T, N, *shape]``.
        dtype: A boolean, integer or floating dtype.
        optional: Whether transitions may lack the field. If the field has a mask, rows without the field are marked as
            not available. If it has no mask, either all rows of a rollout or no rows must have the field, and the
            memory of the field is allocated with the first row that has the field.
        mask: Whether the field has an availability mask, bool ``[T, N]``, named ``<field>_mask``. In unavailable rows,
            the field's array contains zeros or the transition's values.
    """

    shape: tuple[int, ...] = ()
    dtype: npt.DTypeLike = "float32"
    optional: bool = False
    mask: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape("RolloutField", self.shape))
        object.__setattr__(self, "dtype", check_dtype(self.dtype, where="RolloutField"))


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of positive integers; raise ConfigError if it is invalid."""
    listed = isinstance(shape, Sequence) and not isinstance(shape, str)
    if not listed or not all(is_whole(size) and size > 0 for size in shape):  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: expected a shape of positive sizes, such as (48,), found {shape!r}")
    return tuple(map(int, shape))  # type: ignore[call-overload]


def complete_fields(fields: Mapping[str, Any]) -> dict[str, RolloutField]:
    """Return the fields of a storage: the requested fields, and rewards and dones, which every storage has.

    Args:
        fields: For each field name, a ``RolloutField``, a ``FieldSpec``, or a shape of float32 values. A ``Spec`` must
            have the alignment "outgoing".

    Returns:
        The fields in the given order. The shape of a field with one number for each row is ``(1,)``.

    Raises:
        ConfigError: A name is not allowed, a value is not a field, or the fields ``values`` and ``rewards`` differ in
            shape.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"fields: expected a dict from names to RolloutFields or shapes, found {fields!r}")
    if isinstance(fields, Spec) and fields.alignment != "outgoing":
        raise ConfigError(f"fields: expected a spec of alignment 'outgoing', found {fields.alignment!r}")
    made = {}
    for name, given in {**fields, **{name: fields.get(name, ()) for name in ("rewards", "dones")}}.items():
        if not is_text(name) or not name or name.startswith("_"):
            raise ConfigError(f"fields: expected names that do not begin with _, found {name!r}")
        if name in (*COMPUTED, "hidden_states", *ALIASES):
            meaning = f"it is another name of {ALIASES[name]}" if name in ALIASES else "the storage computes it"
            raise ConfigError(f"fields: {name} cannot be requested; {meaning}")
        made[name] = _as_field(name, given)
    for name, made_field in made.items():
        if made_field.mask and f"{name}_mask" in made:
            raise ConfigError(f"fields: {name}_mask exists already; it belongs to {name}, which has mask=True")
    rewards, values = made["rewards"].shape, made.get("values", made["rewards"]).shape
    if values != rewards:
        raise ConfigError(f"fields['values']: expected the shape of the rewards, {rewards}, found {values}")
    return made


def _as_field(name: str, given: Any) -> RolloutField:
    if isinstance(given, FieldSpec):
        given = RolloutField(given.shape, given.dtype)
    elif not isinstance(given, RolloutField):
        given = RolloutField(check_shape(f"fields[{name!r}]", given), "uint8" if name == "dones" else "float32")
    if name not in COLUMNS:
        return given  # type: ignore[no-any-return]
    dtype = np.dtype(given.dtype)
    vector = name in ("rewards", "values") and len(given.shape) == 1
    if given.shape not in ((), (1,)) and not vector:
        hint = "; agents that end separately count as environments: num_envs=N * A" if name == "dones" else ""
        raise ConfigError(f"fields[{name!r}]: expected one number for each row, () or (1,), found {given.shape}{hint}")
    if (number_kind(dtype) == "f") == (name == "dones"):
        wanted = "a boolean or integer" if name == "dones" else "a floating"
        raise ConfigError(f"fields[{name!r}]: expected {wanted} dtype, found {dtype}")
    if name != "dones" and dtype.itemsize < 2:
        raise ConfigError(f"fields[{name!r}]: expected a dtype of at least 16 bits to compute with, found {dtype}")
    if name in ("rewards", "dones") and (given.optional or given.mask):
        raise ConfigError(f"fields[{name!r}]: expected a field without optional and mask, found {given}")
    return RolloutField(given.shape or (1,), dtype, given.optional, given.mask)


def stored_spec(fields: Mapping[str, RolloutField]) -> Spec:
    """Return the spec of a storage with the given fields, including masks and computed fields."""
    specs = {}
    for name, one in fields.items():
        specs[name] = FieldSpec(name, np.dtype(one.dtype), one.shape)
        if one.mask:
            specs[f"{name}_mask"] = FieldSpec(f"{name}_mask", np.dtype(bool), ())
    if "values" in fields:
        specs |= {name: FieldSpec(name, np.dtype(fields["values"].dtype), fields["values"].shape) for name in COMPUTED}
    return Spec(specs, alignment="outgoing")


def motion_mimic_fields(
    training_type: TrainingType,
    obs_shape: Sequence[int],
    ref_obs_shape: Sequence[int | None] | None = None,
    privileged_obs_shape: Sequence[int | None] | None = None,
    privileged_ref_obs_shape: Sequence[int | None] | None = None,
    actions_shape: Sequence[int] | None = None,
    apply_dagger_actions: bool = False,
    rnd_state_shape: Sequence[int | None] | None = None,
) -> dict[str, RolloutField]:
    """Return the configured fields of ``RolloutStorage.motion_mimic``.

    Args:
        training_type: "rl" or "distillation".
        obs_shape, actions_shape: Shapes of observations and actions in one environment.
        ref_obs_shape, privileged_obs_shape, privileged_ref_obs_shape, rnd_state_shape: Shapes of optional fields; None
            or ``(None,)`` leaves the field out. Privileged reference observations are possible only together with
            reference observations.
        apply_dagger_actions: Whether the storage has the field ``dagger_actions``.

    Returns:
        Fields by name.

    Raises:
        ConfigError: The training type is unknown, or a shape is invalid.
    """
    check_choice("training_type", training_type, get_args(TrainingType))
    if actions_shape is None:
        raise ConfigError("actions_shape: expected the shape of actions, found None")
    actions, column = RolloutField(check_shape("actions_shape", actions_shape)), RolloutField((1,))
    is_learned = training_type == "rl"
    fields = {
        "observations": RolloutField(check_shape("obs_shape", obs_shape)),
        "reference_observations": _optional("ref_obs_shape", ref_obs_shape, mask=True),
        "privileged_observations": _optional("privileged_obs_shape", privileged_obs_shape),
        "privileged_reference_observations": _optional("privileged_ref_obs_shape", privileged_ref_obs_shape, mask=True),
        "actions": actions,
        "privileged_actions": None if is_learned else actions,
        "dagger_actions": actions if apply_dagger_actions else None,
        "rewards": column,
        "dones": RolloutField((1,), "uint8"),
        **dict.fromkeys(("values", "actions_log_prob"), column if is_learned else None),
        **dict.fromkeys(("mu", "sigma"), actions if is_learned else None),
        "rnd_state": _optional("rnd_state_shape", rnd_state_shape),
    }
    if fields["reference_observations"] is None:
        del fields["privileged_reference_observations"]
    return {name: field for name, field in fields.items() if field is not None}


def _optional(where: str, shape: Sequence[int | None] | None, *, mask: bool = False) -> RolloutField | None:
    # Runners that wrap a number in a list write (None,) for a missing field.
    if shape is None or (isinstance(shape, Sequence) and tuple(shape) == (None,)):
        return None
    return RolloutField(check_shape(where, shape), mask=mask)


# ---------------------------------------------------------------------- one step, on its way into a storage


class Transition:
    """One step of all environments: arrays ``[N, ...]`` whose names are the names of a storage's fields.

    Fields are set as arguments or attributes; unset fields are None. Some fields have a second name with the same
    meaning: ``critic_observations`` (``privileged_observations``), ``critic_reference_observations`` and its ``_mask``
    (``privileged_reference_observations``), ``action_mean`` (``mu``) and ``action_sigma`` (``sigma``). A storage raises
    SchemaError for unknown names.

    Args:
        fields: The values of fields, by name.

    Raises:
        ConfigError: A field is passed with different values under its two names.
    """

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_values", {})
        for name, value in fields.items():
            canonical = ALIASES.get(name, name)
            earlier = self._values.get(canonical)
            if earlier is not None and earlier is not value:
                raise ConfigError(f"Transition: expected one value for {canonical}, found a second value as {name}")
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._values[ALIASES.get(name, name)] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up while an instance is unpickled
            raise AttributeError(name)
        canonical = ALIASES.get(name, name)
        if canonical in self._values:
            return self._values[canonical]
        if canonical in KNOWN:
            return None
        raise AttributeError(f"Transition: expected one of {sorted(self._values)}, found {name!r}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the fields that are set."""
        return ((name, value) for name, value in self._values.items() if value is not None)

    def __repr__(self) -> str:
        return f"Transition({', '.join(name for name, _ in self)})"

    def clear(self) -> None:
        """Set all fields to None, for the next step."""
        self._values.clear()


def fields_of(transition: Transition | Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict from field name to value, without values that are None, for a transition or a dict with the same
    names.
    """
    if not isinstance(transition, Transition):
        fields = as_record(transition)
        if fields is not None:
            return dict(Transition(**fields))
        raise ConfigError(f"add_transitions: expected a Transition or a dict, found {type(transition).__name__}")
    return dict(transition)


# ---------------------------------------------------------------------- checks of one step

# The order of kinds: a value may be stored in a field of its own kind or a later kind.
_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2}
_SHOWN_TO_BOTH = ("observations", "reference_observations", "reference_observations_mask")


class HostArrays:
    """The array type of a storage; in this class, NumPy arrays. Adapters derive classes for the arrays of their
    framework.

    Args:
        device: The device of the arrays: "cpu" or None, which means "cpu".

    Raises:
        ConfigError: The device is neither "cpu" nor None.
    """

    def __init__(self, device: Any = None) -> None:
        if device is not None and str(device) != "cpu":
            raise ConfigError(f"device: expected 'cpu' or None for NumPy arrays, found {device!r}")
        self.device: Any = "cpu"

    def array(self, value: Any) -> Array:
        """Convert a value to an array of this array type, on this device."""
        return to_numpy(value)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a writable array of zeros; the dtype is a NumPy dtype or a dtype of the framework."""
        return np.zeros(shape, dtype)

    def index(self, rows: npt.NDArray[np.int64]) -> Array:
        """Convert row numbers to an array of this array type, on this device."""
        return rows

    def may_look(self, array: Array) -> bool:
        """Return whether an array's values can be read without waiting for work that is queued on a device."""
        return True

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context that disables gradients, for calls of user functions."""
        return nullcontext()


class StepChecks:
    """Validates one step of all environments, and converts it to a row of a storage.

    Args:
        fields: The fields, as ``complete_fields`` returns them.
        num_envs: The number of environments, N.
        spec: The storage's fields from ``stored_spec``, in the storage's dtypes.
        arrays: The array type of the storage.
        validate: Whether values are checked; None: an array's values are checked if ``arrays.may_look`` returns True
            for the array.
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
            SchemaError: A name is not the name of a field.
            MissingFieldError: A required field is missing.
            ConfigError: The argument is not a transition.
        """
        given = fields_of(transition)
        for name in _SHOWN_TO_BOTH:
            # Training code without privileged observations passes its observations twice, as the critic's input.
            privileged = f"privileged_{name}"
            if privileged in given and privileged not in self._expected and given[privileged] is given.get(name):
                del given[privileged]
        for name in given:
            if name not in self._given and name != "hidden_states":
                raise SchemaError(
                    f"add_transitions: expected fields {self._given}, found also the unknown field {name!r}"
                )
        missing = [name for name in self._required if name not in given]
        if missing:
            raise MissingFieldError(
                f"add_transitions: expected fields {list(self._fields)}, found {list(given)}: {missing} missing"
            )
        return given

    def rows(self, given: Mapping[str, Any], step: int | None) -> dict[str, Array]:
        """Return the arrays of a row by name, in the shapes of the storage. Dtypes are converted later, when the row is
        copied.

        Args:
            given: The result of the method ``given``.
            step: The index of the row, for error messages; None if the index is unknown.

        Raises:
            SchemaError, MissingFieldError: A value's shape or dtype does not match its field, or a mask is passed
                without its field.
            DataError: A reward, value or log-probability is not finite, a done code is invalid, or the field's dtype
                cannot represent an integer.
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
        """Convert a value to an array of ``shape`` whose values ``dtype`` can represent. The value may lack the last
        axis if its length is 1.

        Raises:
            SchemaError: The value cannot be converted to an array of this shape and dtype.
            DataError: ``dtype`` cannot represent a value (checked only if the array's values may be read).
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
        # Done codes 0, 1 and 2 may have any dtype.
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
                    raise DataError(
                        f"{name}: expected values that {dtype} can represent, found {float(made[beyond][0])}"
                    )
        if kind in "iu" and dtype.kind == "f" and isinstance(made, np.ndarray):
            try:
                check_exact(made)
            except RowError as error:
                raise DataError(f"{name}: {error}") from error
        return made

    def ends(
        self, values: Array, dones: Array, last_values: Any, time_outs: Any, final_values: Any
    ) -> tuple[Array, Array | None, Array | None]:
        """Convert ``last_values``, ``time_outs`` and ``final_values``, the additional arguments of ``compute_returns``,
        to arrays.

        Args:
            values, dones: The arrays of all rows, ``[T, N, 1]``; vector values ``[T, N, K]``.
            last_values, time_outs, final_values: See ``RolloutStorage.compute_returns``.

        Raises:
            ConfigError: Only one of ``time_outs`` and ``final_values`` is given, or a row with code 2 in ``dones`` has
                no time-out.
            SchemaError: A shape is wrong.
            DataError: A needed value is not finite, or a time-out is set where no episode ends.
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
            time_outs = self.as_array("time_outs", time_outs, tuple(dones.shape)) != 0
            finals = of_values("final_values", final_values, shape)
        if all(array is None or self._may_look(array) for array in (dones, last, time_outs, finals)):
            _check_ends(dones, widened(last), time_outs, widened(finals))
        return last, time_outs, finals

    def _may_look(self, array: Array) -> bool:
        return self._arrays.may_look(array) if self._validate is None else self._validate


def _split_mask(name: str, value: Any, mask: Any) -> tuple[Any, Any]:
    """Return the data and the mask of a field; a transition may pass both as ``(data, mask)``."""
    if isinstance(value, tuple) and len(value) == 2:
        if mask is not None:
            raise SchemaError(f"{name}: expected one mask, found both {name}_mask and (data, mask)")
        return value
    if value is None and mask is not None:
        raise MissingFieldError(f"add_transitions: expected {name} with {name}_mask, found only the mask")
    return value, mask


def _in_shape(name: str, value: Array, expected: tuple[int, ...]) -> Array:
    """Reshape ``value`` to the field's shape. If the field's shape is ``[..., 1]``, a value of the shape ``[...]`` is
    accepted.
    """
    if tuple(value.shape) == expected:
        return value
    column = len(expected) > 1 and expected[-1] == 1
    if column and tuple(value.shape) == expected[:-1]:
        return namespace(value).reshape(value, expected)
    also = f" or {list(expected[:-1])}" if column else ""
    raise SchemaError(f"{name}: expected shape {list(expected)}{also}, found {list(value.shape)}")


def _refuse(name: str, value: Array, good: Array, wanted: str, step: int | None = None) -> None:
    """Raise DataError for the first value that is not ``good``; arrays are ``[N, K]`` for one step, or ``[T, N,
    K]``.
    """
    xp = namespace(good)
    if bool(xp.all(good)):
        return
    place = int(xp.argmin(xp.astype(xp.reshape(good, (-1,)), xp.uint8)))  # the first False
    found = xp.reshape(value, (-1,))[place]
    found = found.item() if hasattr(found, "item") else found
    *rows, env, _ = (int(number) for number in np.unravel_index(place, tuple(good.shape)))
    row = rows[0] if step is None and rows else step
    where = f"environment {env}" + ("" if row is None else f", row {row}")
    raise DataError(f"{name}: expected {wanted}, found {found} at {where}")


def _check_ends(dones: Array, last_values: Array, time_outs: Array | None, final_values: Array | None) -> None:
    """Check the values that returns need at the ends of episodes and of the rollout: they must exist and be finite.

    Raises:
        ConfigError: Truncated episodes lack the values of their final observations.
        DataError: A time-out is set where no episode ends, or a needed value is not finite.
    """
    xp = namespace(dones)
    truncated = dones == 2
    check_codes(truncated if time_outs is None else truncated & ~time_outs, time_outs, where="compute_returns")
    if time_outs is not None and final_values is not None:
        _refuse(
            "time_outs", time_outs, ~time_outs | (dones != 0), "true values only where dones mark the end of an episode"
        )
        _refuse("final_values", final_values, ~time_outs | xp.isfinite(final_values), "finite numbers at time_outs")
    _refuse("last_values", last_values, (dones[-1] != 0) | xp.isfinite(last_values), "finite numbers")


TrainingType = Literal["rl", "distillation"]
