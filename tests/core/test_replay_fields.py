"""Transforms of fields, frames that are stored once and running normalisation, against plain loops."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError, StateError
from mouse_core.nested import map_tree
from mouse_core.replay import (
    Apply,
    ArrayStorage,
    BurnIn,
    CatFrames,
    CenterCrop,
    Compose,
    Compress,
    Concatenate,
    GrayScale,
    HindsightRelabel,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    NStep,
    OnWrite,
    RandomSampler,
    Rename,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    VecNorm,
)
from mouse_core.store import DatasetStore
from mouse_core.testing import TransformConformance
from tests.raising import assert_raises


def as_torch(batch: Any) -> Any:
    return map_tree(torch.from_numpy, batch)


def wanted_stack(row: int, first: int, frames: int) -> list[int]:
    return [max(first, row - back) for back in range(frames - 1, -1, -1)]


@given(st.data())
def test_stacks_are_of_one_episode_whatever_is_drawn(data: st.DataObject) -> None:
    envs, frames = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    steps, capacity = data.draw(st.integers(8, 30)), data.draw(st.integers(8, 20))
    ends = np.random.default_rng(data.draw(st.integers(0, 99))).random((steps, envs)) < 0.2
    ends[-1] = True
    number = np.arange(steps * envs).reshape(steps, envs)
    rows = {"obs": number[..., None].astype(np.float32), "x": number, "done": ends.astype(np.int8)}
    storage = ArrayStorage(capacity * envs, ndim=2)
    cat, sliced = CatFrames("obs", frames=frames), data.draw(st.booleans())
    pad: Any = data.draw(st.sampled_from([True, 0]))
    sampler = SliceSampler(sequence_length=3, end_key="done", span=(True, True), pad=pad) if sliced else None
    transform = data.draw(st.sampled_from([[cat], [cat, NextView()], [NextView(), cat]]))
    buffer = ReplayBuffer(storage, sampler, transform=transform, batch_size=20)
    buffer.extend(rows)
    batch = buffer.sample()
    oldest = max(0, steps - capacity)
    there = batch.get("mask", np.ones(batch["x"].shape, bool))
    for place in np.argwhere(there).tolist():
        row, env = divmod(int(batch["x"][tuple(place)]), envs)
        begins = [step for step in range(oldest, row + 1) if step == oldest or ends[step - 1, env]]
        found = batch["obs"][tuple(place)].tolist()
        assert found == [step * envs + env for step in wanted_stack(row, begins[-1], frames)]
        if "next" in batch and not ends[row, env]:
            after = batch["next"]["obs"][tuple(place)].tolist()
            assert after == [step * envs + env for step in wanted_stack(row + 1, begins[-1], frames)]


def test_stacks_of_recorded_frames_move_with_n_steps_and_dilations() -> None:
    done = np.zeros(12, np.int8)
    done[[4, 11]] = 1
    buffer = ReplayBuffer(
        ArrayStorage(20), transform=[CatFrames("obs", frames=2), NextView(), NStep(3, 1.0)], batch_size=60
    )
    buffer.extend({"obs": np.arange(12)[:, None], "reward": np.ones(12), "done": done})
    batch = buffer.sample()
    for now, after, steps in zip(batch["obs"], batch["next"]["obs"], batch["steps"], strict=True):
        last = 4 if now[1] < 5 else 11
        assert after[1] == min(now[1] + 3, last)
        assert now[0] == max(now[1] - 1, 0 if last == 4 else 5)
        assert steps == min(3, last + 1 - now[1])
    sampler = SliceSampler(sequence_length=3, dilation=2, end_key="done")
    buffer = ReplayBuffer(ArrayStorage(60), sampler, transform=CatFrames("obs", frames=3), batch_size=30)
    buffer.extend({"obs": np.arange(40)[:, None], "x": np.arange(40), "done": np.arange(40) % 10 == 9})
    batch = buffer.sample()
    assert (np.diff(batch["x"], axis=1) == 2).all()
    wanted = [np.maximum(batch["x"] - back, batch["x"] // 10 * 10) for back in (2, 1, 0)]
    np.testing.assert_array_equal(batch["obs"], np.stack(wanted, axis=-1))


@pytest.mark.parametrize("sampler", [RandomSampler(), SliceSampler(sequence_length=2, end_key=("next", "done"))])
def test_stacks_under_next_follow_the_root_named_or_not(sampler: Any) -> None:
    number = np.arange(20)
    rows = {"obs": number[:, None], "next": {"obs": number[:, None] + 1, "done": number % 10 == 9}}
    cat = CatFrames("obs", ("next", "obs"), frames=3)
    buffer = ReplayBuffer(ArrayStorage(20), sampler, transform=cat, batch_size=20)
    buffer.extend(rows)
    batch = buffer.sample()
    alone = CatFrames("obs", frames=3)
    assert cat == alone
    for now, after in zip(batch["obs"].reshape(-1, 3), batch["next"]["obs"].reshape(-1, 3), strict=True):
        begin = now[-1] // 10 * 10
        assert now.tolist() == [max(now[-1] - back, begin) for back in (2, 1, 0)]
        assert after.tolist() == [*now[1:], now[-1] + 1]


def test_frames_before_an_episode_may_be_a_number_and_channels_may_come_first() -> None:
    frames = np.arange(1, 9, dtype=np.uint8).reshape(2, 4, 1, 1, 1) * np.ones((1, 1, 3, 2, 2), np.uint8)
    batch = {"obs": frames, "done": np.array([[0, 1, 0, 0]] * 2)}
    for change in (lambda tree: tree, as_torch):
        found = CatFrames("obs", frames=2, axis=-3, pad=0)(change(batch))["obs"]
        assert tuple(found.shape) == (2, 4, 6, 2, 2)
        assert found[0, :, 0, 0, 0].tolist() == [0, 1, 0, 3]
        assert found[0, :, 3, 0, 0].tolist() == [1, 2, 3, 4]
    assert_raises(DataError, "'obs': expected a pad that its dtype can", CatFrames("obs", frames=2, pad=-1), batch)
    with pytest.raises(SchemaError, match="expected steps with an axis -1"):
        CatFrames("x", frames=2)({"x": np.zeros((2, 4)), "done": batch["done"]})
    for wrong in ({"frames": 0}, {"frames": 2, "axis": 1}):
        assert_raises(ConfigError, "expected", CatFrames, "obs", **wrong)


def test_what_reads_other_rows_stands_first_and_needs_their_order() -> None:
    cat = CatFrames("obs", frames=2)
    with pytest.raises(ConfigError, match=r"expected CatFrames.* before all transforms that can change the rows"):
        ReplayBuffer(ArrayStorage(9), transform=[Apply({"obs": abs}), cat])
    with pytest.raises(ConfigError, match="keeps the order of rows"):
        ReplayBuffer(ArrayStorage(9), transform=cat, writer=MaxValueWriter("reward"))
    relabel = HindsightRelabel(compute_reward=lambda achieved, goal, batch: np.zeros(achieved.shape[:2]))
    with pytest.raises(ConfigError, match="a single field that marks the ends of episodes"):
        ReplayBuffer(ArrayStorage(9), transform=[relabel, CatFrames("obs", frames=2, done="last")])
    both = ReplayBuffer(ArrayStorage(30), transform=[cat, relabel], batch_size=30)
    place = np.arange(20.0)[:, None]
    both.extend({"obs": place, "achieved_goal": place, "desired_goal": place * 0, "reward": place[:, 0],
                 "done": np.arange(20) % 5 == 4})  # fmt: skip
    batch = both.sample()
    assert batch["relabelled"].any()
    begin = batch["obs"][:, 1] // 5 * 5
    assert (batch["obs"][:, 0] == np.maximum(batch["obs"][:, 1] - 1, begin)).all()


def test_functions_of_fields_on_the_way_out_and_in() -> None:
    clip = Apply({("next", "reward"): lambda reward: reward.clip(-1, 1)}, stored={"obs": lambda obs: obs / 10})
    buffer = ReplayBuffer(ArrayStorage(10), transform=clip, batch_size=40)
    buffer.extend({"obs": np.full((4, 2), 5.0), "next": {"reward": np.array([-3.0, 0.5, 2.0, 1.0])}})
    buffer.append({"obs": np.full(2, 5.0), "next": {"reward": 9.0}})
    buffer.extend([{"obs": np.full(2, 5.0), "next": {"reward": 9.0}}] * 2)
    assert (buffer[:]["obs"] == 0.5).all()
    assert buffer[:]["next"]["reward"].tolist() == [-3, 0.5, 2, 1, 9, 9, 9]
    assert set(buffer.sample()["next"]["reward"].tolist()) == {-1, 0.5, 1}
    found = clip(as_torch({"next": {"reward": np.array([7.0])}}))["next"]["reward"]
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [1.0]
    assert_raises(MissingFieldError, "reward", clip, {"obs": np.ones(2)})
    for wrong in (lambda values: values.sum(), lambda values: 3, lambda values: values[:1]):
        with pytest.raises(SchemaError, match=r"Apply: 'obs': expected an array of \[2\] rows"):
            Apply({"obs": wrong})({"obs": np.ones(2)})
    assert_raises(ConfigError, "expected a function", Apply, {"obs": 3})
    assert_raises(ConfigError, "leave OnWrite out", OnWrite, clip)
    assert pickle.loads(pickle.dumps(Apply({"obs": abs}))).functions["obs"] is abs
    buffer = ReplayBuffer(ArrayStorage(10), transform=Rename({"obs": "observation"}), batch_size=2)
    buffer.extend([{"observation": 1.0}, {"observation": 2.0}])
    assert buffer[:].keys() == {"obs"}
    chain = Compose(Concatenate("a", "b", to="c"), Apply({"c": abs}))
    assert chain({"a": -np.ones((2, 1)), "b": np.ones((2, 1))})["c"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("change", [lambda tree: tree, as_torch])
def test_fields_become_one(change: Any) -> None:
    batch = {"a": np.ones((2, 4, 3)), "b": np.zeros((2, 4)), "index": np.zeros((2, 4), int)}
    found = Concatenate("b", "a", to=("obs", "all"), keep=True)(change(batch))
    assert found["obs"]["all"].tolist() == np.concatenate([batch["b"][..., None], batch["a"]], axis=-1).tolist()
    assert found.keys() == {"a", "b", "index", "obs"}
    assert Concatenate("a", "b", to="a")(change(batch)).keys() == {"a", "index"}
    pair = change({"a": np.ones(4), "b": np.zeros(4), "index": np.arange(4)})
    assert tuple(Concatenate("a", "b", to="c")(pair)["c"].shape) == (4, 2)
    assert_raises(SchemaError, r"'index': expected .*float64 .* in", Concatenate("a", "index", to="c"), change(batch))
    assert_raises(ConfigError, "at least two", Concatenate, "a", to="c")


def test_burn_in_gives_a_state_and_the_steps_behind() -> None:
    seen = []

    def network(first: Any) -> dict[str, Any]:
        seen.append(first["mask"].shape)
        return {"hidden": {"h": first["obs"].sum(axis=1)}}

    buffer = ReplayBuffer(
        ArrayStorage(50),
        SliceSampler(sequence_length=5, end_key="done"),
        transform=BurnIn(network, steps=2),
        batch_size=6,
    )
    buffer.extend({"obs": np.arange(40), "done": np.arange(40) % 10 == 9})
    batch = buffer.sample()
    assert batch["obs"].shape == batch["index"].shape == (6, 3)
    assert (batch["hidden"]["h"] == 2 * batch["obs"][:, 0] - 3).all()
    assert seen == [(6, 2)]
    given = {"obs": torch.arange(10).reshape(2, 5)}
    assert BurnIn(lambda first: {"h": first["obs"].sum(dim=1)}, 3)(given)["h"].tolist() == [3, 18]
    for steps, function, error in (
        (5, lambda first: {}, "more than 5 steps"),
        (2, lambda first: {"obs": first["obs"]}, "found 'obs' in both"),
        (2, lambda first: {"h": first["obs"][:1]}, "'h': expected 2 rows"),
        (2, lambda first: 3, "expected a dict of fields"),
    ):
        assert_raises(SchemaError, error, BurnIn(function, steps), given)
    assert_raises(ConfigError, "expected", BurnIn, network, 0)


@pytest.mark.parametrize("change", [lambda tree: tree, as_torch])
def test_gray_is_what_the_eye_sees_and_crops_are_in_the_middle(change: Any) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, 3, 7, 6, 3)).astype(np.uint8)
    gray = GrayScale("image")(change({"image": image}))["image"]
    wanted = np.floor(image.astype(np.float64) @ [0.299, 0.587, 0.114] + 0.5)[..., None]
    assert np.abs(np.asarray(gray).astype(int) - wanted).max() == 0
    assert np.asarray(gray).dtype == np.uint8
    first = np.ascontiguousarray(np.moveaxis(image, -1, -3))
    other = GrayScale("image", layout="CHW")(change({"image": first}))["image"]
    assert np.array_equal(np.moveaxis(np.asarray(other), -3, -1), np.asarray(gray))
    crop = CenterCrop("image", size=(4, 3))(change({"image": image}))["image"]
    assert np.array_equal(np.asarray(crop), image[..., 2:6, 2:5, :])  # 3 lines too many: round(1.5) above
    with pytest.raises(SchemaError, match=r"expected images of \[8, 3\] or larger, found \[7, 6\]"):
        CenterCrop("image", size=(8, 3))(change({"image": image}))
    assert_raises(SchemaError, "3 channels", GrayScale("image"), change({"image": image[..., :1]}))


def test_rows_are_stored_as_bytes_in_every_storage_and_others_refused(tmp_path: Any) -> None:
    pixels = np.random.default_rng(1).integers(0, 9, (12, 4, 3)).astype(np.int16)
    compress = Compress("pixels", shape=(4, 3), dtype="int16")
    for storage in (ArrayStorage(12), ListStorage(12), MemmapStorage(12, tmp_path / "rows")):
        buffer = ReplayBuffer(storage, transform=[compress, NextView()], batch_size=20)
        buffer.extend({"pixels": pixels[:10], "x": np.arange(10), "done": np.zeros(10, int)})
        buffer.append({"pixels": pixels[10], "x": 10, "done": 0})
        buffer.extend([{"pixels": pixels[11], "x": 11, "done": 0}])
        assert isinstance(buffer[3]["pixels"], bytes)
        buffer.append(buffer[0])  # bytes already
        batch = buffer.sample()
        assert np.array_equal(batch["pixels"], pixels[batch["x"]])
        assert np.array_equal(batch["next"]["pixels"][batch["mask"]], pixels[(batch["x"] + 1) % 12][batch["mask"]])
    vector = ReplayBuffer(ArrayStorage(12, ndim=2), transform=compress, batch_size=4)
    vector.extend({"pixels": pixels.reshape(4, 3, 4, 3)})
    batch = vector.sample()
    assert np.array_equal(batch["pixels"], pixels[batch["index"]])
    compress = Compress("pixels", shape=(2,))
    buffer = ReplayBuffer(ArrayStorage(9), transform=compress, batch_size=4)
    for wrong in (np.zeros((3, 4), np.uint8), np.zeros((3, 2), np.int8)):
        assert_raises(SchemaError, r"'pixels': expected rows of uint8 \[2\]", buffer.extend, {"pixels": wrong})
    assert not len(buffer)
    for value, says in ((b"no", "expected packed bytes"), (compress.pack(b"abc"), "expected 2 bytes, found 3")):
        assert_raises(DataError, f"row 0: {says}", compress, {"pixels": [value]})
    assert_raises(SchemaError, "rows of bytes", compress, {"pixels": np.zeros(3)})
    plain = Compress("pixels", shape=(2,), pack=lambda given: given[::-1], unpack=lambda given: given[::-1])
    assert plain.inverse({"pixels": np.array([1, 2], np.uint8)})["pixels"] == b"\x02\x01"
    for options in ({"shape": (0,)}, {"shape": 3}, {"shape": (2,), "level": 10}, {"shape": (2,), "pack": bytes}):
        assert_raises(ConfigError, "expected", Compress, "pixels", **options)


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
