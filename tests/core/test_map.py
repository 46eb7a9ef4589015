"""A function of one's own over batches: the same wherever it runs, checked against what it says of itself."""

import multiprocessing
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mouse_core import (
    AugmentScalarSpec,
    AugmentTokensConfig,
    BatchSource,
    ConfigError,
    DataError,
    FieldSpec,
    Map,
    MissingFieldError,
    PrefetchBatchifier,
    RandomShift,
    SchemaError,
    StateError,
    WorkerError,
)
from mouse_core.randomness import Key, Purpose
from mouse_core.testing import SourceConformance, example_columns, example_store

Fields = dict[str, npt.NDArray[Any]]
LENGTH, SIZE = 8, 6
STORE = example_store(300)


def noisy(fields: Fields, generator: np.random.Generator) -> Mapping[str, npt.NDArray[Any]]:
    """Rewards with noise, and how large it was."""
    noise = generator.normal(size=fields["reward"].shape)
    return {"reward": (fields["reward"] + noise).astype(np.float32), "noise": np.stack([noise, -noise], axis=-1)}


def parity(fields: Fields) -> Mapping[str, npt.NDArray[Any]]:
    """Which action is odd."""
    return {"odd": fields["action"] % 2 == 1}


def failing(fields: Fields, generator: np.random.Generator, *, at: float) -> Mapping[str, npt.NDArray[Any]]:
    """Fails where the draw is that of one batch."""
    if generator.random() == at:
        raise ZeroDivisionError("no such share")
    return {"reward": fields["reward"]}


NOISY: dict[str, Any] = {"reward": ("float32", ()), "noise": ("float64", (2,))}
ODD: dict[str, Any] = {"odd": (bool, ())}


def mapped(per: Any = "batch", **options: Any) -> BatchSource:
    """A small source of noisy rewards."""
    return BatchSource(STORE, **{"sequence_length": LENGTH, "batch_size": SIZE, "seed": 5, **options}, map=asked(per))


def asked(per: Any) -> Map:
    return Map(parity, "odd/1", ODD, per=per) if per == "rows" else Map(noisy, "noisy/1", NOISY, per=per)


def as_bytes(batch: Any) -> Any:
    return {name: (values.dtype.str, values.shape, values.tobytes()) for name, values in batch.items()}


class TestWholeBatches(SourceConformance):
    def make(self) -> Any:
        return mapped()

    def test_other_numbers_of_processes_go_on_with_it(self) -> None:
        with pytest.raises(ConfigError, match="found per='batch' and shard"):
            PrefetchBatchifier(self.make(), shard=(0, 3), uneven="pad")
        with pytest.raises(ConfigError, match=r"'noisy/1': with a shard, expected per='window' or per='rows'"):
            mapped(shard=(0, 2))
        with pytest.raises(ConfigError, match="per='batch' and shard"):
            mapped().with_options(shard=(1, 3))


class TestWindows(SourceConformance):
    def make(self) -> Any:
        return mapped("window", boundary="episode", drop_last=False)


class TestRowsOfAnchors(SourceConformance):
    def make(self) -> Any:
        return mapped("rows", sequence_length=None, windows={"obs_continuous": [-1, 0]})


def test_a_whole_batch_is_given_with_a_generator_of_its_number() -> None:
    source, plain = mapped(), BatchSource(STORE, LENGTH, SIZE, seed=5)
    for index in (0, 3, 1000):
        raw, batch = plain[index], source[index]
        noise = Key(5, Purpose.MAP, index).generator().normal(size=(SIZE, LENGTH))
        assert batch["reward"].tobytes() == (raw["reward"] + noise).astype(np.float32).tobytes()
        assert batch["noise"].tobytes() == np.stack([noise, -noise], axis=-1).tobytes()
        assert list(batch) == list(source.spec) == [*raw, "noise"]
        assert as_bytes({name: batch[name] for name in raw if name != "reward"}) == as_bytes(
            {name: raw[name] for name in raw if name != "reward"}
        )
    assert source.spec["noise"] == FieldSpec("noise", np.dtype(np.float64), (2,))


def test_a_window_has_a_generator_of_its_number_in_the_whole_batch() -> None:
    source, plain = mapped("window"), BatchSource(STORE, LENGTH, SIZE, seed=5)
    for index in (0, 7):
        raw, batch = plain[index], source[index]
        for row in range(SIZE):
            noise = Key(5, Purpose.MAP, index, row).generator().normal(size=LENGTH)
            assert batch["reward"][row].tobytes() == (raw["reward"][row] + noise).astype(np.float32).tobytes()


