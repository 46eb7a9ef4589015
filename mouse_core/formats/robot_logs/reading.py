"""Read robot recordings as rows: values of topics are columns, and ticks of a clock are steps.

The messages of a recording are aligned to the ticks in two passes over its files. The first pass reads only times.
After it, each column has the index of a message for every tick, and messages out of tolerance have raised an error. The
second pass decodes the chosen messages, and keeps each value until its last tick.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.columns.episode_rows import Columns, placeholder
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged, reading
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import (
    named_action,
    named_observation,
    one_each,
    ordered,
    schema_of,
    to_batches,
    travels_with_action,
)
from mouse_core.formats.columns.transitions import one_later, step_numbers
from mouse_core.formats.layouts.layout import loaded
from mouse_core.formats.robot_logs._messages import Decode, decoder
from mouse_core.formats.robot_logs.layout import Place, Stretch, TopicLayout, is_names
from mouse_core.formats.robot_logs.recordings import Channel, Recording, recordings_of, topics_in
from mouse_core.images.pixels import decode_image
from mouse_core.metadata import DatasetMetadata

# Encodings of images: dtype, channels, and whether blue comes before red.
_PIXELS = {
    "rgb8": ("u1", 3, False), "bgr8": ("u1", 3, True), "rgba8": ("u1", 4, False), "bgra8": ("u1", 4, True),
    "mono8": ("u1", 1, False), "8UC1": ("u1", 1, False), "8UC3": ("u1", 3, False), "8UC4": ("u1", 4, False),
    "mono16": ("u2", 1, False), "16UC1": ("u2", 1, False), "32FC1": ("f4", 1, False),
}  # fmt: skip
_IMAGE = {"height", "width", "encoding", "step", "data"}
_COMPRESSED = {"format", "data"}
_VIDEOS = ("h264", "h265", "hevc", "vp8", "vp9", "av1")
_NAMES = ("name", "joint_names", "names")


def is_of(message: Mapping[str, Any], names: tuple[str, ...], place: Place) -> bool:
    """Whether a message has all names of a path."""
    if not names:
        return True
    value: Any = message
    for part in place.parts:
        if is_names(part):
            return False
        parent, value = value, _step(value, part, place)
        present = names_beside(parent)
        if present is not None and isinstance(part, str) and part not in _NAMES:
            return set(names) <= set(present)
    return False


def names_beside(message: Any) -> list[str] | None:
    """Return the names that a message has for its lists of numbers, or None."""
    for field in _NAMES:
        names = message.get(field) if isinstance(message, Mapping) else None
        if isinstance(names, list) and all(isinstance(one, str) for one in names) and names:
            return names
    return None


def value_at(message: Mapping[str, Any], place: Place) -> tuple[Any, tuple[str, ...]]:
    """Return the value at a path, and the message's names for its numbers if the path has no names.

    Raises:
        DataError: A path without a value, or with a value that cannot be a column.
    """
    value: Any = message
    names: list[str] | None = None
    for part in place.parts:
        if is_names(part):
            if names is None:
                raise DataError(f"{place.text}: expected names beside the value, found none")
            value = _by_name(value, names, part, place)
            names = None
            continue
        parent, value = value, _step(value, part, place)
        names = names_beside(parent) if isinstance(part, str) else None
    if isinstance(value, str):
        return value, ()
    if isinstance(value, Mapping) and set(value) >= _IMAGE:
        return _image(value, place), ()
    if isinstance(value, Mapping) and set(value) >= _COMPRESSED and isinstance(value["format"], str):
        return _compressed(value, place), ()
    numbers = _numbers(value, place)
    return numbers, tuple(names) if names is not None and len(names) == numbers.size and numbers.ndim else ()


def _step(value: Any, part: Any, place: Place) -> Any:
    """Return a field of a message, or an element or a slice of a list."""
    if isinstance(part, str):
        if not isinstance(value, Mapping) or part not in value:
            present = list(value)[:20] if isinstance(value, Mapping) else "a value"
            raise DataError(f"{place.text}: expected a field {part!r}, found {present}")
        return value[part]
    if isinstance(value, str | Mapping) or not hasattr(value, "__getitem__"):
        raise DataError(f"{place.text}: expected several values, found one")
    last = part if isinstance(part, int) else (part.stop or 0) - 1
    part = slice(part.first, part.stop) if isinstance(part, Stretch) else part
    if last >= len(value):
        raise DataError(f"{place.text}: expected at least {last + 1} values, found {len(value)}")
    return value[part]


def _by_name(values: Any, names: list[str], wanted: tuple[str, ...], place: Place) -> Any:
    """Return the values with the names ``wanted``."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != len(names):
        raise DataError(f"{place.text}: expected a value for each of {names[:20]}")
    if missing := [name for name in wanted if names.count(name) != 1]:
        raise DataError(f"{place.text}: expected each once among {names[:20]}, found {missing} missing or twice")
    return [values[names.index(name)] for name in wanted]


