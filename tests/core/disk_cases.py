"""Rows whose every value follows from their number, and what must hold of a folder of them whatever happened to it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore

KINDS = ("numbers", "mixed")
_EPISODE = 7


def rows_of(kind: str, first: int, count: int) -> dict[str, Any]:
    """Columns of rows from a number on; "mixed" ones also with texts, nulls, ragged rows, structs and images."""
    number = np.arange(first, first + count)
    columns: dict[str, Any] = {
        "number": number,
        "observation": number[:, None] * np.array([1.0, 10.0, 0.25]),
        "action": number % 4,
        "reward": (number / 4).astype(np.float32),
        "done": np.where(number % _EPISODE == _EPISODE - 1, 1, 0),
        "episode_step": number % _EPISODE,
    }
    if kind == "mixed":
        columns |= {
            "text": [f"row {n} " * ((n + 1) % 5) for n in number.tolist()],
            "sometimes": [None if n % 3 == 1 else n * 2 for n in number.tolist()],
            "ragged": [[float(n)] * (1 + n % 4) for n in number.tolist()],
            "about": [{"n": n, "name": f"{n}"} for n in number.tolist()],
            "observation_image": (number[:, None, None, None] + np.arange(48).reshape(4, 4, 3)).astype(np.uint8),
        }
    return columns


def row_of(kind: str, number: int) -> dict[str, Any]:
    return {name: values[0] for name, values in rows_of(kind, number, 1).items()}


def table_of(kind: str, first: int, count: int) -> pa.Table:
    made = DatasetStore()
    made.extend(rows_of(kind, first, count))
    return made.snapshot().segments[0].table


def kind_of(store: DatasetStore) -> str:
    return "mixed" if "text" in store.columns else "numbers"


def _listed(kind: str, first: int, count: int) -> dict[str, list[Any]]:
    return {name: [_plain(value) for value in values] for name, values in rows_of(kind, first, count).items()}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def numbers_in(store: DatasetStore) -> range:
    """The numbers of a store's rows, which follow each other; each row is as it was written."""
    found = rows_kept(store)
    first = found[0] if found else 0
    assert found == [*range(first, first + len(found))], f"wrong row: {found[:5]}.. do not follow each other"
    return range(first, first + len(found))


def rows_kept(store: DatasetStore) -> list[int]:
    """The numbers of a store's rows, some of which may be left out; each row is as it was written."""
    snapshot = store.snapshot()
    count = snapshot.num_rows
    if not count:
        return []
    found = snapshot.rows(range(count))
    numbers = found["number"]
    first, stop = min(numbers), max(numbers) + 1
    assert 0 <= first < stop < 1 << 20, f"wrong row: number {first}..{stop}"
    assert numbers == sorted(set(numbers)), "wrong row: numbers that do not grow"
    written = _listed(kind_of(store), first, stop - first)
    assert found.keys() == written.keys(), f"columns {list(found)}"
    for name, all_values in written.items():
        if name == "observation_image" and type(found[name][0]) is dict:
            continue  # encoded: batches show it
        values = [all_values[number - first] for number in numbers]
        if found[name] != values:
            row = next(at for at, (one, other) in enumerate(zip(found[name], values, strict=True)) if one != other)
            raise AssertionError(
                f"wrong row: {name!r} of row {row} of {count} from number {first} on is {found[name][row]!r:.80}, "
                f"and was written as {values[row]!r:.80}"
            )
    return list(numbers)


def check_batches(store: DatasetStore, batches: int = 2, seed: int = 0) -> None:
    """What batches hold is what was written."""
    if len(store) < 4:
        return
    # Of a store that drops rows the first ones may be gone when the next line is read.
    first, last = store[0]["number"], store[-1]["number"]
    source = BatchSource(store, 4, 8, seed=seed)
    for at in range(batches):
        batch = source[at]
        number = batch["obs_continuous"][..., 0]
        assert (np.diff(number, axis=1) == 1).all(), "wrong row: windows are not of rows that follow each other"
        assert number.min() >= first, "wrong row: a window before the first row"
        assert number.max() <= last, "wrong row: a window behind the last row"
        assert (batch["reward"] * 4 == number).all(), "wrong row: reward"
        assert (batch["obs_continuous"] == number[..., None] * np.array([1.0, 10.0, 0.25])).all(), "wrong row"
        assert (batch["time"] == number % _EPISODE).all(), "wrong row: time"


def leftovers(folder: Path) -> list[str]:
    """Files of a folder that its manifest does not name."""
    said = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["mouse_store"]
    named = {one[0] for one in (*said["segments"], *said["tails"])}
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return [
        str(file)
        for file in files
        if str(file) not in ("manifest.json", "manifest.json.bak", "lock", "readers")
        and _number(file.name) not in named
    ]


def _number(name: str) -> int | None:
    """The number in the name of a file, as 12 in ``tail-000012.rows``."""
    found = re.fullmatch(r"(tail-)?(\d{6,})\.[a-z]+", name)
    return None if found is None else int(found[2])
