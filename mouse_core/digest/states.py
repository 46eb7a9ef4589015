"""Digests that run along in states, those of several ranks as the one that a single process would have saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mouse_core.digest.stream import StreamDigest
from mouse_core.errors import ConfigError, StateError

KEY = "digest"
"""What the digest is called in a state."""


def digest_state(digest: StreamDigest | None) -> dict[str, Any]:
    """What a state has of a digest that runs along, where one does."""
    return {} if digest is None else {KEY: digest.state_dict()}


def digest_of(state: Mapping[str, Any], digest: StreamDigest | None) -> StreamDigest | None:
    """The digest to go on with, in place of ``digest``, where one runs along: that of the state, or one of nothing.

    Raises:
        StateError: That of the state is none.
    """
    if digest is None:
        return None
    return StreamDigest.from_state(state[KEY]) if KEY in state else StreamDigest()


def asked_for(digest: StreamDigest | None, maker: str) -> StreamDigest:
    """The digest that runs along; ConfigError where none does."""
    if digest is None:
        raise ConfigError(f"digest: expected a {maker} made with digest=True, found one without")
    return digest


def rank_state(digest: StreamDigest, shard: tuple[int, int]) -> dict[str, Any]:
    """A digest as a part of a state, with the rank whose it is and how many there are."""
    rank, count = shard
    return {**digest.state_dict(), "rank": rank, "ranks": count}


def rank_digest(state: Any, shard: tuple[int, int]) -> StreamDigest:
    """The digest with which a rank goes on: that of a whole stream in the first rank; else one of nothing.

    What one process delivered, or all ranks together (``whole_state``), is carried on by rank 0 and by nobody else, so
    that the sum over ranks has it once. Of the digest of one rank among several none can know whether the others were
    given theirs, or all were given this one. If some went on and others began again, the sum would be no stream's; so
    all begin again.

    Raises:
        StateError: It is none.
    """
    if state is None:
        return StreamDigest()
    found = StreamDigest.from_state(state)
    is_whole = (state.get("rank"), state.get("ranks")) == (0, 1)
    return found if is_whole and shard[0] == 0 else StreamDigest()


def whole_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks of a loader with ``digest=True`` as one: that of a single process that delivered it all.

    Its digest is that of the whole stream. Loaded by all ranks of a run of any size it is carried on by rank 0, while
    the others begin with nothing: at any later moment the digests of all ranks add up to the stream's.

    Args:
        states: Of every rank, each once, in any order, taken at the same batch.

    Raises:
        StateError: A rank is missing or there twice, the states are of other moments or sources, or one has no digest.

    Example:
        >>> from mouse_core import PrefetchBatchifier
        >>> from mouse_core.testing import example_store
        >>> store = example_store()
        >>> loaders = [PrefetchBatchifier(store, 8, 4, shard=(rank, 2), digest=True) for rank in range(2)]
        >>> rewards = [loader.next_batch()["reward"] for loader in loaders]
        >>> state = whole_state([loader.state_dict() for loader in loaders])
        >>> digest = state["digest"]
        >>> digest["windows"], digest["ranks"]
        (4, 1)
    """
    if not states:
        raise StateError("states: expected those of all ranks, found none")
    total, seen = StreamDigest(), []
    rest = _without_digest(states[0])
    for place, state in enumerate(states):
        if not isinstance(state, Mapping) or not isinstance(state.get(KEY), Mapping):
            raise StateError(f"states: expected a state with a digest at {place}, found {state!r:.200}")
        differing = [name for name in {**rest, **_without_digest(state)} if rest.get(name) != state.get(name)]
        if differing:
            said = {name: (rest.get(name), state.get(name)) for name in differing}
            raise StateError(f"states: expected those of one batch, found others at 0 and at {place}: {said!r:.200}")
        total += StreamDigest.from_state(state[KEY])
        seen.append((state[KEY].get("ranks"), state[KEY].get("rank")))
    if sorted(seen, key=repr) != sorted(((len(states), rank) for rank in range(len(states))), key=repr):
        found = ", ".join(f"rank {rank} of {count}" for count, rank in seen)
        raise StateError(f"states: expected each of {len(states)} ranks once, found {found:.200}")
    return {**rest, KEY: rank_state(total, (0, 1))}


def _without_digest(state: Any) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != KEY} if isinstance(state, Mapping) else {}