def _numbers(value: Any, place: Place) -> npt.NDArray[Any]:
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(one, Mapping) for one in value)):
        leaves = list(_leaves(value, place))
        if not leaves:
            raise DataError(f"{place.text}: expected numbers, found none")
        return np.concatenate([np.atleast_1d(leaf) for leaf in leaves])
    numbers = _array(value)
    if numbers.dtype.kind not in "biuf" or numbers.dtype.itemsize > 8:
        raise DataError(f"{place.text}: expected numbers, found {type(value).__name__} of {numbers.dtype}")
    return numbers


def _array(value: Any) -> npt.NDArray[Any]:
    """Return numbers in their dtype and native byte order; numbers of JSON as 64-bit floats."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.empty((), object)
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list | int | float) and numbers.dtype.kind in "iuf":
        return numbers.astype(np.float64)
    return numbers.astype(numbers.dtype.newbyteorder("="))


def _leaves(value: Any, place: Place) -> Iterator[npt.NDArray[Any]]:
    """Yield the numbers of a message without its header."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name != "header":
                yield from _leaves(one, place)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one, place)
    else:
        numbers = _array(value)
        if numbers.dtype.kind not in "biuf":
            raise DataError(f"{place.text}: expected numbers alone, found {value!r:.80} among them; name the fields")
        yield numbers


