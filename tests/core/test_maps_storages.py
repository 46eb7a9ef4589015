"""Where the rows of maps lie, and how they are saved; hashes and codes."""

import copy
import os

import numpy as np
import pytest

from mouse_core.errors import ConfigError, DataError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.maps import RowMap, binary_to_decimal, hash_to_int, random_projection, row_hash
from mouse_core.replay import ArrayStorage, MemmapStorage
from tests.core.killing import forked

KEYS = np.arange(24, dtype=np.float32).reshape(12, 2)


def on_disk(folder, capacity=16):
    return MemmapStorage(capacity, folder / "keys"), MemmapStorage(capacity, folder / "values")


def test_rows_on_disk_are_there_when_it_is_opened_again(tmp_path):
    table = RowMap(storage=on_disk(tmp_path))
    table[KEYS] = {"count": np.arange(12), "name": [f"row {n}" for n in range(12)]}
    table[KEYS[:2]] = {"count": np.array([50, 51]), "name": ["a", "b"]}
    again = RowMap(storage=on_disk(tmp_path))
    assert again[KEYS]["count"].tolist() == [50, 51, *range(2, 12)]
    assert again[KEYS[:3]]["name"] == ["a", "b", "row 2"]
    assert again.index(KEYS).tolist() == list(range(12))
    with pytest.raises(DataError, match="expected at most 4 new rows, found 5"):
        again[np.arange(10, dtype=np.float32).reshape(5, 2) + 100] = {"count": 1, "name": "new"}
    assert len(again) == 12


def test_two_that_share_storages_see_what_the_other_writes(tmp_path):
    one, other = (RowMap(storage=on_disk(tmp_path)) for _ in range(2))
    for step in range(6):
        mine, theirs = (one, other) if step % 2 else (other, one)
        mine.accumulate(KEYS[step : step + 4], 1)
        assert theirs.get(KEYS).tolist() == mine.get(KEYS).tolist()
        assert len(theirs) == len(mine)
    assert one.get(KEYS).tolist() == [1, 2, 3, 4, 4, 4, 3, 2, 1, 0, 0, 0]
    other.empty()
    assert not one.contains(KEYS).any()
    other.extend(KEYS[5:7], np.arange(2))
    assert one[KEYS[5:7]].tolist() == [0, 1]
    other.empty()
    other.extend(KEYS[:2], np.arange(2))  # as many as one knows
    assert one.index(KEYS[[0, 1, 5]]).tolist() == [0, 1, -1]


def test_a_write_that_fails_on_its_way_is_not_there():
    class Failing(ArrayStorage):
        fails = False

        def append(self, rows, *, one=False):
            if self.fails:
                raise OSError("no room")
            return super().append(rows, one=one)

    keys, values = Failing(16), ArrayStorage(16)
    table = RowMap(storage=(keys, values))
    table[KEYS[:3]] = np.arange(3)
    keys.fails = True
    with pytest.raises(OSError, match="no room"):
        table[KEYS[2:6]] = np.arange(4)
    assert table.index(KEYS[:6]).tolist() == [0, 1, 2, -1, -1, -1]
    keys.fails = False
    table[KEYS[4:8]] = np.arange(4, 8)
    assert table.get(KEYS[:8], -1)[3:].tolist() == [-1, 4, 5, 6, 7]


def test_values_without_their_keys_are_overwritten(tmp_path):
    """A process that dies between the two writes leaves values that no key has."""
    table = RowMap(storage=on_disk(tmp_path, 8))
    table[KEYS[:4]] = np.arange(4)
    on_disk(tmp_path, 8)[1].append(np.array([77]))
    assert table.get(KEYS[:5], -1).tolist() == [0, 1, 2, 3, -1]
    table[KEYS[5:6]] = np.array([5])
    assert table.get(KEYS[:6], -1).tolist() == [0, 1, 2, 3, -1, 5]
    on_disk(tmp_path, 8)[0].append(KEYS[7:9])
    with pytest.raises(StateError, match="expected the values of 7 rows, found the values of 5"):
        table.get(KEYS)


