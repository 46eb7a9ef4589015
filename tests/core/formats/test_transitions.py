"""From T transitions to T+1 rows, against an oracle in plain Python; and the digest that does not see batches."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from mouse_core.columns.episode_rows import done_codes
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import reading
from mouse_core.formats.base import RowDigest, RowStream, rows_digest
from mouse_core.formats.columns import TransitionRows, check_final
from mouse_core.formats.rlds import read_rlds

Row = dict[str, Any]


def oracle(lengths: list[int], final: str | None, known: bool) -> list[Row]:
    """Rows of episodes whose n-th observation is n, action 100 + n and note -n; episode k ends with done k % 3.

    The seen metadata are n. Where the last observation is missing, the row before is repeated.
    """
    rows: list[Row] = []
    n = 0
    for episode, length in enumerate(lengths):
        rows.append({"observation": n, "action": 0, "done": 0, "note": -n, "episode_step": 0, "observation_missing": 0})
        rows[-1]["metadata_seen"] = n
        for step in range(1, length + 1):
            last = step == length
            row: Row = {"observation": n + 1, "action": 100 + n, "done": episode % 3 if last else 0, "note": -n - 1}
            row |= {"episode_step": step, "observation_missing": 0, "metadata_seen": n + 1}
            if last:
                row["note"] = rows[-1]["note"]
                if not known and final == "drop":
                    if step > 1:
                        rows[-1]["done"] = 2
                    n += 1
                    continue
                if not known:
                    row |= {"observation": 0, "observation_missing": 1, "metadata_seen": n}
            rows.append(row)
            n += 1
        n += 1
    if known or final != "mark":
        for row in rows:
            del row["observation_missing"]
    return rows


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    final=st.sampled_from(["drop", "mark", None]),
    beside=st.booleans(),
)
def test_rows_are_those_of_the_oracle(lengths: list[int], cuts: list[int], final: str | None, beside: bool) -> None:
    known = final is None
    starts = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)[:-1]])
    n = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    begins = np.concatenate([np.arange(length) == 0 for length in lengths])
    done = np.concatenate([[0] * (length - 1) + [episode % 3] for episode, length in enumerate(lengths)])
    rows = TransitionRows(final=final, where="here")
    made = []
    edges = [0, *sorted(min(cut, len(n)) for cut in cuts), len(n)]
    for start, stop in pairwise(edges):
        part = slice(start, stop)
        made.append(
            rows.add(
                {"observation": n[part], "metadata_seen": n[part]},
                {"action": 100 + n[part], "done": done[part]},
                begins[part],
                {"observation": n[part] + 1, "metadata_seen": n[part] + 1} if known else None,
                {"note": -n[part]} if beside else None,
            )
        )
    rest = rows.finish()
    assert rows.finish() is None
    made += [] if rest is None else [rest]
    found = pa.concat_tables(pa.table(dict(part)) for part in made).to_pylist()
    expected = oracle(lengths, final, known)
    if not beside:
        for row in expected:
            del row["note"]
    assert found == expected


def test_what_lies_beside_is_unknown_at_the_end() -> None:
    rows = TransitionRows(final=None, where="here")
    three = np.arange(3)
    args = ({"o": three}, {"done": np.array([0, 0, 1])}, three == 0, {"o": three + 1}, {"pose": three / 2})
    made = [rows.add(*args), rows.finish()]
    poses = np.concatenate([part["pose"] for part in made if part is not None])
    assert np.array_equal(poses, [0, 0.5, 1, np.nan], equal_nan=True)


def test_transitions_that_are_not_continuous_are_kept_apart() -> None:
    observations = np.array([1.0, 2.0, 7.0, np.nan, 5.0])
    following = np.array([2.0, 3.0, np.nan, 4.0, 6.0])
    for cuts in ([], [1], [2], [3], [1, 2, 3, 4]):
        rows = TransitionRows(final=None, where="here")
        made = [
            rows.add(
                {"o": observations[a:b]}, {"done": np.zeros(b - a, int)}, np.zeros(b - a, bool), {"o": following[a:b]}
            )
            for a, b in zip([0, *cuts], [*cuts, 5], strict=True)
        ]
        steps = np.concatenate([part["episode_step"] for part in made])
        assert steps.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        o = np.concatenate([part["o"] for part in made])
        assert np.array_equal(o, [1, 2, 3, 7, np.nan, 4, 5, 6], equal_nan=True)


def test_final_is_asked_for_and_explained() -> None:
    rows = TransitionRows(final=None, where="file.h5")
    begins = np.array([True, True])
    with pytest.raises(ConfigError, match=r"file.h5: .*final='drop' leaves out.*final='mark' keeps .*, with zeros"):
        rows.add({"o": np.zeros(2)}, {"done": np.ones(2, int)}, begins)
    with pytest.raises(ConfigError, match=r"expected one of \['drop', 'mark'\] or None, found 'zero'"):
        check_final("zero", where="x")
    with pytest.raises(DataError, match="equal length"):
        rows.add({"o": np.zeros(2)}, {"done": np.ones(3, int)}, begins)
    rows = TransitionRows(final="mark", where="x")
    rows.add({"o": np.zeros((2, 3))}, {"done": np.ones(2, int)}, begins)
    with pytest.raises(DataError, match=r"x: column 'o': expected \[3\], found \[4\]"):
        rows.add({"o": np.zeros((2, 4))}, {"done": np.ones(2, int)}, begins)


def test_done_codes() -> None:
    assert done_codes([0, 1, 0, 1], [0, 0, 1, 1]).tolist() == [0, 1, 2, 1]
    assert done_codes(np.array([0.0, 1.0])).tolist() == [0, 1]


def one_step_after_another(observation: Any) -> list[dict[str, Any]]:
    step = {"observation": observation, "action": 0, "reward": 0.0, "discount": 1.0}
    flags = {"is_first": False, "is_last": False, "is_terminal": False}
    return [{**step, **flags, "is_first": True}, {**step, **flags, "is_last": True}]


def test_names_of_nested_values() -> None:
    nested = {"a": {"b": 1}, "c": (2, {"d": 3})}
    rows = read_rlds([{"steps": one_step_after_another(nested)}]).to_table()
    found = {name: rows[name][0].as_py() for name in rows.column_names if name.startswith("observation")}
    assert found == {"observation.a.b": 1, "observation.c.0": 2, "observation.c.1.d": 3}
    with pytest.raises(SchemaError, match=r"observation\.a\.b: when keys are joined"):
        read_rlds([{"steps": one_step_after_another({"a": {"b": 1}, "a.b": 2})}]).to_table()


def table() -> pa.Table:
    random = np.random.default_rng(0)
    n = 50
    return pa.table(
        {
            "number": pa.array(random.integers(0, 9, n)),
            "maybe": pa.array([None if value < 0.3 else value for value in random.random(n)]),
            "flag": pa.array(random.random(n) < 0.5),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(random.random(3 * n)), 3),
            "ragged": pa.array([list(range(size)) if size else None for size in random.integers(0, 4, n)]),
            "text": pa.array([f"{value}" * (value % 3) for value in range(n)]),
            "struct": pa.array([{"bytes": b"x" * (value % 2), "path": None} for value in range(n)]),
            "nothing": pa.nulls(n),
        }
    )


def test_the_digest_does_not_see_batches() -> None:
    whole = table()
    expected = rows_digest(whole)
    for size in (1, 3, 7, 49):
        assert rows_digest(whole.to_batches(max_chunksize=size)) == expected
    parts = pa.concat_tables([whole.slice(0, 11), whole.slice(11, 20), whole.slice(31)])
    assert rows_digest(parts) == expected
    other = whole.set_column(3, "vector", whole.column("vector").cast(pa.list_(pa.float64())))
    other = other.set_column(5, "text", whole.column("text").dictionary_encode())
    assert rows_digest(other) == expected


def test_the_digest_sees_values() -> None:
    whole = table()
    seen = {rows_digest(whole), rows_digest(whole.slice(1)), rows_digest(whole.rename_columns(list("abcdefgh")))}
    assert len(seen) == 3
    for index, name in enumerate(whole.column_names[:-1]):
        values = whole.column(name).to_pylist()
        swapped = pa.array([*values[1:], values[0]], whole.schema.field(name).type)
        seen.add(rows_digest(whole.set_column(index, name, swapped)))
    assert len(seen) == 10
    cuts = ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3], []])
    lists = [pa.table({"a": pa.array(values, pa.list_(pa.int64()))}) for values in cuts]
    assert len({rows_digest(one) for one in lists}) == 3
    digest = RowDigest(whole.schema)
    with pytest.raises(SchemaError, match="expected columns"):
        digest.update(lists[0].to_batches()[0])


def stream(rows: pa.Table, path: str = "somewhere") -> RowStream:
    return RowStream(path, "test", rows.schema, lambda: iter(rows.to_batches(max_chunksize=7)))


def test_streams_are_written_as_datasets(tmp_path: Path) -> None:
    columns = {"action": [0, 1, 2], "reward": [0.0, 0.5, 1.0], "done": [0, 0, 1]}
    rows = pa.table(columns | {"observation": [[0.0], [1.0], [2.0]]})
    stream(rows).save(tmp_path / "rows")
    assert stream(rows).digest() == rows_digest(rows)
    loaded = datasets.load_from_disk(str(tmp_path / "rows"))
    assert rows_digest(loaded.data.table) == rows_digest(rows)
    assert len(stream(rows).to_store()) == 3
    with pytest.raises(ConfigError, match="path that does not exist"):
        stream(rows).save(tmp_path / "rows")

    def failing() -> Any:
        yield from rows.to_batches()
        raise DataError("cut")

    with pytest.raises(DataError, match="cut"):
        stream(rows).replace(batches=failing).save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_whatever_a_library_raises_names_the_file() -> None:
    for error in (OSError("a\nb"), ValueError(""), KeyError("x"), MemoryError(), pa.ArrowInvalid("z")):
        with pytest.raises(DataError, match=r"^file.x, row 3: cannot be read") as caught, reading("file.x", at="row 3"):
            raise error
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="none there"), reading("file.x"):
        raise ConfigError("none there")
    with pytest.raises(DataError, match=r"^file.x: odd$"), reading("file.x"):
        raise DataError("odd")
    with pytest.raises(ConfigError, match="expected a file"), reading("file.x"):
        raise FileNotFoundError(2, "no", "file.x")
