"""Layouts of robot recordings: the values of topics that become columns, and the clock of steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from mouse_core._base.checks import check_choice, check_number, check_seconds
from mouse_core.errors import ConfigError
from mouse_core.formats.layouts.layout import Aligned, Paths

ROLES = ("observation", "action", "reward", "terminated", "truncated", "metadata", "episode")
_PATH = re.compile(r"(?P<topic>[^.\[\]\s]+)(?P<fields>(?:\.\w+|\[[^\[\]]+\])*)")
_PART = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")


class Stretch(NamedTuple):
    """A slice of values: from ``first`` up to ``stop``; None for the beginning or the end."""

    first: int | None
    stop: int | None


@dataclass(frozen=True)
class Place:
    """The path of a value in the messages of a topic.

    Args:
        text: The path as in the layout.
        topic: The topic.
        parts: Names of fields, indices ``[3]``, slices ``[2:5]``, and tuples of names ``[a, b]``.
    """

    text: str
    topic: str
    parts: tuple[str | int | Stretch | tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a message must have for this path."""
        return next((part for part in self.parts if is_names(part)), ())


@dataclass(frozen=True, kw_only=True)
class TopicLayout(Aligned):
    """The values of topics that become columns, and how messages become steps.

    A path is a topic and fields of its messages: ``/joint_states.position``, ``/tf.transforms[0].transform``,
    ``/imu.orientation_covariance[0:3]``. ``/joint_states.position[shoulder, elbow]`` selects two values by the list
    ``name`` in the message, from messages that have both names. The path of a message stands for all its numbers in
    order, without the header; the path of an image for its pixels; a text stays a text. Several paths are a list, or a
    mapping from names.

    Every recording is an episode with a step for each tick of a clock. At a tick, each topic has the message that is
    nearest in time, or the last one before (``match``), within ``tolerance``. A topic without such a message is an
    error, or ends the episode (``gaps``). No older value replaces a missing one.

    Args:
        observation: Observed values.
        action: Commanded values.
        reward: A number per step; without it, rewards are 0.
        terminated: A flag; its value in the last step is whether the episode terminated.
        truncated: A flag; its value in the last step is whether the episode was truncated.
        metadata: Values of additional columns, ``metadata_<name>``.
        rate: Ticks per second.
        clock: Instead of ``rate``, a topic whose messages are the ticks.
        tolerance: Largest distance of a message in seconds; or by role or topic, ``{"action": 0.1, "/task": inf}``.
        match: "nearest", which may be a message up to ``tolerance`` later, or "hold", the last message before the tick;
            or by role or topic.
        stamps: The time of a message: "log" for the time of recording, "header" for the time in its header, if any.
        gaps: The effect of a message out of tolerance: "refuse" raises an error, "cut" ends the episode and begins
            another one behind the gap.
        trim: With ``gaps="refuse"``, the most seconds at both ends of a recording that are left out because a topic has
            not begun or has ended. More raise an error.
        episode: A number or flag: no episode while it is 0, and a new episode when it changes.
        alignment: Whether the action and reward at a tick leave its observation ("outgoing") or led to it ("arrived");
            or by ``action`` and ``reward``.
        ending: End of an episode without a flag: "truncated" (done 2) or "terminal" (done 1).
        files: Pattern of the recordings of a folder, such as ``"episode_*.mcap"``.
        definitions: Definitions of messages by type, as in .msg files, for recordings without definitions.
    """

    observation: Paths = None
    action: Paths = None
    reward: str | None = None
    terminated: str | None = None
    truncated: str | None = None
    metadata: Paths = None
    rate: float | None = None
    clock: str | None = None
    tolerance: float | Mapping[str, float]
    match: str | Mapping[str, str] = "nearest"
    stamps: str = "log"
    gaps: str = "refuse"
    trim: float = 1.0
    episode: str | None = None
    alignment: str | Mapping[str, str] = "outgoing"
    ending: str = "truncated"
    files: str | None = None
    definitions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.observation is None:
            raise ConfigError("layout: observation: expected a path, found none")
        if (self.rate is None) == (self.clock is None):
            raise ConfigError(
                "layout: expected one of rate (ticks a second) and clock (a topic), found both or neither"
            )
        if self.rate is not None:
            check_number("layout: rate", self.rate, above=True)
        if self.clock is not None and place_of("clock", self.clock).parts:
            raise ConfigError(f"layout: clock: expected a topic, found {self.clock!r}")
        check_choice("layout: stamps", self.stamps, ("log", "header"))
        check_choice("layout: gaps", self.gaps, ("refuse", "cut"))
        check_seconds("layout: trim", self.trim)
        if self.files is not None and (not isinstance(self.files, str) or not self.files or "/" in self.files):
            raise ConfigError(f"layout: files: expected names of recordings in the folder, found {self.files!r:.80}")
        if not isinstance(self.definitions, Mapping) or not all(
            isinstance(one, str) for one in self.definitions.values()
        ):
            raise ConfigError("layout: definitions: expected texts by types of messages")
        self.check_alignment()
        self._check_by_role()

    def _check_by_role(self) -> None:
        places = self.places()
        names = {place.topic for _, _, place in places} | {role for role, _, _ in places}
        for name in ("tolerance", "match"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and (others := [key for key in value if key not in names]):
                raise ConfigError(f"layout: {name}: expected roles or topics of the layout, found {others[:8]}")
        for role, _, place in places:
            check_seconds("layout: tolerance", self.of("tolerance", role, place))
            check_choice("layout: match", self.of("match", role, place), ("nearest", "hold"))

    def places(self) -> list[tuple[str, str, Place]]:
        """Return all paths by role and name; the name of the only path of a role is empty."""
        places = []
        for role in ROLES:
            value = getattr(self, role)
            if value is not None:
                named = _named(role, value)
                if role not in ("observation", "action", "metadata") and [*named] != [""]:
                    raise ConfigError(f"layout: {role}: expected one path, found {value!r:.80}")
                places += [(role, name, place_of(role, path)) for name, path in named.items()]
        return places

    def of(self, name: str, role: str, place: Place) -> Any:
        """Return ``tolerance`` or ``match`` of a path: for its topic, else for its role."""
        value = getattr(self, name)
        if not isinstance(value, Mapping):
            return value
        option = value.get(place.topic, value.get(role))
        if option is None and name == "match":
            return "nearest"
        if option is None:
            raise ConfigError(f"layout: {name}: expected one for {role} or {place.topic}, found {dict(value)}")
        return option


def _named(role: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {_name(value) if role == "metadata" else "": value}
    if isinstance(value, Mapping) and value and all(isinstance(name, str) and name for name in value):
        return dict(value)
    if isinstance(value, Sequence) and value and all(isinstance(path, str) for path in value):
        found = {_name(path): path for path in value}
        if len(found) == len(value):
            return found
    raise ConfigError(
        f"layout: {role}: expected a path, different paths, or a mapping of names to paths, found {value!r:.80}"
    )


def _name(path: str) -> str:
    """Return the column name of a path without a name: ``arm_state_position`` for ``/arm/state.position``."""
    return re.sub(r"\W+", "_", path).strip("_")


def place_of(role: str, path: Any) -> Place:
    """Parse a path.

    Raises:
        ConfigError: A value that is not a path.
    """
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise ConfigError(f"layout: {role}: expected a path as '/joint_states.position', found {path!r:.80}")
    parts = tuple(name or _bracket(inner) for name, inner in _PART.findall(match["fields"]))
    if sum(map(is_names, parts)) > 1:
        raise ConfigError(f"layout: {role}: expected names in one pair of brackets, found {path!r:.80}")
    return Place(path, match["topic"], parts)


def is_names(part: Any) -> TypeGuard[tuple[str, ...]]:
    """Whether a part of a path is a tuple of names."""
    return isinstance(part, tuple) and not isinstance(part, Stretch)


def _bracket(inner: str) -> int | Stretch | tuple[str, ...]:
    if re.fullmatch(r"\d{1,9}", inner):
        return int(inner)
    if stretch := re.fullmatch(r"(\d{0,9}):(\d{0,9})", inner):
        return Stretch(*(int(edge) if edge else None for edge in stretch.groups()))
    return tuple(name.strip() for name in inner.split(","))
