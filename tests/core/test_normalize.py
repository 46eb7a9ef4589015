"""Normalised batches: LeRobot's formulas, the same bits however they are made, and back again."""

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    AugmentScalarSpec,
    AugmentTokensConfig,
    BatchSource,
    ConfigError,
    DatasetStore,
    Field,
    MissingFieldError,
    PrefetchBatchifier,
    RandomCrop,
    SchemaError,
    StateError,
)
from mouse_core.mixtures import Mixture
from mouse_core.statistics import Normalizer, statistics
from mouse_core.store.derived import DerivedStore, Return
from mouse_core.store.fields import FieldReader
from mouse_core.testing import SourceConformance
from tests.core.worlds import store_of
from tests.raising import assert_raises

ROWS, LENGTH, SIZE = 600, 8, 4
KINDS = {"obs_continuous": "mean_std", "action": "min_max", "reward": "quantiles"}


def columns(rows: int = ROWS, *, dtype: Any = np.float32, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    step = np.arange(rows) % 10
    observation = rng.normal([0, 300, 1], [1, 5, 0], (rows, 3)).astype(dtype)
    action = np.where(step[:, None] > 0, rng.uniform(-2, 5, (rows, 2)), 0).astype(np.float32)
    reward = np.where(step > 0, rng.normal(3, 2, rows), 0).astype(np.float32)
    done = np.where(step == 9, 1, 0)
    image = rng.integers(0, 256, (rows, 4, 4, 3)).astype(np.uint8)
    plain = {"action": action, "reward": reward, "done": done, "episode_step": step}
    return plain | {"observation": observation, "observation_image": image}


def source_of(store: Any, **options: Any) -> BatchSource:
    return BatchSource(store, LENGTH, SIZE, **options)


def lerobot(kind: str, values: npt.NDArray[Any], rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    values, rows = values.astype(np.float64), rows.astype(np.float64)
    if kind == "mean_std":
        return (values - rows.mean(axis=0)) / (rows.std(axis=0) + 1e-8)
    low, high = rows.min(axis=0), rows.max(axis=0)
    if kind == "quantiles":
        low, high = np.quantile(rows, 0.01, axis=0), np.quantile(rows, 0.99, axis=0)
    return 2 * (values - low) / (high - low) - 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["mean_std", "min_max", "quantiles"])
def test_numbers_are_as_lerobot_makes_them(kind: str, dtype: Any) -> None:
    made = columns(dtype=dtype)
    store = store_of(made)
    taken = made["episode_step"] > 0
    source = source_of(store, normalize=dict.fromkeys(("obs_continuous", "action", "reward"), kind))
    plain = source_of(store)
    for index in range(5):
        batch, raw = source[index], plain[index]
        assert {name: batch[name].dtype for name in batch} == {name: one.dtype for name, one in source.spec.items()}
        for name, rows in (
            ("obs_continuous", made["observation"][:, :2]),
            ("action", made["action"][taken]),
            ("reward", made["reward"][taken]),
        ):
            expected = lerobot(kind, raw[name][..., :2] if name == "obs_continuous" else raw[name], rows)
            found = batch[name][..., :2] if name == "obs_continuous" else batch[name]
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
        assert (batch["obs_continuous"][..., 2] == 0).all()  # what never varied is only shifted
        assert (batch["done"] == raw["done"]).all()
        assert (batch["obs_image"] == raw["obs_image"]).all()


def test_dtypes_that_are_asked_for_are_rounded_to_last_and_images_normalised_by_channel() -> None:
    store = store_of(columns(dtype=np.float64))
    narrow = source_of(store, normalize=KINDS, dtypes={"obs_continuous": np.float16})
    wide = source_of(store, normalize=KINDS, dtypes={"obs_continuous": np.float64})
    usual = source_of(store, normalize=KINDS)
    replaced = source_of(
        store, normalize=KINDS, dtypes={"obs_continuous": np.float64}, replace_dtypes={np.float64: np.float32}
    )
    exact = wide[0]["obs_continuous"]
    assert exact.dtype == np.float64
    assert (narrow[0]["obs_continuous"] == exact.astype(np.float16)).all()
    assert usual[0]["obs_continuous"].tobytes() == exact.astype(np.float32).tobytes()
    assert replaced[0]["obs_continuous"].tobytes() == usual[0]["obs_continuous"].tobytes()
    assert len({one.fingerprint for one in (narrow, wide, usual, replaced)}) == 1
    made = columns()
    store = store_of(made)
    source, plain = source_of(store, normalize={"obs_image": "mean_std"}), source_of(store)
    assert source.spec["obs_image"].dtype == np.float32
    pixels = made["observation_image"].reshape(-1, 3)
    expected = lerobot("mean_std", plain[3]["obs_image"].reshape(SIZE, LENGTH, 16, 3), pixels)
    np.testing.assert_allclose(source[3]["obs_image"].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_the_same_bits_stored_or_delivered_sharded_prefetched_or_pickled() -> None:
    store = store_of(columns())
    source = source_of(store, normalize={**KINDS, "obs_image": "min_max"})
    whole = source[2]
    stored = source.gather(source.plan(2), stored=True)
    out = source.layout(SIZE).arrays(np.empty(source.layout(SIZE).nbytes, np.uint8))
    written = source.gather(source.plan(2), out)
    halves = [source.with_options(shard=(rank, 2))[2] for rank in range(2)]
    again = pickle.loads(pickle.dumps(source))
    with PrefetchBatchifier(store, LENGTH, SIZE, normalize={**KINDS, "obs_image": "min_max"}) as loader:
        prefetched = [loader.next_batch() for _ in range(3)][2]
    for name in (*KINDS, "obs_image"):
        values = whole[name].tobytes()
        assert stored[name].tobytes() == written[name].tobytes() == again[2][name].tobytes() == values
        assert prefetched[name].tobytes() == np.concatenate([half[name] for half in halves]).tobytes() == values
        assert source.spec[name].stored_dtype == np.float32
    assert again.fingerprint == source.fingerprint


def test_steps_that_are_not_there_are_what_pad_says() -> None:
    store = store_of(columns())
    options: dict[str, Any] = {"boundary": "episode", "sampling": "sequential", "normalize": KINDS, "fields": [*KINDS]}
    filled, repeated = source_of(store, pad=-7.0, **options), source_of(store, pad=True, **options)
    seen = 0
    for index in range(len(filled)):
        batch, other = filled[index], repeated[index]
        there = batch["mask"]
        seen += int((~there).sum())
        for name in KINDS:
            assert (batch[name][~there] == -7).all()
            assert (batch[name][there] == other[name][there]).all()
    assert seen
    store = store_of(columns())
    whole = source_of(store, normalize=KINDS)[3]
    found = [source_of(store, normalize=KINDS, shard=(rank, 3), uneven="pad")[3] for rank in range(3)]
    for name in KINDS:
        there = np.concatenate([part[name][part["mask"].all(axis=1)] for part in found])
        assert there.tobytes() == whole[name].tobytes()


def test_windows_by_field_are_normalised() -> None:
    store = store_of(columns())
    windows: Any = {"action": range(3), "obs_image": [-1, 0]}
    kinds: Any = {**KINDS, "obs_image": "mean_std"}
    for options in ({}, {"pad": 9.0}):
        found = BatchSource(store, batch_size=SIZE, windows=windows, normalize=kinds, **options)
        plain = BatchSource(store, batch_size=SIZE, windows=windows, **options)
        for index in range(4):
            batch, raw = found[index], plain[index]
            for name in kinds:
                expected = found.normalizer[name].apply(raw[name])
                if options and name in windows:
                    expected[~raw[f"{name}_mask"]] = 9
                np.testing.assert_allclose(batch[name], expected, rtol=1e-6, atol=1e-6)


def test_what_is_normalised_is_augmented_and_images_the_other_way_round() -> None:
    store = store_of(columns())
    config = AugmentTokensConfig(scale_obs=AugmentScalarSpec(0.5), crop_obs_image=RandomCrop(2, 2))
    kinds: Any = {**KINDS, "obs_image": "mean_std"}
    both = source_of(store, normalize=kinds, augment=config, views=2)
    augmented = source_of(store, augment=config, views=2)
    for view, raw in zip(both[1], augmented[1], strict=True):
        scaling = both.normalizer["obs_image"]
        assert view["obs_image"].tobytes() == scaling.apply(raw["obs_image"].astype(np.uint8)).tobytes()
        assert view["obs_image"].shape == (SIZE, LENGTH, 2 * 2 * 3)
    normalized = source_of(store, normalize=kinds)[1]["obs_continuous"]
    ratio = both[1][0]["obs_continuous"][..., :2] / normalized[..., :2]
    assert np.allclose(ratio, 0.5, rtol=1e-6)
    assert both[1][0]["obs_continuous"] is not both[1][1]["obs_continuous"]


def test_numbers_are_those_of_the_snapshot_or_stay() -> None:
    made = columns()
    store = store_of({name: values[:300] for name, values in made.items()})
    source = source_of(store, normalize=KINDS)
    kept = source_of(store, normalize=source.normalizer)
    assert source[0]["reward"].tobytes() == kept[0]["reward"].tobytes()
    part = source_of(store, normalize=source.normalizer, fields=["action", "done"])  # it may know more fields
    assert set(part[3]) == {"action", "done"}
    assert part[3]["action"].tobytes() == source[3]["action"].tobytes()
    assert set(part.normalizer) == set(KINDS)
    store.extend({name: values[300:] for name, values in made.items()})
    grown = source.with_snapshot(store.snapshot(), epoch_start=10)
    afresh = source_of(store, normalize=KINDS, epoch_start=10)
    assert grown.fingerprint == afresh.fingerprint != source.fingerprint
    assert grown[11]["obs_continuous"].tobytes() == afresh[11]["obs_continuous"].tobytes()
    stays = kept.with_snapshot(store.snapshot(), epoch_start=10)
    assert stays.normalizer["reward"].identity == kept.normalizer["reward"].identity
    assert stays.normalizer["reward"].identity != afresh.normalizer["reward"].identity


def test_only_rows_that_came_are_read_at_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {**columns(1300), "seen": np.random.default_rng(0).normal(size=(1300, 1024)).astype(np.float32)}
    store = store_of({name: values[:1100] for name, values in made.items()}, fields=[Field("seen")])
    source = source_of(store, normalize={"seen": "mean_std"})
    store.extend({name: values[1100:] for name, values in made.items()})
    afresh = source_of(store, normalize={"seen": "mean_std"})
    read: list[int] = []

    def watched(before: Any) -> Any:
        def counting(self: FieldReader, windows: Any, *args: Any) -> Any:
            found = before(self, windows, *args)
            if found is not None:
                read.append(windows.every.length)
            return found

        return counting

    for way in ("read", "seen"):
        monkeypatch.setattr(FieldReader, way, watched(getattr(FieldReader, way)))
    grown = source.with_snapshot(store.snapshot(), epoch_start=0)
    assert sum(read) == 1300 - 1024  # from the beginning of the last block of 1,024 rows
    assert grown.fingerprint == afresh.fingerprint


@pytest.mark.parametrize("kind", ["view", "mixture", "derived"])
def test_any_store_is_normalised_by_its_own_rows_as_they_come(kind: str) -> None:
    made = columns()
    store = store_of({name: values[:305] for name, values in made.items()})
    seen: Any = {
        "view": lambda: store.best(0.5),
        "mixture": lambda: Mixture({"one": store, "other": store_of(columns(200, seed=1))}, weights=[1, 2]),
        "derived": lambda: DerivedStore(store, {"returns": Return()}),
    }[kind]()
    kinds = {**KINDS, "returns": "min_max"} if kind == "derived" else KINDS
    source = source_of(seen, normalize=kinds)
    store.extend({name: values[305:] for name, values in made.items()})
    grown = source.with_snapshot(seen.snapshot(), epoch_start=5)
    afresh = source_of(seen, normalize=kinds, epoch_start=5)
    assert grown.fingerprint == afresh.fingerprint != source.fingerprint
    for name in kinds:
        assert grown[6][name].tobytes() == afresh[6][name].tobytes()


def test_a_loader_resumes_exactly_after_rows_came() -> None:
    made = columns()
    store = store_of({name: values[:300] for name, values in made.items()})
    with PrefetchBatchifier(store, LENGTH, SIZE, normalize=KINDS) as loader:
        for _ in range(3):
            loader.next_batch()
        state = loader.state_dict()
        following = [loader.next_batch() for _ in range(2)]
        store.extend({name: values[300:] for name, values in made.items()})
        with PrefetchBatchifier(store, LENGTH, SIZE, normalize=KINDS) as other:
            other.load_state_dict(state)
            for batch in following:
                assert other.next_batch()["obs_continuous"].tobytes() == batch["obs_continuous"].tobytes()
            other.refresh()
            loader.refresh()
            assert other.next_batch()["action"].tobytes() == loader.next_batch()["action"].tobytes()


@pytest.mark.parametrize(
    ("normalize", "says"),
    [
        ({"reward": "min_max"}, "; normalize: reward: expected min_max by numbers .*, found mean_std by numbers"),
        (
            {"action": "mean_std"},
            "; normalize: expected 'action', found none; normalize: expected no 'reward', found one",
        ),
        (None, "; normalize: expected none, found .*reward"),
    ],
)
def test_a_state_says_which_field_was_normalised_otherwise(normalize: Any, says: str) -> None:
    store = store_of(columns())
    with PrefetchBatchifier(store, LENGTH, SIZE, normalize={"reward": "mean_std"}) as loader:
        state = loader.state_dict()
    with (
        PrefetchBatchifier(store, LENGTH, SIZE, normalize=normalize) as loader,
        pytest.raises(StateError, match=says) as found,
    ):
        loader.load_state_dict(state)
    assert "augment" not in str(found.value)


def test_numbers_are_part_of_the_fingerprint() -> None:
    store = store_of(columns())
    found = [
        source_of(store, normalize=normalize).fingerprint
        for normalize in (
            None,
            {"reward": "mean_std"},
            {"reward": "min_max"},
            Normalizer.of(statistics(store_of(columns(seed=1))), {"reward": "mean_std"}),
        )
    ]
    assert len(set(found)) == 4
    of_others = Normalizer.of(statistics(store), {"reward": "mean_std"})
    assert source_of(store, normalize=of_others).fingerprint == found[1]
    assert source_of(store, normalize={}).fingerprint == found[0]


class TestNormalized(SourceConformance):
    def make(self) -> Any:
        return source_of(store_of(columns(100)), normalize=KINDS)


@given(
    centre=st.floats(-1e6, 1e6),
    spread=st.floats(1e-6, 1e6),
    dtype=st.sampled_from([np.float32, np.float64]),
    kind=st.sampled_from(["mean_std", "min_max"]),
)
def test_undoing_gives_back_what_was_there(centre: float, spread: float, dtype: Any, kind: Any) -> None:
    values = (np.random.default_rng(0).normal(size=(50, 2)) * spread + centre).astype(dtype)
    n = len(values)
    store = DatasetStore(fields=[Field("x")])
    store.extend({"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "x": values})
    scaling = Normalizer.of(statistics(store, "x", quantiles=()), {"x": kind})["x"]
    back = scaling.undo(scaling.apply(values))
    off = np.abs(back.astype(np.float64) - values)
    assert back.dtype == np.float32
    assert (off <= 4e-7 * (np.abs(scaling.centre) + np.abs(values - scaling.centre))).all()


def test_one_step_or_many_and_pixels_of_any_layout() -> None:
    store = store_of(columns())
    normalizer = source_of(store, normalize={**KINDS, "obs_image": "mean_std"}).normalizer
    values = columns()["observation"]
    many = normalizer["obs_continuous"].apply(values)
    assert normalizer["obs_continuous"].apply(values[7]).tobytes() == many[7].tobytes()
    reshaped = normalizer["obs_continuous"].apply(values.reshape(6, 5, 20, 3))
    assert reshaped.tobytes() == many.tobytes()
    assert normalizer["obs_continuous"].apply(values[::2]).tobytes() == many[::2].tobytes()
    assert normalizer["obs_continuous"].apply(values[:0]).shape == (0, 3)
    image = columns()["observation_image"]
    flat = normalizer["obs_image"].apply(image.reshape(ROWS, -1))
    assert normalizer["obs_image"].apply(image).tobytes() == flat.tobytes()
    assert normalizer["reward"].apply(np.float32([1, 2])).shape == (2,)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"normalize": {"reward": "zscore"}}, ConfigError, r"normalize: reward: expected one of \['mean_std', "),
        ({"normalize": "mean_std"}, ConfigError, "normalize: expected kinds by field or a Normalizer, found"),
        ({"normalize": {"obs": "mean_std"}}, MissingFieldError, "normalize: expected fields among .*found 'obs'"),
        ({"normalize": {"reward": "mean_std"}, "fields": ["action"]}, MissingFieldError, r"\['action'\], found 'rewar"),
        ({"normalize": {"done": "mean_std"}}, ConfigError, "normalize: done: expected measurements or images, found"),
        (
            {"normalize": {"reward": "mean_std"}, "dtypes": {"reward": "int64"}},
            ConfigError,
            "normalize: reward: expected a floating dtype, found 'int64'",
        ),
    ],
)
def test_what_cannot_be_normalised_is_said(options: Any, error: type[Exception], message: str) -> None:
    assert_raises(error, message, source_of, store_of(columns()), **options)


