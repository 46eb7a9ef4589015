"""How steps were recorded: in which environment, of which spaces, by which policy, with which versions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mouse_core.errors import ConfigError, DataError

# What a description may take, as JSON: it stands in the metadata of every file.
_MOST_TEXT = 1 << 20


@dataclass(frozen=True, eq=False)
class Recording:
    """How steps were recorded. What is None or empty is not said.

    Args:
        environment: The environment's id, such as "LunarLander-v3".
        policy: What acted, in words.
        spec: What makes the environment again, as JSON has it: of gymnasium's, what ``EnvSpec.to_json`` says.
        observation_space, action_space: What observations and actions are: ``type``, ``shape``, ``dtype``, ``low`` and
            ``high`` and the like, nested under ``subspaces``.
        versions: Versions of the packages that took part, by name.

    Raises:
        ConfigError: What JSON cannot hold, or more than 1 MB of it.
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
    """A copy that nobody can change, through JSON, so that it is what others will read."""
    try:
        copied = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"Recording: {name}: expected what JSON can hold, found {value!r:.80} ({error})") from error
    return MappingProxyType(copied)


def recording_to_json(recording: Recording) -> dict[str, Any]:
    """What is said."""
    found = {item.name: getattr(recording, item.name) for item in dataclasses.fields(recording)}
    said = {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}
    return {name: value for name, value in said.items() if value is not None and value != {}}


def recording_from_json(said: Any) -> Recording:
    """What ``recording_to_json`` gave.

    Raises:
        DataError: Something else.
        ConfigError: Values that a recording cannot have.
    """
    known = {item.name for item in dataclasses.fields(Recording)}
    if not isinstance(said, dict) or not said.keys() <= known:
        raise DataError(f"recordings: expected attributes of a recording, {sorted(known)}, found {said!r:.200}")
    return Recording(**said)


def check_recordings(found: Iterable[Any]) -> tuple[Recording, ...]:
    """Recordings, each once, or ConfigError."""
    recordings = () if isinstance(found, str | Mapping) else tuple(found)
    if not all(isinstance(item, Recording) for item in recordings) or (found and not recordings):
        raise ConfigError(f"recordings: expected mouse_core.about.Recording objects, found {found!r:.200}")
    return tuple(dict.fromkeys(recordings))
