"""The folder of a study: its declaration, and the records of its runs."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import checked_json, json_with_digest
from mouse_core.files.log import read_log
from mouse_core.files.reading import damaged
from mouse_core.files.writing import write_file
from mouse_study.results import SCHEMA, Results, Run

if TYPE_CHECKING:
    from mouse_study.study import Study

RECORDS = "records.log"
"""The name of the log with the recorded values of a run: a JSON object for each step."""

RUN = "run.json"
"""The name of the file with the facts of a run."""

DECLARED = "study.json"
"""The name of the file with a study's declaration."""
_VERSION = 1
# The keys of a function's location.
_FUNCTION = {"module", "file", "name"}
# Parts of a declaration to which entries may be added; existing entries must not change.
_MAY_GROW = ("frameworks", "variants", "seeds")
# Parts of a declaration that do not affect the records of a run.
_MAY_CHANGE = ("checkpoint_every",)


def settle(study: Study, folder: Path) -> dict[str, Any]:
    """Write the declaration of a study to its folder, and return the declaration; the folder must not have a different
    declaration.

    Raises:
        ConfigError: The folder has another declaration; the message names the difference.
    """
    said = study.declaration()
    file = folder / DECLARED
    before = read_json(file, "study")
    if before is not None:
        if before.get("version") != _VERSION:
            found = before.get("version")
            raise DataError(
                f"{file}: expected version {_VERSION}, found {found}, written by another version of mouse-data"
            )
        _check_same(before["study"], said, folder)
    if before is None or before["study"] != said:
        write_file(file, json_with_digest({"version": _VERSION, "study": said}))
    return said


def _check_same(before: dict[str, Any], said: dict[str, Any], folder: Path) -> None:
    for name, now in said.items():
        there = before.get(name)
        if name in _MAY_CHANGE or _comparable(there) == _comparable(now):
            continue
        if name in _MAY_GROW and isinstance(there, list) and set(there) <= set(now):
            continue
        if name in _MAY_GROW and isinstance(there, dict):
            changed = [key for key in there if key not in now or _comparable(there[key]) != _comparable(now[key])]
            if not changed:
                continue
            name, there, now = f"{name}: {changed[0]}", there[changed[0]], now.get(changed[0], "none")
        raise ConfigError(
            f"study: expected {name} {_shown(there)}, as in the study that was begun in {str(folder)!r}, found "
            f"{_shown(now)}; use another folder, or restore the earlier value"
        )


def _comparable(value: Any) -> Any:
    """Return a declaration without the files of functions, because files may be moved; the code of functions is not
    compared either."""
    if isinstance(value, dict):
        where = ("file", "module") if set(value) == _FUNCTION else ()
        return {key: _comparable(child) for key, child in value.items() if key not in where}
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict) and set(value) == _FUNCTION:
        return f"{value['module']}:{value['name']}"
    return f"{value!r:.200}"


def read_json(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the contents of a JSON file after comparing its digest; None if the file does not exist.

    Args:
        path: The file.
        kind: A name that the object in the file must have.
    """
    if not path.exists():
        return None
    value = checked_json(path)
    if not isinstance(value.get(kind), dict):
        raise damaged(path, f"expected an object with {kind!r}, found {list(value)}")
    return value


def run_facts(folder: Path) -> dict[str, Any]:
    """Return the contents of a run's ``run.json``; an empty dict if the run has not begun.

    Raises:
        DataError: The file is damaged, or is missing although the run has recorded values.
    """
    found = read_json(folder / RUN, "run")
    if found is None and (folder / RECORDS).exists():
        raise damaged(folder / RUN, f"expected the facts of the run of {RECORDS}, found no file")
    return dict(found["run"]) if found else {}


def collect(path: str | Path) -> Results:
    """Collect the results that the runs of a study have recorded so far; runs may still be active.

    Args:
        path: The study's folder.

    Raises:
        ConfigError: The folder has no study.
    """
    folder = Path(path)
    declared = read_json(folder / DECLARED, "study")
    if declared is None:
        raise ConfigError(f"study: expected a folder in which a study was begun, found none at {str(folder)!r}")
    said = declared["study"]
    runs, tables, missing = [], [], []
    for variant in sorted(said["variants"]):
        for framework in sorted(said["frameworks"]):
            for seed in said["seeds"]:
                name = f"{variant}/{framework}/{seed}"
                own = folder / "runs" / name
                if not own.exists():
                    missing.append(name)
                else:
                    which = {"run": name, "variant": variant, "framework": framework, "seed": seed}
                    run, table = _run(own, which)
                    runs.append(run)
                    tables.append(table)
    order = [(column, "ascending") for column in ("run", "step", "name")]
    table = pa.concat_tables(tables).sort_by(order) if tables else SCHEMA.empty_table()
    return Results(said["name"], said["steps"], tuple(sorted(runs, key=lambda one: one.run)), table, tuple(missing))


def _run(folder: Path, which: dict[str, Any]) -> tuple[Run, pa.Table]:
    """Return the facts of a run, and its values."""
    known = {one.name for one in fields(Run)}
    noted = {name: value for name, value in run_facts(folder).items() if name in known}
    records = [json.loads(record) for record in read_log(folder / RECORDS)]
    values = [(one["step"], name, value) for one in records for name, value in one.items() if name != "step"]
    steps, names, numbers = zip(*values, strict=True) if values else ((), (), ())
    count = len(values)
    columns = {
        **{name: pa.repeat(value, count) for name, value in which.items()},
        "step": np.array(steps, np.int64),
        "name": pa.array(names, pa.string()),
        "value": np.array(numbers, np.float64),
    }
    return Run(**which, **{"status": "partial", **noted, "steps": len(records)}), pa.table(columns, SCHEMA)
