"""The fields of a rollout's row, and the names that training code uses for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import as_record, is_text, is_whole
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError
from mouse_core.spec import FieldSpec, Spec, check_dtype

TrainingType = Literal["rl", "distillation"]

Array = Any
COLUMNS = ("rewards", "dones", "values", "actions_log_prob", "returns", "advantages")
"""Fields that hold one number for each row; their arrays are ``[T, N, 1]``."""

COMPUTED = ("returns", "advantages")
"""Fields that are computed from the others, and not added."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "critic_observations": "privileged_observations",
        "critic_reference_observations": "privileged_reference_observations",
        "critic_reference_observations_mask": "privileged_reference_observations_mask",
        "action_mean": "mu",
        "action_sigma": "sigma",
    }
)
"""What transitions also call some fields."""

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
"""The names of ``RolloutStorage.motion_mimic``. A storage that lacks one of them says None for it."""


@dataclass(frozen=True)
class RolloutField:
    """One field of a row.

    Args:
        shape: Its shape in one environment; the storage holds ``[T, N, *shape]``.
        dtype: Its dtype; boolean, integer or floating.
        optional: Whether transitions may lack it. With a mask, rows that lack it are not available. Without one, either
            all rows of a rollout have it or none has, and its memory is allocated when the first one has it.
        mask: Whether an availability mask belongs to it, bool ``[T, N]``, under the name ``<field>_mask``. Rows that
            are not available hold zeros or what came with them.
    """

    shape: tuple[int, ...] = ()
    dtype: npt.DTypeLike = "float32"
    optional: bool = False
    mask: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape("RolloutField", self.shape))
        object.__setattr__(self, "dtype", check_dtype(self.dtype, where="RolloutField"))


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """``shape`` as a tuple of positive integers, or ConfigError."""
    listed = isinstance(shape, Sequence) and not isinstance(shape, str)
    if not listed or not all(is_whole(size) and size > 0 for size in shape):  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: expected a shape of positive sizes, such as (48,), found {shape!r}")
    return tuple(map(int, shape))  # type: ignore[call-overload]