def _image(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    encoding = message["encoding"]
    if encoding not in _PIXELS:
        raise DataError(f"{place.text}: expected an image in one of {list(_PIXELS)}, found {encoding!r}")
    letters, channels, swapped = _PIXELS[encoding]
    dtype = np.dtype(letters).newbyteorder(">" if message.get("is_bigendian") else "<")
    height, width, step = (int(message[name]) for name in ("height", "width", "step"))
    row = width * channels * dtype.itemsize
    data = _octets(message["data"], place)
    if height < 1 or width < 1 or step < row or len(data) != height * step:
        raise DataError(
            f"{place.text}: expected {height} rows of {step} bytes, of which {row} are pixels, found {len(data)} bytes"
        )
    pixels = np.ascontiguousarray(data.reshape(height, step)[:, :row]).view(dtype).reshape(height, width, channels)
    if swapped:
        pixels = pixels[:, :, [2, 1, 0, *range(3, channels)]]
    return pixels.astype(dtype.newbyteorder("="))


def _octets(data: Any, place: Place) -> npt.NDArray[np.uint8]:
    """Return bytes of a message; JSON messages have them in base64."""
    try:
        data = np.frombuffer(base64.b64decode(data, validate=True), np.uint8) if isinstance(data, str) else data
        return np.asarray(data, np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{place.text}: expected bytes, in JSON as base64, found {data!r:.80}") from error


def _compressed(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    kind = message["format"]
    if "compressedDepth" in kind:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {kind!r}, which has a header of its own")
    if kind.lower() in _VIDEOS:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {kind!r}, a frame of a video that needs others")
    wide = "16UC1" in kind or "mono16" in kind
    data = _octets(message["data"], place).tobytes()
    try:
        return decode_image(data, dtype=np.uint16 if wide else np.uint8)
    except ValueError as error:
        raise DataError(f"{place.text}: {error}") from error


def stamp_of(message: Mapping[str, Any]) -> int | None:
    """Return the time in a message's header, in nanoseconds; None without a header."""
    stamp = message.get("header", {}).get("stamp") if isinstance(message.get("header"), Mapping) else None
    if not isinstance(stamp, Mapping):
        return None
    seconds, rest = stamp.get("sec", stamp.get("secs")), stamp.get("nanosec", stamp.get("nsec", stamp.get("nsecs")))
    if not isinstance(seconds, int | np.integer) or not isinstance(rest, int | np.integer) or seconds < 0:
        raise DataError(f"header.stamp: expected seconds and nanoseconds, found {stamp!r:.80}")
    if not seconds and not rest:
        raise DataError("header.stamp: expected a time, found 0, which no writer set; take stamps='log'")
    return int(seconds) * 10**9 + int(rest)


Times = npt.NDArray[np.int64]
Source = tuple[str, tuple[str, ...]]
"""A topic, and the names that its messages must have."""

# A damaged time would create ticks without end: this many may have no message, and this many more for each message.
_MOST_EMPTY, _MOST_A_MESSAGE = 1 << 20, 1000


@dataclass(frozen=True)
class Column:
    """A path of a layout, whose value at each tick becomes a column.

    Args:
        role: The layout's role: "observation", "action", ...
        name: Name within the role; empty for the only path of a role.
        place: The path.
        match: "nearest" or "hold".
        tolerance: Largest distance in time, in seconds.
    """

    role: str
    name: str
    place: Place
    match: str
    tolerance: float

    @property
    def source(self) -> Source:
        """The topic and names of its messages."""
        return self.place.topic, self.place.names


@dataclass(frozen=True)
class StepBlock:
    """Consecutive steps of an episode.

    Args:
        values: Values by column, one for each step.
        seconds: Time of each step since the episode's first step.
        begins, ends: Whether the piece has the episode's first, or last, step.
    """

    values: Mapping[Column, list[Any]]
    seconds: npt.NDArray[np.float64]
    begins: bool
    ends: bool


def columns_of(layout: TopicLayout) -> list[Column]:
    """Return the columns of a layout."""
    return [
        Column(role, name, place, layout.of("match", role, place), float(layout.of("tolerance", role, place)))
        for role, name, place in layout.places()
    ]


class Aligned:
    """The steps of a recording.

    Args:
        recording: The recording.
        layout: The layout.
        names: Names beside the numbers of each path in the recordings before; this recording adds its own.

    Raises:
        DataError: A damaged file, a topic without messages, or a message out of tolerance that the layout refuses.
    """

    def __init__(self, recording: Recording, layout: TopicLayout, names: dict[str, tuple[str, ...]]) -> None:
        self.recording, self.layout, self._names = recording, layout, names
        self.columns = columns_of(layout)
        self._decoders: dict[Channel, Decode] = {}
        self._places = {column.source: column.place for column in self.columns}
        if layout.clock is not None:
            self._places.setdefault((layout.clock, ()), Place(layout.clock, layout.clock, ()))
        self._topics = {topic for topic, _ in self._places}
        self._times, self._ordinals, numbers = self._read_times()
        self.ticks, self.runs = self._aligned_ticks(numbers)

    @property
    def left_out(self) -> int:
        """Number of ticks outside of episodes."""
        return len(self.ticks) - sum(stop - first for first, stop in self.runs)

    def _message(self, channel: Channel, data: memoryview) -> Mapping[str, Any]:
        if channel not in self._decoders:
            _, kind, encoding, schema, definition = channel
            self._decoders[channel] = decoder(kind, encoding, schema, definition, self.layout.definitions)
        return self._decoders[channel](data)

    def _read_times(self) -> tuple[dict[Source, Times], dict[Source, npt.NDArray[np.int64]], list[float]]:
        """Return the times of each source's messages, their numbers among all messages, and the numbers of episodes."""
        times: dict[Source, list[int]] = {source: [] for source in self._places}
        ordinals: dict[Source, list[int]] = {source: [] for source in self._places}
        episode = next((column for column in self.columns if column.role == "episode"), None)
        stamped, numbers = self.layout.stamps == "header", []
        topics = set()
        for ordinal, (channel, time, data) in enumerate(self.recording.messages()):
            topics.add(channel.topic)
            for source in self._places if channel.topic in self._topics else ():
                if source[0] != channel.topic:
                    continue
                wanted = episode is not None and episode.source == source
                with reading(str(self.recording.path), at=f"{channel.topic} at {time} ns"):
                    message = self._message(channel, data) if stamped or source[1] or wanted else {}
                    if not is_of(message, source[1], self._places[source]):
                        continue
                    if episode is not None and wanted:
                        numbers.append(_number(value_at(message, episode.place)[0], episode.place))
                    stamp = stamp_of(message) if stamped else None
                times[source].append(time if stamp is None else stamp)
                ordinals[source].append(ordinal)
        for (topic, names), some in times.items():
            if not some:
                which = f" with the names {list(names)}" if names else ""
                raise damaged(
                    self.recording.path, f"{topic}: expected messages{which}, found topics {sorted(topics)[:20]}"
                )
        as_arrays = {source: np.array(some, np.int64) for source, some in times.items()}
        return as_arrays, {source: np.array(some, np.int64) for source, some in ordinals.items()}, numbers

    def _aligned_ticks(self, numbers: list[float]) -> tuple[Times, list[tuple[int, int]]]:
        """Return the ticks, and the first and stop tick of each episode."""
        order = {source: np.argsort(times, kind="stable") for source, times in self._times.items()}
        ascending = {source: self._times[source][places] for source, places in order.items()}
        with reading(str(self.recording.path)):
            if self.layout.clock is not None:
                ticks = np.unique(ascending[self.layout.clock, ()])
            else:
                ticks = ticks_of([ascending[column.source] for column in self.columns], float(self.layout.rate or 0))
        self._indices: dict[Column, npt.NDArray[np.int64]] = {}
        whole, running = np.ones(len(ticks), bool), np.ones(len(ticks))
        away = {}
        for column in self.columns:
            places, away[column] = matched(ascending[column.source], ticks, column.match, column.tolerance)
            self._indices[column] = np.where(places < 0, -1, order[column.source][places])
            whole &= places >= 0
            if column.role == "episode":
                running = np.where(places >= 0, np.array(numbers)[self._indices[column]], np.nan)
        if self.layout.gaps == "refuse":
            self._check_gaps(ticks, whole, running, away)
        runs = runs_of(whole, np.nan_to_num(running))
        if not runs and not whole.any():
            lacking = {column: self._indices[column] < 0 for column in self.columns}
            worst = max(self.columns, key=lambda column: int(lacking[column].sum()))
            fewest = np.where(lacking[worst], sum(lacking.values()), len(self.columns) + 1)
            self._raise_missing(worst, ticks, int(np.argmin(fewest)), away, "at no step is every topic there")
        if not runs:
            raise damaged(self.recording.path, f"expected an episode of two steps, found none in {len(ticks)} ticks")
        return ticks, runs

    def _check_gaps(
        self, ticks: Times, whole: npt.NDArray[np.bool_], running: npt.NDArray[Any], away: Mapping[Column, Times]
    ) -> None:
        """Raise DataError for a value out of tolerance, unless between episodes or at the ends of the recording."""
        lacking = np.flatnonzero(~whole & (running != 0))
        complete = np.flatnonzero(whole)
        if not len(lacking) or not len(complete):
            return
        first, last = int(complete[0]), int(complete[-1])
        for tick in lacking.tolist():
            if first < tick < last:
                self._raise_missing(None, ticks, tick, away, "gaps='cut' ends the episode there")
        for tick, edge, what in ((lacking[0], first, "beginning"), (lacking[-1], last, "end")):
            seconds = abs(int(ticks[tick]) - int(ticks[edge])) / 1e9
            inside = tick < first if what == "beginning" else tick > last
            if inside and seconds > self.layout.trim:
                hint = (
                    f"trim={seconds:.3g} leaves out so much of a recording's {what}, gaps='cut' whatever lacks a topic"
                )
                self._raise_missing(None, ticks, int(tick), away, hint)

    def _raise_missing(
        self, lacking: Column | None, ticks: Times, tick: int, away: Mapping[Column, Times], hint: str
    ) -> None:
        """Raise DataError for the column ``lacking``, by default the first one without a message at the tick."""
        column = lacking or next(one for one in self.columns if self._indices[one][tick] < 0)
        seconds, since = away[column][tick] / 1e9, (ticks[tick] - ticks[0]) / 1e9
        which = "last one before" if column.match == "hold" else "nearest"
        if column.match == "hold" and ticks[tick] < self._times[column.source].min():
            which = "first one after"
        raise damaged(
            self.recording.path,
            f"{column.place.text}: expected a message within {column.tolerance:g} s of the step at {since:.3f} s "
            f"({ticks[tick]} ns), found the {which} {seconds:.3f} s away; {hint}",
        )

    def pieces(self, size: Callable[[Mapping[Column, Any]], int]) -> Iterator[StepBlock]:
        """Yield all episodes in pieces.

        Args:
            size: Returns the most steps of a piece, from the values of the first step.
        """
        steps = np.concatenate([np.arange(first, stop) for first, stop in self.runs])
        taken = {column: places[steps] for column, places in self._indices.items()}
        # A step is complete once the last of its messages is read, and all steps before it are complete.
        needed = [self._ordinals[column.source][places] for column, places in taken.items()]
        ready = np.maximum.accumulate(np.max(needed, axis=0)).tolist()
        last_use = {
            column: dict(zip(places.tolist(), range(len(steps)), strict=True)) for column, places in taken.items()
        }
        at = {column: places.tolist() for column, places in taken.items()}
        first_of = {first for first, _ in self.runs}
        last_of = {stop - 1 for _, stop in self.runs}
        held: dict[Column, dict[int, Any]] = {column: {} for column in self.columns}
        rows: list[Mapping[Column, Any]] = []
        begin, most, number, origin = 0, 0, 0, 0
        for ordinal in self._read_values(last_use, held):
            while number < len(ready) and ready[number] <= ordinal:
                row = {column: held[column][at[column][number]] for column in self.columns}
                for column in self.columns:
                    if last_use[column][at[column][number]] == number:
                        del held[column][at[column][number]]
                if steps[number] in first_of:
                    origin, begin = int(self.ticks[steps[number]]), number
                rows.append(row)
                most = most or size(row)
                number += 1
                ends = bool(steps[number - 1] in last_of)
                if ends or len(rows) >= most:
                    some = self.ticks[steps[begin:number]]
                    begins = bool(steps[begin] in first_of)
                    values = {column: [one[column] for one in rows] for column in self.columns}
                    yield StepBlock(values, (some - origin) / 1e9, begins, ends)
                    rows, begin = [], number
        if number < len(ready):
            raise damaged(
                self.recording.path, "expected the messages of the first pass, found others: the file was changed"
            )

    def _read_values(
        self, wanted: Mapping[Column, Mapping[int, int]], held: Mapping[Column, dict[int, Any]]
    ) -> Iterator[int]:
        """Decode the chosen values into ``held``; yield the number of each message that was read."""
        seen = dict.fromkeys(self._places, 0)
        by_source: dict[Source, list[Column]] = {}
        for column in self.columns:
            by_source.setdefault(column.source, []).append(column)
        for ordinal, (channel, time, data) in enumerate(self.recording.messages()):
            message: Mapping[str, Any] | None = None
            for source in self._places if channel.topic in self._topics else ():
                ordinals, place = self._ordinals[source], seen[source]
                if source[0] != channel.topic or place >= len(ordinals) or ordinals[place] != ordinal:
                    continue
                seen[source] += 1
                for column in by_source.get(source, ()):
                    if place in wanted[column]:
                        with reading(str(self.recording.path), at=f"{channel.topic} at {time} ns"):
                            message = message or self._message(channel, data)
                            held[column][place] = self._value(message, column.place)
            yield ordinal

    def _value(self, message: Mapping[str, Any], place: Place) -> Any:
        value, names = value_at(message, place)
        if names and self._names.setdefault(place.text, names) != names:
            before = self._names[place.text]
            raise DataError(
                f"{place.text}: expected the names {list(before)[:20]} beside the values, as before, found "
                f"{list(names)[:20]}; {place.text}[{before[0]}, ...] takes them by name"
            )
        return value


def _number(value: Any, place: Place) -> float:
    if isinstance(value, str) or np.size(value) != 1:
        raise DataError(f"{place.text}: expected a number or flag, found {value!r:.80}")
    return float(np.asarray(value).reshape(()))


def ticks_of(times: Sequence[Times], rate: float) -> Times:
    """Return ticks at a rate, from the first message to the last; one tick is at the start of the last topic.

    Example with 20 ticks per second: a topic has messages at 0 and 90 ms, and another topic starts at 40 ms. The ticks
    are at 40 and 90 ms. There is no tick at -10 ms, before the first message.

    Args:
        times: Times of the messages of each topic, in nanoseconds.
        rate: Ticks per second.

    Raises:
        ValueError: Far more ticks than messages, from a damaged time.
    """
    first, last = min(int(some.min()) for some in times), max(int(some.max()) for some in times)
    anchor = max(int(some.min()) for some in times)
    # With Python integers, as a float does not resolve nanoseconds since 1970.
    before, after = int((anchor - first) * rate // 1e9), int((last - anchor) * rate // 1e9)
    if before + after > _MOST_EMPTY + _MOST_A_MESSAGE * sum(map(len, times)):
        raise ValueError(
            f"expected about as many ticks as messages, found {before + after} ticks of {rate} a second in "
            f"{(last - first) / 1e9:.3f} s"
        )
    steps = np.round(np.arange(-before, after + 1) * (1e9 / rate)).astype(np.int64)
    return anchor + steps


def matched(times: Times, ticks: Times, match: str, tolerance: float) -> tuple[Times, Times]:
    """Return the index of a topic's message at each tick, and the distance in time, int64 ``[ticks]`` each.

    Example with messages at 10, 20 and 30: a tick at 19 has the second message by "nearest" and the first by "hold". A
    tick at 15 has the first message, as "nearest" prefers the earlier one of two.

    Args:
        times: Times of the messages, ascending, at least one.
        ticks: The ticks, in nanoseconds.
        match: "nearest" or "hold".
        tolerance: Largest distance, in seconds.

    Returns:
        The index of the message, -1 for a tick without a message within the tolerance. And the distance in nanoseconds:
        to the nearest message, or for "hold" to the last one before the tick (to the first, for a tick before it).
    """
    # The last message up to the tick: of several at one time the last, -1 before the first.
    last = np.searchsorted(times, ticks, side="right") - 1
    index = np.maximum(last, 0)
    if match == "nearest":
        after = np.minimum(last + 1, len(times) - 1)
        nearer = times[after] - ticks < ticks - times[index]
        index = np.where(nearer, after, index)
    distance = np.abs(times[index] - ticks)
    inside = distance <= (np.inf if np.isinf(tolerance) else tolerance * 1e9)
    if match == "hold":
        inside &= last >= 0
    return np.where(inside, index, -1), distance


def runs_of(whole: npt.NDArray[np.bool_], numbers: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the first tick of each episode and the tick behind its last; episodes have at least two ticks.

    Args:
        whole: Whether all columns have a value at a tick.
        numbers: Number of the episode at each tick, 0 for none.
    """
    running = np.where(whole, numbers, 0)
    edges = np.flatnonzero(np.diff(running, prepend=0, append=0))
    return [(int(first), int(stop)) for first, stop in pairwise(edges) if running[first] and stop - first > 1]


_SHOWN = 12


def read_robot_logs(
    path: str | os.PathLike[str],
    *,
    layout: TopicLayout | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read MCAP files and bags of ROS 2 as rows, with a step for every tick of a clock.

    Messages are encoded as CDR, in the layout of ROS 1, or as JSON. An episode of T ticks is T rows: the observation at
    a tick, and the action and reward of the tick before. The action and reward of the last tick are left out, as no
    observation follows. ``metadata_timestamp`` has seconds since the episode's first step. ``done`` of the last row is
    1 if ``terminated`` is set there, 2 if ``truncated`` is set there, else the layout's ``ending``. Images are pixels,
    depth images in the recorded unit.

    Args:
        path: An MCAP file, an SQLite file of rosbag2, a folder of rosbag2 with its ``metadata.yaml``, or a folder of
            these, ordered by the numbers in their names.
        layout: A ``TopicLayout``, its arguments as a mapping, or a YAML file with them.
        batch_rows: Most rows of a batch.

    Returns:
        The rows. ``metadata["files"]`` has the recordings.

    Raises:
        ConfigError: A missing or invalid layout, or a path without recordings.
        DataError: A damaged file, messages that do not fit the layout, or a message out of tolerance; the error names
            recording, topic and time.
    """
    check_batch_rows(batch_rows)
    root = Path(path)
    if layout is None:
        topics = topics_in(root)
        shown = ", ".join(f"{one.name} ({one.type}, {one.rate:.3g} Hz)" for one in topics[:_SHOWN])
        more = f" and {len(topics) - _SHOWN} more" if len(topics) > _SHOWN else ""
        raise ConfigError(
            f"{root}: format (--format): expected a layout that says which topics are columns, found none for "
            f"{shown}{more}"
        )
    options = loaded(TopicLayout, layout)
    recordings = recordings_of(root, options.files)
    names: dict[str, tuple[str, ...]] = {}
    first = Aligned(recordings[0], options, names)
    schema = schema_of(ordered(next(_rows(first, options, 1))))

    def batches() -> Iterator[pa.RecordBatch]:
        for number, recording in enumerate(recordings):
            opened = Aligned(recording, options, names) if number else first
            yield from to_batches(_rows(opened, options, batch_rows), schema, where=str(recording.path))

    return RowStream(
        os.fspath(path),
        "robot_logs",
        schema,
        batches,
        episodes=len(first.runs) if len(recordings) == 1 else None,
        rows=len(first.ticks) - first.left_out if len(recordings) == 1 else None,
        notes=tuple(_notes(first, options)),
        format_metadata={"files": [str(recording.path) for recording in recordings]},
        metadata=DatasetMetadata("arrived", frames_per_second=[] if options.rate is None else [options.rate]),
    )


def _notes(first: Aligned, layout: TopicLayout) -> Iterator[str]:
    clock = f"a message of {layout.clock}" if layout.clock is not None else f"a tick of {layout.rate:g} a second"
    yield f"A step is {clock}; times are those of {'headers' if layout.stamps == 'header' else 'recording'}."
    ways = {(column.match, column.tolerance) for column in first.columns}
    for match, tolerance in sorted(ways):
        paths = [
            column.place.text for column in first.columns if (column.match, column.tolerance) == (match, tolerance)
        ]
        which = "the nearest message" if match == "nearest" else "the last message before"
        yield f"{', '.join(paths)}: {which}, at most {tolerance:g} s away."
    if first.left_out:
        yield (
            f"{first.recording.path}: {first.left_out} of {len(first.ticks)} ticks are left out, at which a topic is "
            "out of tolerance or no episode runs."
        )
    if layout.reward is None:
        yield "There are no rewards: reward is 0."
    if layout.terminated is None and layout.truncated is None:
        yield f"Nothing says how episodes ended: they are taken as {layout.ending}."


def _rows(recording: Aligned, layout: TopicLayout, batch_rows: int) -> Iterator[Columns]:
    before: Columns = {}
    step = 0

    def size(row: Mapping[Column, Any]) -> int:
        return rows_at_once(sum(getattr(value, "nbytes", 64) for value in row.values()), most=batch_rows)

    for piece in recording.pieces(size):
        count = len(piece.seconds)
        begins = np.arange(count) < int(piece.begins)
        seen, leaving, arrived = _columns(piece, layout)
        rows = one_later(leaving, before, begins)
        for name, values in arrived.items():
            rows[name] = np.concatenate([placeholder(values), values[1:]]) if piece.begins else values
        rows["done"] = np.zeros(count, np.int64)
        if piece.ends:
            rows["done"][-1] = _ending(piece, layout)
        rows |= seen
        rows["episode_step"] = step_numbers(begins, step)
        step = int(rows["episode_step"][-1]) + 1
        yield ordered(rows)


def _columns(piece: StepBlock, layout: TopicLayout) -> tuple[Columns, Columns, Columns]:
    """Return the columns of the ticks' observations, of the actions that leave them, and of those that led to them."""
    by_role: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for column, values in piece.values.items():
        by_role.setdefault(column.role, {})[column.name] = _stacked(column, values)
    seen = named_observation(_alone(by_role["observation"]))
    groups: dict[bool, Columns] = {True: {}, False: {}}
    moved = layout.arrived()
    if "action" in by_role:
        groups["action" in moved] |= named_action(_alone(by_role["action"]))
    reward = by_role.get("reward", {"": np.zeros(len(piece.seconds))})
    groups["reward" in moved]["reward"] = one_each({"reward": _alone(reward)}, "reward")
    metadata = {"timestamp": piece.seconds} | by_role.get("metadata", {})
    for name, values in metadata.items():
        (groups["action" in moved] if travels_with_action(name) else seen)[f"metadata_{name}"] = values
    return seen, groups[False], groups[True]


def _alone(values: Mapping[str, Any]) -> Any:
    return values[""] if [*values] == [""] else values


def _stacked(column: Column, values: list[Any]) -> npt.NDArray[Any]:
    if any(isinstance(value, str) for value in values):
        texts = np.empty(len(values), object)
        texts[:] = values
        return texts
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise DataError(f"{column.place.text}: expected values of one shape, found {sorted(shapes)[:4]}")
    return np.stack(values)


def _ending(piece: StepBlock, layout: TopicLayout) -> int:
    for code, role in ((1, "terminated"), (2, "truncated")):
        for column, values in piece.values.items():
            if column.role == role and np.any(np.asarray(values[-1])):
                return code
    return 1 if layout.ending == "terminal" else 2
