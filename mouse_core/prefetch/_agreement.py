"""Whether the ranks of a run deliver parts of the same batches: compared when they begin, refresh and resume.

Each rank leaves what it is about to deliver as a note, rank 0 compares them all, and the others read what it found. No
collective call is made, so that nothing depends on which others a program has under way; and a rank that is about to
deliver a batch says so, from which the others see that it will not come.

A process that died and was started again finds what the earlier one had noted. Where the others go on meanwhile, it
goes on with them and asks nobody; where they do not, all may have been started again, and it waits for them for a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.ranks import Ranks, find_ranks

# What differs wherever something else does, and says nothing by itself.
_DIGESTS = ("fingerprint", "data")
_MOST_RANKS, _MOST_WORDS = 4, 6
# Seconds between two looks, and until somebody who waits is told.
_SHORTEST_WAIT, _LONGEST_WAIT, _TOLD_AFTER = 0.0005, 0.05, 60
# What no other process has, also where its number is the same.
_STARTED = time.time_ns()
# Seconds that a process waits that was started again, and loaders of before whose notes it watches.
_RETURNED_SECONDS, _WATCHED = 300.0, 8
# Seconds that rank 0 stays until the others have read what is wrong: its process may hold the notes.
_STAYS = 5.0


class _Alone(Exception):
    """The others go on, with a loader of this name."""


class Agreement:
    """The exchange between ranks about a loader: the notes that this rank sent and received.

    Args:
        ranks: The ranks, as found when the loader was created.
        framework: The framework to ask first for the other ranks.
    """

    def __init__(self, ranks: Ranks, framework: str) -> None:
        self.ranks, self._framework = ranks, framework
        self._board: Any = None  # a Board, once there are others to agree with
        self._name = ""
        self._held, self._refreshes = 0, 0
        self._is_pending = True
        # What the others had noted of loaders of before when this process came again; None: it is the first.
        self._before: dict[tuple[str, int], str | None] | None = None

    def deliver(self, feed: Any, index: int) -> None:
        """Before batch ``index`` is delivered: see that all begin with it, and say that this one has come so far.

        Raises:
            ConfigError: See ``hold``.
        """
        if self._is_pending:
            self.hold("the first batch", feed, index, index)
            self._is_pending = False
        if self._board is not None:
            self._board.put(f"{self._name}/at/{self.ranks.rank}", f"{self._held} {index}")

    def hold(self, call: str, feed: Any, next_index: int, at: int) -> None:
        """See that all ranks make the same call, and that the same follows.

        Args:
            call: Which one, in words.
            feed: Where batches come from after it.
            next_index: The number of the next batch after it.
            at: That of the next batch before it.

        Raises:
            ConfigError: They differ, or one has gone on without it, or has not come in time.
        """
        if not self._meets():
            return
        try:
            self._hold(call, feed, next_index, at)
        except _Alone as others:
            self._go_on(str(others), next_index)

    def _hold(self, call: str, feed: Any, next_index: int, at: int) -> None:
        board, ranks, name = self._board, self.ranks, f"{self._name}/{self._held}"
        refreshes = self._refreshes + (call == "refresh()")
        board.put(f"{name}/{ranks.rank}", json.dumps(words_of(feed, next_index, call, refreshes, ranks.count)))
        if ranks.rank:
            try:
                (found,) = self._wait(name, ["found"], call, at)
            except ConfigError:
                board.put(f"{name}/read/{ranks.rank}", "")
                raise
        else:
            try:
                found = _compared(self._wait(name, range(ranks.count), call, at), call)
                self._forget(self._held - 1)  # which all have read, or they would not be here
            except ConfigError as error:
                found = str(error)
            board.put(f"{name}/found", found)
        self._held += 1
        if found:
            if ranks.rank:
                board.put(f"{name}/read/{ranks.rank}", "")
            else:
                self._stay(name)
            raise ConfigError(found)
        self._refreshes, self._is_pending, self._before = refreshes, False, None

    def _meets(self) -> bool:
        """Whether there are others to agree with, and a way to do so; that may come after the loader was made."""
        if self._board is not None:
            return True
        if self.ranks.process != os.getpid() or _in_data_loader():
            return False
        now = self.ranks if self.ranks.board is not None else self._found_now()
        if now.count == 1 or now.board is None:
            return False
        # How many loaders of this rank have agreed on something: the others count them in the same order.
        started = f"{os.getpid()}-{_STARTED}"
        number, _, by = (now.board.get(f"mouse/loaders/{now.rank}") or f"0 {started}").partition(" ")
        now.board.put(f"mouse/loaders/{now.rank}", f"{int(number) + 1} {started}")
        self._board, self._name = now.board, f"mouse/{number}"
        if by != started:
            names = [f"mouse/{one}" for one in range(max(0, int(number) - _WATCHED), int(number))]
            others = [rank for rank in range(now.count) if rank != now.rank][:_MOST_RANKS]
            self._before = {(name, rank): now.board.get(f"{name}/at/{rank}") for name in names for rank in others}
        return True

    def _check_alone(self) -> None:
        """Raise ``_Alone`` where another rank delivers batches of a loader of before."""
        for (name, rank), note in (self._before or {}).items():
            if self._board.get(f"{name}/at/{rank}") != note:
                raise _Alone(name)

    def _go_on(self, name: str, next_index: int) -> None:
        """Be one of the ranks that go on with a loader of before."""
        board, own = self._board, self.ranks.rank
        board.remove(f"{self._name}/{self._held}/{own}")
        number = self._name.rpartition("/")[2]
        board.put(f"mouse/loaders/{own}", f"{number} {os.getpid()}-{_STARTED}")
        rank = next(rank for of, rank in self._before or () if of == name)
        held, _, index = (board.get(f"{name}/at/{rank}") or "1 0").partition(" ")
        said = json.loads(board.get(f"{name}/{int(held) - 1}/{own}") or "{}")
        self._name, self._held, self._refreshes = name, int(held), int(said.get("refreshes", 0))
        self._before, self._is_pending = None, False
        warnings.warn(
            f"rank {own} of {self.ranks.count} was started again, and the others were not: it goes on with batch "
            f"{next_index}, where rank {rank} is at batch {index}, and nobody has compared what they are made of",
            stacklevel=2,
        )

    def _found_now(self) -> Ranks:
        """The ranks as they are found by now, which must be those that the loader was made for."""
        if self.ranks.found_in == "the caller":
            return self.ranks
        now = find_ranks(self._framework)
        if now.shard != self.ranks.shard:
            raise ConfigError(
                f"shard: expected a loader for {now.shard}, which {now.found_in} says, found one for "
                f"{self.ranks.shard} by {self.ranks.found_in}; make it after the processes have found each other"
            )
        return now

    def _forget(self, held: int) -> None:
        """Take the notes of an agreement away."""
        for part in (*range(self.ranks.count), "found") if held >= 0 else ():
            self._board.remove(f"{self._name}/{held}/{part}")

    def _wait(self, name: str, parts: Any, call: str, at: int) -> list[str]:
        """The notes of some names, when all are there."""
        board = self._board
        notes: dict[Any, str] = {}
        pause, begin, is_told = _SHORTEST_WAIT, time.monotonic(), False
        while True:
            for part in parts:
                note = None if part in notes else board.get(f"{name}/{part}")
                if note is not None:
                    notes[part] = note
            missing = [0 if part == "found" else part for part in parts if part not in notes]
            if not missing:
                return [notes[part] for part in parts]
            self._check_alone()
            if call == "refresh()":
                self._check_gone_on(missing, at)
            waited = time.monotonic() - begin
            self._check_waiting(missing, waited, call, at, tell=waited > _TOLD_AFTER and not is_told)
            is_told = waited > _TOLD_AFTER
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)

    def _stay(self, name: str) -> None:
        """Wait until the ranks that have come know what is wrong, before this one, which is told, may end."""
        board = self._board
        until = time.monotonic() + min(_STAYS, board.seconds)
        unread = list(range(1, self.ranks.count))
        while unread and time.monotonic() < until:
            time.sleep(_SHORTEST_WAIT)
            came = [rank for rank in unread if board.get(f"{name}/{rank}") is not None]
            unread = [rank for rank in came if board.get(f"{name}/read/{rank}") is None]

    def _check_gone_on(self, missing: Sequence[int], at: int) -> None:
        """Raise ConfigError where a rank asks for batch ``at`` or a later one, and has agreed as often as this one."""
        for rank in missing:
            held, _, index = (self._board.get(f"{self._name}/at/{rank}") or "-1 -1").partition(" ")
            if int(held) == self._held and int(index) >= at:
                raise ConfigError(
                    f"ranks: expected all {self.ranks.count} to call refresh() before batch {at}, "
                    f"found rank {rank} at batch {index} without"
                )

    def _check_waiting(self, missing: Sequence[int], waited: float, call: str, at: int, *, tell: bool) -> None:
        """Raise ConfigError where the ranks have had their time, and say in good time for whom it is that all wait."""
        seconds, again = self._board.seconds, ""
        if self._before:
            seconds = min(seconds, _RETURNED_SECONDS)
            again = (
                f"; rank {self.ranks.rank} was started again, as notes of an earlier process say, and the others "
                "deliver no batches: start all of them again, or give this one its shard as (rank, count)"
            )
        absent = f"rank {', '.join(map(str, missing[:_MOST_RANKS]))}"
        if waited > seconds:
            raise ConfigError(
                f"ranks: expected all {self.ranks.count} at {call} before batch {at}, found that {absent} did not come "
                f"in {seconds:.0f} s{again}"
            )
        if tell:
            warnings.warn(
                f"rank {self.ranks.rank} of {self.ranks.count} has been waiting for {absent} at {call} for "
                f"{waited:.0f} s, and will for {seconds:.0f} s; all ranks use loaders with shard='auto' in one order",
                stacklevel=2,
            )


def _compared(notes: Sequence[str], call: str) -> str:
    """Describe how the notes of all ranks, in order, differ; "" if they are equal."""
    [(usual, _), *others] = Counter(notes).most_common()
    if not others:
        return ""
    expected = json.loads(usual)
    whose = f"rank {notes.index(usual)} has" if len(notes) == 2 else "most have"
    said = []
    for rank, note in enumerate(notes):
        if note != usual:
            differing = _differing(expected, json.loads(note))
            parts = [f"{name} {found} where {whose} {wanted}" for name, found, wanted in differing]
            said.append(f"rank {rank} with {', '.join(parts)}")
    more = f"; and {len(said) - _MOST_RANKS} more" if len(said) > _MOST_RANKS else ""
    return f"ranks: expected all {len(notes)} to agree at {call}, found {'; '.join(said[:_MOST_RANKS])}{more}"


def words_of(feed: Any, next_index: int, call: str, refreshes: int, count: int) -> dict[str, str]:
    """Return the values that must be equal in all ranks, by name: all that determines batches, except the rank."""
    state = feed.state(next_index)
    configuration = json.loads(state.pop("configuration", "{}"))
    source = feed.source
    words: dict[str, Any] = {"call": call, "shards": count, **state, "refreshes": refreshes}
    for name in ("batch_size", "sequence_length", "views", "uneven"):
        words[name] = getattr(source, name, None)
    for name, value in configuration.items():
        parts = {f"{name} {part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
        words |= parts
    words |= {f"dtype of {name}": field.dtype for name, field in source.spec.items()}
    return {name: str(value) for name, value in words.items()}


def _differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the differing values: the name of each, the value found, and the expected one."""
    names = [name for name in dict.fromkeys([*expected, *found]) if expected.get(name) != found.get(name)]
    telling = [name for name in names if name not in _DIGESTS] or names[:1]
    return [(name, found.get(name, "none"), expected.get(name, "none")) for name in telling[:_MOST_WORDS]]


def _in_data_loader() -> bool:
    """Whether this process is a worker of a torch DataLoader, of which there may be several, or none, in a rank."""
    worker: Any = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return worker is not None and worker() is not None
