"""Windows of lengths of their own, padded and packed: which rows they are, by an oracle in plain Python."""

import pickle
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mouse_core import (
    AugmentMaskProbConfig,
    AugmentTokensConfig,
    BatchSource,
    ConfigError,
    DataError,
    DatasetStore,
    Field,
    Map,
    PrefetchBatchifier,
    SchemaError,
    StateError,
    WorkerError,
)
from mouse_core.digest import StreamDigest
from mouse_core.mixtures import Mixture, MixtureSource
from mouse_core.sampling import EpisodeWindows, RandomWindows
from mouse_core.sampling.lengths import DrawnLengths
from mouse_core.testing import SourceConformance, WindowSamplerConformance, example_columns, example_store
from tests.core.oracle import assert_same
from tests.core.test_batches import expected_arrays
from tests.core.worlds import Part, World, build, parts, worlds

STORE, RAW = example_store(300), example_columns(300)
PACKED = ("cu_seqlens", "position", "sequence_id", "mask")
Fields = dict[str, np.ndarray]

CHOSEN = st.fixed_dictionaries(
    {
        "sequence_length": st.integers(1, 9),
        "batch_size": st.integers(1, 7),
        "seed": st.integers(0, 2**64 - 1),
        "boundary": st.sampled_from(["stream", "episode"]),
        "lengths": st.sampled_from([None, "any", "short"]),
    }
).map(lambda drawn: drawn | {"lengths": lengths_of(drawn["lengths"], drawn["sequence_length"])})


