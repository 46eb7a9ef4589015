"""Checks, whenever ranks begin, refresh or resume, that all ranks deliver parts of the same batches.

Each rank writes a note that describes its next batches; rank 0 compares all notes, and the other ranks read the result.
The exchange uses no collective calls, because these could interfere with the program's own collective calls. A rank
that is about to deliver a batch writes the index of the batch. So the other ranks see that this rank will not join the
exchange.
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

# Digests differ whenever another value differs, so they are not listed as causes.
_DIGESTS = ("fingerprint", "data")
_MOST_RANKS, _MOST_WORDS = 4, 6
# Seconds between two polls (shortest and longest), and seconds until a warning about the wait.
_SHORTEST_WAIT, _LONGEST_WAIT, _TOLD_AFTER = 0.0005, 0.05, 60
# Seconds that rank 0 waits until the other ranks have read an error, because its process may hold the notes.
_STAYS = 5.0


class Agreement:
    """The exchange of notes between ranks about one loader.

    Args:
        ranks: The ranks that were found when the loader was created.
        framework: The framework whose ranks are used if it has any; see ``find_ranks``.
    """

    def __init__(self, ranks: Ranks, framework: str) -> None:
        self.ranks, self._framework = ranks, framework
        self._board: Any = None  # a Board, when other ranks exist
        self._name = ""
        self._held, self._refreshes = 0, 0
        self._is_pending = True

    def deliver(self, feed: Any, index: int) -> None:
        """Check, before batch ``index`` is delivered, that all ranks begin with the same batch; then write ``index`` to
        the board for the other ranks.

        Raises:
            ConfigError: See ``hold``.
        """
        if self._is_pending:
            self.hold("the first batch", feed, index, index)
            self._is_pending = False
        if self._board is not None:
            self._board.put(f"{self._name}/at/{self.ranks.rank}", f"{self._held} {index}")

    def hold(self, call: str, feed: Any, next_index: int, at: int) -> None:
        """Check that all ranks make the same call, and continue with the same batches.

        Args:
            call: The name of the call.
            feed: The feed after the call.
            next_index: The index of the next batch after the call.
            at: The index of the next batch before the call.

        Raises:
            ConfigError: The batches of the ranks differ; or another rank has continued without the call, or has not
                made the call in time.
        """
        if not self._meets():
            return
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
                self._forget(self._held - 1)  # all ranks have read it, since they all joined this exchange
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
        self._refreshes, self._is_pending = refreshes, False

    def _meets(self) -> bool:
        """Return whether other ranks exist, and a board on which ranks exchange notes. The program can create the ranks
        and the board later than the loader.
        """
        if self._board is not None:
            return True
        if self.ranks.process != os.getpid() or _in_data_loader():
            return False
        now = self.ranks if self.ranks.board is not None else self._found_now()
        if now.count == 1 or now.board is None:
            return False
        # The number of loaders of this rank that have agreed: all ranks count their loaders in the same order.
        number = int(now.board.get(f"mouse/loaders/{now.rank}") or 0)
        now.board.put(f"mouse/loaders/{now.rank}", str(number + 1))
        self._board, self._name = now.board, f"mouse/{number}"
        return True

    def _found_now(self) -> Ranks:
        """Return the current ranks; raise ConfigError unless they equal the ranks for which the loader was created."""
        if self.ranks.found_in == "the caller":
            return self.ranks
        now = find_ranks(self._framework)
        if now.shard != self.ranks.shard:
            raise ConfigError(
                f"shard: expected a loader for the shard (rank, count) = {now.shard} of {now.found_in}, found a loader "
                f"for {self.ranks.shard} of {self.ranks.found_in}; create the loader after the process group is "
                "initialised"
            )
        return now

    def _forget(self, held: int) -> None:
        """Delete the notes that all ranks wrote for an agreement."""
        for part in (*range(self.ranks.count), "found") if held >= 0 else ():
            self._board.remove(f"{self._name}/{held}/{part}")

    def _wait(self, name: str, parts: Any, call: str, at: int) -> list[str]:
        """Wait until the notes of the given names exist, and return them."""
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
            if call == "refresh()":
                self._check_gone_on(missing, at)
            waited = time.monotonic() - begin
            self._check_waiting(missing, waited, call, at, tell=waited > _TOLD_AFTER and not is_told)
            is_told = waited > _TOLD_AFTER
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)

    def _stay(self, name: str) -> None:
        """Wait until the other ranks have read the error, because this process can end after it has raised the
        error.
        """
        board = self._board
        until = time.monotonic() + min(_STAYS, board.seconds)
        unread = list(range(1, self.ranks.count))
        while unread and time.monotonic() < until:
            time.sleep(_SHORTEST_WAIT)
            came = [rank for rank in unread if board.get(f"{name}/{rank}") is not None]
            unread = [rank for rank in came if board.get(f"{name}/read/{rank}") is None]

    def _check_gone_on(self, missing: Sequence[int], at: int) -> None:
        """Raise ConfigError if another rank, after as many agreements as this rank, has already continued to batch
        ``at`` or a later batch.
        """
        for rank in missing:
            held, _, index = (self._board.get(f"{self._name}/at/{rank}") or "-1 -1").partition(" ")
            if int(held) == self._held and int(index) >= at:
                raise ConfigError(
                    f"ranks: expected all {self.ranks.count} ranks to call refresh() before batch {at}, "
                    f"found rank {rank} at batch {index} without this call"
                )

    def _check_waiting(self, missing: Sequence[int], waited: float, call: str, at: int, *, tell: bool) -> None:
        """Raise ConfigError after the time limit; before the time limit, warn once with the names of the missing
        ranks."""
        seconds = self._board.seconds
        absent = f"rank {', '.join(map(str, missing[:_MOST_RANKS]))}"
        if waited > seconds:
            raise ConfigError(
                f"ranks: expected all {self.ranks.count} ranks to reach {call} before batch {at}, but {absent} did not "
                f"arrive within {seconds:.0f} s"
            )
        if tell:
            warnings.warn(
                f"rank {self.ranks.rank} of {self.ranks.count} has been waiting for {absent} at {call} for "
                f"{waited:.0f} s, and waits up to {seconds:.0f} s; all ranks must use their loaders in the same order",
                stacklevel=2,
            )


def _compared(notes: Sequence[str], call: str) -> str:
    """Return a description of the differences between the ranks' notes; "" if all notes are equal."""
    [(usual, _), *others] = Counter(notes).most_common()
    if not others:
        return ""
    expected = json.loads(usual)
    whose = f"rank {notes.index(usual)} has" if len(notes) == 2 else "most have"
    said = []
    for rank, note in enumerate(notes):
        if note != usual:
            differing = _differing(expected, json.loads(note))
            parts = [f"{name} {found} ({whose} {wanted})" for name, found, wanted in differing]
            said.append(f"rank {rank} with {', '.join(parts)}")
    more = f"; and {len(said) - _MOST_RANKS} more" if len(said) > _MOST_RANKS else ""
    return f"ranks: expected all {len(notes)} ranks to agree at {call}, found {'; '.join(said[:_MOST_RANKS])}{more}"


