"""query: the episodes of a buffer that a predicate holds for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.replay.samplers.episodes import StorageEpisodes
from mouse_core.replay.transforms._fields import check_keys, replaced


def query(
    buffer: Any,
    predicate: Callable[[Any], Any] | None = None,
    *,
    fields: Sequence[FieldKey] | None = None,
    traj_key: FieldKey | None = None,
    end_key: FieldKey | None = None,
) -> list[Slots]:
    """The episodes of a buffer that a predicate holds for, as indices of their rows.

    ``buffer[index]`` reads one, ``update_priority(index, ...)`` changes its priorities, and
    ``other.extend(buffer[index])`` copies it. Episodes are as far there as their rows are: of the oldest one of a full
    ring the first rows may be gone, and the newest may go on. (``store.where`` chooses episodes of a store.)

    Args:
        buffer: A ``ReplayBuffer`` of any package, with its rows in memory, in files, or in a store.
        predicate: Called with the rows of each episode ``{field: [T, ...]}`` as they are stored, as ``buffer[index]``
            gives them; what it returns is taken for true or false. None: all episodes.
        fields: The only fields that it reads; by default it gets all. Large ones left out are not read.
        traj_key, end_key: What says where episodes end, as for ``SliceSampler``.

    Returns:
        NumPy's int64 ``[T]`` for each, whatever the package, from its first row to its last; episodes in the order of
        time, environment after environment. The lock is held meanwhile, so that they are those of one moment.

    Raises:
        ConfigError: No buffer, such as an ensemble; or a writer that keeps no order of rows.
        MissingFieldError: Nothing says where episodes end, or the rows lack one of ``fields``.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import ArrayStorage, ReplayBuffer, query
        >>> buffer = ReplayBuffer(ArrayStorage(100))
        >>> _ = buffer.extend({"reward": np.array([0.0, 1, 0, 5, 0]), "done": np.array([0, 1, 0, 1, 0])})
        >>> good = query(buffer, lambda episode: episode["reward"].sum() > 3)
        >>> len(good), good[0].tolist()
        (1, [2, 3])
    """
    storage, writer = getattr(buffer, "storage", None), getattr(buffer, "writer", None)
    if storage is None or writer is None:
        raise ConfigError(f"query: expected a replay buffer, found {buffer!r:.80}; ask each of an ensemble's `buffers`")
    if not writer.ordered:
        raise ConfigError(f"query: expected rows in the order they were written, found those of {writer!r:.80}")
    if predicate is not None and not callable(predicate):
        raise ConfigError(f"query: predicate: expected a function, found {predicate!r:.80}")
    keys = None if fields is None else check_keys(fields, where="query: fields")
    with buffer._lock, buffer._shared():
        if not len(storage):
            return []
        index = StorageEpisodes(traj_key, end_key).settled(storage)
        steps = np.arange(index.begin, index.end, dtype=np.int64)
        slots = []
        for env in range(index.num_envs):
            begins, _, _ = index.episode_of(steps, env)
            runs = np.split(steps, np.flatnonzero(np.diff(begins)) + 1)
            slots += [index.slots_of(run, env) for run in runs]
        return [episode for episode in slots if predicate is None or predicate(_rows(buffer, episode, keys))]


def _rows(buffer: Any, index: Slots, keys: Sequence[FieldKey] | None) -> Any:
    """Rows as the buffer's framework has them, fields as arrays in every storage."""
    storage = buffer.storage
    if keys is None:
        rows = getattr(storage, "batch", storage.get)(index)
    else:
        rows = replaced({}, {key: storage.read(key, index) for key in keys})
    return buffer._deliver_rows(rows, index.shape)