def test_storages_that_lost_rows_are_no_map():
    storage = ArrayStorage(4)
    storage.append(KEYS[:6])
    with pytest.raises(StateError, match="expected all 6 rows, found 4"):
        RowMap(storage=storage)


def test_storages_hold_distinct_rows_and_values_only_where_there_is_a_place():
    storage = ArrayStorage(8)
    storage.append(KEYS[[0, 1, 0]])
    with pytest.raises(StateError, match="found a row twice"):
        RowMap(storage=storage)
    keys_alone = RowMap(storage=ArrayStorage(8))
    keys_alone.extend(KEYS[:2])
    assert keys_alone.index(KEYS[:3]).tolist() == [0, 1, -1]
    with pytest.raises(SchemaError, match="no values"):
        keys_alone[KEYS[:2]] = 1
    with pytest.raises(ConfigError, match="expected a pair"):
        RowMap(storage=ArrayStorage(8)).extend(KEYS[:2], 1)


@pytest.mark.parametrize("options", [{}, {"capacity": 16}], ids=repr)
def test_what_was_saved_is_there_again(tmp_path, options):
    table = RowMap(["obs"], **options)
    for part in (slice(0, 4), slice(3, 7), slice(6, 8)):
        table[{"obs": KEYS[part]}] = {"n": np.arange(12)[part], "s": [str(n) for n in range(12)[part]]}
    table.dumps(tmp_path)
    again = RowMap(["obs"], **options)
    again[{"obs": KEYS[:1] + 90}] = {"n": 3, "s": "gone"}
    again.loads(tmp_path)
    others = [again, copy.deepcopy(table)]
    for _ in range(2):
        for other in others:
            assert len(other) == len(table)
            assert other.index({"obs": KEYS}).tolist() == table.index({"obs": KEYS}).tolist()
            assert other.values()["s"] == table.values()["s"]
        indices = [each.extend({"obs": KEYS[9:11]}, {"n": 0, "s": "new"}).tolist() for each in (table, *others)]
        assert indices[0] == indices[1] == indices[2]


def test_rows_without_values_are_saved_too(tmp_path):
    many = np.arange(100)
    table = RowMap()
    table.extend(many)
    table.dumps(tmp_path)
    again = RowMap()
    again.loads(tmp_path)
    assert again.extend(many[::-1] + 2).tolist() == [100, 101, *range(99, 1, -1)]
    single = RowMap(storage=ArrayStorage(12))
    single.extend(KEYS)
    other = RowMap(storage=ArrayStorage(12))
    other.load_state_dict(single.state_dict())
    assert other.index(KEYS).tolist() == list(range(12))
    valued = RowMap(capacity=12)
    valued[KEYS] = 1
    with pytest.raises(StateError, match="a map without values"):
        other.load_state_dict(valued.state_dict())
    assert len(other) == 12


def test_fields_that_a_storage_was_told_to_be_ragged_are(tmp_path):
    same, other = [np.arange(2), np.arange(2)], [np.arange(3), np.arange(2)]
    for storage in (ArrayStorage(8, ragged=["r"]), MemmapStorage(8, tmp_path / "rows", ragged=["r"])):
        table = RowMap(storage=storage)
        assert table.extend({"r": same}).tolist() == [0, 0]
        assert table.extend({"r": other}).tolist() == [1, 0]
        assert [row.tolist() for row in table.rows()["r"]] == [[0, 1], [0, 1, 2]]


