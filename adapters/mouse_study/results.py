"""The recorded results of a study: a table with one row per value, and facts about every run, in a single Parquet
file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core.errors import ConfigError, DataError, SchemaError, StorageError
from mouse_core.files.manifest import add_parquet_checksum, check_parquet_checksum
from mouse_core.files.writing import replacing, storing

FILE = "results.parquet"
"""The name of the file in a study's folder."""

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("variant", pa.string()),
        ("framework", pa.string()),
        ("seed", pa.int64()),
        ("step", pa.int64()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ]
)
"""The columns of ``Results.table``; each row has the value that a run recorded under a name at a step."""

Status = Literal["done", "failed", "partial"]

_KEY = b"mouse_study"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """The facts of one run.

    Args:
        run: The run's name, "variant/framework/seed".
        variant, framework, seed: The parts of the name.
        status: "done"; "failed", if an exception ended the run; "partial", if it was stopped before its last step.
        steps: Number of training steps taken.
        seconds: Duration from process start to end, summed over all processes of the run.
        first_step_seconds: Duration of the first step, including one-time work such as compilation.
        peak_memory: Peak memory of the process in bytes.
        versions: Versions of Python and packages by name; "2.10, then 2.11" if the run resumed with another version.
        fingerprint: Fingerprint of the batches' data and configuration; None if the source has no fingerprint.
        digest: Digest of the batches of all steps; None if no digest was computed.
        machine: Description of the hardware and system, by name.
        error: The exception that ended the run, in one line.
    """

    run: str
    variant: str
    framework: str
    seed: int
    status: Status
    steps: int = 0
    seconds: float = 0.0
    first_step_seconds: float | None = None
    peak_memory: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str | None = None
    digest: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Results:
    """The results of a study.

    Args:
        name: The study's name.
        steps: Number of training steps of a finished run.
        runs: Facts of every run.
        table: One row per value, with the columns of ``SCHEMA``, sorted by run and step. Every step has a ``loss``, the
            time that it waited for a batch (``wait``) and the time of its computation (``compute``), both in seconds;
            ``memory`` is the process's memory in bytes, recorded from time to time. All other names belong to values
            that the training reported.
        missing: Names of declared runs that have not started.

    Raises:
        SchemaError: The columns differ from ``SCHEMA``, a value is null, or the table has a run without facts.
    """

    name: str
    steps: int
    runs: tuple[Run, ...]
    table: pa.Table
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.table.schema.remove_metadata() != SCHEMA:
            raise SchemaError(f"results: expected the columns {_words(SCHEMA)}, found {_words(self.table.schema)}")
        if empty := [name for name in SCHEMA.names if name != "value" and self.table[name].null_count]:
            raise SchemaError(
                f"results: expected {', '.join(empty)} in each row of the table, found rows without a value"
            )
        unknown = set(pc.unique(self.table["run"]).to_pylist()) - {one.run for one in self.runs}
        if unknown:
            raise SchemaError(f"results: expected facts of every run of the table, found no facts of {sorted(unknown)}")

    def series(self, name: str) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Return the recorded values of a name, for each run that has values.

        Args:
            name: The name, for example "loss".

        Returns:
            For each run: the steps, int64 ``[n]``, ascending, and the values, float64 ``[n]``.
        """
        found = self.table.filter(pc.equal(self.table["name"], name)).combine_chunks()
        steps, values = found["step"].to_numpy(), found["value"].to_numpy()
        encoded = pc.run_end_encode(found["run"]).chunks
        result, begin = {}, 0
        for chunk in encoded:
            for run, length in zip(
                chunk.values.to_pylist(), np.diff(chunk.run_ends.to_numpy(), prepend=0), strict=True
            ):
                result[run] = (steps[begin : begin + length], values[begin : begin + length])
                begin += int(length)
        return result

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the results to a file; after an error, an existing file is unchanged.

        Raises:
            StorageError: The file cannot be written.
        """
        stored = {
            "version": _VERSION,
            "name": self.name,
            "steps": self.steps,
            "missing": list(self.missing),
            "runs": [asdict(one) for one in sorted(self.runs, key=lambda one: one.run)],
        }
        order = [(column, "ascending") for column in ("run", "step", "name")]
        table = self.table.sort_by(order).replace_schema_metadata({_KEY: json.dumps(stored)})
        with storing(f"file {os.fspath(path)}"), replacing(path) as partial:
            pq.write_table(table, partial, compression="zstd")
            add_parquet_checksum(partial)


def read(path: str | os.PathLike[str]) -> Results:
    """Read the results of a study.

    Args:
        path: The study's folder, or the file ``results.parquet`` in it.

    Raises:
        ConfigError: The file does not exist.
        DataError: The file has no results, is damaged, or was written by a newer mouse-data.
        StorageError: The file cannot be read.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ConfigError(f"results: expected a study's folder with {FILE}, or that file, found none at {str(path)!r}")
    try:
        check_parquet_checksum(file, advance=lambda count: None)
        table = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: expected the Parquet file of a study, found another file: {error}") from error
    except OSError as error:
        raise StorageError(f"{file}: expected a file that can be read, found: {error}") from error
    stored = _stored(file, (table.schema.metadata or {}).get(_KEY))
    try:
        runs = tuple(_run(one) for one in stored["runs"])
        missing = tuple(str(one) for one in stored.get("missing", ()))
        return Results(str(stored["name"]), int(stored["steps"]), runs, table.replace_schema_metadata(None), missing)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: expected the results of a study, found damage: {error}") from error


def _stored(file: Path, text: bytes | None) -> dict[str, Any]:
    """Parse the study's metadata in a results file."""
    try:
        stored = json.loads(text or b"null")
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or not isinstance(stored.get("version"), int):
        raise DataError(f"{file}: expected a study's results (metadata 'mouse_study' with a version), found none")
    if stored["version"] > _VERSION:
        raise DataError(
            f"{file}: expected results of version {_VERSION} at most, found version {stored['version']}, which a newer "
            "mouse-data wrote"
        )
    return stored


# The JSON types of the facts of a run.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run", "variant", "framework", "status"), (str,)),
    **dict.fromkeys(("fingerprint", "digest", "error"), (str, NoneType)),
    **dict.fromkeys(("seed", "steps"), (int,)),
    "seconds": (int, float),
    **dict.fromkeys(("first_step_seconds", "peak_memory"), (int, float, NoneType)),
    **dict.fromkeys(("versions", "machine"), (dict,)),
}


def _run(stored: Mapping[str, Any]) -> Run:
    """Return the checked facts of a run."""
    given = {name: stored[name] for name in _KINDS if name in stored}
    for name, value in given.items():
        if not isinstance(value, _KINDS[name]):
            kinds = " or ".join(kind.__name__ for kind in _KINDS[name])
            raise TypeError(f"expected {name} of a run to be {kinds}, found {value!r:.80}")
    return Run(**given)


def _words(schema: pa.Schema) -> str:
    return ", ".join(f"{one.name} ({one.type})" for one in schema)
