"""DatasetStore: an ordered sequence of steps, from recorded datasets and appended rows."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.dense import DENSE_BYTES, DenseBudget
from mouse_core._base.checks import columns_of, row_of
from mouse_core.errors import ConfigError, MouseError
from mouse_core.spec import Alignment, Field
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata


class DatasetStore(Store):
    """Steps in the order they were recorded: datasets by reference, then appended rows.

    Datasets stay where they are, on disk or in memory; nothing is copied or scanned. One thread may append while
    others read snapshots.

    Args:
        max_action_dim: Number of actions A, or the width of action vectors; by default from the data.
        max_obs_continuous_dim: Width C of observations; by default from the data.
        fields: Fields that replace standard ones of the same name, or come after them.
        alignment: Which transition a row's action, reward and done belong to: "arrived" (they led to its observation)
            or "outgoing" (they leave it); None: "arrived", as for all stores.
        dense_bytes: How much memory the store's readers may use, in all and in each process, to keep dense copies of
            what cannot be copied as it is stored: stretches of a column with nulls, with rows of differing length or of
            another width than declared, and booleans. What is beyond is read more slowly, with the same result.
        image_roots: Folders in which images may lie that rows name by path, beside the folder that a dataset itself
            lies in. No other file is opened.
        spec: Which values columns may have: specs of ``mouse_core.spec`` by name. Appended rows are held to them by
            value, whatever the dtype; columns of transitions may have zeros where the alignment is "arrived".

    Raises:
        ConfigError: A dimension below 1, an unknown alignment or ``spec``, ``dense_bytes`` below 0, no folders.
    """

    def __init__(
        self,
        max_action_dim: int | None = None,
        max_obs_continuous_dim: int | None = None,
        *,
        fields: Iterable[Field] = (),
        alignment: Alignment | None = None,
        dense_bytes: int = DENSE_BYTES,
        image_roots: Iterable[str | os.PathLike[str]] = (),
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        # What only some stores need is loaded with the first of them.
        from mouse_core.store._intake import StoreBackend, StoreSchema

        self._budget = DenseBudget(dense_bytes)
        dims = {"max_action_dim": max_action_dim, "max_obs_continuous_dim": max_obs_continuous_dim}
        self._rows = StoreBackend(StoreSchema(fields, dims, alignment, image_roots, spec), self._budget)

    # ------------------------------------------------------------------ in a folder

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "a"] = "r",
        *,
        sync: Literal["none", "flush", "append"] = "flush",
        verify: bool | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        layout: Literal["columns", "windows"] | None = None,
        **options: Any,
    ) -> DatasetStore:
        """Open the store in a folder, to write rows as they come or to read them, or the rows at an address.

        Saved datasets and recordings of other formats are read by ``mouse_core.formats.open(...).to_store()``.

        A folder has one writer at a time, ``mode="a"``, and any number of readers in any process, also while it is
        written; they see the rows that were flushed. When a process ends, however it does, every row that ``append`` or
        ``extend`` returned of is kept. When the machine stops, ``sync`` says what is:

        - "none": the rows in sealed files; those of the last 64 MB may be lost.
        - "flush": the rows before the last ``flush()``.
        - "append": every row that ``append`` or ``extend`` returned of.

        Args:
            path: The folder; or an address, ``s3://bucket/runs``, ``gs://``, ``az://``, ``https://`` or
                ``hf://datasets/name/of/it``, of a store, a saved dataset or Parquet files, which are only read.
            mode: "r" reads a store that is there, and writes nothing; "a" writes one, which is made if it is not there.
            sync: What a writer waits for, as above.
            verify: Whether a file's digest is compared when its rows are first read, which reads all of it once; behind
                an address each page's, where ``mouse upload`` sent them. None: if there are any; True: there must be.
            max_rows: How many rows a writer keeps, at most, from 8; None: all. The oldest are dropped, about an eighth
                at a time; stores and snapshots that others opened keep theirs.
            max_bytes: How many bytes of files a writer keeps, likewise, from 65,536.
            layout: How rows are sealed: "columns", one by one; "windows", 128 to 256 rows at a time; None: as the last.
            **options: Those of the class, where an alignment that is not given is the one that the rows have; for an
                address also those of ``mouse_core.remote.Reaching``, ``storage_options``, ``cache`` and the like; for
                other formats also those of ``mouse_core.formats.open``, such as ``final``.

        Returns:
            The store. A writer's is closed by ``close()``, or at the end of a ``with`` block.

        Raises:
            ConfigError: There is no store to read, something else lies in the folder, or another process writes to it,
                which the message names; the file system has no locks; an option that such rows do not have.
            DataError: The store is damaged, or a newer release wrote it.
            SchemaError: Options that do not fit what the rows say of themselves.
            StorageError: The folder cannot be read, or be written.
        """
        from mouse_core.remote.clients.options import Reaching, is_url, without_secrets
        from mouse_core.store.disk.rows import Limits, open_rows

        reaching = {name: options.pop(name) for name in Reaching.__dataclass_fields__ if name in options}
        if reaching and not is_url(path):
            raise ConfigError(
                f"{' and '.join(f'{name}=' for name in reaching)}: expected an address, as s3://bucket/folder or "
                f"file:///folder, found the path {str(path)!r:.200}, which is read where it lies"
            )
        writing = {"sync=": sync != "flush", "max_rows=": max_rows, "max_bytes=": max_bytes, "layout=": layout}
        found = [name for name, value in writing.items() if value is not None and value is not False]
        if mode == "r" and not is_url(path) and _is_recording(Path(path)):
            from mouse_core import formats

            if found:
                raise ConfigError(f"{path}: expected options that read, as it is no store, found {', '.join(found)}")
            own = {name: options.pop(name) for name in inspect.signature(cls).parameters if name in options}
            options |= {} if verify is None else {"verify": verify}
            return formats.open(path, **options).to_store(cls, **own)
        try:
            store = cls(**options)
        except TypeError as error:
            raise ConfigError(
                f"{without_secrets(str(path))}: expected options of {cls.__name__}, found {sorted(options)} ({error}); "
                "mouse_core.formats.open(...).to_store() opens recordings of other formats, with options of theirs"
            ) from error
        if not is_url(path):
            limits = Limits(max_rows, max_bytes)
            store._rows = open_rows(path, mode, sync, verify is not False, store._rows, limits, layout)
            return store
        from mouse_core.store.remote.rows import open_remote

        if mode != "r" or found:
            raise ConfigError(
                f"{without_secrets(str(path))}: expected the mode 'r' without {' and '.join(writing)}, as rows at an "
                f"address are only read, found {[mode, *found]}; write in a folder, and mouse upload sends what is new"
            )
        store._rows = open_remote(str(path), Reaching(**reaching), store._rows, verify)
        return store

    @property
    def sync(self) -> str:
        """The durability that a writer waits for; see ``open``. For rows in memory it is "none"."""
        return self._rows.sync

    @property
    def path(self) -> str | None:
        """The folder that the store was opened in; None where there is none."""
        return self._rows.path

    def flush(self) -> None:
        """Show readers the rows so far, and wait until they are on the disk, as ``sync`` says; see ``open``.

        Raises:
            StorageError: They cannot be written. They are still there, for another attempt.
        """
        self._rows.warn_of_rewards(stacklevel=2)
        self._rows.flush()

    def close(self) -> None:
        """Seal the rows of a store that was opened to be written, and let others write; others have nothing to close.

        Recordings into it are broken off before. What was read so far can still be read.

        Raises:
            StorageError: Rows cannot be written; the store is still open.
        """
        self._rows.warn_of_rewards(stacklevel=2)
        self._rows.close()

    def interrupt_on_close(self, recording: Any) -> None:
        """Have ``recording.interrupt()`` called when ``close()`` begins, if it is alive; recorders ask for it."""
        self._rows.interrupt_on_close(recording)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what is there

    def __len__(self) -> int:
        return self._rows.seen().count

    @property
    def written(self) -> int:
        """The number of rows ever written, including rows that were cleared or evicted."""
        return self._rows.seen().end

    def __repr__(self) -> str:
        where = "" if self.path is None else f", path={self.path!r}"
        return f"DatasetStore(num_rows={len(self)}, columns={list(self.columns)}, alignment={self.alignment!r}{where})"

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self._rows.schema.alignment

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The stored columns' Arrow types by name; where parts of the store differ in encoding, that of the first."""
        return dict(self._rows.seen().schema.arrow_types)

    @property
    def metadata(self) -> DatasetMetadata:
        """The metadata of the rows, from the store's arguments and from its datasets.

        The alignment is None if "arrived" is only an assumption, stated by neither.
        """
        return self._rows.seen().schema.metadata()

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that the store knows, whether it has their columns or not."""
        return dict(self._rows.seen().schema.fields)

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """An immutable view of the rows there are now, or of the first ``rows`` of them. Copies no steps.

        Raises:
            ConfigError: The store has fewer than ``rows`` rows.
        """
        self._rows.warn_of_rewards(stacklevel=2)
        kept = self._rows.snapshot()
        return kept if rows is None else kept.of_rows(rows)

    # ------------------------------------------------------------------ datasets

    def from_dataset(
        self,
        dataset: Any,
        splits: str | Sequence[str] | None = None,
        split_pattern: str | Sequence[str] | None = None,
    ) -> DatasetStore:
        """Add recorded steps after those there are, by reference, in constant time.

        The metadata of a dataset (see ``mouse_core.metadata``) are checked, and fill in what the store was not told:
        fields, ``max_action_dim`` and ``max_obs_continuous_dim``. A field that the store was given decides how values
        are delivered; it must be read from the same column, in the same shape. A width may be larger than the one said.

        Rewards where episodes begin, among the first rows, speak against the alignment "arrived"; that is an
        ``AlignmentWarning``. So it is of rows that are appended, once some came.

        Args:
            dataset: A ``datasets.Dataset``, a ``DatasetDict`` (or any dict of datasets: all splits in their order),
                or a ``pyarrow.Table``.
            splits: Names of the splits to take, in this order.
            split_pattern: Shell patterns (``"train_*"``) of the splits to take, pattern by pattern, each split once.

        Raises:
            ConfigError: Not a dataset, an unknown split, or a pattern that matches none.
            DataError: A file that a dataset is mapped from was cut, or holds rows that its reader did not see.
            MissingFieldError: A required column is missing.
            SchemaError: Columns that a field cannot be read from, or that do not fit those there are; rows of another
                alignment, or that say something else that contradicts the store or the rows there are.
            DataError: What a dataset says of itself cannot be read, or a newer version wrote it. Done codes that
                contradict flags beside them, such as 1 where ``truncated`` is set and ``terminated`` is not.

        The store is unchanged after an error.
        """
        from mouse_core.metadata import read_metadata
        from mouse_core.store._intake import segment_of, select_splits
        from mouse_core.store.evidence import check_flags_of, warn_of_rewards

        parts = select_splits(dataset, splits, split_pattern)
        segments = [segment_of(part, self._rows.schema.image_roots) for _, part in parts]
        said = [(where, read_metadata(part, label=where)) for where, part in parts]
        for segment, (where, _) in zip(segments, parts, strict=True):
            check_flags_of(segment, self._rows.schema.fields["done"].column, where)
        self._rows.take(segments, said)
        if self.alignment == "arrived":
            for segment, (where, _) in zip(segments, parts, strict=True):
                warn_of_rewards(segment, self._rows.schema.fields, where, stacklevel=2)
        return self

    # ------------------------------------------------------------------ appended rows

    lock = property(lambda self: self._rows.lock, doc="Who holds it appends with no rows of other threads in between.")

    def describe(self, metadata: DatasetMetadata) -> None:
        """Say something of the rows that are appended: where they are recorded, which fields they have.

        It is checked, and fills in what the store was not told, as what a dataset says of itself is in
        ``from_dataset``. Recorders (``mouse_core.record``) do it by themselves.

        Raises:
            ConfigError: Not a ``mouse_core.metadata.DatasetMetadata``.
            SchemaError: Another alignment, or something else that contradicts the store or the rows there are.

        The store is unchanged after an error.
        """
        from mouse_core.metadata import DatasetMetadata

        if not isinstance(metadata, DatasetMetadata):
            raise ConfigError(f"describe: expected a mouse_core.metadata.DatasetMetadata, found {metadata!r:.200}")
        rows, said = self._rows, [("describe", metadata)]
        # Without the lock: a store in a folder waits in here for a thread that needs it.
        if rows.schema.merged([], said).metadata() != rows.schema.metadata():
            rows.take([], said)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step.

        Args:
            row: A value for every column, in a dict, or in a TensorDict, a named tuple or a dataclass. The first row of
                an empty store says which columns there are; later ones must have the same. None is a null, allowed
                where the field fills it (``episode_step``, ``metadata_q_star``) and in columns that no field reads.

        Raises:
            MissingFieldError: A column is missing.
            SchemaError: A column that the store does not have.
            DataError: A value of the wrong type or shape, out of bounds, or None where nulls are not allowed; a done
                code that contradicts the flags beside it, such as 1 where only ``truncated`` is set.
            StorageError: No room for it on the disk, or the wait for the disk failed.

        The store is unchanged after an error, but where a wait for the disk failed (``sync="append"``): it has the row.
        """
        fields = row if type(row) is dict else row_of(row)
        rows = self._rows
        with rows.lock:
            try:
                rows.append(fields)
                rows.count += 1
            except BaseException:
                rows.recount()
                raise
            # Of the first rows alone, so that later ones take no longer.
            if rows.evidence is not None:
                self._look_at(fields)

    def _look_at(self, row: Mapping[str, Any]) -> None:
        """Look at one of the first rows that are appended; see ``StoreBackend.evidence``."""
        evidence: Any = self._rows.evidence
        evidence.add_row(row, self._rows.schema.fields)
        if evidence.is_whole or evidence.is_enough:
            self._rows.warn_of_rewards(stacklevel=3)
            self._rows.evidence = None

    def extend(self, columns: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add many steps at once, column by column.

        Args:
            columns: For every column an array or sequence ``[n, ...]``, all of one length, held as in ``append``; or a
                list of rows, all of the same columns.

        Raises:
            MissingFieldError, SchemaError, DataError, StorageError: As ``append``, or columns of differing lengths.

        The store is unchanged after an error, but for the one that ``append`` names.
        """
        fields, n = columns_of(columns)
        for name, values in fields.items():
            if isinstance(values, pa.Array | pa.ChunkedArray):
                check_rows(values, f"column {name!r}", whole=False)
        rows = self._rows
        if n:
            with rows.lock:
                rows.extend(fields, n)
                if rows.evidence is not None:
                    rows.evidence.add(fields, rows.schema.fields, n)
            rows.warn_of_rewards(stacklevel=2)
            if rows.evidence is not None and rows.evidence.is_whole:
                rows.evidence = None

    def add_episode(
        self,
        episode: Any = None,
        /,
        *,
        observations: Any = None,
        actions: Any = None,
        rewards: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        infos: Any = None,
        **columns: Any,
    ) -> Self:
        """Add an episode of T transitions as a simulator gives it: arrays of NumPy, torch or JAX, or lists.

        Observations may be nested. Batches have them under their names, as ``batch["observation.image"]``, in their
        dtype and shape; see ``layout`` of ``mouse_core.BatchSource``. Rows, alignment, done codes and episode steps
        follow from the arrays:

        - With T + 1 observations the rows have the alignment "arrived"; with T, without the observation that the
          episode ended in, "outgoing". The first episode of an empty store decides, unless ``alignment`` was given.
        - In a store of alignment "outgoing" the last of T + 1 observations is left out.
        - An episode that neither terminated nor was truncated is unfinished: its last ``done`` is 0.

        Args:
            episode: A mapping with the other arguments, or an object that has them as attributes, as episodes of
                Minari do.
            observations: Arrays ``[T + 1, ...]`` or ``[T, ...]``, in nested dicts or tuples, or a list of such a dict
                for each step.
            actions: Arrays ``[T, ...]``, likewise.
            rewards: ``[T]``.
            terminated, truncated: How the episode ended: a flag, or flags ``[T]`` of which the last may be set. None:
                not so.
            infos: Arrays ``[T + 1, ...]``, which came with the observations, or ``[T, ...]``, which came with the
                rewards; likewise.
            **columns: Columns that have one number or text for the episode, such as ``task`` or ``success``.

        Returns:
            The store.

        Raises:
            ConfigError: Not an episode.
            DataError: Arrays that contradict each other, or the episodes before; values that no column holds.
            MissingFieldError, SchemaError, StorageError: As ``extend``.

        The store is unchanged after an error.

        Example:
            >>> store = DatasetStore()
            >>> episode = {"observations": {"position": [0.0, 0.5, 1.0]}, "actions": [1, 1], "rewards": [0.0, 1.0]}
            >>> len(store.add_episode(episode, terminated=True, task="go right"))
            3
        """
        from mouse_core.metadata import DatasetMetadata
        from mouse_core.store._adding import PARTS, EpisodeColumns, parts_of  # what only some stores need

        given = dict(zip(PARTS, (observations, actions, rewards, terminated, truncated, infos), strict=True))
        parts = parts_of(episode, {name: one for name, one in given.items() if one is not None} | columns)
        schema = self._rows.schema
        is_first = not schema.arrow_types
        added = EpisodeColumns.of(parts, schema.metadata().alignment if is_first else self.alignment)
        if is_first:
            metadata = DatasetMetadata(added.alignment, layout="stored", fields=added.fields)
            self._rows.check_first(added.columns, metadata)
            self.describe(metadata)
        self.extend(added.columns)
        return self

    def add_episodes(self, episodes: Iterable[Any]) -> Self:
        """Add episodes, one after the other; see ``add_episode``.

        Args:
            episodes: What ``add_episode`` takes as ``episode``.

        Returns:
            The store.

        Raises:
            MouseError: As ``add_episode``; a note has the number of the episode. The episodes before stay.
        """
        for number, episode in enumerate(episodes):
            try:
                self.add_episode(episode)
            except MouseError as error:
                error.add_note(f"add_episodes: episode {number}")
                raise
        return self

    def clear(self) -> None:
        """Forget all rows, those of datasets too; columns and fields stay as they are.

        Snapshots that were taken keep their rows, and so do loaders until ``refresh()``: an on-policy loop appends a
        rollout, refreshes its loader, trains, and clears.
        """
        self._rows.clear()

    # ------------------------------------------------------------------ back to datasets

    def encode_hf_rows(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Turn a dict of lists, as ``datasets`` yields it, into a dict of field arrays.

        Args:
            batch: Values by column, ``n`` of each.

        Returns:
            The store's fields by name, ``[n, ...]`` in their documented dtypes.

        Raises:
            MissingFieldError, SchemaError, DataError: As ``append``.
        """
        from mouse_core.store.export import rows_to_table

        shapes = {name: spec.shape for name, spec in self.snapshot().spec.items() if spec.image_shape is None}
        schema = self._rows.schema
        fields = [replace(field, shape=shapes.get(name, field.shape)) for name, field in schema.fields.items()]
        options: dict[str, Any] = {**schema.dims, "alignment": self.alignment, "image_roots": schema.image_roots}
        encoded = DatasetStore(fields=fields, **options).from_dataset(rows_to_table(batch, schema)).snapshot()
        rows = np.arange(encoded.num_rows)
        return {name: encoded.stored(name, rows, 1, one.dtype) for name, one in encoded.spec.items()}


def _is_recording(path: Path) -> bool:
    """Whether something lies at a path that is neither a store nor an empty folder; never fails."""
    from mouse_core.store.disk.folder import looks_like_store

    try:
        return path.is_file() or (not looks_like_store(path) and any(path.iterdir()))
    except OSError:
        return False