def test_states_that_do_not_fit_change_nothing(tmp_path):
    table = RowMap(capacity=16)
    table[KEYS] = np.arange(12)
    state = table.state_dict()
    write_checkpoint(tmp_path / "newer", {**state, "format": 2})
    twice = {**state["keys"], "columns": {"0": KEYS * 0}}
    other = RowMap(capacity=16)
    other[KEYS[:1]] = np.array([9])
    for bad, message in [
        (read_checkpoint(tmp_path / "newer"), "expected format 1, found 2"),
        ({**state, "kind": "rows"}, "expected the state of a row map"),
        ({**state, "grows": True}, "expected the state of a map with the capacity 16"),
        ({**state, "keys": twice}, "found a row twice"),
        ({**state, "keys": None}, "expected a state of rows"),
        ({**state, "values": {**state["values"], "size": 5}}, "expected"),
        (3, "expected the state of a row map"),
    ]:
        with pytest.raises(StateError, match=message):
            other.load_state_dict(bad)
        assert other.get(KEYS[:2], -1).tolist() == [9, -1]
    other.load_state_dict(state)
    assert other[KEYS].tolist() == list(range(12))


def test_two_processes_count_together(tmp_path):
    def work():
        table = RowMap(storage=on_disk(tmp_path, 64))
        for number in range(20):
            table.accumulate(np.arange(number, number + 3), 1)

    workers = [forked(work) for _ in range(2)]
    assert [os.waitpid(worker, 0)[1] for worker in workers] == [0, 0]
    counts = RowMap(storage=on_disk(tmp_path, None))
    assert counts[np.arange(22)].tolist() == [2, 4, *[6] * 18, 4, 2]


def test_hashes_are_of_the_bytes_and_of_the_seed():
    rows = {"a": np.arange(1000, dtype=np.uint16), "b": np.zeros((1000, 3), np.uint8)}
    hashes = row_hash(rows)
    assert hashes.shape == (1000, 2)
    assert len({*map(tuple, hashes.tolist())}) == 1000
    for lane in range(2):  # each bit is set in about half of them
        ones = np.unpackbits(hashes[:, lane : lane + 1].copy().view(np.uint8), axis=1).mean(axis=0)
        assert (abs(ones - 0.5) < 0.1).all()
    assert (row_hash(rows, seed=1) != hashes).all()
    assert (row_hash(rows)[::-1] == row_hash({name: leaf[::-1] for name, leaf in rows.items()})).all()
    # What they are is an interface: maps of other machines, and of later releases, have the same.
    assert row_hash(np.array([[1.0, 2.0]])).tolist() == PINNED[0]
    assert row_hash(np.arange(600, dtype=np.float32)[None]).tolist() == PINNED[1]
    assert row_hash(["text"]).tolist() == PINNED[2]


PINNED = [
    [[1666680647884631909, 13588587346060589352]],
    [[13645220852532762087, 4650683558833227010]],
    [[8049278642673359067, 14460519318241663930]],
]


def test_text_is_no_number():
    for function in (binary_to_decimal, lambda rows: random_projection(rows, 2)):
        with pytest.raises(SchemaError, match="expected numbers"):
            function(["a", "b"])


def test_numbers_of_bits_and_of_hashes():
    bits = np.array([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]])
    assert binary_to_decimal(bits, width=4).tolist() == [3, 2]
    assert binary_to_decimal(bits).tolist() == [33, 2]
    with pytest.raises(ConfigError, match="divide the 8"):
        binary_to_decimal(bits, width=3)
    assert hash_to_int(row_hash(KEYS[[4, 1, 4, 0]])).tolist() == [0, 1, 0, 2]


def test_random_projections_keep_what_is_near_together():
    images = np.random.default_rng(0).random((3, 30, 30)).astype(np.float32)
    images[1] = images[0] + 1e-4
    codes = random_projection(images, 64, seed=3)
    assert codes.shape == (3, 64)
    assert np.linalg.norm(codes[0] - codes[1]) < 0.05 < np.linalg.norm(codes[0] - codes[2])
    lengths = np.linalg.norm(random_projection(np.eye(40), 64), axis=1)
    assert np.allclose(lengths, 1)
    assert (codes == random_projection(images, 64, seed=3)).all()
    assert (codes != random_projection(images, 64)).any()
