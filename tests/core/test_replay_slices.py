"""Slices against rows that say themselves where they belong."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, MissingFieldError, SchemaError, StateError
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.replay.storages.array import ArrayStorage
from tests.core.oracle import assert_same
from tests.core.replay_cases import filled
from tests.core.statistics import check_frequencies
from tests.raising import assert_raises


class World:
    """Rows of some environments, each with its number, environment and the number of its episode."""

    def __init__(self, num_envs: int, mode: str) -> None:
        self.num_envs, self.mode = num_envs, mode
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]
        self.episodes = list(range(num_envs))

    def __len__(self) -> int:
        return len(self.rows[0])

    def make(self, n: int, rng: np.random.Generator, often: float = 0.15) -> dict[str, Any]:
        """``n`` more steps, as a tree ``[n, E]``, or ``[n]`` of one environment; only a number tells silent ends."""
        for env, rows in enumerate(self.rows):
            for _ in range(n):
                kinds = ["no", "over", "silent" if self.mode == "both" else "cut"]
                kind = rng.choice(kinds, p=[1 - often, often / 2, often / 2])
                row = {"row": len(rows), "env": env, "episode": self.episodes[env]}
                row |= {"terminated": kind == "over", "truncated": kind == "cut"}
                rows.append(row)
                if kind != "no":
                    self.episodes[env] += self.num_envs
        return self.tree([rows[-n:] for rows in self.rows])

    def tree(self, rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
        names = ["row", "env", "number"] + ["episode"] * (self.mode != "flag")
        names += ["terminated", "truncated"] * (self.mode != "id")
        sources = {"number": "episode"}
        tree = {name: np.array([[row[sources.get(name, name)] for row in env] for env in rows]).T for name in names}
        return tree if self.num_envs > 1 else {name: values[:, 0] for name, values in tree.items()}

    @property
    def keys(self) -> dict[str, Any]:
        ends = {"end_key": "terminated", "truncated_key": "truncated"}
        return {"id": {"traj_key": "episode"}, "flag": ends, "both": {}}[self.mode]

    def alive(self, capacity: int) -> list[list[dict[str, Any]]]:
        stretches: list[list[dict[str, Any]]] = []
        for rows in self.rows:
            for row in rows[max(0, len(rows) - capacity) :]:
                if stretches and (stretches[-1][-1]["env"], stretches[-1][-1]["episode"]) == (
                    row["env"], row["episode"]
                ):  # fmt: skip
                    stretches[-1].append(row)
                else:
                    stretches.append([row])
        return stretches


def slices_of(batch: dict[str, Any]) -> list[list[tuple[int, int, int, int]]]:
    """Environment, row, number of the episode and id of every step that is there, slice by slice."""
    columns = [np.asarray(batch[name]) for name in ("env", "row", "number", "traj_id")]
    if batch["index"].ndim == 1:
        cuts = np.nonzero(np.diff(batch["slice_id"]))[0] + 1
        assert batch["slice_id"].tolist() == sorted(batch["slice_id"].tolist())
        parts = [np.split(column, cuts) for column in columns]
    else:
        there = batch.get("mask", np.ones(batch["index"].shape, bool))
        parts = [[values[kept] for values, kept in zip(column, there, strict=True)] for column in columns]
    return [list(zip(*(part.tolist() for part in one), strict=True)) for one in zip(*parts, strict=True)]


def check_slices(
    batch: dict[str, Any], world: World, capacity: int, length: int, options: dict[str, Any], tiled: bool
) -> None:
    homes = {}
    for stretch in world.alive(capacity):
        for row in stretch:
            homes[row["env"], row["row"], row["episode"]] = (stretch[0]["row"], stretch[-1]["row"] + 1)
    ids: dict[int, int] = {}
    left, right = options.get("span", (False, False))
    for one in slices_of(batch):
        env, first, number, traj_id = one[0]
        begin, end = homes[env, first, number]
        assert [row for _, row, _, _ in one] == list(range(first, first + len(one)))
        assert {(step[0], step[2], step[3]) for step in one} == {(env, number, traj_id)}
        assert begin <= first
        assert first + len(one) <= end
        if world.mode == "id":
            assert traj_id == number
        assert ids.setdefault(traj_id, number) == number
        full = min(length, end - begin)
        if options["strict_length"] and not options.get("pad"):
            assert end - begin >= length
        missing = full - len(one)
        if missing and not tiled:
            touches = (left and first == begin) or (right and first + len(one) == end)
            most = max(length - 1 if side is True else side for side in (left, right))
            assert touches
            assert missing <= most
    for name, values in batch.items():
        assert values.flags.c_contiguous or name in ("mask",), name


@given(
    data=st.data(),
    num_envs=st.integers(1, 3),
    capacity=st.integers(2, 30),
    mode=st.sampled_from(["id", "flag", "both"]),
    replacement=st.booleans(),
)
def test_slices_lie_in_one_episode_whatever_happens(
    data: st.DataObject, num_envs: int, capacity: int, mode: str, replacement: bool
) -> None:
    length = data.draw(st.integers(1, 6))
    world = World(num_envs, mode)
    options: dict[str, Any] = {"strict_length": data.draw(st.booleans()), "pad": data.draw(st.booleans())}
    if replacement:
        sides = st.one_of(st.booleans(), st.integers(0, length - 1))
        options |= {"span": (data.draw(sides), data.draw(sides))}
        options |= {"weighting": data.draw(st.sampled_from(["step", "trajectory"]))}

    def make(seed: int = 9) -> ReplayBuffer:
        kind = SliceSampler if replacement else SliceSamplerWithoutReplacement
        sampler = kind(sequence_length=length, **world.keys, **options)
        storage = ArrayStorage(capacity * num_envs, ndim=min(num_envs, 2))
        return ReplayBuffer(storage, sampler, batch_size=3, seed=seed)

    buffer = make()
    for _ in range(data.draw(st.integers(1, 8))):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        step = data.draw(st.sampled_from(["add", "extend", "extend", "same", "move", "restore", "empty"]))
        if step in ("add", "extend") or not len(world):
            n = 1 if step == "add" else int(rng.integers(1, 2 * capacity + 2))
            rows = world.make(n, rng)
            if step == "add":
                buffer.append({name: values[0] for name, values in rows.items()})
            else:
                buffer.extend(rows)
        elif step == "same":
            # The same rows written in place: nothing changes.
            slots = rng.integers(0, len(buffer), 3)
            buffer[slots] = buffer[slots]
        elif step == "move" and mode != "both":
            # One row joins the episode before, or gets one of its own.
            rows = world.rows[0]
            row = int(rng.integers(max(0, len(rows) - capacity), len(rows)))
            if mode == "flag":
                rows[row]["terminated"] = not rows[row]["terminated"]
                rows[row]["truncated"] = False
            else:
                rows[row]["episode"] = rows[row - 1]["episode"] if row and rng.integers(2) else 1000 + row
            if mode == "flag":
                number = world.rows[0][0]["episode"]
                for other in rows:
                    other["episode"] = number
                    number += num_envs * (other["terminated"] or other["truncated"])
                world.episodes[0] = number
                relabelled = np.arange(max(0, len(rows) - capacity), len(rows))
            else:
                relabelled = np.array([row])
            slots = relabelled % capacity * num_envs
            tree = world.tree([[rows[place] for place in relabelled]] * num_envs)
            buffer[slots] = {name: values[:, 0] for name, values in tree.items()} if num_envs > 1 else tree
        elif step == "restore":
            before, buffer = buffer, make(seed=0)
            buffer.load_state_dict(before.state_dict())
            for _ in range(2):
                try:
                    expected = before.sample()
                except ConfigError:
                    break
                assert_same(buffer.sample(), expected)
        elif step == "empty":
            buffer.empty()
            world = World(num_envs, mode)
            continue
        stretches = world.alive(capacity)
        strict = options["strict_length"] and not options["pad"]
        tiles = sum(len(one) // length if strict else -(-len(one) // length) for one in stretches)
        fits = any(len(one) >= length for one in stretches) or not strict
        if not fits or (not replacement and tiles < 3):
            assert_raises(ConfigError, "slices", buffer.sample)
            continue
        batch = buffer.sample()
        check_slices(batch, world, capacity, length, options, tiled=not replacement)
        assert len(slices_of(batch)) <= 3


def episodes_buffer(lengths: list[int], sampler: Any, batch_size: int, *, overwritten: int = 0) -> ReplayBuffer:
    number = np.repeat(np.arange(len(lengths)), lengths)
    done = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    buffer = ReplayBuffer(ArrayStorage(len(done) - overwritten), sampler, batch_size=batch_size, seed=21)
    buffer.extend({"row": np.arange(len(done)), "number": number, "done": done})
    return buffer


@pytest.mark.parametrize("weighting", ["step", "trajectory"])
@pytest.mark.parametrize("strict", [True, False])
def test_weighting(weighting: Any, strict: bool) -> None:
    lengths, length = [3, 4, 9, 30, 2, 12], 4
    sampler = SliceSampler(sequence_length=length, weighting=weighting, strict_length=strict, pad=not strict)
    buffer = episodes_buffer(lengths, sampler, 2000, overwritten=2)  # the first episode has one row left
    drawn = np.concatenate([buffer.sample()["row"][:, 0] for _ in range(12)])
    expected, first = np.zeros(sum(lengths)), 0
    for steps in lengths:
        begin = max(first, 2)
        alive = first + steps - begin
        count = max(alive - length + 1, 0 if strict else 1)
        expected[begin : begin + count] = 1.0 if weighting == "step" else 1.0 / max(count, 1)
        first += steps
    check_frequencies(np.bincount(drawn, minlength=len(expected)), expected / expected.sum())


def test_every_environment_comes_as_often_as_it_has_slices() -> None:
    done = np.zeros((40, 3), bool)
    done[[9, 19, 29, 39], 1] = True
    done[::2, 2] = True  # too short
    sampler = SliceSampler(sequence_length=5, pad=False)
    buffer = ReplayBuffer(ArrayStorage(120, ndim=2), sampler, batch_size=3000)
    buffer.extend({"done": done, "env": np.tile(np.arange(3), (40, 1)), "t": np.arange(40)[:, None].repeat(3, 1)})
    batches = [buffer.sample() for _ in range(4)]
    counts = Counter(
        (env, t)
        for batch in batches
        for env, t in zip(batch["env"][:, 0].tolist(), batch["t"][:, 0].tolist(), strict=True)
    )
    there = [(0, t) for t in range(36)] + [(1, t) for t in range(40) if t % 10 <= 5]
    assert set(counts) == set(there)
    check_frequencies(np.array([counts[place] for place in there]), np.full(len(there), 1 / len(there)))


def test_the_ways_to_treat_short_episodes() -> None:
    lengths = [2, 5]
    dropped = episodes_buffer(lengths, SliceSampler(sequence_length=4, pad=False), 10).sample()
    assert dropped["index"].shape == (10, 4)
    assert set(dropped["number"].reshape(-1).tolist()) == {1}
    assert "mask" not in dropped

    flat = episodes_buffer(lengths, SliceSampler(sequence_length=4, strict_length=False, pad=False), 10).sample()
    sizes = Counter(flat["slice_id"].tolist())
    assert list(sizes) == list(range(10))
    assert set(sizes.values()) == {2, 4}
    assert flat["row"].shape == flat["traj_id"].shape == flat["index"].shape == (sum(sizes.values()),)

    padded = episodes_buffer(lengths, SliceSampler(sequence_length=4), 10).sample()
    assert padded["row"].shape == padded["mask"].shape == (10, 4)
    for row, mask in zip(padded["row"].tolist(), padded["mask"].tolist(), strict=True):
        assert (mask == [True] * 4) if row[0] > 1 else (row == [0, 1, 1, 1] and mask == [True, True, False, False])

    filled = episodes_buffer(lengths, SliceSampler(sequence_length=4, pad=1), 10).sample()
    assert not filled["mask"].all()
    for name in ("row", "number", "done"):
        assert (filled[name][~filled["mask"]] == 1).all()
    np.testing.assert_array_equal(filled["row"][filled["mask"]], padded["row"][padded["mask"]])
    for pad, field in ((-1, "done"), (np.nan, "row"), (0.5, "row")):
        with pytest.raises(DataError, match=f"field '{field}': expected a pad that"):
            episodes_buffer(lengths, SliceSampler(sequence_length=4, pad=pad), 10).sample()


def test_a_span_reaches_over_the_ends_of_long_and_short_episodes() -> None:
    lengths = [6]
    batch = episodes_buffer(lengths, SliceSampler(sequence_length=4, span=(2, True), pad=True), 400).sample()
    found = Counter(tuple(zip(row, mask, strict=True)) for row, mask in
                    zip(batch["row"].tolist(), batch["mask"].tolist(), strict=True))  # fmt: skip
    expected = set()
    for start in range(-2, 6):
        steps = range(start, start + 4)
        expected.add(tuple((min(max(step, 0), 5), 0 <= step <= 5) for step in steps))
    assert set(found) == expected
    flat = episodes_buffer(lengths, SliceSampler(sequence_length=4, span=1, pad=False), 100).sample()
    assert set(Counter(flat["slice_id"].tolist()).values()) == {3, 4}
    sampler = SliceSampler(sequence_length=5, span=(True, 1), strict_length=False, pad=True)
    batch = episodes_buffer([3], sampler, 200).sample()
    found = {tuple(row[mask].tolist()) for row, mask in zip(batch["row"], batch["mask"], strict=True)}
    assert found == {(0,), (0, 1), (0, 1, 2), (1, 2)}


@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        *(({}, SliceSampler), ({"traj_key": "traj_id"}, SliceSamplerWithoutReplacement), ({"pad": -1.0}, SliceSampler)),
        *(({"end_key": "done"}, PrioritizedSliceSampler), ({"pad": True}, PrioritizedSliceSampler)),
    ],
)
def test_numbers_of_trajectories_that_rows_have_themselves_pass_through(sampler: Any, options: dict[str, Any]) -> None:
    numbers = np.repeat([70, 12, 33, 5], 6).astype(np.int16)
    rows = {"traj_id": numbers, "row": np.arange(24), "done": (np.arange(1, 25) % 6 == 0).astype(np.int8)}
    buffer = filled(rows, 24, sampler(sequence_length=4, **options), batch_size=4)
    batch = buffer.sample()
    there = batch.get("mask", np.ones((4, 4), bool))
    assert batch["traj_id"].dtype == np.int16
    np.testing.assert_array_equal(batch["traj_id"][there], numbers[batch["row"][there]])
    assert (batch["traj_id"][~there] != -1).sum() == 0 or options.get("pad", True) is True


def test_traj_ids_stay_with_their_episodes_and_texts_pass_through() -> None:
    sampler = SliceSampler(sequence_length=2)
    buffer = ReplayBuffer(ArrayStorage(20), sampler, batch_size=100, seed=1)
    known: dict[int, int] = {}
    for first in range(0, 90, 9):
        rows = np.arange(first, first + 9)
        buffer.extend({"row": rows, "done": rows % 5 == 4})
        if first == 45:
            other = ReplayBuffer(ArrayStorage(20), SliceSampler(sequence_length=2), batch_size=100, seed=1)
            other.load_state_dict(buffer.state_dict())
            buffer = other
        batch = buffer.sample()
        for row, traj_id in zip(batch["row"][:, 0].tolist(), batch["traj_id"][:, 0].tolist(), strict=True):
            assert known.setdefault(row // 5, traj_id) == traj_id
    assert len(set(known.values())) == len(known)
    buffer = ReplayBuffer(ArrayStorage(12), SliceSampler(sequence_length=3), batch_size=2)
    buffer.extend({"traj_id": ["a"] * 4 + ["b"] * 8, "row": np.arange(12), "done": np.arange(12) == 3})
    batch = buffer.sample()
    names = np.array(batch["traj_id"]).reshape(batch["row"].shape)
    assert (names == np.where(batch["row"] < 4, "a", "b")).all()


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    length=st.integers(1, 5),
    batch=st.integers(1, 4),
    strict=st.booleans(),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_an_epoch_has_every_slice_once(
    lengths: list[int], length: int, batch: int, strict: bool, drop_last: bool, shuffle: bool
) -> None:
    sampler = SliceSamplerWithoutReplacement(
        sequence_length=length, strict_length=strict, pad=not strict, drop_last=drop_last, shuffle=shuffle
    )
    buffer = episodes_buffer(lengths, sampler, batch)
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    every = [
        list(range(first + place, min(first + place + length, first + steps)))
        for first, steps in zip(firsts, lengths, strict=True)
        for place in range(0, steps, length)
        if not strict or place + length <= steps
    ]
    if len(every) < batch:
        assert_raises(ConfigError, "slices", buffer.sample)
        return
    per_epoch = len(every) // batch if drop_last else -(-len(every) // batch)
    orders = []
    for _ in range(3):
        seen: list[list[int]] = []
        for number in range(per_epoch):
            found = buffer.sample()
            there = found.get("mask", np.ones(found["row"].shape, bool))
            seen += [row[kept].tolist() for row, kept in zip(found["row"], there, strict=True)]
            assert buffer.ran_out == (number == per_epoch - 1)
        assert len(seen) == (per_epoch * batch if drop_last else len(every))
        assert len({tuple(one) for one in seen}) == len(seen)
        assert all(one in every for one in seen)
        orders.append(seen)
        if not shuffle:
            assert seen == every[: len(seen)]
    if shuffle and len(every) > 6:
        assert orders[0] != orders[1] or orders[1] != orders[2]


def test_a_write_begins_an_epoch_and_slices_keep_their_places() -> None:
    sampler = SliceSamplerWithoutReplacement(sequence_length=2, shuffle=False, pad=False)
    buffer = episodes_buffer([4, 4], sampler, 2)
    assert buffer.sample()["row"].tolist() == [[0, 1], [2, 3]]
    buffer.extend({"row": [8], "number": [9], "done": [False]})  # over row 0
    assert buffer.sample()["row"].tolist() == [[1, 2], [4, 5]]
    storage = ArrayStorage(31)
    buffers = [
        ReplayBuffer(storage, SliceSampler(sequence_length=4, pad=False, period=3), batch_size=500) for _ in range(2)
    ]
    buffers[0].extend({"done": np.arange(48) % 16 == 15})
    state = buffers[0].state_dict()
    begins = [{*buffer.sample()["index"][:, 0].tolist()} for buffer in buffers]
    buffers[0].load_state_dict(state)
    assert [{*buffer.sample()["index"][:, 0].tolist()} for buffer in buffers] == begins
    assert begins[0] == begins[1]


@pytest.mark.parametrize(
    ("names", "there"),
    [
        (("done",), "done"),
        (("terminated", "truncated"), "truncated"),
        (("next/done", "done"), "next/done"),
        (("next/terminated", "next/truncated", "done"), "next/truncated"),
        (("collector/traj_ids",), "collector/traj_ids"),
        (("episode",), "episode"),
        (("traj_id_of_mine", "traj_id_2"), None),
    ],
)
def test_fields_that_say_where_episodes_end(names: tuple[str, ...], there: str | None) -> None:
    rows: dict[str, Any] = {"row": np.arange(20)}
    for name in names:
        ids = name in ("collector/traj_ids", "episode")
        column = (
            (np.arange(20) // 5 if ids else np.arange(20) % 5 == 4) if name == there else np.zeros((20, 1), np.int8)
        )
        *outer, last = name.split("/")
        (rows.setdefault(outer[0], {}) if outer else rows)[last] = column
    buffer = filled(rows, 20, SliceSampler(sequence_length=5), batch_size=20)
    if there is None:
        assert_raises(MissingFieldError, "expected end_key=, truncated_key= or traj_key=", buffer.sample)
        return
    assert set(buffer.sample()["row"][:, 0].tolist()) == {0, 5, 10, 15}


@pytest.mark.parametrize("how", ["extend", "one by one", "reset"])
def test_fields_that_contradict_each_other_are_named(how: str) -> None:
    def sampled(rows: dict[str, Any], **options: Any) -> Any:
        buffer = ReplayBuffer(ArrayStorage(40), SliceSampler(sequence_length=2, **options), batch_size=200)
        rows = {"row": np.arange(20), **rows}
        if how == "one by one":
            for number in range(20):
                buffer.append({name: values[number] for name, values in rows.items()})
                if number:
                    buffer.sample()
        else:
            buffer.extend(rows)
        if how == "reset":
            buffer[3] = buffer[3]
        return buffer.sample()["row"]

    ends, ids = np.arange(20) % 5 == 4, np.arange(20) // 10
    with pytest.warns(
        UserWarning, match=r"row 5 begins an episode according to \['done'\], but 'traj' does not change; both mark"
    ) as seen:
        rows = sampled({"done": ends, "traj": ids})
    assert len(seen) == 1
    assert not (rows % 5 == 4)[:, 0].any()
    with pytest.warns(
        UserWarning,
        match=r"row 5 begins an episode according to \['done'\], which end_key= and traj_key= do not",
    ):
        rows = sampled({"done": ends, "traj": ids}, traj_key="traj")
    assert (rows[:, 0] == 4).any()
    assert not (rows[:, 0] == 9).any()
    with pytest.warns(UserWarning, match=r"row 10 begins an episode according to \['traj'\], which"):
        sampled({"done": np.zeros(20, bool), "traj": ids}, end_key="done")
    with pytest.warns(UserWarning, match=r"row 5 begins an episode according to \['truncated'\], which"):
        sampled({"done": np.zeros(20, bool), "truncated": ends}, end_key="done")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled({"done": np.zeros(20, bool), "traj": ids})  # cut off by who collected them
        sampled({"done": ends, "traj": np.arange(20) // 5})
        sampled({"done": ends, "episode": np.random.default_rng(0).normal(size=20)})  # no numbers of episodes


def test_fields_and_batches_that_cannot_be() -> None:
    def sampled(column: Any, **options: Any) -> None:
        buffer = ReplayBuffer(ArrayStorage(20), SliceSampler(sequence_length=5, **options), batch_size=20)
        buffer.extend({"row": np.arange(20), "x": column})
        buffer.sample()

    with pytest.raises(SchemaError, match="'x': expected one value per row, found rows of shape \\[2\\]"):
        sampled(np.zeros((20, 2)), end_key="x")
    assert_raises(SchemaError, r"'x': expected integers, found 0\.5", sampled, np.full(20, 0.5), traj_key="x")
    assert_raises(MissingFieldError, "end", sampled, np.zeros(20), end_key="end")
    sampled(np.zeros(20), traj_key="x")
    buffer = ReplayBuffer(ArrayStorage(20), SliceSampler(sequence_length=6, pad=False), batch_size=4)
    assert_raises(ConfigError, "found an empty buffer", buffer.sample)
    buffer.extend({"done": np.arange(20) % 5 == 4})
    assert_raises(ConfigError, "an episode of at least 6 steps, found episodes of at most 5 steps", buffer.sample)
    cut = filled({"done": np.zeros(5, np.bool_)}, 5, SliceSampler(sequence_length=4, pad=False, period=4), batch_size=4)
    cut.extend({"done": np.zeros(1, np.bool_)})  # of the steps 1 to 5 those from 4 on count, and are too few
    assert_raises(ConfigError, r"expected a row .* \(period 4\) with 4 steps after it, found none", cut.sample)
    few = filled({"done": np.arange(20) % 5 == 4}, 20, SliceSamplerWithoutReplacement(sequence_length=5), batch_size=5)
    assert_raises(ConfigError, r"expected a batch .* at most 4 slices, .* of 5 steps, found batch_size 5", few.sample)
    assert few.sample(4)["index"].shape == (4, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sequence_length": 0}, "sequence_length: expected an integer of at least 1"),
        ({"sequence_length": 2.0}, "sequence_length: expected an integer of at least 1"),
        ({"sequence_length": 2, "span": 2}, "span: expected less than the 2 steps"),
        ({"sequence_length": 2, "span": -1}, "span: expected True, False or an integer"),
        ({"sequence_length": 2, "span": (1, 0, 0)}, "span: expected True, False or an integer"),
        ({"sequence_length": 2, "pad": "zero"}, "pad: expected True, False or a number"),
        ({"sequence_length": 2, "strict_length": 1}, "strict_length: expected True or False"),
        ({"sequence_length": 2, "weighting": "length"}, "weighting: expected one of"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], says: str) -> None:
    assert_raises(ConfigError, says, SliceSampler, **options)


def test_states_that_cannot_be() -> None:
    sampler = SliceSampler(sequence_length=2)
    buffer = episodes_buffer([4, 4, 4], sampler, 4, overwritten=3)
    expected = [buffer.sample()["row"].tolist()]
    state = sampler.state_dict()
    assert_raises(StateError, "sampler: expected the state of", SliceSampler(sequence_length=3).load_state_dict, state)
    for change in (
        {"begins": state["begins"][::-1]},
        {"begins": state["begins"][1:]},
        {"begins": state["begins"] + 4},
        {"counts": np.array([-1])},
        {"counts": np.array([1, 2])},
        {"ids": np.zeros(3)},
        {"steps": np.array([1, 9, 13, 12])},
        {"steps": np.array([1, 9])},
    ):
        assert_raises(StateError, r"sampler: expected|sampler: not", sampler.load_state_dict, {**state, **change})
    sampler.load_state_dict(state)
    other = episodes_buffer([4, 4, 4], SliceSampler(sequence_length=2), 4, overwritten=3)
    assert [other.sample()["row"].tolist()] == expected
    assert buffer.sample()["row"].tolist() == other.sample()["row"].tolist()


@pytest.mark.parametrize(
    ("sampler", "ends", "rows"),
    [(SliceSampler, {}, 18), (SliceSamplerWithoutReplacement, {"done": 0}, 21), (PrioritizedSliceSampler, {}, 21)],
)
def test_environments_that_take_turns_are_told_of_ndim_2(sampler: Any, ends: dict[str, int], rows: int) -> None:
    more = {name: np.full(rows, value) for name, value in ends.items()}
    says = r"'episode' recur after other values: do rows of several env.*ndim=2"
    strict = filled({"episode": np.arange(rows) % 6, **more}, 18, sampler(sequence_length=4, pad=False), batch_size=2)
    assert_raises(ConfigError, says, strict.sample)
    padded = filled({"episode": np.arange(rows) % 6, **more}, 18, sampler(sequence_length=4), batch_size=2)
    with pytest.warns(UserWarning, match=says):
        padded.sample()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        padded.sample()


def test_short_episodes_in_their_order_are_not_told_of_ndim_2() -> None:
    for rows in (17, 20, 22):  # also where the ring's ends meet in an episode
        buffer = filled({"episode": np.arange(rows) // 3}, 17, SliceSampler(sequence_length=4, pad=False), batch_size=2)
        assert_raises(ConfigError, "found episodes of at most 3 steps; pad=True accepts shorter", buffer.sample)
        padded = filled({"episode": np.arange(rows) // 3}, 17, SliceSampler(sequence_length=4), batch_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            padded.sample()


def test_a_loaded_buffer_follows_the_episodes_of_the_one_that_was_saved(tmp_path: Path) -> None:
    """Also a write of the whole ring, which replaces the row that it differs from; and a buffer saved without rows."""
    zeros = np.zeros(4, np.int8)
    for name, keys, first, later, writes, begins in (
        ("rows", {}, {"done": zeros, "episode": np.full(4, 1)}, {"done": zeros, "episode": np.full(4, 2)}, 1, {0, 3}),
        ("none", {"end_key": "done"}, {"done": zeros[:0]}, {"done": zeros[:1]}, 8, {6 % 4}),
    ):
        sampler = {"sequence_length": 1, "period": 3, **keys}
        whole, loaded = (ReplayBuffer(ArrayStorage(4), SliceSampler(**sampler), batch_size=64) for _ in range(2))
        whole.extend(first)
        whole.dumps(tmp_path / name)
        loaded.loads(tmp_path / name)
        for buffer in (whole, loaded):
            for _ in range(writes):
                buffer.extend(later)
            assert {*buffer.sample()["index"][:, 0].tolist()} == begins