def complete_fields(fields: Mapping[str, Any]) -> dict[str, RolloutField]:
    """The fields of a storage: those that are asked for, with rewards and dones, which every rollout has.

    Args:
        fields: By name: a ``RolloutField``, a ``FieldSpec``, or a shape, which stands for float32. A ``Spec`` must have
            the alignment "outgoing".

    Returns:
        In their order. What is one number for each row has the shape ``(1,)``.

    Raises:
        ConfigError: A name that cannot be one, or what is no field.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"fields: expected a dict of names and RolloutFields or shapes, found {fields!r}")
    if isinstance(fields, Spec) and fields.alignment != "outgoing":
        raise ConfigError(f"fields: expected a spec of alignment 'outgoing', found {fields.alignment!r}")
    made = {}
    for name, given in {**fields, **{name: fields.get(name, ()) for name in ("rewards", "dones")}}.items():
        if not is_text(name) or not name or name.startswith("_"):
            raise ConfigError(f"fields: expected names that do not begin with _, found {name!r}")
        if name in (*COMPUTED, "hidden_states", *ALIASES):
            meaning = f"it is another name of {ALIASES[name]}" if name in ALIASES else "it is made by the storage"
            raise ConfigError(f"fields: {name} cannot be asked for; {meaning}")
        made[name] = _as_field(name, given)
    for name, made_field in made.items():
        if made_field.mask and f"{name}_mask" in made:
            raise ConfigError(f"fields: {name}_mask is there already; it belongs to {name}, which has mask=True")
    return made


def _as_field(name: str, given: Any) -> RolloutField:
    if isinstance(given, FieldSpec):
        given = RolloutField(given.shape, given.dtype)
    elif not isinstance(given, RolloutField):
        given = RolloutField(check_shape(f"fields[{name!r}]", given), "uint8" if name == "dones" else "float32")
    if name not in COLUMNS:
        return given  # type: ignore[no-any-return]
    dtype = np.dtype(given.dtype)
    if given.shape not in ((), (1,)):
        raise ConfigError(f"fields[{name!r}]: expected one number for each row, () or (1,), found {given.shape}")
    if (number_kind(dtype) == "f") == (name == "dones"):
        wanted = "a boolean or integer" if name == "dones" else "a floating"
        raise ConfigError(f"fields[{name!r}]: expected {wanted} dtype, found {dtype}")
    if name != "dones" and dtype.itemsize < 2:
        raise ConfigError(f"fields[{name!r}]: expected a dtype of at least 16 bits to compute with, found {dtype}")
    if name in ("rewards", "dones") and (given.optional or given.mask):
        raise ConfigError(f"fields[{name!r}]: expected a field that every row has, found {given}")
    return RolloutField((1,), dtype, given.optional, given.mask)


def stored_spec(fields: Mapping[str, RolloutField]) -> Spec:
    """Return the storage spec of these fields, including masks and computed fields."""
    specs = {}
    for name, one in fields.items():
        specs[name] = FieldSpec(name, np.dtype(one.dtype), one.shape)
        if one.mask:
            specs[f"{name}_mask"] = FieldSpec(f"{name}_mask", np.dtype(bool), ())
    if "values" in fields:
        specs |= {name: FieldSpec(name, np.dtype(fields["values"].dtype), (1,)) for name in COMPUTED}
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
    """The fields of ``RolloutStorage.motion_mimic``; only what is configured is among them.

    Args:
        training_type: "rl" or "distillation".
        obs_shape, actions_shape: Shapes in one environment.
        ref_obs_shape, privileged_obs_shape, privileged_ref_obs_shape, rnd_state_shape: Likewise; None, or ``(None,)``,
            for what there is not. Privileged references are there only beside references.
        apply_dagger_actions: Whether there are ``dagger_actions``.

    Returns:
        Fields by name.

    Raises:
        ConfigError: An unknown training type, or what is no shape.
    """
    if training_type not in get_args(TrainingType):
        raise ConfigError(f"training_type: expected one of {list(get_args(TrainingType))}, found {training_type!r}")
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
    # (None,) is how runners that wrap a number in a list say that there is none.
    if shape is None or (isinstance(shape, Sequence) and tuple(shape) == (None,)):
        return None
    return RolloutField(check_shape(where, shape), mask=mask)


# ---------------------------------------------------------------------- one step, on its way into a storage


class Transition:
    """One step of all environments: arrays ``[N, ...]`` under the names of a storage's fields.

    Fields are arguments or attributes; those that were not set are None. Some have a second name, which means the same:
    ``critic_observations`` (``privileged_observations``), ``critic_reference_observations`` and its ``_mask``
    (``privileged_reference_observations``), ``action_mean`` (``mu``) and ``action_sigma`` (``sigma``). A storage
    refuses names that it does not hold.

    Args:
        fields: Values by name.

    Raises:
        ConfigError: Two names of one field have different values.
    """

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_values", {})
        for name, value in fields.items():
            canonical = ALIASES.get(name, name)
            earlier = self._values.get(canonical)
            if earlier is not None and earlier is not value:
                raise ConfigError(f"Transition: expected one value for {canonical}, found another one as {name}")
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._values[ALIASES.get(name, name)] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while an instance is being unpickled
            raise AttributeError(name)
        canonical = ALIASES.get(name, name)
        if canonical in self._values:
            return self._values[canonical]
        if canonical in KNOWN:
            return None
        raise AttributeError(f"Transition: expected one of {sorted(self._values)}, found {name!r}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Names and values of what is set to something."""
        return ((name, value) for name, value in self._values.items() if value is not None)

    def __repr__(self) -> str:
        return f"Transition({', '.join(name for name, _ in self)})"

    def clear(self) -> None:
        """Forget all fields, to be filled for the next step."""
        self._values.clear()


def fields_of(transition: Transition | Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-None values of a transition, or of a dict with the same names, by field name."""
    if not isinstance(transition, Transition):
        fields = as_record(transition)
        if fields is not None:
            return dict(Transition(**fields))
        raise ConfigError(f"add_transitions: expected a Transition or a dict, found {type(transition).__name__}")
    return dict(transition)