def test_a_key_gives_a_generator_of_its_words() -> None:
    key = Key(2**64 - 1, Purpose.MAP, 2**63 + 3, 2**40)
    words = key.generator().bit_generator.random_raw(9)
    assert words.tolist() == key.bits(9).tolist()
    assert key.generator().bit_generator.random_raw(9).tolist() == words.tolist()
    with pytest.raises(TypeError):  # children would be others each time
        key.generator().spawn(1)


@pytest.mark.parametrize("per", ["window", "rows"])
@pytest.mark.parametrize(("count", "uneven"), [(2, "refuse"), (3, "refuse"), (4, "pad")])
def test_shards_make_what_one_would(per: str, count: int, uneven: Any) -> None:
    whole = mapped(per)
    shards = [whole.with_options(shard=(rank, count), uneven=uneven) for rank in range(count)]
    for index in (0, 5):
        parts = [shard[index] for shard in shards]
        own = [part["mask"][:, 0] if "mask" in part else np.ones(len(part["reward"]), bool) for part in parts]
        for name in whole.spec:
            found = np.concatenate([part[name][mine] for part, mine in zip(parts, own, strict=True)])
            assert found.tobytes() == whole[index][name].tobytes(), name
    assert {shard.fingerprint for shard in shards} == {whole.fingerprint}


def test_windows_without_steps_are_rows() -> None:
    def last(fields: Fields, generator: np.random.Generator) -> Any:
        assert fields["obs_continuous"].shape == (2, 5)
        assert fields["reward"].shape == ()
        return {"change": fields["obs_continuous"][1] - fields["obs_continuous"][0]}

    chosen = Map(last, "change/1", {"change": ("float64", (5,))}, per="window", drop=["obs_continuous"])
    source = BatchSource(STORE, batch_size=SIZE, windows={"obs_continuous": [-1, 0]}, map=chosen)
    plain = BatchSource(STORE, batch_size=SIZE, windows={"obs_continuous": [-1, 0]})
    assert "obs_continuous" not in source.spec
    assert source.spec.batch_dims == 1
    for index in range(3):
        seen = plain[index]["obs_continuous"]
        assert source[index]["change"].tobytes() == (seen[:, 1] - seen[:, 0]).tobytes()


def test_it_comes_behind_normalisation_and_augmentation_for_each_view() -> None:
    config = AugmentTokensConfig(scale_obs=AugmentScalarSpec(mean=1.0, std=0.3))
    options: dict[str, Any] = {"normalize": {"obs_continuous": "mean_std"}, "augment": config, "views": 2, "seed": 5}

    def mean(fields: Fields, generator: np.random.Generator) -> Any:
        fields["obs_continuous"] += 1  # its own to write to
        return {"mean": fields["obs_continuous"].mean(axis=-1), "draw": generator.random(fields["reward"].shape)}

    chosen = Map(mean, "mean/1", {"mean": ("float32", ()), "draw": ("float64", ())})
    source, plain = BatchSource(STORE, LENGTH, SIZE, map=chosen, **options), BatchSource(STORE, LENGTH, SIZE, **options)
    views, before = source[4], plain[4]
    assert len(views) == len(before) == 2
    for view, raw in zip(views, before, strict=True):
        assert view["mean"].tobytes() == (raw["obs_continuous"] + 1).mean(axis=-1).tobytes()
    assert (views[0]["draw"] != views[1]["draw"]).all()
    layout = source.layout(SIZE)
    outs = [layout.arrays(np.empty(layout.nbytes, np.uint8)) for _ in range(2)]
    written = source.gather(source.plan(4), outs)
    assert [as_bytes(view) for view in written] == [as_bytes(view) for view in views]


