"""DatasetStore: an ordered sequence of steps from recorded datasets and appended rows."""

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
    """A store of steps in recorded order. The store consists of datasets, to which it refers without a copy, and of
    appended rows.

    Datasets stay on disk or in memory; the rows of datasets are neither copied nor scanned. One thread can append while
    other threads read snapshots.

    Args:
        max_action_dim: Number of discrete actions, or width of action vectors; by default determined from the data.
        max_obs_continuous_dim: Width C of observation vectors; by default determined from the data.
        fields: Fields that replace standard fields of the same name, or are added after the standard fields.
        alignment: The transition that a row's action, reward and done belong to: "arrived" (the transition led to the
            row's observation) or "outgoing" (the transition leaves the observation). With None, the alignment is
            "arrived", unless added rows in the layout "stored" have another alignment.
        dense_bytes: Largest size in bytes of the dense copies of columns, for all readers of the store together, in
            each process. A dense copy is needed for columns of booleans, columns with nulls, and columns whose rows
            differ in length or are shorter than declared. When the limit is reached, further columns are read without a
            dense copy; the result is the same, but reading is slower.
        image_roots: Folders for images that rows name by path, in addition to the dataset's own folder. No other file
            is opened.
        spec: The allowed values of columns: for each column name, a spec of ``mouse_core.spec``. The values of appended
            rows are checked against the specs, whatever their dtype; with alignment "arrived", zeros are also allowed
            in columns of transitions.
        columns: Types of columns, declared instead of inferred from the first value: a ``pyarrow.Schema``, a
            ``datasets.Features``, or a dict with a type for each column: an Arrow type or field, a dtype, or
            ``(dtype, shape)``. A size of -1 in a shape allows any length. ``str`` and ``bytes`` are dtypes, too.
            Columns that are not declared are allowed, too.

    Raises:
        ConfigError: A dimension is below 1, the alignment, ``spec`` or ``columns`` are invalid, ``dense_bytes`` is
            below 0, or a folder is invalid.
        SchemaError: A field cannot be read from the declared type of its column.
    """

    #: The format that ``open`` found: "store", "minari" and so on; None for a store in memory.
    format: str | None = None
    #: Decisions of the format's reader, a sentence each.
    notes: tuple[str, ...] = ()

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
        columns: Any = None,
    ) -> None:
        # Modules that only some stores need are imported when such a store is first used.
        from mouse_core.store._intake import StoreBackend, StoreSchema

        self._budget = DenseBudget(dense_bytes)
        dims = {"max_action_dim": max_action_dim, "max_obs_continuous_dim": max_obs_continuous_dim}
        self._rows = StoreBackend(StoreSchema(fields, dims, alignment, image_roots, spec, columns), self._budget)

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
        """Open recorded data of any format as a store, or open the store in a folder for writing.

        The attributes ``format`` and ``notes`` of the store, and the store's ``repr``, describe the data that were
        found. A store on disk, a saved dataset and videos are not copied: their rows are read from the present files.
        Other formats are read into memory.

        A folder has one writer at a time (``mode="a"``) and any number of readers in any process, also during writing;
        readers see the flushed rows. When the writing process ends, for any reason, every row whose ``append`` or
        ``extend`` returned is kept. The argument ``sync`` determines which rows survive a power cut:

        - "none": rows in sealed files are kept; the last 64 MB of rows can be lost.
        - "flush": rows before the last ``flush()`` are kept.
        - "append": every row whose ``append`` or ``extend`` returned is kept.

        Args:
            path: A store, a saved dataset, or a file or folder of any format that ``mouse_core.formats`` reads; the id
                of a dataset, such as ``minari:D4RL/door/human-v2``; or the address of a store. Examples of addresses
                are ``s3://bucket/runs``, ``gs://bucket``, ``az://container``, ``https://`` URLs and
                ``hf://datasets/name/of/it``.
            mode: "r" reads an existing store and writes nothing; "a" writes a store and creates it if necessary.
            sync: Which rows of a writer survive a power cut: "none", "flush" or "append", as above.
            verify: Whether to compare the pages of files with their checksums when rows are first read. With None,
                pages are compared if checksums exist; with True, missing checksums also raise ConfigError.
            max_rows: Largest number of rows that a writer keeps, at least 8; None: all rows are kept. The oldest rows
                are dropped, about an eighth at a time; stores and snapshots that other processes opened earlier can
                still read the dropped rows.
            max_bytes: Largest size in bytes of the files that a writer keeps, at least 65,536; the oldest rows are
                dropped in the same way as for ``max_rows``.
            layout: Layout of sealed files: with "columns", each file has one record batch; with "windows", a record
                batch for each 128 to 256 rows. None means the layout of the newest file.
            **options: Arguments of ``DatasetStore``; ``alignment`` defaults to the alignment of the stored rows. If
                ``path`` is an address, also the options of ``mouse_core.remote.Reaching``, such as ``storage_options``
                and ``cache``; if ``path`` has another format, also the options of ``mouse_core.formats.open``, such as
                ``format`` and ``final``.

        Returns:
            The store. Close a writer with ``close()`` or a ``with`` block.

        Raises:
            ConfigError: No data exist at ``path``, the format is not recognised, another process writes to the store
                (the message names the process), the file system has no locks, or an option does not apply to the
                format.
            DataError: The store is damaged, or a newer release wrote it.
            SchemaError: Options contradict the metadata of the rows.
            StorageError: The folder cannot be read or written.
        """
        from mouse_core.remote.clients.options import Reaching, is_url, without_secrets
        from mouse_core.store.disk.rows import Limits, open_rows

        reaching = {name: options.pop(name) for name in Reaching.__dataclass_fields__ if name in options}
        own = {name: options.pop(name) for name in inspect.signature(cls).parameters if name in options}
        is_remote = is_url(path)
        if reaching and not is_remote:
            raise ConfigError(
                f"{' and '.join(f'{name}=' for name in reaching)}: expected an address, as s3://bucket/folder or "
                f"file:///folder, found the path {str(path)!r:.200}, which is read in place"
            )
        writing = {"sync=": sync != "flush", "max_rows=": max_rows, "max_bytes=": max_bytes, "layout=": layout}
        found = [name for name, value in writing.items() if value is not None and value is not False]
        if mode == "r" and (options or (not is_remote and _is_recording(path))):
            from mouse_core import formats

            if found:
                raise ConfigError(
                    f"{path}: expected options for reading, since the path is not a store, found {', '.join(found)}"
                )
            options |= {name: own.pop(name) for name in ("alignment", "image_roots") if name in own}
            options |= {} if verify is None else {"verify": verify}
            return formats.open(path, **options, **reaching).to_store(cls, **own)
        if options:
            raise ConfigError(
                f"{without_secrets(str(path))}: expected options of {cls.__name__}, found {sorted(options)}"
            )
        store = cls(**own)
        store.format, told = "store", store._rows
        if not is_remote:
            limits = Limits(max_rows, max_bytes)
            store._rows = open_rows(path, mode, sync, verify is not False, told, limits, layout)
            return store
        from mouse_core.store.remote.files import Place
        from mouse_core.store.remote.rows import StoreRows

        if mode != "r" or found:
            raise ConfigError(
                f"{without_secrets(str(path))}: expected the mode 'r' without {' and '.join(writing)}, as rows at an "
                f"address are read-only, found {[mode, *found]}; write to a folder, and mouse upload sends new rows"
            )
        place = Place.of(str(path), Reaching(**reaching))
        store._rows = StoreRows(place, told.schema, told.budget, verify is not False)
        return store

    @property
    def sync(self) -> str:
        """The argument ``sync`` of ``open``: the rows that survive a power cut; "none" if the rows are in memory."""
        return self._rows.sync

    @property
    def path(self) -> str | None:
        """The folder of the store; None if the store has no folder."""
        return self._rows.path

    def flush(self) -> None:
        """Make the present rows visible to readers; unless ``sync`` is "none", wait until the rows are on disk. See
        ``open``.

        Raises:
            StorageError: The rows cannot be written. The store keeps the rows for another attempt.
        """
        self._rows.warn_of_rewards(stacklevel=2)
        self._rows.flush()

    def close(self) -> None:
        """Seal a writer's rows and release the folder's lock; for other stores, do nothing.

        Recordings into the store are interrupted first. Rows that were read before stay valid.

        Raises:
            StorageError: Rows cannot be written; the store stays open.
        """
        self._rows.warn_of_rewards(stacklevel=2)
        self._rows.close()

    def interrupt_on_close(self, recording: Any) -> None:
        """Call ``recording.interrupt()`` when ``close()`` begins, if the recording still exists. Recorders use this
        method.
        """
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
        """The number of rows ever written, including rows that were cleared or dropped."""
        return self._rows.seen().end

    def __repr__(self) -> str:
        found = "" if self.format is None else f", format={self.format!r}"
        found += "" if self.path is None else f", path={self.path!r}"
        return f"DatasetStore(num_rows={len(self)}, columns={list(self.columns)}, alignment={self.alignment!r}{found})"

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self._rows.schema.alignment

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The Arrow types of the stored columns by name: the declared type, or the type in the store's first segment.

        An empty store has the declared columns.
        """
        return self._rows.seen().schema.columns()

    @property
    def metadata(self) -> DatasetMetadata:
        """The metadata of the rows, from the store's arguments and from its datasets.

        The alignment is None if neither the arguments nor the datasets specify an alignment; "arrived" is then only
        assumed.
        """
        return self._rows.seen().schema.metadata()

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the store, including fields whose column does not exist."""
        return dict(self._rows.seen().schema.fields)

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """Return an immutable view of the present rows, or of the first ``rows`` rows; no steps are copied.

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
        """Add recorded steps after the existing rows, without a copy, in constant time.

        The metadata of a dataset (see ``mouse_core.metadata``) are checked. The metadata set the options that were not
        passed to the store: fields, ``max_action_dim`` and ``max_obs_continuous_dim``. A field of the store overrides
        the dataset's field of the same name; both must read the same column in the same shape. The store's dimensions
        can be larger than the dimensions in the metadata.

        A reward in the first row of an episode contradicts the alignment "arrived": if a reward of this kind is in the
        first rows of the dataset, an ``AlignmentWarning`` is issued. Appended rows are inspected in the same way when a
        snapshot is taken, at ``flush()`` and at ``close()``.

        Args:
            dataset: A ``datasets.Dataset``, a ``DatasetDict`` (or any dict of datasets: all splits in their order),
                or a ``pyarrow.Table``.
            splits: Names of the splits to take, in this order.
            split_pattern: Shell patterns (``"train_*"``) of the splits to take, in the order of the patterns; each
                split is taken once.

        Raises:
            ConfigError: ``dataset`` is not a dataset, a split is unknown, or a pattern matches no split.
            DataError: A mapped file was truncated, or has grown since its reader opened the file. The metadata cannot
                be read, or a newer version wrote the metadata. Done codes contradict the flags in the same row, for
                example ``done`` 1 in a row in which only ``truncated`` is set.
            MissingFieldError: A required column is missing.
            SchemaError: A field cannot be read from its column, columns differ from the store's columns, or the
                alignment or other metadata contradict the store or its rows.

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

    lock = property(lambda self: self._rows.lock, doc="A lock; its holder appends rows without rows of other threads.")

    def describe(self, metadata: DatasetMetadata) -> None:
        """Add metadata of the appended rows, such as their environment and their fields.

        The metadata are used like a dataset's metadata in ``from_dataset``: the metadata are checked, and set the
        options that were not passed to the store. Recorders (``mouse_core.record``) call this method.

        Raises:
            ConfigError: ``metadata`` is not a ``mouse_core.metadata.DatasetMetadata``.
            SchemaError: The alignment or other metadata contradict the store or its rows.

        The store is unchanged after an error.
        """
        from mouse_core.metadata import DatasetMetadata

        if not isinstance(metadata, DatasetMetadata):
            raise ConfigError(f"describe: expected a mouse_core.metadata.DatasetMetadata, found {metadata!r:.200}")
        rows, said = self._rows, [("describe", metadata)]
        # Without the lock, because a store in a folder waits here for a thread that takes the lock.
        if rows.schema.merged([], said).metadata() != rows.schema.metadata():
            rows.take([], said)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step.

        Args:
            row: A value for every column, in a dict, a TensorDict, a named tuple or a dataclass. The first row of an
                empty store defines the columns, and the types that ``columns`` does not declare; later rows must have
                the same columns. None is a null, which is allowed for fields that replace nulls (``episode_step``,
                ``metadata_q_star``) and in columns that no field reads.

        Raises:
            MissingFieldError: A column is missing.
            SchemaError: The row has a column that the store lacks.
            DataError: A value has the wrong type or shape, is out of bounds, or is None where nulls are not allowed. Or
                a done code contradicts the flags in the row, for example 1 in a row in which only ``truncated`` is set.
            StorageError: The disk has no room for the row, or syncing the row to the disk failed.

        The store is unchanged after an error. Exception: if syncing failed (``sync="append"``), the row is in the
        store.
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

    def extend(self, columns: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add many steps at once, column by column.

        Args:
            columns: An array or sequence ``[n, ...]`` for every column, all of equal length; or a list of rows that
                have the same columns. Values are checked as in ``append``.

        Raises:
            MissingFieldError, SchemaError, DataError, StorageError: See ``append``. DataError is also raised if columns
                differ in length.

        The store is unchanged after an error, except if syncing to the disk failed; see ``append``.
        """
        fields, n = columns_of(columns)
        for name, values in fields.items():
            if isinstance(values, pa.Array | pa.ChunkedArray):
                check_rows(values, f"column {name!r}", whole=False)
        if n:
            self._rows.extend(fields, n)

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
        """Add an episode of T transitions from a simulator: arrays of NumPy, torch or JAX, or lists.

        Observations can be nested. A batch contains each observation under its column name, such as
        ``batch["observation.image"]``, in the stored dtype and shape; see ``layout`` of ``mouse_core.BatchSource``. The
        arrays determine the rows, the alignment, the done codes and the episode steps:

        - With T + 1 observations, the rows have the alignment "arrived". With T observations, the final observation of
          the episode is missing, and the rows have the alignment "outgoing". The first episode of an empty store
          determines the alignment of the store, unless ``alignment`` was given.
        - In a store of alignment "outgoing", the last of T + 1 observations is dropped.
        - An episode that neither terminated nor was truncated is unfinished: its last ``done`` is 0.
        - With a flag for each agent, the episode ends when all agents have ended: ``done`` is 1 if all terminated, else
          2. ``agent_done`` has the same codes for each agent, and 3 in transitions after the agent's end.

        Args:
            episode: A mapping whose keys are the names of the arguments below, or an object with attributes of these
                names, such as a Minari episode.
            observations: Arrays ``[T + 1, ...]`` or ``[T, ...]``, in nested dicts or tuples, or a list with such a dict
                for each step.
            actions: Arrays ``[T, ...]``, which can be nested like observations.
            rewards: ``[T]``; for K objectives ``[T, K]``, for A agents ``[T, A]`` or ``[T, A, K]``.
            terminated, truncated: How the episode ended: a flag, or flags ``[T]``. Only the last flag can be set. None
                means False. Flags ``[T, A]`` mark the end of each agent and create the column
                ``agent_done``.
            infos: Arrays ``[T + 1, ...]`` with a value for each observation, or ``[T, ...]`` with a value for each
                reward; arrays can be nested.
            **columns: Columns with a single number or text for the whole episode, such as ``task`` or ``success``.

        Returns:
            The store.

        Raises:
            ConfigError: ``episode`` is not an episode.
            DataError: Arrays contradict each other or the arrays of earlier episodes, or a value has a type that no
                column can have.
            MissingFieldError, SchemaError, StorageError: See ``extend``.

        The store is unchanged after an error.

        Example:
            >>> store = DatasetStore()
            >>> episode = {"observations": {"position": [0.0, 0.5, 1.0]}, "actions": [1, 1], "rewards": [0.0, 1.0]}
            >>> len(store.add_episode(episode, terminated=True, task="go right"))
            3
        """
        from mouse_core.store._adding import PARTS, episode_columns, episode_metadata, parts_of  # loaded on demand

        given = dict(zip(PARTS, (observations, actions, rewards, terminated, truncated, infos), strict=True))
        parts = parts_of(episode, {name: one for name, one in given.items() if one is not None} | columns)
        schema = self._rows.schema
        is_first = not schema.arrow_types
        alignment = schema.metadata().alignment if is_first else self.alignment
        rows, alignment, transitions = episode_columns(parts, alignment, schema.declared)
        if is_first:
            metadata = episode_metadata(rows, alignment, transitions, schema.declared)
            self._rows.check_first(rows, metadata)
            self.describe(metadata)
        self.extend(rows)
        return self

    def add_episodes(self, episodes: Iterable[Any]) -> Self:
        """Add several episodes in order; see ``add_episode``.

        Args:
            episodes: Episodes, each valid as ``episode`` of ``add_episode``.

        Returns:
            The store.

        Raises:
            ConfigError: ``episodes`` is a dict, that is, a single episode.
            MouseError: See ``add_episode``; a note on the error contains the index of the episode. Earlier episodes
                stay in the store.
        """
        if isinstance(episodes, Mapping):
            raise ConfigError(
                f"add_episodes: expected a list of episodes, found one episode {list(episodes)}; call add_episode"
            )
        for number, episode in enumerate(episodes):
            try:
                self.add_episode(episode)
            except MouseError as error:
                error.add_note(f"add_episodes: episode {number}")
                raise
        return self

    def clear(self) -> None:
        """Remove all rows, including rows of datasets; columns and fields stay.

        Existing snapshots keep their rows; loaders keep their snapshots until ``refresh()``. An on-policy loop appends
        a rollout, refreshes its loader, trains, and clears.
        """
        self._rows.clear()

    # ------------------------------------------------------------------ back to datasets

    def encode_hf_rows(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Convert a dict of lists, in the form that ``datasets`` yields, to a dict of field arrays.

        Args:
            batch: Values by column, each of length ``n``.

        Returns:
            The store's fields by name, ``[n, ...]`` in their documented dtypes.

        Raises:
            MissingFieldError, SchemaError, DataError: See ``append``.
        """
        from mouse_core.store.export import rows_to_table

        shapes = {name: spec.shape for name, spec in self.snapshot().spec.items() if spec.image_shape is None}
        schema = self._rows.schema
        fields = [replace(field, shape=shapes.get(name, field.shape)) for name, field in schema.fields.items()]
        options: dict[str, Any] = {**schema.dims, "alignment": self.alignment, "image_roots": schema.image_roots}
        encoded = DatasetStore(fields=fields, **options).from_dataset(rows_to_table(batch, schema)).snapshot()
        rows = np.arange(encoded.num_rows)
        return {name: encoded.stored(name, rows, 1, one.dtype) for name, one in encoded.spec.items()}


def _is_recording(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a dataset id, or holds data other than a store; raise no error in any case."""
    from mouse_core.store.disk.folder import looks_like_store

    if isinstance(path, str) and ":" in path:
        from mouse_core import formats

        if formats.opening.is_id(path):
            return True
    place = Path(path)
    try:
        return place.is_file() or (not looks_like_store(place) and any(place.iterdir()))
    except OSError:
        return False