def test_codes_that_are_numbers_are_normalised_and_normalisers_of_another_width_refused() -> None:
    normalizer = source_of(store_of(columns()), normalize={**KINDS, "obs_image": "mean_std"}).normalizer
    narrow = columns()
    narrow["observation"] = narrow["observation"][:, :2]
    message = r"normalize: obs_continuous: expected a normaliser for the field's shape \[2\].*found shape \[3\]"
    assert_raises(SchemaError, message, source_of, store_of(narrow), normalize=normalizer)
    grey = {**columns(), "observation_image": columns()["observation_image"][..., :1]}
    with pytest.raises(SchemaError, match=r"normalize: obs_image: expected a normaliser for the field's shape \[1\]"):
        source_of(store_of(grey), normalize=normalizer)
    source = source_of(store_of(columns()), normalize={"time": "min_max"}, dtypes={"time": "float32"})
    assert set(np.unique(source[0]["time"])) <= set((np.arange(10) / 4.5 - 1).astype(np.float32))


def test_values_of_another_shape_are_refused() -> None:
    normalizer = source_of(store_of(columns()), normalize={**KINDS, "obs_image": "mean_std"}).normalizer
    for method in ("apply", "undo"):
        with pytest.raises(
            SchemaError, match=f"{method}: expected an array of .*, found a list; np.asarray converts it"
        ):
            getattr(normalizer["action"], method)([1.0, 2.0])
    with pytest.raises(SchemaError, match=r"expected values \[\.\.\., 3\], found shape \[4, 2\]"):
        normalizer["obs_continuous"].apply(np.zeros((4, 2)))
    with pytest.raises(SchemaError, match=r"expected values \[\.\.\., H \* W \* 3\], found shape \[7\]"):
        normalizer["obs_image"].apply(np.zeros(7))
    with pytest.raises(SchemaError, match="undo: expected normalised values, which are floats, found int64"):
        normalizer["reward"].undo(np.zeros(3, np.int64))
    with pytest.raises(MissingFieldError, match="normalize: expected one of"):
        _ = normalizer["time"]
    with pytest.raises(ConfigError, match=r"expected statistics with the quantiles \(0.01, 0.99\), found \[\]"):
        Normalizer.of(statistics(store_of(columns()), quantiles=()), {"reward": "quantiles"})