def test_it_gets_the_same_whatever_the_framework_lacks() -> None:
    seen: list[Any] = []

    def watching(fields: Fields, generator: np.random.Generator) -> Any:
        seen.append(as_bytes(fields))
        return {"wide": generator.random(fields["reward"].shape), "large": fields["action"] + 2**40}

    spec: dict[str, Any] = {"wide": ("float64", ()), "large": ("int64", ())}
    source = BatchSource(STORE, LENGTH, SIZE, map=Map(watching, "w/1", spec))
    narrow = source.with_options(replace_dtypes={np.float64: np.float32})
    assert {one.dtype for one in narrow.spec.values()}.isdisjoint({np.dtype(np.float64)})
    expected = source[2]["wide"].astype(np.float32)
    assert narrow[2]["wide"].tobytes() == expected.tobytes()
    stored = source.gather(source.plan(2), stored=True)
    assert as_bytes(stored) == as_bytes(source[2])
    assert all(one == seen[0] for one in seen)
    assert narrow.fingerprint == source.fingerprint
    with pytest.raises(DataError, match="'w/1': 'large'"):
        source.with_options(replace_dtypes={np.int64: np.int32})[2]


def test_it_gets_augmented_images_as_they_are_delivered_however_they_are_moved() -> None:
    seen = []

    def brightness(fields: Fields, generator: np.random.Generator) -> Any:
        seen.append(as_bytes(fields))
        return {"brightness": fields["obs_image"].mean(axis=-1)}

    chosen = Map(brightness, "brightness/1", {"brightness": ("float64", ())})
    augment = AugmentTokensConfig(crop_obs_image=RandomShift(1))
    source = BatchSource(STORE, LENGTH, SIZE, augment=augment, map=chosen)
    delivered, stored = source[3], source.gather(source.plan(3), stored=True)
    assert as_bytes(stored) == as_bytes(delivered)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("per", ["batch", "window", "rows"])
def test_workers_and_resumption_change_nothing(per: str) -> None:
    source = mapped(per)
    expected = [as_bytes(source[index]) for index in range(8)]
    for workers in (0, 1, 2):
        options: dict[str, Any] = {"seed": 5, "num_workers": workers, "map": asked(per)}
        with PrefetchBatchifier(STORE, LENGTH, SIZE, **options) as loader:
            assert [as_bytes(loader.next_batch()) for _ in range(5)] == expected[:5]
            state = loader.state_dict()
        with PrefetchBatchifier(STORE, LENGTH, SIZE, **options) as loader:
            loader.load_state_dict(state)
            assert [as_bytes(loader.next_batch()) for _ in range(3)] == expected[5:]


def test_it_follows_a_store_that_grows() -> None:
    store = example_store(100)
    with PrefetchBatchifier(store, LENGTH, SIZE, map=asked("batch")) as loader:
        loader.next_batch()
        store.extend(example_columns(60, first=100))
        loader.refresh()
        batch = loader.next_batch()
        assert loader.source.snapshot.num_rows == 160
        assert batch["noise"].shape == (SIZE, LENGTH, 2)
        assert as_bytes(loader.source[1]) == as_bytes(batch)


def in_another_process(data: bytes) -> Any:
    return as_bytes(pickle.loads(data)[3])


def test_spawned_processes_make_the_same_and_lambdas_are_refused() -> None:
    source = mapped()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(in_another_process, (pickle.dumps(source),)) == as_bytes(source[3])
    chosen = Map(lambda fields, generator: {"reward": fields["reward"]}, "same/1", {"reward": ("float32", ())})
    with PrefetchBatchifier(STORE, LENGTH, SIZE, map=chosen, num_workers=2) as loader:
        assert as_bytes(loader.next_batch()) == as_bytes(BatchSource(STORE, LENGTH, SIZE)[0])
        with pytest.raises(ConfigError, match=r"'same/1': expected a function that can be pickled .* or use threads"):
            pickle.dumps(loader.source)


def test_whoever_pickles_functions_by_value_may_take_any() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    chosen = Map(lambda fields: {"odd": fields["action"] > 2}, "large/1", ODD, per="rows")
    again = pickle.loads(cloudpickle.dumps(chosen))
    assert (again.version, again.spec, again.per) == (chosen.version, chosen.spec, chosen.per)