def words_of(feed: Any, next_index: int, call: str, refreshes: int, count: int) -> dict[str, str]:
    """Return the values that must be equal in all ranks, by name: all values that determine batches, except the
    rank.
    """
    state = feed.state(next_index)
    configuration = json.loads(state.pop("configuration", "{}"))
    source = feed.source
    words: dict[str, Any] = {"call": call, "shards": count, **state, "refreshes": refreshes}
    for name in ("batch_size", "sequence_length", "views", "uneven", "packed"):
        words[name] = getattr(source, name, None)
    for name, value in configuration.items():
        parts = {f"{name} {part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
        words |= parts
    words |= {f"dtype of {name}": field.dtype for name, field in source.spec.items()}
    return {name: str(value) for name, value in words.items()}


def _differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the values that differ: for each value its name, the found value and the expected value."""
    names = [name for name in dict.fromkeys([*expected, *found]) if expected.get(name) != found.get(name)]
    telling = [name for name in names if name not in _DIGESTS] or names[:1]
    return [(name, found.get(name, "none"), expected.get(name, "none")) for name in telling[:_MOST_WORDS]]


def _in_data_loader() -> bool:
    """Return whether this process is a worker of a torch DataLoader; one rank can have several workers."""
    worker: Any = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return worker is not None and worker() is not None
