"""One step of all environments, on its way into a storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.rollouts.fields import ALIASES, KNOWN
from mouse_core.trees import as_record


class Transition:
    """What all environments did in one step: arrays ``[N, ...]`` under the names of a storage's fields.

    Fields are arguments or attributes; those that were not set are None. Some have a second name, which means the same:
    ``critic_observations`` (``privileged_observations``), ``critic_reference_observations`` and its ``_mask``
    (``privileged_reference_observations``), ``action_mean`` (``mu``) and ``action_sigma`` (``sigma``). A storage
    refuses names that it does not hold.

    Args:
        fields: Values by name.

    Raises:
        ConfigError: Two different values under two names of one field.
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
    """What a transition, or a dict with the same names, holds: values that are not None, by the names of fields."""
    if not isinstance(transition, Transition):
        fields = as_record(transition)
        if fields is not None:
            return dict(Transition(**fields))
        raise ConfigError(f"add_transitions: expected a Transition or a dict, found {type(transition).__name__}")
    return dict(transition)
