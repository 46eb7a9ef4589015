"""Statistics against NumPy in float64 over all data, in parts, in files, and as rows come."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, Field, MissingFieldError
from mouse_core.formats.converting import convert
from mouse_core.formats.lerobot import read_lerobot
from mouse_core.mixtures import Mixture, Schedule
from mouse_core.statistics import QUANTILES, FieldStatistics, Normalizer, Statistics, statistics
from mouse_core.statistics.counting import Moments, Sketch
from mouse_core.store.fields import FieldReader
from tests.core.test_lerobot import Robot
from tests.core.worlds import store_of
from tests.raising import assert_raises

LENGTH = 7


def rows(n: int, seed: int = 0, width: int = 3) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    step = np.arange(n) % LENGTH
    action = rng.normal(5, 2, (n, 2)).astype(np.float32)
    reward = rng.normal(-1, 3, n).astype(np.float32)
    action[step == 0], reward[step == 0] = 0, 0
    observation = rng.normal([0, 1000, -1e-3], [1, 0.5, 1e-4], (n, 3)).astype(np.float32)[:, :width]
    return {
        "action": action,
        "reward": reward,
        "done": np.where(step == LENGTH - 1, 1, 0),
        "episode_step": step,
        "observation": observation,
    }


def assert_are_of(found: FieldStatistics, values: npt.NDArray[Any]) -> None:
    numbers = values.astype(np.float64)
    scale = np.maximum(numbers.std(axis=0), 1e-30)
    assert found.count.shape == found.mean.shape == values.shape[1:]
    assert (found.count == len(values)).all()
    assert (np.abs(found.mean - numbers.mean(axis=0)) <= 1e-6 * scale).all()
    assert (np.abs(found.std - numbers.std(axis=0)) <= 1e-6 * scale).all()
    assert (found.min == numbers.min(axis=0)).all()
    assert (found.max == numbers.max(axis=0)).all()


def assert_same(one: Statistics, other: Statistics) -> None:
    assert list(one) == list(other)
    for name, found in one.items():
        like = other[name]
        for key in ("count", "mean", "std", "min", "max"):
            assert getattr(found, key).tobytes() == getattr(like, key).tobytes(), (name, key)
        assert found.quantiles.keys() == like.quantiles.keys()
        assert found.rank_error == like.rank_error
        for share, values in found.quantiles.items():
            assert values.tobytes() == like.quantiles[share].tobytes()


def test_are_those_of_numpy_by_dimension() -> None:
    columns = rows(2000)
    values = np.random.default_rng(0).normal(0, 30, (2000, 2))
    kinds = ("float16", "float32", "float64", "int8", "int64", "bool")
    columns |= {kind: (values > 0 if kind == "bool" else values).astype(kind) for kind in kinds}
    found = statistics(store_of(columns, fields=[*map(Field, kinds)]))
    assert_are_of(found["obs_continuous"], columns["observation"])
    assert_are_of(found["time"], columns["episode_step"])
    for kind in kinds:
        assert_are_of(found[kind], columns[kind])
    for share in QUANTILES:
        expected = np.quantile(columns["observation"].astype(np.float64), share, axis=0)
        np.testing.assert_allclose(found["obs_continuous"].quantiles[share], expected, rtol=1e-12)
    assert found["obs_continuous"].rank_error == 0


def test_actions_of_first_rows_and_observations_that_are_not_there_do_not_count() -> None:
    columns = rows(2000)
    taken = columns["episode_step"] > 0
    arrived = statistics(store_of(columns))
    for name in ("action", "reward", "done"):
        assert_are_of(arrived[name], columns[name][taken])
    outgoing = statistics(store_of(columns, alignment="outgoing"))
    for name in ("action", "reward", "done"):
        assert_are_of(outgoing[name], columns[name])
    columns = rows(70)
    last = columns["done"] > 0
    columns["observation"][last] = 0
    found = statistics(store_of({**columns, "observation_missing": last.astype(np.int64)}))
    assert_are_of(found["obs_continuous"], columns["observation"][~last])
    assert_are_of(found["reward"], columns["reward"][columns["episode_step"] > 0])


def test_nulls_that_a_field_fills_do_not_count() -> None:
    arms = [[1.0, 5.0], None, [3.0, None], [2.0, 7.0], None, [2.0, 6.0]]
    table = datasets.Dataset.from_dict(
        {
            "action": [0.0] * 6,
            "reward": [0.0] * 6,
            "done": [0] * 5 + [1],
            "sensor": [1, 2, None, None, 3, 5],
            "arm": arms,
            "episode_step": [0, 1, None, 3, 4, 5],
        }
    )
    fields = [Field("sensor", fill=-999), Field("arm", fill=-5.0, shape=(2,))]
    store = DatasetStore(fields=fields).from_dataset(table)
    found = statistics(store, ["sensor", "arm", "time"])
    assert (found["sensor"].count, found["sensor"].mean, found["sensor"].min) == (4, 2.75, 1)
    assert found["sensor"].quantiles[0.5] == 2.5
    assert found["arm"].count.tolist() == [4, 3]
    assert found["arm"].min.tolist() == [1, 5]
    assert (found["time"].count, found["time"].min) == (5, 0)
    assert BatchSource(store, 1, 6, sampling="last")[0]["sensor"].min() == -999  # batches have what is filled in


def test_a_nan_counts_for_nothing_and_changes_no_other_dimension() -> None:
    columns = rows(3000)
    observation = columns["observation"]
    observation[::7, 0], observation[5, 0], observation[6, 0], observation[:, 2] = np.nan, np.inf, -np.inf, np.nan
    found = statistics(store_of(columns), "obs_continuous")["obs_continuous"]
    for place in (0, 1):
        known = observation[:, place][np.isfinite(observation[:, place])].astype(np.float64)
        assert found.count[place] == len(known)
        assert (found.min[place], found.max[place]) == (known.min(), known.max())
        np.testing.assert_allclose([found.mean[place], found.std[place]], [known.mean(), known.std()], rtol=1e-8)
        np.testing.assert_allclose(found.quantiles[0.9][place], np.quantile(known, 0.9), rtol=1e-12)
    assert found.count[2] == 0
    assert np.isnan(found.mean[2])
    assert np.isnan(found.quantiles[0.5][2])
    values = np.random.default_rng(0).normal([0, 1000, 5, 1e-3], [1, 2, 1e20, 1e-4], (5000, 4)).astype(np.float32)
    whole = Moments(4)
    whole.add(values)
    values[[3, 4000], 1] = np.nan, -np.inf
    found = Moments(4)
    found.add(values)
    for name in ("count", "mean", "squares", "low", "high"):
        kept = [0, 2, 3]
        assert getattr(found, name)[kept].tolist() == getattr(whole, name)[kept].tolist()
    there = values[np.isfinite(values[:, 1]), 1].astype(np.float64)
    assert found.count[1] == len(there)
    np.testing.assert_allclose([found.mean[1], found.deviation[1]], [there.mean(), there.std()], rtol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "constant", "other"),
    [(np.float16, 0.1, np.nan), (np.float32, -1 / 3, np.inf), (np.float32, 0.3, np.nan), (np.float64, 123.456, np.nan)],
)
def test_a_constant_beside_what_does_not_count_has_no_deviation(constant: float, dtype: Any, other: float) -> None:
    values = np.full((1000, 2), constant, dtype)
    values[5, 0] = other
    made = {**rows(1000), "observation": values}
    found = statistics(store_of(made))["obs_continuous"]
    assert found.count.tolist() == [999, 1000]
    assert found.std.tolist() == [0, 0]
    assert found.mean.tolist() == [float(dtype(constant))] * 2
    scaling = BatchSource(store_of(made), 8, 4, normalize={"obs_continuous": "mean_std"}).normalizer["obs_continuous"]
    beside = np.array([constant * 1.01] * 2, np.float32)
    assert np.abs(scaling.apply(beside)).max() <= abs(constant) * 0.011


def test_images_are_counted_by_channel_and_how_rows_lie_says_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {**rows(60), "observation_image": rng.integers(0, 200, (60, 4, 5, 3)).astype(np.uint8)}
    columns["observation_image"][..., 1] //= 3
    found = statistics(store_of(columns))["obs_image"]
    pixels = columns["observation_image"].reshape(-1, 3).astype(np.float64)
    assert found.is_image
    assert found.count.tolist() == [60, 60, 60]
    assert found.rank_error == 0
    np.testing.assert_allclose(found.mean, pixels.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.std, pixels.std(axis=0), rtol=1e-12)
    for share in QUANTILES:
        np.testing.assert_allclose(found.quantiles[share], np.quantile(pixels, share, axis=0), rtol=1e-12)
    columns = rows(5000)
    table = {name: values.tolist() for name, values in columns.items()}
    datasets.Dataset.from_dict(table, features=None).save_to_disk(tmp_path / "rows")
    stored = {**columns, "observation": columns["observation"].astype(np.float64)}
    one = statistics(store_of({**stored, "action": stored["action"].astype(np.float64)}), ["obs_continuous", "time"])
    other = DatasetStore().from_dataset(datasets.load_from_disk(tmp_path / "rows"))
    assert_same(one, statistics(other, ["obs_continuous", "time"]))


def test_what_cannot_be_counted_or_is_damaged_is_said(tmp_path: Path) -> None:
    store = store_of(rows(20))
    assert_raises(MissingFieldError, r"statistics: expected fields among .*found 'obs'", statistics, store, ["obs"])
    assert_raises(ConfigError, "quantiles: expected numbers from 0 to 1, found", statistics, store, quantiles=[1.5])
    assert_raises(ConfigError, "store: expected rows", statistics, DatasetStore())
    assert_raises(ConfigError, "store: expected a Store or a Snapshot, found dict", statistics, {})
    with pytest.raises(MissingFieldError, match="expected one of \\['time'\\]"):
        _ = statistics(store, "time")["reward"]
    assert_raises(ConfigError, r"expected meta/stats.json, found none", Statistics.load, tmp_path)
    statistics(store_of(rows(100))).save(tmp_path)
    loaded = Statistics.load(tmp_path)
    assert set(loaded["reward"].quantiles) == set(QUANTILES)
    for number, change in enumerate(({"std": [-1.0, 1.0]}, {"std": [float("nan"), 1.0]}, {"q01": [None, 0.0]})):
        folder = write_stats(tmp_path / f"{number}", {"action": {**entry_of(1.0, 2.0), **change}})
        says = r"stats.json.*action: expected only numbers or null.*found .* in dimension 0"
        assert_raises(DataError, says, Statistics.load, folder)
    (tmp_path / "meta" / "stats.json").write_text('{"action": {"mean": [1]}}')
    assert_raises(DataError, r"stats.json.*action: expected mean, std, min, max, found", Statistics.load, tmp_path)


def wide_rows(n: int) -> dict[str, npt.NDArray[Any]]:
    """Rows with a field of 1,024 numbers, of which 1,024 rows make a block."""
    seen = np.random.default_rng(0).normal(size=(n, 1024)).astype(np.float32)
    return {**rows(n), "seen": seen}


@pytest.mark.slow
def test_few_rows_at_a_time_give_the_same_bits() -> None:
    made = wide_rows(1200)
    store = store_of({name: values[:1] for name, values in made.items()}, fields=[Field("seen")])
    grown, at = statistics(store, ["seen", "reward"], quantiles=[0.5]), 1
    for rows_there in (2, 65, 1000, 1023, 1024, 1025, 1200):
        store.extend({name: values[at:rows_there] for name, values in made.items()})
        grown, at = grown.update(store), rows_there
        assert_same(grown, statistics(store, ["seen", "reward"], quantiles=[0.5]))


def test_only_new_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    before = FieldReader.read

    def watched(self: FieldReader, windows: Any, *args: Any) -> Any:
        read.append(windows.every.length)
        return before(self, windows, *args)

    columns = wide_rows(2100)
    store = store_of({name: values[:2060] for name, values in columns.items()}, fields=[Field("seen")])
    found = statistics(store, "seen")
    store.extend({name: values[2060:] for name, values in columns.items()})
    monkeypatch.setattr(FieldReader, "read", watched)
    found.update(store)
    assert read == [2100 - 2048]


def test_only_a_store_that_begins_with_the_same_rows_is_counted_on(tmp_path: Path) -> None:
    columns = rows(700)
    store = store_of({name: values[:350] for name, values in columns.items()})
    every, best = store.where(lambda episode: True), store.best(0.2)
    found, of_best = statistics(every), statistics(best)
    assert_same(found.update(every), found)
    store.extend({name: values[350:] for name, values in columns.items()})
    assert_same(found.update(every), statistics(every))
    assert_raises(ConfigError, r"found \d+ other rows", of_best.update, best)
    found = statistics(store_of(rows(100)))
    found.save(tmp_path)
    with pytest.raises(ConfigError, match=r"begins with the 100 rows of the statistics, found 200 other rows"):
        found.update(store_of(rows(200, seed=1)))
    assert_raises(ConfigError, "found 50 other rows", found.update, store_of(rows(50)))
    assert_raises(ConfigError, "found statistics that cannot", Statistics.load(tmp_path).update, store_of(rows(200)))


floats = st.floats(-1e6, 1e6, width=32)
matrices = hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.just(2)), elements=floats)


@given(parts=st.lists(matrices, min_size=1, max_size=5))
def test_moments_of_parts_are_those_of_the_whole(parts: list[npt.NDArray[np.float32]]) -> None:
    merged = Moments(2)
    for part in parts:
        moments = Moments(2)
        moments.add(part)
        merged.merge(moments)
    whole = np.concatenate(parts).astype(np.float64)
    span = np.abs(whole).max() + 1e-30
    assert (merged.count == len(whole)).all()
    assert (np.abs(merged.mean - whole.mean(axis=0)) <= 1e-6 * whole.std(axis=0) + 1e-12 * span).all()
    assert (np.abs(merged.deviation - whole.std(axis=0)) <= 1e-6 * whole.std(axis=0) + 1e-8 * span).all()
    assert (merged.low == whole.min(axis=0)).all()
    assert (merged.high == whole.max(axis=0)).all()


@pytest.mark.parametrize(("offset", "deviation"), [(0, 1e-25), (1e4, 1e-3), (-1e8, 1), (0, 1e25)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_hold_at_any_scale_and_beside_outliers(offset: float, deviation: float, dtype: str) -> None:
    values = (np.random.default_rng(0).normal(0, 1, (40_000, 3)) * deviation + offset).astype(dtype)
    values[::1000, 1] *= 1e4
    values[:, 2] = values[0, 2]
    moments = Moments(3)
    moments.add(values)
    numbers = values.astype(np.float64)
    exact = numbers - numbers[0]  # so that NumPy's own rounding is not what is compared
    mean, std = numbers[0] + exact.mean(axis=0), exact.std(axis=0)
    assert (np.abs(moments.mean - mean) <= 1e-6 * std + 1e-15 * np.abs(mean)).all()
    np.testing.assert_allclose(moments.deviation, std, rtol=1e-6)
    assert moments.deviation[2] == 0


def test_moments_hold_where_odd_rows_are_looked_at_first_and_ranks_of_many_numbers() -> None:
    values = np.random.default_rng(0).normal(0, 1, (320_000, 1)).astype(np.float32)
    values[::10_000] = 1e5
    moments = Moments(1)
    moments.add(values)
    numbers = values.astype(np.float64)
    np.testing.assert_allclose(moments.mean, numbers.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(moments.deviation, numbers.std(axis=0), rtol=1e-9)
    sketch, numbers = Sketch(), np.arange(1 << 20, dtype=np.float64)
    sketch.add(numbers)
    shares = np.linspace(0, 1, 1001).tolist()
    off = np.abs(sketch.quantiles(shares, 0, numbers[-1]) - np.quantile(numbers, shares))
    assert len(sketch.levels[8]) == 4096
    assert off.max() <= 1
    assert sketch.rank_error * len(numbers) == 128 + 256
    sketch = Sketch()
    block = np.arange(1 << 20, dtype=np.float64)
    for _ in range(30):  # thirty million
        sketch.add(block)
    assert sketch.rank_error < 0.002
    assert sum(map(len, sketch.levels)) < 9 * 8192
    (found,) = sketch.quantiles([0.25], 0, block[-1])
    assert abs(found / len(block) - 0.25) <= sketch.rank_error


@pytest.mark.parametrize("order", ["ascending", "mixed", "alternating"])
def test_the_rank_error_holds_when_numbers_come_in_any_order(order: str) -> None:
    """And is no more than some times what is found."""
    numbers, size = np.arange(600_000, dtype=np.float64), 6000
    if order == "mixed":
        np.random.default_rng(0).shuffle(numbers)
    elif order == "alternating":
        numbers = np.concatenate([numbers[::2], numbers[1::2]])
    sketch = Sketch()
    for begin in range(0, len(numbers), size):  # so few at a time that all errors are made when levels are full
        sketch.add(np.sort(numbers[begin : begin + size]))
    shares = np.linspace(0, 1, 2001).tolist()
    found = sketch.quantiles(shares, 0, len(numbers) - 1)
    off = (found - np.quantile(numbers, shares)) / len(numbers)
    assert np.abs(off).max() <= sketch.rank_error < 0.002
    assert np.abs(off.mean()) <= 0.1 * sketch.rank_error  # neither too high nor too low on the whole
    # Whenever 8,192 numbers that stand for w each become half as many, ranks may be wrong by w more.
    assert sketch.rank_error >= (len(sketch.levels) - 1) / 2 / 8192


@given(
    data=st.data(),
    sizes=st.lists(st.sampled_from([1, 10, 1000, 9000, 40_000]), min_size=1, max_size=5),
    few=st.booleans(),
)
def test_quantiles_are_within_the_rank_error_that_is_said(data: st.DataObject, sizes: list[int], few: bool) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    merged, parts = Sketch(), []
    for size in sizes:
        numbers = rng.integers(0, 5, size).astype(np.float64) if few else rng.standard_cauchy(size)
        sketch = Sketch()
        sketch.add(np.sort(numbers))
        merged.merge(sketch)
        parts.append(numbers)
    whole = np.sort(np.concatenate(parts))
    assert merged.count == len(whole)
    shares = [0, 0.01, 0.3, 0.5, 0.99, 1]
    found = merged.quantiles(shares, whole[0], whole[-1])
    if merged.rank_error == 0:
        np.testing.assert_allclose(found, np.quantile(whole, shares), rtol=1e-12)
    assert merged.rank_error <= 0.01
    for share, value in zip(shares, found, strict=True):
        below, up_to = (np.searchsorted(whole, value, side) / len(whole) for side in ("left", "right"))
        slack = merged.rank_error + 1 / len(whole)
        assert below - slack <= share <= up_to + slack, (share, value)


def entry_of(*mean: float, count: int | None = 50) -> dict[str, Any]:
    entry: dict[str, Any] = {"mean": list(mean), "std": [0.5] * len(mean), "min": [-9] * len(mean)}
    entry["max"] = [9] * len(mean)
    return entry if count is None else {**entry, "count": [count]}


def camera_of(mean: float) -> dict[str, Any]:
    return {name: [[[mean]]] * 3 for name in ("mean", "std", "min", "max")} | {"count": [40]}


def write_stats(folder: Path, stats: dict[str, Any]) -> Path:
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "stats.json").write_text(json.dumps(stats))
    return folder


def test_what_stands_for_the_same_feature_is_written_anew(tmp_path: Path) -> None:
    images = np.arange(700 * 12).reshape(700, 2, 2, 3).astype(np.uint8)
    top, hand = "observation.images.top", "observation.images.in.hand"
    made = {**rows(700), top: images, hand: images // 2}
    before = {"next.done": entry_of(7.0), top: camera_of(0.0), hand: camera_of(0.25), "timestamp": entry_of(3.0)}
    folder = write_stats(tmp_path / "one", before)
    store = store_of(made, fields=[Field(top, image=True), Field(hand, image=True)])
    fields = ["done", top, "reward"]
    statistics(store, fields).save(folder)
    said = json.loads((folder / "meta" / "stats.json").read_text())
    assert list(said) == [*before, "next.reward"]
    np.testing.assert_allclose(np.ravel(said[top]["mean"]), images.mean(axis=(0, 1, 2)) / 255)
    assert said["next.done"]["max"] == [1]
    found = Statistics.load(folder)
    assert set(found) == {*fields, hand, "timestamp"}
    assert found[hand].mean.tolist() == [63.75] * 3
    np.testing.assert_allclose(found[top].mean, images.mean(axis=(0, 1, 2)))


def test_null_dimensions_and_statistics_without_a_count_are_saved_and_loaded(tmp_path: Path) -> None:
    made = rows(700)
    made["observation"][:, 1] = np.nan

    def refuse(said: str) -> None:
        raise AssertionError(said)

    found = statistics(store_of(made), ["obs_continuous"])
    found.save(tmp_path)
    text = (tmp_path / "meta" / "stats.json").read_text()
    state = json.loads(text, parse_constant=refuse)["obs_continuous"]
    assert [state[name][1] for name in ("mean", "std", "min", "max", "q50")] == [None] * 5
    again = Statistics.load(tmp_path)["obs_continuous"]
    assert again.count.tolist() == [700, 0, 700]
    assert np.isnan(again.mean).tolist() == np.isnan(again.std).tolist() == [False, True, False]
    found = Statistics.load(write_stats(tmp_path / "old", {"action": entry_of(1.0, 2.0, count=None)}))
    assert found["action"].count.tolist() == [0, 0]
    assert found["action"].std.tolist() == [0.5, 0.5]
    scaling = Normalizer.of(found, {"action": "mean_std"})["action"]
    assert scaling.apply(np.float32([2, 2])).tolist() == [2, 0]
    found.save(tmp_path / "new")
    said = (tmp_path / "new" / "meta" / "stats.json").read_text()
    assert json.loads(said) == {"action": entry_of(1.0, 2.0, count=None)}
    assert_same(Statistics.load(tmp_path / "new"), found)


def test_are_saved_as_lerobot_has_them(tmp_path: Path) -> None:
    columns = {**rows(700), "observation_image": np.arange(700 * 12).reshape(700, 2, 2, 3).astype(np.uint8)}
    found = statistics(store_of(columns))
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "stats.json").write_text(json.dumps({"timestamp": entry_of(1.0)}))
    found.save(tmp_path)
    said = json.loads((tmp_path / "meta" / "stats.json").read_text())
    assert {"timestamp", "obs_continuous", "action", "next.reward", "obs_image"} <= said.keys()
    state = said["obs_continuous"]
    assert state["count"] == [700]
    assert set(state) == {"mean", "std", "min", "max", "count", "q01", "q10", "q50", "q90", "q99"}
    np.testing.assert_allclose(state["mean"], columns["observation"].astype(np.float64).mean(axis=0), rtol=1e-6)
    assert np.shape(said["next.reward"]["std"]) == (1,)
    image = said["obs_image"]
    assert np.shape(image["mean"]) == (3, 1, 1)
    assert 0 <= np.min(image["min"]) <= np.max(image["max"]) <= 1
    pixels = columns["observation_image"] / 255.0
    np.testing.assert_allclose(np.ravel(image["std"]), pixels.std(axis=(0, 1, 2)), rtol=1e-9)
    loaded = Statistics.load(tmp_path)
    assert loaded["timestamp"].mean.tolist() == 1.0
    assert loaded.rows == 700
    for name, one in found.items():
        for kind in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(np.ravel(getattr(loaded[name], kind)), np.ravel(getattr(one, kind)), rtol=1e-12)


def test_what_lerobot_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    stats = {
        "observation.state": {"mean": [1.0, 2.0], "std": [3.0, 4.0], "min": [-9, -9], "max": [9, 9], "count": [50]},
        "observation.images.top": {
            name: [[[0.5]], [[0.25]], [[1.0]]] for name in ("mean", "std", "min", "max", "q01", "q99")
        }
        | {"count": [40]},
        "next.reward": {"mean": [0.5], "std": [0.1], "min": [0.0], "max": [1.0], "count": [50]},
        "action": {"mean": [0.5], "std": [0.1], "min": [0.0], "max": [1.0], "q01": [0.1], "count": [50]},
    }
    (tmp_path / "meta" / "stats.json").write_text(json.dumps(stats))
    found = Statistics.load(tmp_path)
    found.save(tmp_path / "other")
    assert json.loads((tmp_path / "other" / "meta" / "stats.json").read_text())["action"] == stats["action"]
    assert list(found) == ["observation.state", "observation.images.top", "reward", "action"]
    assert found["observation.state"].std.tolist() == [3, 4]
    assert found["reward"].mean.shape == ()
    assert found["observation.images.top"].is_image
    assert found["observation.images.top"].quantiles[0.99].tolist() == [127.5, 63.75, 255]
    assert found["action"].quantiles[0.01].tolist() == [0.1]
    assert found["action"].mean.shape == (1,)


def test_frames_of_lerobot_have_the_statistics_of_lerobot(tmp_path: Path) -> None:
    robot = Robot(lengths=(5, 3, 7, 4))
    convert(read_lerobot(robot.write(tmp_path / "robot"), final="mark"), tmp_path / "rows")
    found = statistics(DatasetStore().from_dataset(datasets.load_from_disk(tmp_path / "rows")))
    assert_are_of(found["observation.state"], robot.state)
    assert_are_of(found["action"], robot.action)
    assert_are_of(found["reward"], robot.reward)


def test_views_and_mixtures_have_statistics_of_their_rows() -> None:
    columns = rows(700)
    store, other = store_of(columns), store_of(rows(350, seed=1))
    parts = store.split(train=0.5, test=0.5)
    for view in parts.values():
        own = view.snapshot().rows(range(len(view)), {"observation"})["observation"]
        assert_are_of(statistics(view)["obs_continuous"], np.array(own, np.float32))
    merged = statistics(Mixture(parts, per="step"))
    whole = statistics(store)
    np.testing.assert_allclose(merged["reward"].mean, whole["reward"].mean, rtol=1e-6)
    np.testing.assert_allclose(merged["reward"].std, whole["reward"].std, rtol=1e-6)
    both = Mixture({"one": store, "other": other})
    source = BatchSource(both, 8, 4, normalize={"obs_continuous": "mean_std"})
    assert source[0]["obs_continuous"].dtype == np.float32


def test_rows_of_a_mixture_count_as_often_as_they_are_drawn() -> None:
    """The second member's 350 rows have three quarters of the windows: as if each of them were there six times."""
    one, other = rows(700), rows(350, seed=1)
    stores = {"one": store_of(one), "other": store_of(other), "none": store_of(rows(100, seed=2))}
    mixture = Mixture(stores, weights=[1, 3, 0])
    found = statistics(mixture)
    drawn = np.concatenate([one["observation"], *[other["observation"]] * 6]).astype(np.float64)
    seen = found["obs_continuous"]
    np.testing.assert_allclose(seen.mean, drawn.mean(axis=0), rtol=0, atol=1e-6 * drawn.std(axis=0).max())
    np.testing.assert_allclose(seen.std, drawn.std(axis=0), rtol=1e-6)
    for share, values in seen.quantiles.items():
        assert ((drawn < values).mean(axis=0) <= share + seen.rank_error).all()
        assert ((drawn <= values).mean(axis=0) >= share - seen.rank_error).all()
    assert 0 < seen.rank_error < 0.01
    parts = [statistics(stores[name], "obs_continuous")["obs_continuous"] for name in ("one", "other")]
    assert np.array_equal(seen.max, np.maximum(parts[0].max, parts[1].max))
    assert (seen.count == 1050).all()
    assert found["member"].mean == pytest.approx(0.75)
    equal = statistics(Mixture(stores, weights=[7, 4, 0], per="member"))["reward"].mean
    by_steps = statistics(Mixture({"one": stores["one"], "other": stores["other"]}, per="step"))["reward"]
    each = [statistics(stores[name], "reward")["reward"] for name in ("one", "other")]
    shares = [part.count / sum(other.count for other in each) for part in each]
    mean = sum(share * part.mean for share, part in zip(shares, each, strict=True))
    variance = sum(share * (part.std**2 + (part.mean - mean) ** 2) for share, part in zip(shares, each, strict=True))
    assert by_steps.mean == pytest.approx(mean, rel=1e-4)
    assert by_steps.std == pytest.approx(variance**0.5, rel=1e-4)
    assert equal != pytest.approx(mean, rel=1e-3)


