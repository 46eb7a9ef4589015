"""Episodes of RLDS as rows, and back.

A step holds an observation, the action that is taken on it, and the reward of the action; the last step of an episode
holds only an observation. So N steps are N rows, and an action moves to the next row. Much of Open X has an action and
a reward in the last step too, without the observation that they led to: ``last_step="transition"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError, EpisodeError
from mouse_core.files.reading import reading
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows
from mouse_core.formats.columns.named import (
    MISSING,
    Columns,
    flatten,
    named_action,
    named_observation,
    ordered,
    to_batch,
    travels_with_action,
)
from mouse_core.formats.columns.steps import (
    FEATURES,
    FLAGS,
    Stack,
    at,
    check_episodes,
    check_features,
    rlds_steps,
    stacks,
)
from mouse_core.formats.columns.transitions import check_final, done_codes, one_later, placeholder
from mouse_core.formats.sources import episodes_of


def read_rlds(
    episodes: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    final: str | None = None,
    last_step: str = "observation",
    batch_rows: int = BATCH_ROWS,
    path: str = "RLDS episodes",
) -> RowStream:
    """Read episodes of RLDS as rows.

    ``done`` is 1 at a last step that is terminal, 2 at another last step. The columns of observations are
    ``observation``, ``observation_discrete`` or ``observation_image``, or ``observation_<key>`` for nested ones.
    ``discount`` becomes ``metadata_discount``, other features of steps become ``metadata_<key>``, and features of an
    episode become ``metadata_episode_<key>`` in each of its rows. Features whose names begin with ``action``,
    ``policy`` or ``log_prob`` move to the next row with the action, the others stay with their step.

    Args:
        episodes: An iterable of episodes as in ``convert_rlds_to_trajectories``, or a function that returns one.
            Generators, of episodes or of steps, can be read only once.
        final: What becomes of the last action of an episode whose steps end without ``is_last``, as the observation
            that it led to is missing: "drop" leaves the action out, "mark" adds a row of zeros. By default an error.
        last_step: Content of a last step: "observation", as RLDS defines it, so that action and reward have no meaning
            and are left out; or "transition", as in much of Open X and DROID, so that they count, and the observation
            that they led to is missing in every episode (see ``final``).
        batch_rows: Most rows of a batch.
        path: Name of the source for messages.

    Raises:
        ConfigError: ``episodes`` is no iterable, ``final`` or ``last_step`` is unknown, or transitions lack ``final``.
        DataError: There are no steps, or values do not fit together. While iterating: steps of an episode contradict
            each other (EpisodeError), or its last observation is missing (ConfigError).
        MissingFieldError: Steps lack features.
    """
    check_last_step(last_step, final, where=path)
    check_batch_rows(batch_rows)
    if not callable(episodes):
        check_episodes(episodes)
    first, notes, fresh = _peek(episodes, batch_rows, final, last_step, path)

    def batches() -> Iterator[pa.RecordBatch]:
        pieces = stacks(fresh(), batch_rows, path)
        for columns, where in stack_rows(pieces, final=final, path=path, last_step=last_step):
            yield to_batch(columns, first.schema, where=where)

    return RowStream(path, "rlds", first.schema, batches, notes=notes, about=About("arrived"))


def check_last_step(last_step: str, final: str | None, *, where: str) -> None:
    """Raise ConfigError for an unknown ``last_step`` or ``final``, or for transitions without ``final``."""
    if last_step not in ("observation", "transition"):
        raise ConfigError(f"last_step: expected 'observation' or 'transition', found {last_step!r}")
    check_final(final, where=where, needed=last_step == "transition")


def last_step_notes(pieces: Iterator[Stack]) -> tuple[str, ...]:
    """Return a note if the last step of the first episode holds an action and a reward, which RLDS gives no meaning.

    Args:
        pieces: Pieces with flags, actions and rewards; those of the first episode are taken.
    """
    for piece in pieces:
        if piece.last:
            last = {name: np.asarray(value)[-1] for name, value in flatten("", piece.values).items()}
            brought = [name for name in last if name == "_reward" or f"{name}_".startswith("_action_")]
            holds = any(last[name].dtype.kind in "biuf" and np.any(last[name]) for name in brought)
            if not holds or not np.any(last["_is_last"]):
                return ()
            return (
                f"The last step of the first episode holds the reward {np.sum(last['_reward']):g} and an action, to "
                "which RLDS gives no meaning: in every episode they are left out. In much of Open X and DROID they "
                "have one, and last_step='transition' (--last-step) keeps them.",
            )
    return ()


def _peek(
    given: Iterable[Any] | Callable[[], Iterable[Any]], batch_rows: int, final: str | None, last_step: str, path: str
) -> tuple[pa.RecordBatch, tuple[str, ...], Callable[[], Iterable[Any]]]:
    """Return the first batch, notes on it, and a function that returns the episodes from the start."""
    seen: list[Any] = []

    def noted(episodes: Iterator[Any]) -> Iterator[Any]:
        for episode in episodes:
            seen.append(episode if callable(given) else _kept(episode))
            yield seen[-1]

    iterator = iter(given() if callable(given) else given)
    once = not callable(given) and isinstance(given, Iterator)
    first = next(stacks(noted(iterator), batch_rows, path), None)
    pieces = [] if first is None else [first]
    batch = first_batch(iter(pieces), final=final, path=path, last_step=last_step)
    notes = last_step_notes(iter(pieces)) if last_step == "observation" else ()
    left: list[Iterable[Any]] = [chain(seen, iterator)]

    def fresh() -> Iterable[Any]:
        if callable(given):
            return given()
        if left:
            return left.pop()
        if once:
            raise ConfigError(f"{path}: a generator can be read once; pass a list, or a function that makes one")
        return _whole(given, path)

    return batch, notes, fresh


def _whole(episodes: Iterable[Any], path: str) -> Iterator[Any]:
    """Yield episodes again; steps that were a generator raise an error."""
    for number, episode in enumerate(episodes):
        if _steps_once(episode):
            raise ConfigError(
                f"{path}, episode {number}: its steps are a generator, which can be read once; pass lists of steps, or "
                "a function that makes the episodes"
            )
        yield episode


def _steps_once(episode: Any) -> bool:
    return isinstance(episode.get("steps") if isinstance(episode, Mapping) else episode, Iterator)


def _kept(episode: Any) -> Any:
    """Return an episode whose steps can be read twice."""
    if not _steps_once(episode):
        return episode
    return {**episode, "steps": list(episode["steps"])} if isinstance(episode, Mapping) else list(episode)


def first_batch(
    pieces: Iterator[Stack], *, final: str | None, path: str, last_step: str = "observation"
) -> pa.RecordBatch:
    """Return the first rows, which tell the columns.

    Raises:
        DataError: There are no rows.
    """
    # Whether an episode is complete is asked while rows are read.
    rows = stack_rows(pieces, final=final or "mark", path=path, last_step=last_step)
    columns, where = next(rows, (None, path))
    if columns is None:
        raise DataError(f"{path}: expected episodes with steps, found none")
    if final != "mark":
        columns.pop(MISSING, None)
    return to_batch(columns, None, where=where)


def stack_rows(
    pieces: Iterator[Stack], *, final: str | None, path: str, last_step: str = "observation"
) -> Iterator[tuple[Columns, str]]:
    """Yield rows for pieces of episodes, and the name of each piece for messages.

    Args:
        pieces: The pieces, from ``stacks``.
        final, last_step: See ``read_rlds``.
        path: Name of the source for messages.
    """
    before: Columns = {}
    for piece in pieces:
        where = f"{path}, episode {piece.episode}"
        with reading(path, at=f"episode {piece.episode}"):
            check_features(
                piece.values,
                where=f"{where}, step {piece.first}",
                wanted=tuple(name for name in FEATURES if name != "discount"),
            )
            flags = _flags(piece, where)
            staying, leaving = _split(piece)
            arriving = one_later(leaving, before, flags["is_first"])
            if piece.first == 0 and "metadata_discount" in arriving:
                arriving["metadata_discount"][0] = 1
            done = done_codes(flags["is_terminal"] & flags["is_last"], flags["is_last"])
            columns = arriving | {"done": done} | staying
            columns["episode_step"] = piece.first + np.arange(piece.count)
            if final == "mark":
                columns[MISSING] = np.zeros(piece.count, np.int64)
            if piece.last and (last_step == "transition" or not flags["is_last"][-1]):
                check_final(final, where=where)
                columns = _ended(columns, before, staying, final)
            # The time of the row before, where the next piece is of the same episode.
            before |= {name: values[-1:][: not piece.last] for name, values in staying.items() if _is_clock(name)}
        yield ordered(columns), where


def _ended(columns: Columns, before: Columns, staying: Columns, final: str | None) -> Columns:
    """Return the last rows of an episode without the observation that its last action led to."""
    code = int(columns["done"][-1])  # what its last step says; 0 where that is no last one
    if final == "drop":
        columns["done"][-1] = 2 if len(columns["done"]) > 1 or columns["episode_step"][0] else 0
        return columns
    columns["done"][-1] = 0
    more = dict(before)
    for name, values in staying.items():
        more[name] = values[-1:] if name.startswith("metadata_") else placeholder(values)
        if _is_clock(name):  # which goes on as it went
            latest = np.concatenate([before.get(name, values[:0]), values])[-2:]
            more[name] = latest[-1:] + np.diff(latest) if len(latest) == 2 else latest
    more |= {"done": np.array([code]), "episode_step": columns["episode_step"][-1:] + 1}
    more[MISSING] = np.ones(1, np.int64)
    return {name: np.concatenate([values, more[name]]) for name, values in columns.items()}


def _is_clock(name: str) -> bool:
    return name.startswith("metadata_") and name.endswith("timestamp")


def _flags(piece: Stack, where: str) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the flags of a piece, after checking that first is at the start, and last and terminal are at the end."""
    flags = {name: np.asarray(piece.values[name]).reshape(piece.count, -1) for name in FLAGS}
    for name, values in flags.items():
        if values.shape[1] != 1 or values.dtype.kind not in "biuf":
            raise DataError(f"{where}: {name}: expected one true or false a step, found {values.dtype}")
        flags[name] = values[:, 0].astype(bool)
    first = np.zeros(piece.count, bool)
    first[0] = piece.first == 0
    end = np.zeros(piece.count, bool)
    end[-1] = piece.last
    for wrong, problem in (
        (flags["is_first"] != first, "expected is_first at the first step and nowhere else"),
        (flags["is_last"] & ~end, "expected is_last at the last step only"),
        (flags["is_terminal"] & ~flags["is_last"], "expected is_terminal only where is_last is set"),
    ):
        if wrong.any():
            step = piece.first + int(wrong.argmax())
            raise EpisodeError(f"{where}, step {step}: {problem}", episode=piece.episode, step=step)
    return flags