def test_versions_are_in_the_fingerprint() -> None:
    def again(fields: Fields, generator: np.random.Generator) -> Any:
        return noisy(fields, generator)

    made = [
        BatchSource(STORE, LENGTH, SIZE),
        BatchSource(STORE, LENGTH, SIZE, map=Map(noisy, "noisy/1", NOISY)),
        BatchSource(STORE, LENGTH, SIZE, map=Map(noisy, "noisy/2", NOISY)),
        BatchSource(STORE, LENGTH, SIZE, map=Map(noisy, "noisy/1", NOISY, per="window")),
        BatchSource(STORE, LENGTH, SIZE, map=Map(noisy, "noisy/1", NOISY, drop=("done",))),
    ]
    assert len({one.fingerprint for one in made}) == len(made)
    same = BatchSource(STORE, LENGTH, SIZE, map=Map(again, "noisy/1", NOISY))
    assert same.fingerprint == made[1].fingerprint
    with PrefetchBatchifier(STORE, LENGTH, SIZE, map=Map(noisy, "noisy/1", NOISY)) as loader:
        state = loader.state_dict()
    with (
        PrefetchBatchifier(STORE, LENGTH, SIZE, map=Map(noisy, "noisy/2", NOISY)) as loader,
        pytest.raises(StateError, match="noisy/2"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_surface_at_their_number(workers: int) -> None:
    at = Key(0, Purpose.MAP, 3).generator().random()
    chosen = Map(partial(failing, at=at), "failing/1", {"reward": ("float32", ())})
    with PrefetchBatchifier(STORE, LENGTH, SIZE, num_workers=workers, map=chosen) as loader:
        for _ in range(3):
            loader.next_batch()
        for _ in range(2):
            with pytest.raises(WorkerError, match="batch 3: ZeroDivisionError: no such share") as caught:
                loader.next_batch()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.__cause__.__notes__ == ["map: 'failing/1', batch 3"]
        assert loader.state_dict()["next_index"] == 3


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda reward: {}, r"expected fields \['reward'\], found \[\]"),
        (lambda reward: {"reward": reward, "other": reward}, r"found \['reward', 'other'\]"),
        (lambda reward: reward, "found ndarray"),
        (lambda reward: {"reward": reward.astype(np.float64)}, r"expected an array float32 .* found float64"),
        (lambda reward: {"reward": reward[..., None]}, r"found float32 \[6, 8, 1\]"),
        (lambda reward: {"reward": reward[:2]}, r"found float32 \[2, 8\]"),
        (lambda reward: {"reward": reward.tolist()}, "found list"),
    ],
)
def test_what_it_returns_is_what_it_said(made: Any, said: str) -> None:
    chosen = Map(lambda fields, generator: made(fields["reward"]), "wrong/1", {"reward": ("float32", ())})
    with pytest.raises(SchemaError, match=r"map: 'wrong/1', batch 2: .*" + said):
        BatchSource(STORE, LENGTH, SIZE, map=chosen)[2]


def test_what_it_returns_may_be_no_array_of_its_own() -> None:
    one = np.ones((), np.float32)
    one.flags.writeable = False

    def spread(fields: Fields, generator: np.random.Generator) -> Any:
        return {"one": np.broadcast_to(one, fields["reward"].shape)}

    batch = BatchSource(STORE, LENGTH, SIZE, map=Map(spread, "one/1", {"one": ("float32", ())}))[0]
    batch["one"][0, 0] = 3
    assert batch["one"].sum() == SIZE * LENGTH + 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, "a/1", ODD), "expected a function"),
        ((parity, "", ODD), "expected a version"),
        ((parity, 1, ODD), "expected a version"),
        ((parity, "a/1", {}), "expected a spec"),
        ((parity, "a/1", {"odd": bool}), "expected .dtype, shape of a step"),
        ((parity, "a/1", {"odd": ("text", ())}), "expected a NumPy dtype"),
        ((parity, "a/1", {"odd": ("U8", ())}), "expected a boolean, integer or floating dtype"),
        ((parity, "a/1", {"odd": (bool, (0,))}), "expected a shape of positive sizes"),
        ((parity, "a/1", {"odd": FieldSpec("even", np.dtype(bool), ())}), "expected a FieldSpec with the name 'odd'"),
        ((parity, "a/1", ODD, "row"), "per: expected one of"),
        ((parity, "a/1", ODD, "rows", ["odd"]), "expected different fields in drop"),
        ((parity, "a/1", ODD, "rows", "done"), "expected a list of names"),
    ],
)
def test_bad_options_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Map(*arguments)


def test_bad_options_of_a_source_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"map: expected a mouse_core\.Map, found <function"):
        BatchSource(STORE, LENGTH, SIZE, map=parity)  # type: ignore[arg-type]
    with pytest.raises(MissingFieldError, match="map: drop: expected fields among"):
        BatchSource(STORE, LENGTH, SIZE, map=Map(parity, "a/1", ODD, "rows", ["none"]))
