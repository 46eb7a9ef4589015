"""Maps whose keys are rows, against a plain dict of the rows' bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError, MissingRowError, SchemaError
from mouse_core.maps import RowMap, row_hash
from mouse_core.maps.hashing import hash_rows

OBS = np.array([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [4.0, 5.0]], np.float32)


class DictMap:
    """What a map is: values by bytes."""

    def __init__(self, capacity=None):
        self.rows: dict[bytes, float] = {}
        self.capacity = capacity

    def write(self, keys, values):
        rows = {**self.rows, **dict(zip(keys, values, strict=True))}
        if self.capacity is not None and len(rows) > self.capacity:
            return False
        self.rows = rows
        return True


def observation(numbers):
    """Rows of two fields that say a number, alike in no single one of them."""
    numbers = np.asarray(numbers, np.int64)
    return {
        "a": (numbers % 5).astype(np.uint8),
        "b": {"c": np.stack([numbers // 5, numbers * 0], 1).astype(np.float32)},
    }


def as_bytes(rows):
    return [a.tobytes() + c.tobytes() for a, c in zip(rows["a"], rows["b"]["c"], strict=True)]


writes = st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=8)


def check_against_dict(batches, capacity):
    """Whether a map does what a dict does, write by write."""
    table, oracle, stamp = RowMap(capacity=capacity), DictMap(capacity), 0
    everything = observation(np.arange(31))
    for batch in batches:
        rows, values = observation(batch), np.arange(stamp, stamp + len(batch), dtype=np.float64)
        stamp += len(batch)
        if not oracle.write(as_bytes(rows), values):
            with pytest.raises(DataError):
                table.extend(rows, values)
        else:
            index = table.extend(rows, values)
            assert (table.index(rows) == index).all()
        assert table.contains(everything).tolist() == [key in oracle.rows for key in as_bytes(everything)]
        assert table.get(everything, -1.0).tolist() == [oracle.rows.get(key, -1) for key in as_bytes(everything)]
        assert len(table) == len(oracle.rows)
        if len(table):
            assert as_bytes(table.rows()) == [*oracle.rows]


CAPACITIES = st.sampled_from([None, 12, 20])


@given(writes, CAPACITIES)
def test_it_is_a_dict_of_bytes(batches, capacity):
    check_against_dict(batches, capacity)


@given(writes, CAPACITIES, st.sampled_from([1, 3]))
def test_rows_with_the_same_hash_are_kept_apart(batches, capacity, hashes):
    """Of all rows there are as many hashes as said; and rows are looked up few at a time."""

    def few(rows, seed, places=slice(None)):
        return hash_rows(rows, seed, places) % np.uint64(hashes) << np.uint64(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mouse_core.maps.row_map.hash_rows", few)
        patch.setattr("mouse_core.maps.row_map._STEP", 5)
        check_against_dict(batches, capacity)


def test_indices_count_rows_as_they_come():
    table = RowMap(keys=["obs"])
    assert table.extend({"obs": OBS, "reward": OBS[:, 0]}).tolist() == [0, 1, 0, 2]
    assert table.extend({"obs": OBS[::-1]}).tolist() == [2, 0, 1, 0]
    assert table.index({"obs": OBS[:2] + 100}).tolist() == [-1, -1]
    assert table.rows()["obs"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert table.rows(np.array([2, 0]))["obs"].tolist() == [[4, 5], [0, 1]]


def test_many_rows_at_once_and_many_times():
    rng = np.random.default_rng(0)
    table = RowMap()
    seen: dict[bytes, int] = {}
    for _ in range(3):
        rows = rng.integers(0, 20_000, (20_000, 1)).astype(np.float32) + np.arange(3, dtype=np.float32)
        expected = [seen.setdefault(row.tobytes(), len(seen)) for row in rows]
        assert table.extend(rows).tolist() == expected
        assert table.index(rows).tolist() == expected
    assert len(table) == len(seen)


def test_bytes_are_compared_not_numbers():
    values = np.array([0.0, -0.0, np.nan, -np.nan, np.inf])
    assert RowMap().extend(values).tolist() == [0, 1, 2, 3, 4]
    table = RowMap()
    table[values] = np.arange(5)
    assert table[values].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "rows",
    [
        np.arange(6).reshape(3, 2) > 2,
        np.arange(12, dtype=np.int16).reshape(3, 4),
        np.arange(9, dtype=np.uint8).reshape(3, 3),
        np.arange(3) + 1j,
        np.array(["2020-01-01", "2021-01-01", "2022-01-01"], "M8[D]"),
        ["a", "", "a longer text"],
        [b"a", b"", b"\0"],
        [np.arange(2), np.arange(3), np.arange(0)],
        np.zeros((3, 40, 40), np.uint8) + np.arange(3, dtype=np.uint8)[:, None, None],
        (np.arange(3), {"deep": np.arange(3.0)}),
    ],
    ids=["bool", "int16", "odd bytes", "complex", "times", "text", "bytes", "ragged", "images", "nested"],
)
def test_keys_and_values_of_any_dtype(rows):
    table = RowMap()
    table[rows] = {"number": np.arange(3), "key": rows}
    assert table[rows]["number"].tolist() == [0, 1, 2]
    found = table[rows]["key"]
    assert RowMap().extend(found).tolist() == [0, 1, 2]
    assert (row_hash(found) == row_hash(rows)).all()
    assert RowMap().extend((rows, found)).tolist() == [0, 1, 2]


def test_counts_take_each_row_as_often_as_it_comes():
    visits = RowMap()
    assert visits.accumulate(OBS, 1).tolist() == [0, 1, 0, 2]
    visits.accumulate(OBS[[0, 0, 3]], np.array([10, 20, 30]))
    assert visits[OBS].tolist() == [32, 1, 32, 31]
    best = RowMap()
    best.accumulate(OBS, {"return": np.array([1.0, 5.0, 3.0, 2.0])}, np.maximum)
    best.accumulate(OBS[:1], {"return": np.array([2.0])}, np.maximum)
    assert best[OBS]["return"].tolist() == [3.0, 5.0, 3.0, 2.0]


def test_what_is_missing_is_named():
    table = RowMap()
    table[OBS[:2]] = 1
    with pytest.raises(MissingRowError, match=r"found 1 of 2 rows missing, the first at index 1: array\(\[\[4\., 5\."):
        table[OBS[[0, 3]]]
    with pytest.raises(KeyError):
        table[OBS[3:]]
    assert table.get(OBS[[3, 0]], 7).tolist() == [7, 1]
    with pytest.raises(TypeError):
        OBS[0] in table  # noqa: B015


def test_an_index_is_a_number_and_rows_are_combined_by_a_ufunc():
    table = RowMap()
    table.accumulate(np.arange(3), 1)
    for index in (np.array([True, False, True]), [0.5]):
        with pytest.raises(SchemaError, match="index: expected integers"):
            table.rows(index)
    for how in (max, np.negative):
        with pytest.raises(ConfigError, match="expected a ufunc of two numbers"):
            table.accumulate(np.arange(3), 1, how)
    assert table.values([2, 0]).tolist() == [1, 1]


def test_a_single_row_hears_how_it_is_written():
    numbers = RowMap(keys=["k"])
    numbers[{"k": np.arange(3)}] = {"v": np.arange(3)}
    for ask in (numbers.index, numbers.contains, numbers.__getitem__):
        with pytest.raises(SchemaError, match=r"'k': expected the shape .*; to write one row, pass \[row\]"):
            ask({"k": 1})
    assert numbers.index([{"k": 1}]).tolist() == [1]


def test_what_does_not_fit_changes_nothing():
    table = RowMap(capacity=3)
    table[OBS[:2]] = {"v": np.zeros(2)}
    for rows, values, kind in [
        (OBS.astype(np.float64), {"v": np.zeros(4)}, SchemaError),
        (OBS[:, :1], {"v": np.zeros(4)}, SchemaError),
        (OBS, {"v": np.zeros(3)}, DataError),
        (OBS, {"w": np.zeros(4)}, SchemaError),
        (OBS, None, SchemaError),
        (np.arange(8, dtype=np.float32).reshape(4, 2) + 50, {"v": np.zeros(4)}, DataError),
    ]:
        with pytest.raises(kind):
            table.extend(rows, values)
        assert len(table) == 2
        assert table[OBS[:2]]["v"].tolist() == [0.0, 0.0]
    table[OBS] = {"v": np.ones(4)}  # one new row, for which there is room
    assert table.extend(OBS[:0], {"v": np.zeros(0)}).tolist() == []
    table.empty()
    assert len(table) == 0
    assert not table.contains(OBS).any()


@pytest.mark.parametrize(
    "options",
    [
        {"keys": []},
        {"keys": "obs"},
        {"capacity": 0},
        {"seed": -1},
    ],
    ids=repr,
)
def test_options_that_cannot_be(options):
    with pytest.raises(ConfigError):
        RowMap(**options)