def _split(piece: Stack) -> tuple[Columns, Columns]:
    """Return the columns that stay in the row of their step, and those that move to the next row."""
    staying: Columns = named_observation(piece.values["observation"])
    leaving: Columns = named_action(piece.values["action"])
    leaving |= {"reward": _one_each(piece.values["reward"], "reward")}
    if "discount" in piece.values:
        leaving["metadata_discount"] = _one_each(piece.values["discount"], "discount")
    for key, value in piece.values.items():
        if key not in FEATURES:
            (leaving if travels_with_action(str(key)) else staying).update(flatten(f"metadata_{key}", value))
    for name, value in flatten("metadata_episode", dict(piece.about)).items():
        array = np.asarray(value)
        if array.dtype.kind in "SUO" and not array.ndim:
            staying[name] = np.full(piece.count, array.item(), object)
        else:
            staying[name] = np.broadcast_to(array, (piece.count, *array.shape))
    return staying, leaving


def _one_each(value: Any, name: str) -> npt.NDArray[Any]:
    values = np.asarray(value)
    if values.shape not in ((len(values),), (len(values), 1)) or values.dtype.kind not in "biuf":
        raise DataError(f"{name}: expected one number a step, found {values.dtype} {list(values.shape[1:])}")
    return values.reshape(len(values))


def write_rlds(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield rows as episodes of RLDS, one in memory at a time.

    ``metadata_discount`` becomes ``discount``; without that column it is 0 at the action that led to a terminal step,
    else 1. Rows have no action after the last step of an episode: its action, its reward and all values that travel
    with the action are zeros. The discount of a last step is 0 if it is terminal; if it is truncated, it equals the
    discount of the step before, or 1 without a step before. RLDS has no episode without an end: an episode whose last
    row has ``done`` 0 is written as truncated.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset``, a ``pyarrow.Table``, or record batches.

    Yields:
        Episodes ``{"steps": [...]}`` of steps that are mappings of NumPy values. Columns ``observation_<key>`` become a
        mapping of ``<key>``, unless there is only one with a standard name. ``metadata_<key>`` becomes ``<key>``, and
        ``metadata_episode_<key>`` becomes ``<key>`` of the episode if it is equal in all its rows.

    Raises:
        ConfigError, SchemaError, DataError: As the source of the rows, or rows are marked as missing an observation.
    """
    for number, columns in enumerate(episodes_of(rows)):
        stacked, about = rlds_steps(columns, number)
        yield {"steps": [at(stacked, index) for index in range(len(stacked["is_first"]))], **about}