def test_shares_of_nested_mixtures_multiply_and_those_that_change_are_refused(tmp_path: Path) -> None:
    stores = [store_of(rows(64, seed=seed)) for seed in range(3)]
    nested = Mixture({"both": Mixture({"a": stores[0], "b": stores[1]}, weights=[1, 3]), "c": stores[2]})
    flat = Mixture({"a": stores[0], "b": stores[1], "c": stores[2]}, weights=[1, 3, 4])
    for name in ("obs_continuous", "reward"):
        np.testing.assert_allclose(statistics(nested)[name].mean, statistics(flat)[name].mean, rtol=1e-9)
        np.testing.assert_allclose(statistics(nested)[name].quantiles[0.5], statistics(flat)[name].quantiles[0.5])
    found = statistics(flat, ["reward"])
    found.save(tmp_path)
    again = Statistics.load(tmp_path)
    assert again["reward"].mean == found["reward"].mean
    assert again["reward"].quantiles[0.5] == pytest.approx(float(found["reward"].quantiles[0.5]))
    assert_raises(ConfigError, "begins with the 192 rows", found.update, flat)
    staged = Mixture({"a": stores[0], "b": stores[1]}, weights=Schedule({0: [1, 0], 5: [1, 1]}))
    assert_raises(ConfigError, "expected one share for each member, found a Schedule", statistics, staged)
    kinds: Any = {"obs_continuous": "mean_std"}
    assert_raises(ConfigError, "found a Schedule", BatchSource, staged, 8, 4, normalize=kinds)
    normalizer = Normalizer.of(statistics(stores[0]), kinds)
    assert BatchSource(staged, 8, 4, normalize=normalizer)[0]["obs_continuous"].dtype == np.float32