def lengths_of(kind: str | None, longest: int) -> list[int] | None:
    return {None: None, "any": list(range(1, longest + 1)), "short": [1, (longest + 1) // 2]}[kind]


def described(lengths: list[int], capacity: int | None = None) -> Fields:
    """Where sequences lie, one row after the other."""
    bounds, position, sequence = [0], [], []
    for number, length in enumerate(lengths):
        bounds.append(bounds[-1] + length)
        position += list(range(length))
        sequence += [number] * length
    missing = 0 if capacity is None else capacity - bounds[-1]
    found = {
        "cu_seqlens": np.array(bounds, np.int32),
        "position": np.array(position + [0] * missing, np.int32),
        "sequence_id": np.array(sequence + [len(lengths)] * missing, np.int32),
    }
    if capacity is not None:
        found["mask"] = np.array([True] * bounds[-1] + [False] * missing, np.bool_)
    return found


def packed_of(arrays: Fields, starts: list[int], lengths: list[int], capacity: int | None = None) -> Fields:
    rows = [start + step for start, length in zip(starts, lengths, strict=True) for step in range(length)]
    missing = 0 if capacity is None else capacity - len(rows)
    found = {}
    for name, array in arrays.items():
        values = np.zeros((len(rows) + missing, *array.shape[1:]), array.dtype)
        for place, row in enumerate(rows):
            values[place] = array[row]
        found[name] = values
    return found | described(lengths, capacity)


def packed_from(batch: Fields, capacity: int | None = None) -> Fields:
    """A padded batch without its padding, window by window."""
    shape = next(iter(batch.values())).shape[:2]
    mask = batch.get("mask", np.ones(shape, np.bool_))
    lengths = [sum(window) for window in mask.tolist()]
    total = sum(lengths)
    made = {}
    for name, values in batch.items():
        if name != "mask":
            there = [values[window, :length] for window, length in enumerate(lengths)]
            missing = np.zeros((0 if capacity is None else capacity - total, *values.shape[2:]), values.dtype)
            made[name] = np.concatenate([*there, missing])
    return made | described(lengths, capacity)


@settings(max_examples=5)
@given(chosen=CHOSEN, world=worlds(), wanted=parts(max_parts=3), whole=st.booleans())
def test_any_store_gives_what_the_oracle_says(
    chosen: dict[str, Any], world: World, wanted: list[Part], whole: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = build(world, wanted, Path(folder))
        assume(len(built.rows) >= chosen["sequence_length"])
        arrays = expected_arrays(world, built.rows)
        capacity = chosen["sequence_length"] * chosen["batch_size"] if whole else None
        source = BatchSource(built.store, packed=capacity or True, **chosen)
        for index in (0, 1, 2, 7, 9, 40):
            plan = source.plan(index)
            lengths = [source.sequence_length] * len(plan.starts) if plan.lengths is None else plan.lengths.tolist()
            expected = packed_of(arrays, plan.starts.tolist(), lengths, capacity)
            assert list(source.spec) == list(expected)
            assert_same(source[index], expected, index)


@given(chosen=CHOSEN, rows=st.integers(9, 120), index=st.integers(0, 40))
def test_windows_have_a_length_that_was_asked_for_and_lie_in_an_episode(
    chosen: dict[str, Any], rows: int, index: int
) -> None:
    store, steps = example_store(rows), example_columns(rows)["episode_step"].tolist()
    # Row 0 of an episode has step 0; the episodes of one row end with nothing, and go on in the next.
    ends = [*store.snapshot().episode_starts.tolist()[1:], rows]
    assert all(steps[end] == 0 for end in ends[:-1])
    source = BatchSource(store, **chosen)
    plan = source.plan(index)
    lengths = [source.sequence_length] * len(plan.starts) if plan.lengths is None else plan.lengths.tolist()
    for start, length in zip(plan.starts.tolist(), lengths, strict=True):
        end = rows if chosen["boundary"] == "stream" else next(end for end in ends if end > start)
        begin = 0 if chosen["boundary"] == "stream" else next((e for e in reversed(ends) if e <= start), 0)
        assert start + length <= end
        asked = chosen["lengths"] or [source.sequence_length]
        # Of an episode with fewer steps than were drawn it is all of it.
        assert length in asked or (start == begin and length == end - begin and length < max(asked))


def test_lengths_and_places_are_as_likely_as_is_said() -> None:
    """Of 40,000 windows of 8 rows, cut to 2, 4 or 4 steps."""
    store = example_store(1000)
    source = BatchSource(store, 8, 2000, lengths=[4, 2, 4], seed=3)
    before = BatchSource(store, 8, 2000, seed=3)
    lengths: Counter[int] = Counter()
    places: dict[int, Counter[int]] = {2: Counter(), 4: Counter()}
    for index in range(20):
        plan = source.plan(index)
        assert plan.lengths is not None
        for start, length, first in zip(plan.starts, plan.lengths, before.plan(index).starts, strict=True):
            lengths[int(length)] += 1
            places[int(length)][int(start - first)] += 1
    assert lengths.keys() == {2, 4}
    assert lengths[4] / 40_000 == pytest.approx(2 / 3, abs=0.02)
    for length, counts in places.items():
        assert counts.keys() == set(range(8 - length + 1))
        for count in counts.values():
            assert count / lengths[length] == pytest.approx(1 / (8 - length + 1), rel=0.1)


def test_padded_steps_repeat_the_last_one_or_are_a_number() -> None:
    for pad, boundary in ((None, "stream"), (-7, "stream"), (True, "episode"), (-7, "episode")):
        source = BatchSource(STORE, 6, 5, lengths=[2, 4], fields=["time"], pad=pad, boundary=boundary)
        for index in range(5):
            batch, plan = source[index], source.plan(index)
            assert plan.lengths is not None
            for window, length in enumerate(plan.lengths.tolist()):
                steps = batch["time"][window].tolist()
                missing = [steps[length - 1] if pad in (None, True) else -7] * (6 - length)
                assert steps[length:] == missing
                assert batch["mask"][window].tolist() == [True] * length + [False] * (6 - length)


def noisy(fields: Fields, generator: np.random.Generator) -> Fields:
    return {"reward": (fields["reward"] + generator.normal(size=fields["reward"].shape)).astype(np.float32)}


MASKED = AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(reward=0.5))
REWARD: Any = {"reward": ("float32", ())}
OPTIONS: dict[str, dict[str, Any]] = {
    "stream": {},
    "episode": {"boundary": "episode"},
    "lengths": {"lengths": range(1, 9)},
    "sequential": {"boundary": "episode", "sampling": "sequential", "drop_last": False},
    "trajectory": {"boundary": "episode", "weighting": "trajectory", "lengths": [3, 5]},
    "task": {"boundary": "task"},
    "sampler": {"sampling": EpisodeWindows(8, 4, "batch")},
    "normalize": {"boundary": "episode", "normalize": {"reward": "mean_std"}},
    "fill": {"boundary": "episode", "pad": 0, "normalize": {"reward": "mean_std"}},
    "augment": {"lengths": range(1, 9), "augment": MASKED},
    "views": {"boundary": "episode", "views": 2},
    "map": {"lengths": range(1, 9), "map": Map(noisy, "noisy/1", REWARD)},
    "window": {"lengths": range(1, 9), "map": Map(noisy, "noisy/1", REWARD, per="window")},
    "windows": {"lengths": range(1, 9), "windows": {"action": range(3), "obs_image": [-1, 0]}},
    "anchors": {"boundary": "episode", "windows": {"action": range(3)}, "pad": False},
    "dtypes": {"boundary": "episode", "dtypes": {"reward": "float64", "action": "int32"}},
}


def source_of(name: str, **options: Any) -> BatchSource:
    store = STORE
    if name == "task":
        store = DatasetStore()
        store.extend({**RAW, "task": np.arange(300) // 7 % 5})
    return BatchSource(store, **{"sequence_length": 8, "batch_size": 4, "seed": 9, **OPTIONS[name], **options})


def views_of(batch: Any) -> tuple[Fields, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_packed_batch_is_the_padded_one_without_padding(name: str, capacity: int | None) -> None:
    """Whatever is done to batches: packing is the last thing."""
    if name == "sampler":
        packed, padded = (source_of(name, sequence_length=None, packed=one) for one in (capacity or True, False))
    else:
        packed, padded = source_of(name, packed=capacity or True), source_of(name)
    assert packed.spec.is_packed
    assert packed.spec.batch_dims == 1
    assert packed.fingerprint != padded.fingerprint
    for index in range(12):
        for one, other in zip(views_of(packed[index]), views_of(padded[index]), strict=True):
            assert_same(one, packed_from(other, capacity), (name, index))
            for field, values in one.items():
                spec = packed.spec[field]
                axes = (5,) if spec.per_sequence and len(other["reward"]) == 4 else values.shape[:1]
                assert values.shape == (*axes, *spec.shape)


@pytest.mark.parametrize("name", ["stream", "sampler", "normalize", "views", "map", "anchors", "dtypes"])
def test_it_is_gathered_into_memory_of_others(name: str) -> None:
    source = source_of(name, packed=True) if name != "sampler" else source_of(name, packed=True, sequence_length=None)
    for stored in (False, True):
        plan = pickle.loads(pickle.dumps(source.plan(3)))  # a plan from elsewhere knows its lengths
        layout = source.layout(plan, stored=stored)
        out = [layout.arrays(np.full(layout.nbytes, 7, np.uint8)) for _ in range(source.views)]
        source.gather(plan, out if source.views > 1 else out[0], stored=stored)
        expected = source.gather(source.plan(3), stored=stored)
        for view, other in zip(out, views_of(expected), strict=True):
            assert_same(view, other, name)
    with pytest.raises(ConfigError, match="layout: expected a plan"):
        source.layout(4)


def test_the_digest_is_that_of_windows_wherever_they_lie() -> None:
    """As of each alone, of its steps: filled up to a capacity it is the same."""
    options: Any = {"lengths": range(1, 9), "seed": 5, "batch_size": 4, "fields": ["reward", "time"]}
    digests = []
    for packed in (True, 40):
        with PrefetchBatchifier(STORE, digest=True, packed=packed, **options) as loader:
            loader.next_batch()
            digests.append(loader.digest)
    source = BatchSource(STORE, **options)
    batch, expected = source[0], StreamDigest()
    for window, mask in enumerate(batch["mask"]):
        steps = {name: batch[name][window][mask][None] for name in ("reward", "time")}
        expected += StreamDigest.of(0, steps, window)
    assert digests == [expected, expected]


def test_dtypes_that_a_framework_lacks() -> None:
    replaced = {"bool": "uint8", "int32": "int64", "float64": "float32"}
    source = source_of("lengths", packed=40, replace_dtypes=replaced)
    for batch in (source[2], source.gather(source.plan(2), stored=True)):
        for name in PACKED:
            assert batch[name].dtype == source.spec[name].dtype == (np.uint8 if name == "mask" else np.int64)
            assert np.array_equal(batch[name], source_of("lengths", packed=40)[2][name])


def test_a_source_that_was_pickled_or_given_other_options_is_the_same() -> None:
    for name in ("lengths", "windows", "augment", "normalize"):
        source = source_of(name, packed=True)
        again = pickle.loads(pickle.dumps(source))
        assert again.fingerprint == source.fingerprint
        assert_same(again[3], source[3])
        assert_same(source.with_options(shard=(1, 2))[3], source_of(name, packed=True, shard=(1, 2))[3])


def test_what_is_asked_for_is_in_the_fingerprint() -> None:
    source = BatchSource(STORE, batch_size=4, lengths=range(1, 13))
    assert (source.sequence_length, source[0]["mask"].shape) == (12, (4, 12))
    assert BatchSource(STORE, 20, 4, lengths=range(1, 13)).sequence_length == 20
    asked: list[dict[str, Any]] = [
        {},
        {"packed": True},
        {"lengths": [1, 2]},
        {"lengths": [1, 1, 2]},
        {"lengths": [1, 2], "boundary": "episode"},
        {"lengths": [1, 2], "packed": True},
        {"lengths": [1, 2], "pad": 0},
    ]
    found = [BatchSource(STORE, 8, 4, **options).fingerprint for options in asked]
    assert len(set(found)) == len(found)
    assert BatchSource(STORE, 8, 4, lengths=[2, 1]).fingerprint == found[2]
    assert BatchSource(STORE, 8, 4, packed=32).fingerprint == found[1]  # the stream does not depend on padding


def test_a_state_of_another_choice_is_refused_and_says_which() -> None:
    with PrefetchBatchifier(STORE, 8, 4, lengths=[1, 2], packed=True) as loader:
        state = loader.state_dict()
    for options, says in (
        ({}, r"lengths: expected none, found \[1, 2\]; packed: expected none, found True"),
        ({"lengths": [1, 3], "packed": True}, r"lengths: expected \[1, 3\], found \[1, 2\]$"),
        ({"lengths": [1, 2], "packed": True, "boundary": "episode"}, "boundary: expected 'episode', found 'stream'$"),
    ):
        with PrefetchBatchifier(STORE, 8, 4, **options) as other, pytest.raises(StateError, match=says):
            other.load_state_dict(state)


def test_members_of_a_mixture_and_views_of_a_store() -> None:
    options: Any = {"sequence_length": 6, "batch_size": 5, "boundary": "episode", "lengths": range(1, 7), "seed": 1}
    mixture = Mixture({"a": example_store(200), "b": example_store(90)}, weights=[1, 2])
    for store in (mixture, STORE.where(length=(4, 13))):
        packed, padded = BatchSource(store, packed=True, **options), BatchSource(store, **options)
        for index in range(10):
            assert_same(packed[index], packed_from(padded[index]), index)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"packed": 0}, "packed: expected True, False or the number of rows to pad each batch to, found 0"),
        ({"packed": "yes"}, "packed: expected True, False or the number of rows to pad each batch to, found 'yes'"),
        ({"lengths": []}, "lengths: expected integers of at least 1"),
        ({"lengths": 5}, "lengths: expected integers of at least 1"),
        ({"lengths": [0, 3]}, "lengths: expected integers of at least 1"),
        ({"lengths": [2.5]}, "lengths: expected integers of at least 1"),
        ({"lengths": [9], "sequence_length": 8}, "lengths: expected no length above sequence_length 8, found 9"),
        ({"lengths": [9], "sampling": RandomWindows(8, 4)}, "lengths: expected no length above sequence_length 8"),
        ({"lengths": [2], "sampling": "sequential"}, "lengths: expected sampling='random'"),
        ({"lengths": [2], "pad": False}, "pad: with lengths, which omit steps, expected True"),
        (
            {"lengths": [2], "sampling": DrawnLengths(RandomWindows(8, 4), (2,))},
            "lengths: with a sampler that draws lengths, expected None",
        ),
        (
            {"packed": True, "sequence_length": None, "windows": {"action": [0]}},
            "packed: with windows=, expected a sequence",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    options = {"sequence_length": 8, "batch_size": 4, **options}
    with pytest.raises(ConfigError, match=re.escape(says)):
        BatchSource(STORE, **options)


def test_more_rows_than_the_capacity_are_an_error_at_their_batch() -> None:
    options: Any = {"sequence_length": 8, "batch_size": 4, "lengths": range(1, 9), "seed": 2}
    totals = [int(BatchSource(STORE, packed=True, **options)[index]["cu_seqlens"][-1]) for index in range(30)]
    capacity = sorted(totals)[20]
    first = next(index for index, total in enumerate(totals) if total > capacity)
    says = rf"packed: expected at most {capacity} rows in a batch, found {totals[first]} in 4 sequences"
    with PrefetchBatchifier(STORE, packed=capacity, **options) as loader:
        for _ in range(first):
            loader.next_batch()
        for _ in range(2):
            with pytest.raises(WorkerError, match=says) as raised:
                loader.next_batch()
            assert isinstance(raised.value.__cause__, DataError)
            assert loader.state_dict()["next_index"] == first


@pytest.mark.parametrize("name", ["cu_seqlens", "position", "sequence_id"])
def test_a_field_of_a_name_that_batches_get(name: str) -> None:
    store = DatasetStore(fields=[Field(name)])
    store.extend({**RAW, name: np.zeros(300)})
    with pytest.raises(ConfigError, match=f"packed: expected a store without a field '{name}'"):
        _ = BatchSource(store, 8, 4, packed=True).spec
    assert name in BatchSource(store, 8, 4)[0]


def test_sources_that_are_packed_are_not_mixed() -> None:
    members: Any = {name: BatchSource(STORE, 8, 4, packed=True) for name in "ab"}
    with pytest.raises(SchemaError, match="mixture: expected members that are not packed"):
        MixtureSource(members, [1, 1])


class TestPacked(SourceConformance):
    def make(self) -> Any:
        return BatchSource(example_store(), 8, 4, lengths=range(1, 9), packed=True)


class TestFilledUp(SourceConformance):
    def make(self) -> Any:
        return BatchSource(example_store(), 8, 4, boundary="episode", packed=32, views=2)


class TestDrawnLengths(WindowSamplerConformance):
    def make(self) -> Any:
        return DrawnLengths(EpisodeWindows(8, 4), (2, 3, 8))


class Forwarding:
    def __init__(self, sampler: Any) -> None:
        self.sampler, self.sequence_length, self.batch_size = sampler, sampler.sequence_length, sampler.batch_size
        self.batches_per_epoch, self.starts = sampler.batches_per_epoch, sampler.starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


def test_a_sampler_that_forwards_is_padded_or_refused() -> None:
    """From Python 3.12 on, isinstance of a protocol does not see what ``__getattr__`` forwards."""
    sampling: Any = Forwarding(EpisodeWindows(8, 4))
    if sys.version_info >= (3, 12):
        with pytest.raises(ConfigError, match="expected a class that defines lengths and fill, because"):
            BatchSource(STORE, sampling=sampling)
    else:
        assert_same(BatchSource(STORE, sampling=sampling)[0], BatchSource(STORE, sampling=EpisodeWindows(8, 4))[0])
