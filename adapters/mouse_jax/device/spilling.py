"""Writes rows from a compiled loop to a store, on disk or in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import io_callback

from mouse_core import ClosedError, ConfigError, DatasetStore, MissingFieldError, SchemaError
from mouse_core.dtypes import is_ml_float
from mouse_core.nested import flatten
from mouse_jax.device.replay import as_dicts
from mouse_jax.dtypes import as_numbers

_ENDS = ("done", "terminated", "truncated")
_TRUNCATED = 2  # the value of ``done`` in the last row of a truncated episode
_TIME = "time"


class Spill:
    """Writes all rows of a compiled loop to a ``DatasetStore``, episode by episode.

    Call the object with rows anywhere in a function under ``jax.jit`` or ``jax.lax.scan``, any number of times. Each
    row is written to the store once and in order, even if the ring of a replay overwrites the row. JAX does not support
    ordered callbacks inside ``jax.vmap``. Therefore call a ``Spill`` outside of ``jax.vmap``, with rows that include
    the mapped axis. Calls do not wait for the store.

    The rows of an episode are consecutive in a store, so the rows of each stream wait in the host's memory until their
    episode ends. In every stream, the allocated memory is as long as the longest episode that has not ended. If the
    process is killed, only the waiting rows are lost. At ``close``, in the last row of each episode that has not ended,
    ``truncated`` is set to True, or ``done`` is set to 2.

    Args:
        store: A writable store with the alignment of the rows; ``close`` does not close the store.
        axes: The names of the leading axes of rows, in order, such as ("seed", "time", "env"). "time" is the axis of
            time steps; without it, each call has one time step. Each combination of indices on the other axes is a
            stream.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from mouse_core import DatasetStore
        >>> from mouse_jax import device
        >>> store = DatasetStore(alignment="outgoing")
        >>> with device.Spill(store, axes=("env",)) as spill:
        ...     def step(count, _):
        ...         row = {"action": count % 2, "reward": count * 1.0, "done": (count % 5 == 4).astype(jnp.int8)}
        ...         spill(row)
        ...         return count + 1, None
        ...     _ = jax.jit(lambda counts: jax.lax.scan(step, counts, length=12))(jnp.array([0, 3]))
        >>> len(store)
        24
    """

    def __init__(self, store: DatasetStore, *, axes: Sequence[str] = (_TIME,)) -> None:
        if not hasattr(store, "extend"):
            raise ConfigError(f"store: expected a DatasetStore, found {store!r:.80}")
        if isinstance(axes, str) or len({*axes}) < len([*axes]) or not all(isinstance(name, str) for name in axes):
            raise ConfigError(f"axes: expected different names, as in ('seed', 'time', 'env'), found {axes!r}")
        self._store, self._axes = store, tuple(axes)
        # The sizes of all axes but time; the shape of a row and the dtype of each column.
        self._layout: tuple[dict[str, int], dict[str, Any]] | None = None
        # Waiting rows, [room, streams, ...]; their time steps; the first step of each stream's running episode.
        self._held: dict[str, npt.NDArray[Any]] = {}
        self._steps = self._looked = 0  # waiting time steps; those searched for ends
        self._begins = np.zeros(0, np.int64)
        self._is_open = True

    def __call__(self, rows: Mapping[str, Any]) -> None:
        """Write rows. ``rows`` has an array for each column, whose leading axes are ``axes``.

        Columns of nested rows have the names on their path, joined by "_". A store has no random keys and no narrow
        dtypes, so keys are converted by ``jax.random.key_data``, bfloat16 and 8-bit floats to float32, and int4 to
        int8.

        Raises:
            ConfigError: The call is inside of ``jax.vmap``.
            MissingFieldError: ``rows`` has no ``done``, ``terminated`` or ``truncated``.
            SchemaError: ``rows`` is not a dict of arrays; two columns have the same name; columns, shapes or dtypes
                differ from earlier calls, or are not supported by a store; or no column can mark a truncated episode.
            ClosedError: The object was closed.

        If the store cannot write rows, for example on a full disk, the compiled function raises an error. Rows that
        could not be written still wait, and are written with the next rows, or by ``close()``.
        """
        if not self._is_open:
            raise ClosedError("spill: expected an open spill, found a closed spill")
        columns = self._checked(rows)
        try:
            io_callback(self._take, None, columns, ordered=True)
        except ValueError as error:
            if "vmap" not in str(error):
                raise
            raise ConfigError(
                "spill: expected a call outside of jax.vmap, found a call inside; return the rows from the mapped "
                "function, and write all of them outside, with a name for the mapped axis in axes"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all calls, and write the waiting rows of episodes that have not ended.

        Raises:
            DataError, StorageError: The store cannot write the rows. The rows still wait for another attempt.
        """
        if not self._is_open:
            return
        try:
            jax.effects_barrier()  # type: ignore[no-untyped-call]
        finally:
            episodes, begins = self._ended()
            (running,) = np.nonzero(begins < self._steps)
            if running.size:
                name, value = ("truncated", 1) if "truncated" in self._held else ("done", _TRUNCATED)
                self._held[name][self._steps - 1, running] = value
            self._write(episodes + [(int(begins[stream]), self._steps, stream) for stream in running.tolist()])
            self._is_open, self._held = False, {}

    def _checked(self, rows: Any) -> dict[str, jax.Array]:
        """Return rows as columns by name, ``[time, streams, ...]``, in dtypes that a store supports."""
        if not isinstance(rows, Mapping):
            raise SchemaError(f"spill: expected a dict of arrays, one for each column, found {rows!r:.200}")
        columns: dict[str, jax.Array] = {}
        kinds, sizes, lead = {}, {}, len(self._axes)
        for key, value in flatten(as_dicts(rows)).items():
            name = key if isinstance(key, str) else "_".join(map(str, key))
            if name in columns:
                raise SchemaError(
                    f"spill: expected columns of different names, found {name!r} twice, after "
                    f"nested keys are joined by '_'"
                )
            try:
                leaf = as_numbers(jnp.asarray(value))
            except TypeError as error:
                raise SchemaError(f"spill: column {name!r}: expected an array, found {value!r:.80}") from error
            leaf = leaf.astype(jnp.float32) if is_ml_float(np.dtype(leaf.dtype)) else leaf
            if leaf.dtype.kind not in "biuf":
                raise SchemaError(
                    f"spill: column {name!r}: expected a numeric dtype that a store supports, found {leaf.dtype}"
                )
            if leaf.ndim < lead:
                found = f"{list(self._axes)} in front, found {list(leaf.shape)}"
                raise SchemaError(f"spill: column {name!r}: expected the axes {found}")
            sizes[name], kinds[name] = leaf.shape[:lead], (leaf.shape[lead:], leaf.dtype)
            leaf = jnp.moveaxis(leaf, self._axes.index(_TIME), 0) if _TIME in self._axes else leaf[None]
            columns[name] = leaf.reshape(len(leaf), -1, *kinds[name][0])
        if not any(name in columns for name in _ENDS):
            raise MissingFieldError(f"spill: expected one of the columns {list(_ENDS)}, found {list(columns)}")
        if "truncated" not in columns and ("done" not in columns or columns["done"].dtype.kind not in "iu"):
            raise SchemaError(
                "spill: expected a column 'truncated', or 'done' of integers, to mark episodes that have not ended, "
                f"found {list(columns)}"
            )
        if len({*sizes.values()}) > 1:
            raise SchemaError(
                f"spill: expected the axes {list(self._axes)} of equal length in all columns, found {sizes}"
            )
        streams = dict(zip(self._axes, next(iter(sizes.values())), strict=True))
        layout = {axis: size for axis, size in streams.items() if axis != _TIME}, kinds
        if self._layout is not None and layout != self._layout:
            raise SchemaError(f"spill: expected columns as before, {self._layout}, found {layout}")
        self._layout = layout
        return columns

    # ------------------------------------------------------------------ on the host

    def _take(self, columns: dict[str, Any]) -> None:
        """Receive rows of all streams."""
        arrays = {name: np.asarray(values) for name, values in columns.items()}
        count, streams = next(iter(arrays.values())).shape[:2]
        if not self._held:
            self._begins = np.zeros(streams, np.int64)
            self._held = {name: np.empty((0, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
        if self._steps + count > len(next(iter(self._held.values()))):
            self._make_room(count)
        for name, array in arrays.items():
            self._held[name][self._steps : self._steps + count] = array
        self._steps += count
        self._write(self._ended()[0])

    def _make_room(self, count: int) -> None:
        """Remove time steps that are written in all streams, and make room for ``count`` more."""
        gone = int(self._begins.min(initial=self._steps))
        kept = self._steps - gone
        for name, held in self._held.items():
            self._held[name] = np.empty((max(2 * kept, kept + count, 64), *held.shape[1:]), held.dtype)
            self._held[name][:kept] = held[gone : self._steps]
        self._steps, self._looked, self._begins = kept, self._looked - gone, self._begins - gone

    def _ended(self) -> tuple[list[tuple[int, int, int]], npt.NDArray[np.int64]]:
        """Return the start, the end and the stream of each ended episode that is not written yet, in the order in which
        the episodes ended; and the start of the running episode of each stream.
        """
        begins, found, first = self._begins.copy(), [], self._looked
        ends = [self._held[name][first : self._steps] for name in _ENDS if name in self._held]
        over = np.any([flags.reshape(-1, len(begins)) for flags in ends], 0) if ends else np.zeros((0, 0))
        for step, stream in zip(*(places.tolist() for places in np.nonzero(over)), strict=True):
            found.append((int(begins[stream]), first + step + 1, stream))
            begins[stream] = first + step + 1
        return found, begins

    def _write(self, episodes: list[tuple[int, int, int]]) -> None:
        """Write ``episodes`` (all that have ended) and remove their rows; after an error nothing has changed."""
        if episodes:
            self._store.extend(
                {
                    name: np.concatenate([held[begin:end, stream] for begin, end, stream in episodes])
                    for name, held in self._held.items()
                }
            )
        for _, end, stream in episodes:
            self._begins[stream] = end
        self._looked = self._steps
