"""Metadata of a recording: the environment, its spaces, the policy and versions of packages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mouse_core.errors import ConfigError, DataError

# Limit of the JSON text, which is in the metadata of every file.
_MOST_TEXT = 1 << 20


@dataclass(frozen=True, eq=False)
class Recording:
    """The recording of steps. Attributes that are None or empty are not part of it.

    Args:
        environment: The environment's id, such as "LunarLander-v3".
        policy: Description of the policy.
        spec: JSON to create the environment again: for gymnasium, the content of ``EnvSpec.to_json``.
        observation_space, action_space: Descriptions of the spaces: ``type``, ``shape``, ``dtype``, ``low``, ``high``
            and so on, nested under ``subspaces``.
        versions: Versions of packages by name.

    Raises:
        ConfigError: A value that JSON cannot represent, or more than 1 MB of JSON.
    """

    environment: str | None = None
    policy: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    observation_space: Mapping[str, Any] = field(default_factory=dict)
    action_space: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("environment", "policy"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"Recording: {name}: expected a text or None, found {getattr(self, name)!r:.80}")
        for name in ("spec", "observation_space", "action_space", "versions"):
            object.__setattr__(self, name, _frozen(name, getattr(self, name)))
        if len(self._text()) > _MOST_TEXT:
            raise ConfigError(f"Recording: expected at most {_MOST_TEXT} characters of JSON, found {len(self._text())}")

    def __eq__(self, other: object) -> bool:
        return self._text() == other._text() if isinstance(other, Recording) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        return recording_from_json, (recording_to_json(self),)

    def _text(self) -> str:
        return json.dumps(recording_to_json(self), sort_keys=True)


def _frozen(name: str, value: Any) -> Mapping[str, Any]:
    """Return an immutable copy through JSON, which equals what a reader gets."""
    try:
        copied = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"Recording: {name}: expected what JSON can hold, found {value!r:.80} ({error})") from error
    return MappingProxyType(copied)


def recording_to_json(recording: Recording) -> dict[str, Any]:
    """Return the attributes that are not None or empty."""
    values = {item.name: getattr(recording, item.name) for item in dataclasses.fields(recording)}
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if value is not None and value != {}}


def recording_from_json(content: Any) -> Recording:
    """Return the recording in a JSON object of ``recording_to_json``.

    Raises:
        DataError: Another object.
        ConfigError: An invalid value of an attribute.
    """
    names = {item.name for item in dataclasses.fields(Recording)}
    if not isinstance(content, dict) or not content.keys() <= names:
        raise DataError(f"recordings: expected attributes of a recording, {sorted(names)}, found {content!r:.200}")
    return Recording(**content)


def check_recordings(given: Iterable[Any]) -> tuple[Recording, ...]:
    """Return recordings without duplicates; raises ConfigError for other objects."""
    recordings = () if isinstance(given, str | Mapping) else tuple(given)
    if not all(isinstance(item, Recording) for item in recordings) or (given and not recordings):
        raise ConfigError(f"recordings: expected mouse_core.about.Recording objects, found {given!r:.200}")
    return tuple(dict.fromkeys(recordings))
