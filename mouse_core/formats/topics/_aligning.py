"""A recording's messages brought to the ticks of one clock, in two walks over its files.

The first walk looks at times alone. When it is over, it is known which message each column has at which tick, and what
is out of tolerance is refused before anything is made of it. The second walk decodes those messages, and holds of them
what ticks still wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.reading import damaged, reading
from mouse_core.formats.topics._clock import Times, matched, runs_of, ticks_of
from mouse_core.formats.topics._mcap import Channel
from mouse_core.formats.topics._messages import Decode, decoder
from mouse_core.formats.topics._values import is_of, stamp_of, value_at
from mouse_core.formats.topics.layout import Place, TopicLayout
from mouse_core.formats.topics.recordings import Recording

Source = tuple[str, tuple[str, ...]]
"""A topic, and the names that its messages must have."""


@dataclass(frozen=True)
class Column:
    """A value of each step.

    Args:
        role: What for, as layouts call it.
        name: What its column is called besides; empty where it is alone.
        place: Where it lies.
        match: "nearest" or "hold".
        tolerance: In seconds.
    """

    role: str
    name: str
    place: Place
    match: str
    tolerance: float

    @property
    def source(self) -> Source:
        """What has its messages."""
        return self.place.topic, self.place.names


@dataclass(frozen=True)
class Piece:
    """Steps of an episode that follow each other.

    Args:
        values: Those of each column, one a step.
        seconds: When each step is, from the episode's first one on.
        begins, ends: Whether the episode begins, or ends, with the piece.
    """

    values: Mapping[Column, list[Any]]
    seconds: npt.NDArray[np.float64]
    begins: bool
    ends: bool


def columns_of(layout: TopicLayout) -> list[Column]:
    """All that a layout names."""
    return [
        Column(role, name, place, layout.of("match", role, place), float(layout.of("tolerance", role, place)))
        for role, name, place in layout.places()
    ]


class Aligned:
    """A recording, step by step.

    Args:
        recording: It.
        layout: What of it is wanted.
        names: Of the numbers of each path, as they were in the recordings before.

    Raises:
        DataError: A damaged file, a topic without messages, or one that is out of tolerance and must not be.
    """

    def __init__(self, recording: Recording, layout: TopicLayout, names: dict[str, tuple[str, ...]]) -> None:
        self.recording, self.layout, self._names = recording, layout, names
        self.columns = columns_of(layout)
        self._decoders: dict[Channel, Decode] = {}
        self._places = {column.source: column.place for column in self.columns}
        if layout.clock is not None:
            self._places.setdefault((layout.clock, ()), Place(layout.clock, layout.clock, ()))
        self._topics = {topic for topic, _ in self._places}
        self._times, self._ordinals, numbers = self._first_walk()
        self.ticks, self.runs = self._settled(numbers)

    @property
    def left_out(self) -> int:
        """How many ticks are in no episode."""
        return len(self.ticks) - sum(stop - first for first, stop in self.runs)

    def _message(self, channel: Channel, data: memoryview) -> Mapping[str, Any]:
        if channel not in self._decoders:
            _, kind, encoding, schema, definition = channel
            self._decoders[channel] = decoder(kind, encoding, schema, definition, self.layout.definitions)
        return self._decoders[channel](data)

    def _first_walk(self) -> tuple[dict[Source, Times], dict[Source, npt.NDArray[np.int64]], list[float]]:
        """When the messages of each source are, which they are among all, and the numbers of episodes."""
        times: dict[Source, list[int]] = {source: [] for source in self._places}
        ordinals: dict[Source, list[int]] = {source: [] for source in self._places}
        episode = next((column for column in self.columns if column.role == "episode"), None)
        stamped, numbers = self.layout.stamps == "header", []
        found = set()
        for ordinal, (channel, time, data) in enumerate(self.recording.messages()):
            found.add(channel.topic)
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
                    self.recording.path, f"{topic}: expected messages{which}, found topics {sorted(found)[:20]}"
                )
        as_arrays = {source: np.array(some, np.int64) for source, some in times.items()}
        return as_arrays, {source: np.array(some, np.int64) for source, some in ordinals.items()}, numbers

    def _settled(self, numbers: list[float]) -> tuple[Times, list[tuple[int, int]]]:
        """The ticks, and the stretches of them that are episodes."""
        order = {source: np.argsort(times, kind="stable") for source, times in self._times.items()}
        ascending = {source: self._times[source][places] for source, places in order.items()}
        with reading(str(self.recording.path)):
            if self.layout.clock is not None:
                ticks = np.unique(ascending[self.layout.clock, ()])
            else:
                ticks = ticks_of([ascending[column.source] for column in self.columns], float(self.layout.rate or 0))
        self._taken: dict[Column, npt.NDArray[np.int64]] = {}
        whole, running = np.ones(len(ticks), bool), np.ones(len(ticks))
        away = {}
        for column in self.columns:
            places, away[column] = matched(ascending[column.source], ticks, column.match, column.tolerance)
            self._taken[column] = np.where(places < 0, -1, order[column.source][places])
            whole &= places >= 0
            if column.role == "episode":
                running = np.where(places >= 0, np.array(numbers)[self._taken[column]], np.nan)
        if self.layout.gaps == "refuse":
            self._refuse(ticks, whole, running, away)
        runs = runs_of(whole, np.nan_to_num(running))
        if not runs and not whole.any():
            lacking = {column: self._taken[column] < 0 for column in self.columns}
            worst = max(self.columns, key=lambda column: int(lacking[column].sum()))
            fewest = np.where(lacking[worst], sum(lacking.values()), len(self.columns) + 1)
            self._blame(worst, ticks, int(np.argmin(fewest)), away, "at no step is every topic there")
        if not runs:
            raise damaged(self.recording.path, f"expected an episode of two steps, found none in {len(ticks)} ticks")
        return ticks, runs

    def _refuse(
        self, ticks: Times, whole: npt.NDArray[np.bool_], running: npt.NDArray[Any], away: Mapping[Column, Times]
    ) -> None:
        """Raise where something is out of tolerance that is neither between episodes nor at the recording's ends."""
        lacking = np.flatnonzero(~whole & (running != 0))
        there = np.flatnonzero(whole)
        if not len(lacking) or not len(there):
            return
        first, last = int(there[0]), int(there[-1])
        for tick in lacking.tolist():
            if first < tick < last:
                self._blame(None, ticks, tick, away, "gaps='cut' ends the episode there")
        for tick, edge, what in ((lacking[0], first, "beginning"), (lacking[-1], last, "end")):
            seconds = abs(int(ticks[tick]) - int(ticks[edge])) / 1e9
            inside = tick < first if what == "beginning" else tick > last
            if inside and seconds > self.layout.trim:
                hint = (
                    f"trim={seconds:.3g} leaves out so much of a recording's {what}, gaps='cut' whatever lacks a topic"
                )
                self._blame(None, ticks, int(tick), away, hint)

    def _blame(self, lacking: Column | None, ticks: Times, tick: int, away: Mapping[Column, Times], hint: str) -> None:
        """Raise DataError for a column, or the first one, that is not there at a tick."""
        column = lacking or next(one for one in self.columns if self._taken[one][tick] < 0)
        seconds, since = away[column][tick] / 1e9, (ticks[tick] - ticks[0]) / 1e9
        which = "last one before" if column.match == "hold" else "nearest"
        if column.match == "hold" and ticks[tick] < self._times[column.source].min():
            which = "first one after"
        raise damaged(
            self.recording.path,
            f"{column.place.text}: expected a message within {column.tolerance:g} s of the step at {since:.3f} s "
            f"({ticks[tick]} ns), found the {which} {seconds:.3f} s away; {hint}",
        )

    def pieces(self, size: Callable[[Mapping[Column, Any]], int]) -> Iterator[Piece]:
        """All episodes, in pieces.

        Args:
            size: Says how many steps a piece may have, from the values of the first one.
        """
        steps = np.concatenate([np.arange(first, stop) for first, stop in self.runs])
        taken = {column: places[steps] for column, places in self._taken.items()}
        # A step is ready when the last of its messages has come, and all steps before it are.
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
        for ordinal in self._second_walk(last_use, held):
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
                    yield Piece(values, (some - origin) / 1e9, begins, ends)
                    rows, begin = [], number
        if number < len(ready):
            raise damaged(
                self.recording.path, "expected the messages that were there before, found others: it was changed"
            )

    def _second_walk(
        self, wanted: Mapping[Column, Mapping[int, int]], held: Mapping[Column, dict[int, Any]]
    ) -> Iterator[int]:
        """Put values that are wanted into ``held``, and say how many messages have been looked at."""
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
            known = self._names[place.text]
            raise DataError(
                f"{place.text}: expected the names {list(known)[:20]} beside the values, as before, found "
                f"{list(names)[:20]}; {place.text}[{known[0]}, ...] takes them by name"
            )
        return value


def _number(value: Any, place: Place) -> float:
    if isinstance(value, str) or np.size(value) != 1:
        raise DataError(f"{place.text}: expected a number or flag, found {value!r:.80}")
    return float(np.asarray(value).reshape(()))
