"""Running normalisation against plain loops, and what all transforms must do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, MissingFieldError, SchemaError, StateError
from mouse_core.replay import (
    Apply,
    ArrayStorage,
    CatFrames,
    Compress,
    HindsightRelabel,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    NStep,
    OnWrite,
    ReplayBuffer,
    ReplayBufferEnsemble,
    VecNorm,
)
from mouse_core.store import DatasetStore
from mouse_core.testing import TransformConformance
from tests.raising import assert_raises


class TestVecNorm(TransformConformance):
    def make(self) -> Any:
        return [VecNorm("obs", "reward", decay=0.97), NextView()]


class TestFramesOfSlices(TransformConformance):
    sequence_length = 3

    def make(self) -> Any:
        return [CatFrames("obs", frames=3), VecNorm("obs"), NextView(), NStep(2, 0.9)]


class TestCompress(TransformConformance):
    def make(self) -> Any:
        return [Compress("obs", shape=(2,), dtype="float32"), Apply({"reward": np.abs}, stored={"action": np.negative})]


class TestStepsBehindRows(TransformConformance):
    def make(self) -> Any:
        return [CatFrames("obs", frames=2), NextView(), NStep(3, 0.9)]


class TestArrivedStepsBehindRows(TransformConformance):
    alignment = "arrived"

    def make(self) -> Any:
        return NStep(3, 0.9, takes="arrived")


class TestHindsight(TransformConformance):
    def make(self) -> Any:
        return HindsightRelabel(compute_reward=goal_distance, strategy="final", goal="goal", achieved="obs")

    def rows(self, first: int, n: int) -> dict[str, Any]:
        rows = super().rows(first, n)
        return {**rows, "goal": rows["obs"] + 1}


def goal_distance(achieved: Any, goal: Any, batch: Any) -> Any:
    return np.abs(achieved - goal).sum(-1)


def wanted(rows: list[float], decay: float) -> tuple[float, float]:
    known = [(decay ** (len(rows) - 1 - place), value) for place, value in enumerate(rows) if np.isfinite(value)]
    total = sum(weight for weight, _ in known)
    if not total:
        return 0.0, 1.0
    mean = sum(weight * value for weight, value in known) / total
    deviation = (sum(weight * (value - mean) ** 2 for weight, value in known) / total) ** 0.5
    return mean, deviation


numbers = st.one_of(st.floats(-100, 100), st.sampled_from([np.nan, np.inf]))


@given(st.data())
def test_every_row_counts_once_however_it_came(data: st.DataObject) -> None:
    decay, capacity = data.draw(st.sampled_from([1.0, 0.9])), data.draw(st.integers(1, 7))
    norm = VecNorm("x", decay=decay)
    buffer = ReplayBuffer(ArrayStorage(capacity), transform=norm, batch_size=3)
    all_rows: list[float] = []
    for part in data.draw(st.lists(st.lists(numbers, min_size=1, max_size=7), min_size=1, max_size=6)):
        rows = part[:capacity]
        if data.draw(st.booleans()):
            buffer.extend({"x": np.array(rows)})
        else:
            for row in rows:
                buffer.append({"x": row})
        all_rows += rows
        if data.draw(st.booleans()):
            buffer.sample()
    batch = buffer.sample()
    mean, deviation = wanted(all_rows, decay)
    scaling = norm.normalizer["x"]
    assert abs(float(scaling.centre) - mean) < 1e-9
    stored = buffer[:]["x"][batch["index"]]
    with np.errstate(invalid="ignore"):
        found = (stored - scaling.centre) / scaling.spread
    np.testing.assert_allclose(batch["x"], found, rtol=1e-5, atol=1e-5)
    if deviation > 1e-3:
        assert abs(float(scaling.spread) / deviation - 1) < 1e-6


def test_what_is_under_next_has_the_numbers_of_the_root_and_a_constant_is_shifted() -> None:
    norm = VecNorm("obs", ("next", "obs"), "reward", "flag")  # what follows need not be named, and may be
    buffer = ReplayBuffer(ArrayStorage(9), transform=norm, batch_size=9)
    obs = np.array([1.0, 3.0, 5.0])
    buffer.extend(
        {"obs": obs, "flag": np.ones(3, bool), "next": {"obs": obs + 2, "reward": np.array([[1.0], [2.0], [3.0]])}}
    )
    batch = buffer.sample()
    deviation = obs.std()
    np.testing.assert_allclose(batch["obs"], (obs[batch["index"]] - 3) / deviation, rtol=1e-6)
    np.testing.assert_allclose(batch["next"]["obs"], (obs[batch["index"]] - 1) / deviation, rtol=1e-6)
    assert batch["next"]["reward"].shape == (9, 1)
    assert (batch["flag"] == 0).all()
    buffer[0] = {"obs": 1e9, "flag": True, "next": {"obs": 0.0, "reward": np.array([0.0])}}
    buffer.sample()
    assert norm.normalizer["obs"].centre == 3
    buffer.empty()
    buffer.extend({"obs": obs[:1] + 6, "flag": np.ones(1, bool), "next": {"obs": obs[:1], "reward": np.ones((1, 1))}})
    buffer.sample()
    assert norm.normalizer["obs"].centre == 4  # 1, 3, 5 and 7: rows that are gone go on counting


def test_rows_that_others_wrote_count(tmp_path: Path) -> None:
    norms = [VecNorm("x"), VecNorm("x")]
    one, other = (
        ReplayBuffer(MemmapStorage(50, tmp_path / "rows"), transform=norm, batch_size=4, seed=1) for norm in norms
    )
    one.extend({"x": np.arange(10.0)})
    other.extend({"x": np.arange(10.0, 20.0)})
    assert one.sample()["x"].tolist() == other.sample()["x"].tolist()
    assert [float(norm.normalizer["x"].centre) for norm in norms] == [9.5, 9.5]
    third = VecNorm("x")
    ReplayBuffer(MemmapStorage(50, tmp_path / "rows"), transform=third, batch_size=4).sample()
    assert third.normalizer["x"].centre == 9.5


def steps(first: int, n: int) -> dict[str, Any]:
    number = np.arange(first, first + n)
    return {"observation": number[:, None] * 1.0, "action": number % 2, "reward": number * 1.0, "done": number % 5 == 4}


def test_rows_of_a_store_count_when_they_are_taken_over(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path, "a", sync="none", max_rows=160) as store:
        store.extend(steps(0, 100))
        norm = VecNorm("obs_continuous")
        buffer = ReplayBuffer(store, transform=norm, batch_size=4)
        assert buffer.sample()["obs_continuous"].dtype == np.float32
        store.extend(steps(100, 10))
        buffer.refresh()
        buffer.sample()
        assert norm.normalizer["obs_continuous"].centre == np.arange(110).mean()
        seen, first = set(range(110)), 0.0
        for part in range(11, 40):
            store.extend(steps(part * 10, 10))
            store.flush()
            if part % 3 == 0 or part > 36:
                buffer.refresh()
                buffer.sample()
                there = buffer[:]["reward"].tolist()
                seen, first = seen | set(map(int, there)), max(first, there[0])
        assert first > 0
        assert len(seen) == 400
        assert norm.normalizer["obs_continuous"].centre[0] == pytest.approx(np.mean(sorted(seen)))


def test_states_bring_the_numbers_back(tmp_path: Path) -> None:
    def made(**options: Any) -> tuple[ReplayBuffer, VecNorm]:
        norm = VecNorm("x", **options)
        return ReplayBuffer(ArrayStorage(20), transform=norm, batch_size=4), norm

    buffer, norm = made()
    buffer.extend({"x": np.arange(100.0)})
    buffer.dumps(tmp_path / "state")
    again, other = made()
    again.loads(tmp_path / "state")
    assert again.sample()["x"].tolist() == buffer.sample()["x"].tolist()
    assert other.normalizer["x"].centre == norm.normalizer["x"].centre == 89.5
    different, _ = made(eps=0.5)
    assert_raises(StateError, "eps", different.loads, tmp_path / "state")
    assert not len(different)
    plain = ReplayBuffer(ArrayStorage(20), batch_size=4)
    plain.loads(tmp_path / "state")
    assert "transforms" not in plain.state_dict()
    other.load_state_dict({})
    again.load_state_dict(plain.state_dict())  # of no numbers: those of the rows that are there
    again.sample()
    assert other.normalizer["x"].centre == 89.5
    damaged = norm.state_dict()
    damaged["fields"]["0"] = {**damaged["fields"]["0"], "weight": np.array([-1.0])}
    assert_raises(StateError, "finite arrays", norm.load_state_dict, damaged)
    assert norm.normalizer["x"].centre == 89.5


def test_all_frameworks_have_the_same_numbers() -> None:
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    import mouse_jax
    import mouse_torch

    rows = {"x": np.random.default_rng(0).normal(3, 2, (60, 3)).astype(np.float32)}
    found = []
    for package, storage in (
        (mouse_torch, ArrayStorage(40)),
        (mouse_torch, mouse_torch.TensorStorage(40)),
        (mouse_jax, ArrayStorage(40)),
    ):
        norm = VecNorm("x", decay=0.99)
        buffer = package.ReplayBuffer(storage, transform=norm, batch_size=5, seed=2)
        for begin in range(0, 60, 20):
            buffer.extend({"x": rows["x"][begin : begin + 20]})
        found.append(buffer.sample()["x"])
        again = package.ReplayBuffer(type(storage)(40), transform=VecNorm("x", decay=0.99), batch_size=5)
        again.load_state_dict(buffer.state_dict())
        assert np.array_equal(np.asarray(again.sample()["x"]), np.asarray(buffer.sample()["x"]))
    assert isinstance(found[0], torch.Tensor)
    assert isinstance(found[2], jax.Array)
    assert all(np.array_equal(np.asarray(one), np.asarray(found[0])) for one in found)


def test_where_it_cannot_be_is_said() -> None:
    norm = VecNorm("x")
    ReplayBuffer(ArrayStorage(9), transform=norm)
    assert_raises(ConfigError, "one storage", ReplayBuffer, ArrayStorage(9), transform=norm)
    with pytest.raises(ConfigError, match="keeps the order"):
        ReplayBuffer(ArrayStorage(9), transform=VecNorm("x"), writer=MaxValueWriter("x"))
    with pytest.raises(ConfigError, match="before all transforms that can change the rows"):
        ReplayBuffer(ArrayStorage(9), transform=[Apply({"x": abs}), VecNorm("x")])
    with pytest.raises(ConfigError, match="before all transforms that can change the rows"):
        ReplayBuffer(ArrayStorage(9), transform=[VecNorm("x"), CatFrames("x", frames=2)])
    with pytest.raises(ConfigError, match="an ensemble stores no rows"):
        ReplayBufferEnsemble(ReplayBuffer(ArrayStorage(9)), transform=VecNorm("x"))
    assert_raises(ConfigError, "without statistics of all rows", OnWrite, VecNorm("x"))
    for options in ({"decay": 0.0}, {"decay": 2.0}, {"eps": 0.0}, {"eps": True}):
        assert_raises(ConfigError, "expected", VecNorm, "x", **options)
    assert_raises(ConfigError, "at least one", VecNorm)
    assert_raises(ConfigError, "expected statistics of at least one row", VecNorm("x"), {"x": np.ones(3)})
    buffer = ReplayBuffer(ListStorage(9), transform=VecNorm("x"), batch_size=2)
    buffer.extend([{"y": 1.0}])
    assert_raises(MissingFieldError, "'x'", buffer.sample)
    text = ReplayBuffer(ListStorage(9), transform=VecNorm("x"), batch_size=2)
    text.extend([{"x": "a"}])
    assert_raises(SchemaError, "'x': expected a numeric array", text.sample)
