"""Where the rows of maps lie, and how they are saved; hashes and codes."""

import copy

import numpy as np
import pytest

from mouse_core.errors import ConfigError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.maps import RowMap, binary_to_decimal, hash_to_int, random_projection, row_hash
from mouse_core.replay import ArrayStorage

KEYS = np.arange(24, dtype=np.float32).reshape(12, 2)


def test_a_write_that_fails_on_its_way_is_not_there(monkeypatch):
    class Failing(ArrayStorage):
        fails = False

        def append(self, rows, *, one=False):
            if self.fails and rows.ndim == 2:  # keys, after the values
                raise OSError("no room")
            return super().append(rows, one=one)

    monkeypatch.setattr("mouse_core.maps.row_map.ArrayStorage", Failing)
    table = RowMap()
    table[KEYS[:3]] = np.arange(3)
    Failing.fails = True
    with pytest.raises(OSError, match="no room"):
        table[KEYS[2:6]] = np.arange(4)
    assert table.index(KEYS[:6]).tolist() == [0, 1, 2, -1, -1, -1]
    Failing.fails = False
    table[KEYS[4:8]] = np.arange(4, 8)
    assert table.get(KEYS[:8], -1)[3:].tolist() == [-1, 4, 5, 6, 7]


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


def test_states_that_do_not_fit_change_nothing(tmp_path):
    table = RowMap(capacity=16)
    table[KEYS] = np.arange(12)
    state = table.state_dict()
    write_checkpoint(tmp_path / "newer", {**state, "format": 2})
    twice = {**state["keys"], "columns": {"0": KEYS * 0}}
    shorter, other = RowMap(capacity=16), RowMap(capacity=16)
    shorter[KEYS[:3]] = np.arange(3)
    other[KEYS[:1]] = np.array([9])
    for bad, message in [
        (read_checkpoint(tmp_path / "newer"), "expected format 1, found 2"),
        ({**state, "kind": "rows"}, "expected the state of a row map"),
        ({**state, "grows": True}, "expected the state of a map with the capacity 16"),
        ({**state, "keys": twice}, "found a key twice"),
        ({**state, "keys": None}, "expected a state of rows"),
        ({**state, "values": {**state["values"], "size": 5}}, "expected"),
        ({**state, "keys": {**state["keys"], "written": 14}}, "expected 14 rows in the state, found 12"),
        ({**state, "values": shorter.state_dict()["values"]}, "the values of 12 rows, found the values of 3"),
        (3, "expected the state of a row map"),
    ]:
        with pytest.raises(StateError, match=message):
            other.load_state_dict(bad)
        assert other.get(KEYS[:2], -1).tolist() == [9, -1]
    other.load_state_dict(state)
    assert other[KEYS].tolist() == list(range(12))


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
    with pytest.raises(ConfigError, match="divides the row length 8"):
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
