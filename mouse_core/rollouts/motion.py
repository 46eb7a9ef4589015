"""Imitating motion: the fields that training for it has, and previous states for adversarial motion priors (AMP).

A discriminator judges pairs of states that follow each other (Peng et al., "AMP: adversarial motion priors for stylized
physics-based character control", SIGGRAPH 2021). A pair never crosses the end of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mouse_core.dtypes import namespace
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.rollouts.fields import RolloutField, check_shape
from mouse_core.rollouts.trajectories import history_rows

TrainingType = Literal["rl", "distillation"]

Array = Any
Extractor = Callable[[Any], Any]


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


# ---------------------------------------------------------------------- previous states


def find_extractors(amp_cfg: Any, fields: Mapping[str, RolloutField]) -> tuple[Extractor, Extractor] | None:
    """The two functions of an ``amp_cfg``.

    Raises:
        ConfigError: One of them is missing, or there are no observations to call them with.
    """
    if amp_cfg is None:
        return None
    found = []
    for name in ("amp_obs_extractor", "amp_ref_obs_extractor"):
        call = amp_cfg.get(name) if isinstance(amp_cfg, Mapping) else getattr(amp_cfg, name, None)
        if not callable(call):
            raise ConfigError(f"amp_cfg: expected a function as {name}, found {call!r}")
        found.append(call)
    if "observations" not in fields or fields["observations"].optional:
        raise ConfigError(f"amp_cfg: expected a field 'observations' beside it, found {list(fields)}")
    if "reference_observations" in fields and not fields["reference_observations"].mask:
        raise ConfigError("amp_cfg: expected reference_observations with mask=True, found none")
    return found[0], found[1]


@dataclass(frozen=True)
class AmpStates:
    """What the AMP extractors say of every row.

    Args:
        obs: ``[T * N, ...]``.
        ref_obs: ``[T * N, ...]``, or None without references.
        ref_mask: Whether that was available, bool ``[T * N]`` or ``[T * N, 1]``; or None.
    """

    obs: Array
    ref_obs: Array | None = None
    ref_mask: Array | None = None


def amp_states(flat: Mapping[str, Array], obs_extractor: Extractor, ref_extractor: Extractor) -> AmpStates:
    """Ask the extractors about all rows.

    Args:
        flat: Fields ``[T * N, ...]``.
        obs_extractor: Called with observations ``[T * N, ...]``.
        ref_extractor: Called with ``(reference observations, mask)``; returns a state, or ``(state, mask)``.

    Raises:
        SchemaError: States of another number of rows.
    """
    states = obs_extractor(flat["observations"])
    found: Any = (None, None)
    if "reference_observations" in flat:
        reference = flat["reference_observations"], flat["reference_observations_mask"]
        found = ref_extractor(reference)
        if not isinstance(found, tuple):
            found = found, reference[1]
    rows = flat["observations"].shape[0]
    for name, values in (("amp_obs_extractor", states), *(("amp_ref_obs_extractor", part) for part in found)):
        if values is not None and (values.ndim < 1 or values.shape[0] != rows):
            raise SchemaError(f"{name}: expected an array of {rows} rows, found shape {list(values.shape)}")
    return AmpStates(states, *found)


def previous_states(states: AmpStates, rows: Array, starts: Array) -> dict[str, Array]:
    """The ``..._prev_...`` parts of a mini-batch of rows.

    Args:
        states: Of every row.
        rows: Flat row numbers, of any shape.
        starts: As ``episode_starts`` returns them.
    """
    xp = namespace(rows)
    before, there = history_rows(xp.reshape(rows, (-1,)), starts, 2)
    before, there = before[:, 0], there[:, 0]

    def taken(values: Array) -> Array:
        values = xp.take(values, before, axis=0)
        hidden = xp.reshape(there, (-1, *(1,) * (values.ndim - 1)))
        return xp.reshape(xp.where(hidden, values, xp.zeros_like(values[:1])), (*rows.shape, *values.shape[1:]))

    parts = {"obs_prev_state": taken(states.obs), "obs_prev_mask": xp.reshape(there, rows.shape)}
    if states.ref_obs is not None:
        parts["ref_obs_prev_state"] = taken(states.ref_obs)
        parts["ref_obs_prev_mask"] = taken(states.ref_mask != 0)
    return parts
