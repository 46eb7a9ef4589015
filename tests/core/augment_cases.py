"""Batches, configurations and a plain-Python oracle for the tests of augmentation, in every framework."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mouse_core import DatasetStore
from mouse_core.augment import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    Draws,
    RandomCrop,
    RandomShift,
)

Batch = dict[str, np.ndarray]

FIELDS = ("action", "reward", "xformed_reward", "done", "time", "q_star", "obs_continuous", "obs_discrete", "obs_image")
IMAGE = (6, 5, 2)
ACTIONS, STATES = 5, 7

UNIFORM = AugmentScalarSpec(low=0.5, high=2.0)
GAUSSIAN = AugmentScalarSpec(mean=0.25, std=0.5)


def full_config(**changes: Any) -> AugmentTokensConfig:
    options: dict[str, Any] = {
        "scale_reward": UNIFORM,
        "shift_reward": GAUSSIAN,
        "scale_obs": UNIFORM,
        "shift_obs": GAUSSIAN,
        "scale_obs_image": UNIFORM,
        "shift_obs_image": AugmentScalarSpec(mean=0.0, std=40.0),
        "scale_xformed_reward": True,
        "permute_action": "both",
        "permute_done": True,
        "permute_obs_discrete": True,
        "crop_obs_image": RandomShift(pad=2, per="step"),
        "mask_prob": AugmentMaskProbConfig(**dict.fromkeys(FIELDS, 0.3)),
        "deliver_masks": True,
        "max_num_actions": ACTIONS,
        "max_num_obs_discrete": STATES,
    }
    return AugmentTokensConfig(**options | changes)


def make_batch(seed: int = 0, batch: int = 3, length: int = 4, *, flat_images: bool = False) -> Batch:
    """A batch with every field, NaN and infinities in the places where data have them."""
    rng = np.random.default_rng(seed)
    shape = (batch, length)
    values = {
        "action": rng.integers(0, ACTIONS, shape),
        "reward": rng.normal(size=shape).astype(np.float32),
        "xformed_reward": rng.normal(size=shape).astype(np.float32),
        "done": rng.integers(0, 3, shape),
        "time": rng.integers(0, 1000, shape),
        "q_star": rng.normal(size=(*shape, ACTIONS)).astype(np.float32),
        "obs_continuous": rng.normal(size=(*shape, 3)),
        "obs_discrete": rng.integers(0, STATES, shape),
        "obs_image": rng.integers(0, 256, (*shape, *IMAGE)),
    }
    values["q_star"][rng.random(values["q_star"].shape) < 0.2] = -np.inf
    for name in ("reward", "obs_continuous", "q_star"):
        values[name][rng.random(values[name].shape) < 0.1] = np.nan
    if flat_images:
        values["obs_image"] = values["obs_image"].reshape(*shape, -1)
    return values


COLUMNS = {
    "time": "episode_step",
    "q_star": "metadata_q_star",
    "obs_continuous": "observation",
    "obs_discrete": "observation_discrete",
    "obs_image": "observation_image",
}


def make_store(rows: int = 60) -> DatasetStore:
    steps = {COLUMNS.get(name, name): values[0] for name, values in make_batch(5, 1, rows).items()}
    steps["observation_image"] = steps["observation_image"].astype(np.uint8)
    store = DatasetStore(max_action_dim=ACTIONS)
    store.extend(steps)
    return store


@st.composite
def scalar_specs(draw: st.DrawFn) -> AugmentScalarSpec | None:
    # Numbers of which no product is subnormal: XLA flushes those to zero on the CPU.
    number = st.floats(-100, 100, width=16, allow_subnormal=False)
    kind = draw(st.sampled_from(["none", "uniform", "gaussian"]))
    if kind == "uniform":
        low, high = sorted((draw(number), draw(number)))
        return AugmentScalarSpec(low=low, high=high)
    if kind == "gaussian":
        return AugmentScalarSpec(draw(number), draw(st.floats(0, 10, width=16, allow_subnormal=False)))
    return None


@st.composite
def configs(draw: st.DrawFn) -> AugmentTokensConfig:
    per = draw(st.sampled_from(["sequence", "step"]))
    crop = draw(
        st.sampled_from([None, RandomShift(1, per), RandomShift(9, per), RandomCrop(4, 2, per), RandomCrop(6, 5, per)])
    )
    probability = st.sampled_from([0.0, 0.1, 0.5, 1.0])
    switch = st.booleans()
    return AugmentTokensConfig(
        **{
            f"{part}_{name}": draw(scalar_specs())
            for part in ("scale", "shift")
            for name in ("reward", "obs", "obs_image")
        },
        scale_xformed_reward=draw(switch),
        permute_action=draw(st.sampled_from([False, "input", "target", "both"])),
        permute_done=draw(switch),
        permute_obs_discrete=draw(switch),
        crop_obs_image=crop,
        mask_prob=AugmentMaskProbConfig(**{name: draw(probability) for name in FIELDS}),
        deliver_masks=draw(switch),
        max_num_actions=ACTIONS,
        max_num_obs_discrete=STATES,
    )


def number_at(part: Any, place: tuple[int, ...]) -> Any:
    """The scale or shift of the value at a place; an array is [B, 1 or S, ...] with the last axes of the field."""
    if not np.ndim(part):
        return part
    b, s, *_ = place
    return part[(b, min(s, part.shape[1] - 1), *place[len(place) - part.ndim + 2 :])]


def oracle(batch: Batch, draws: Draws) -> Batch:
    """What ``apply`` must give, one value after the other in plain Python; images as [B, S, H, W, C]."""
    found = {name: values.copy() for name, values in batch.items()}
    size, length = next(iter(batch.values())).shape[:2]
    for b in range(size):
        for s in range(length):
            for name, permutation in draws.permutations.items():
                found[name][b, s] = permutation[b, batch[name][b, s]]
            for name, permutation in draws.columns.items():
                for a in range(len(permutation[b])):
                    found[name][b, s][..., permutation[b, a]] = batch[name][b, s][..., a]
    for name, (scale, shift) in draws.affine.items():
        dtype = batch[name].dtype.type
        for place in np.ndindex(batch[name].shape):
            value = batch[name][place]
            with np.errstate(all="ignore"):
                if scale is not None:
                    value = dtype(value * dtype(number_at(scale, place)))
                if shift is not None:
                    value = dtype(value + dtype(number_at(shift, place)))
            found[name][place] = value
    for name, (crop, pixels) in draws.images.items():
        image = found[name]
        if crop is not None:
            rows, columns = crop
            cropped = np.empty((size, length, rows.shape[2], columns.shape[2], image.shape[-1]), image.dtype)
            for b, s, y, x in np.ndindex(cropped.shape[:4]):
                t = min(s, rows.shape[1] - 1)
                cropped[b, s, y, x] = image[b, s, rows[b, t, y], columns[b, t, x]]
            image = cropped
        if pixels is not None:
            image = np.array([int(pixels[v]) for v in image.ravel()], image.dtype).reshape(image.shape)
        found[name] = image
    for masks, delivered in ((draws.masks, False), (draws.delivered_masks, True)):
        for name, hidden in masks.items():
            for b, s in np.ndindex(size, length):
                if hidden[b, s]:
                    found[name][b, s] = draws.fills.get(name, -1 if name == "time" else 0)
            if delivered:
                found[f"{name}_mask"] = hidden
    return found


def assert_same(found: Any, expected: Batch) -> None:
    """The same names, dtypes, shapes and bits (any NaN equals any other)."""
    assert set(found) == set(expected)
    for name, values in expected.items():
        other = np.asarray(found[name])
        assert other.dtype == values.dtype, name
        assert other.shape == values.shape, name
        if values.dtype.kind == "f":
            np.testing.assert_array_equal(np.isnan(other), np.isnan(values), err_msg=name)
            other, values = np.where(np.isnan(other), 0, other), np.where(np.isnan(values), 0, values)
        assert other.tobytes() == values.tobytes(), f"{name}: {other} {values}"


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variable exceeds once in 10,000 times (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3


def chi_square(counts: Any, expected: Any) -> float:
    counts = np.asarray(counts, float)
    return float(((counts - expected) ** 2 / expected).sum())
