"""NumPy, PyTorch and JAX deliver the same batches, to the bit: one digest for one configuration.

Only here both frameworks are in one process. What JAX cannot hold without x64 is compared with NumPy batches that are
narrowed by the same table, and with x64 nothing is narrowed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import BatchSource, DatasetStore, rollouts
from mouse_core.augment import AugmentMaskProbConfig, AugmentScalarSpec, AugmentTokensConfig
from mouse_core.digest import StreamDigest
from mouse_core.replay import ArrayStorage, ReplayBuffer
from mouse_core.store import Store
from mouse_core.store.derived import (
    DerivedStore,
    IsFirst,
    NStepDiscount,
    NStepReturn,
    Previous,
    Return,
    TimeToEnd,
)
from mouse_core.testing import as_arrays, example_columns, example_store, stream_digest
from mouse_jax import rollout_storage

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
SAMPLINGS = ("random", "last", "sequential", "batch", "blocks")
WORKERS = (0, 1, 2, 8)
N = 10
OPTIONS = {"sequence_length": 8, "batch_size": 8, "seed": 5}
#: float64 that float32 cannot hold is the only thing that replaced_dtypes changes in these data.
SINGLE = {"dtypes": {"obs_continuous": "float32"}}

AUGMENT = AugmentTokensConfig(
    scale_reward=AugmentScalarSpec(mean=1.0, low=0.5, high=2.0),
    shift_obs=AugmentScalarSpec(mean=0.0, std=1.0),
    permute_action="both",
    permute_done=True,
    mask_prob=AugmentMaskProbConfig(reward=0.1, obs_continuous=0.15),
)


def loader(package: str, store: Store, **options: Any) -> Any:
    return PACKAGES[package].PrefetchBatchifier(store, **{**OPTIONS, **options})


def digest(package: str, store: Store, n: int = N, **options: Any) -> str:
    with loader(package, store, **options) as opened:
        return stream_digest(opened, n)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """Two files with images in them, rows in memory, and appended rows."""
    folder = tmp_path_factory.mktemp("mixed")
    store = DatasetStore()
    for number, (first, rows) in enumerate([(0, 130), (130, 41)]):
        part = example_store(0)
        part.extend(example_columns(rows, first=first))
        part.to_dataset().save_to_disk(folder / str(number))
        store.from_dataset(datasets.load_from_disk(folder / str(number)))
    store.extend(example_columns(77, first=171))
    for row in range(3):
        store.append({name: values[row] for name, values in example_columns(3, first=248).items()})
    return store


# ---------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("package", PACKAGES)
def test_one_digest_for_a_sampling_mode(package: str, sampling: str, mixed: DatasetStore, x64: bool) -> None:
    replaced = {} if x64 or package != "jax" else mouse_jax.REPLACED_DTYPES
    expected = stream_digest(BatchSource(mixed, sampling=sampling, replace_dtypes=replaced, **OPTIONS), N)
    for workers in WORKERS:
        assert digest(package, mixed, sampling=sampling, num_workers=workers) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_one_digest_for_all_packages(sampling: str, mixed: DatasetStore, x64: bool) -> None:
    """Also without x64, where what is left of the values is the same: 32 bits hold them."""
    options = {} if x64 else SINGLE
    assert len({digest(package, mixed, sampling=sampling, **options) for package in PACKAGES}) == 1


def test_without_x64_the_values_differ_by_rule_alone(mixed: DatasetStore) -> None:
    with loader("numpy", mixed) as wide, loader("jax", mixed) as narrow:
        assert {name: spec.dtype for name, spec in narrow.spec.items()} == {
            name: mouse_jax.REPLACED_DTYPES.get(spec.dtype, spec.dtype) for name, spec in wide.spec.items()
        }
        for _ in range(N):
            expected, found = as_arrays(wide.next_batch()), as_arrays(narrow.next_batch())
            assert expected["obs_continuous"].dtype == np.float64
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values.astype(found[name].dtype), strict=True)


def test_with_x64_the_dtypes_are_the_documented_ones(mixed: DatasetStore) -> None:
    with jax.enable_x64(True), loader("numpy", mixed) as expected, loader("jax", mixed) as found:
        assert found.spec == expected.spec
        for name, values in as_arrays(expected.next_batch()).items():
            assert values.dtype == expected.spec[name].dtype
        for name, values in found.next_batch().items():
            assert values.dtype == expected.spec[name].dtype


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resume_at_a_random_index_in_another_package(data: st.DataObject, mixed: DatasetStore) -> None:
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    begin, finish = data.draw(st.permutations(list(PACKAGES)))[:2]
    stop = data.draw(st.integers(0, 40))
    seed = data.draw(st.integers(0, 2**64 - 1))
    workers = [data.draw(st.sampled_from(WORKERS)) for _ in range(2)]
    options = {"sampling": sampling, **SINGLE}
    with loader(begin, mixed, seed=seed, num_workers=workers[0], **options) as first:
        for _ in range(stop):
            first.next_batch()
        state = first.state_dict()
        rest = stream_digest(first, 3)
    with loader(finish, mixed, num_workers=workers[1], **options) as second:
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert stream_digest(second, 3) == rest


# ---------------------------------------------------------------------- proof that it can fail


def perturbed(kind: str, field: str, byte: int) -> Callable[..., Any]:
    """A loader class of which one byte of one value of batch 7 is another than in the core."""
    base = PACKAGES[kind].PrefetchBatchifier

    class Perturbed(base):  # type: ignore[misc,valid-type]
        def next_batch(self) -> Any:
            index = self.state_dict()["next_index"]
            batch = super().next_batch()
            if index == 7:
                values = as_arrays(batch)[field].copy()
                values.reshape(-1).view(np.uint8)[byte] ^= 1
                batch[field] = torch.from_numpy(values) if kind == "torch" else jax.numpy.asarray(values)
            return batch

    return Perturbed


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_one_byte_makes_another_digest(package: str, mixed: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    right, before = digest("numpy", mixed), digest("numpy", mixed, n=7)
    with jax.enable_x64(True):
        assert digest(package, mixed) == right
        for number, field in enumerate(("action", "reward", "done", "time", "q_star", "obs_continuous", "obs_image")):
            with monkeypatch.context() as patched:
                changed = perturbed(package, field, -(number % 2))
                patched.setattr(PACKAGES[package], "PrefetchBatchifier", changed)
                assert digest(package, mixed) != right, field
        assert digest(package, mixed, n=7) == before


def running(package: str, store: DatasetStore, n: int = N, **options: Any) -> StreamDigest:
    with loader(package, store, digest=True, **options) as opened:
        for _ in range(n):
            opened.next_batch()
        digest: StreamDigest = opened.digest
        return digest


WINDOWS: dict[str, Any] = {
    "windows": {"action": range(6), "obs_image": [-3, -1, 0], "obs_continuous": [-1, 0], "done": [0]}
}
AROUND = (
    {**WINDOWS, "sequence_length": None},
    {**WINDOWS, "sequence_length": None, "pad": False},
    {**WINDOWS, "boundary": "episode", "pad": 0},
)


DERIVED = {
    "to_go": Return(0.99),
    "target": NStepReturn(3, 0.9),
    "factor": NStepDiscount(3, 0.9),
    "left": TimeToEnd(),
    "before": Previous(),
    "first": IsFirst(),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"windows": {"to_go": [0, 1], "before": [0]}}, {"boundary": "episode", "pad": True}],
    ids=("stream", "windows", "episode"),
)
def test_one_digest_for_derived_fields(options: dict[str, Any], mixed: DatasetStore, x64: bool) -> None:
    derived = DerivedStore(mixed, DERIVED)
    options = {**OPTIONS, **({} if x64 else SINGLE), **options}
    expected = stream_digest(BatchSource(derived, **options), N)
    for package in PACKAGES:
        for workers in (0, 2):
            assert digest(package, derived, num_workers=workers, **options) == expected


@pytest.mark.parametrize("options", AROUND, ids=("rows", "whole", "steps"))
def test_one_digest_for_fields_at_offsets(options: dict[str, Any], mixed: DatasetStore, x64: bool) -> None:
    replaced = {} if x64 else mouse_jax.REPLACED_DTYPES
    options = {**OPTIONS, **({} if x64 else SINGLE), **options}
    expected = stream_digest(BatchSource(mixed, **options), N)
    assert stream_digest(BatchSource(mixed, replace_dtypes=replaced, **options), N) == expected
    for package in PACKAGES:
        for workers in (0, 2):
            assert digest(package, mixed, num_workers=workers, **options) == expected
    whole = running("numpy", mixed, **options)
    parts = [running(name, mixed, shard=(rank, 4), **options) for rank, name in enumerate([*PACKAGES, "torch"])]
    assert sum(parts, StreamDigest()) == whole


@pytest.mark.parametrize(
    "options",
    [{}, {"augment": AUGMENT, "views": 2}, {"boundary": "episode"}, {"windows": {"reward": (-2, 0), "action": (0, 1)}}],
    ids=str,
)
def test_the_digest_that_runs_along_is_equal_in_all_frameworks(mixed: DatasetStore, options: dict[str, Any]) -> None:
    expected = running("numpy", mixed, **SINGLE, **options)
    for package in PACKAGES:
        for workers in (0, 2):
            assert running(package, mixed, **SINGLE, **options, num_workers=workers) == expected
    for count in (2, 3, 4):  # shards in any of the packages, put together
        names = [list(PACKAGES)[(rank + count) % 3] for rank in range(count)]
        parts = [
            running(name, mixed, shard=(rank, count), uneven="pad", **SINGLE, **options)
            for rank, name in enumerate(names)
        ]
        assert sum(parts, StreamDigest()) == expected


def test_a_digest_goes_on_in_another_framework(mixed: DatasetStore) -> None:
    expected = running("numpy", mixed, 9, **SINGLE)
    state: dict[str, Any] = {}
    for package in ("torch", "jax", "numpy"):
        with loader(package, mixed, digest=True, **SINGLE) as opened:
            if state:
                opened.load_state_dict(state)
            for _ in range(3):
                opened.next_batch()
            state = opened.state_dict()
    assert state["digest"]["total"] == expected.hexdigest()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_narrow_floats_are_digested_as_the_same_numbers_in_all_frameworks(name: str) -> None:
    """NumPy has them from ml_dtypes, JAX too, and torch of its own; ``stream_digest`` takes plain numbers only."""
    values = np.arange(-3, 3, dtype=np.float32).reshape(3, 2)
    narrow = {
        "numpy": values.astype(jax.numpy.dtype(name)),
        "torch": torch.from_numpy(values).to(getattr(torch, name)).requires_grad_(name == "bfloat16"),
        "jax": jax.numpy.asarray(values, dtype=name),
    }
    for package, batch in narrow.items():
        assert StreamDigest.of(3, {"x": batch}) == StreamDigest.of(3, {"x": values}), package
        with pytest.raises(TypeError):
            stream_digest([{"x": batch}], 1)


def test_samples_of_buffers_and_mini_batches_of_rollouts_are_digested_alike() -> None:
    """What comes from no loader is digested by one line, and is the same in every framework."""
    samples, mini_batches = [], []
    for package, kind in (
        (None, rollouts.RolloutStorage),
        (mouse_torch, mouse_torch.RolloutStorage),
        (mouse_jax, None),
    ):
        buffer = (ReplayBuffer if package is None else package.ReplayBuffer)(
            ArrayStorage(50), batch_size=6, seed=3, digest=True
        )
        buffer.extend({"reward": np.arange(40, dtype=np.float32), "next": {"done": np.arange(40) % 2 == 0}})
        digests = [StreamDigest.of(index, buffer.sample()) for index in range(4)]
        samples.append(sum(digests, StreamDigest()))
        assert buffer.digest == samples[-1]
        if kind is None:  # JAX has functions, whose mini-batches its own tests compare
            continue
        storage = kind(4, 6, {"observations": (3,), "actions": (2,), "values": ()}, seed=1, digest=True)
        for step in range(6):
            row = {"observations": np.full((4, 3), step, np.float32), "actions": np.full((4, 2), step, np.float32)}
            storage.add_transitions(
                {**row, "rewards": np.ones(4, np.float32), "dones": np.zeros(4, bool), "values": np.ones(4)}
            )
        storage.compute_returns(np.zeros(4), gamma=0.5, lam=0.5)
        found = [*storage.mini_batch_generator(3, 2), *storage.recurrent_mini_batch_generator(2, 1)]
        mini_batches.append(sum((one.digest(index) for index, one in enumerate(found)), StreamDigest()))
        assert storage.digest == mini_batches[-1]
    assert samples[0] == samples[1] == samples[2]
    assert samples[0].windows == 24
    assert mini_batches[0] == mini_batches[1]
    assert len({*samples, *mini_batches}) == 2


@pytest.mark.parametrize("recurrent", [False, True])
def test_mini_batches_of_pure_functions_have_the_digests_of_a_storage(recurrent: bool) -> None:
    """JAX's rollouts keep no digest, for they change nothing; a mini-batch says its own."""
    storage = rollouts.RolloutStorage(4, 6, {"observations": (3,)}, seed=1, digest=True)
    rollout = rollout_storage.init(
        4, 6, {"observations": (3,)}, 1, hidden_states=(np.zeros((2, 4, 5), np.float32), None)
    )
    for step in range(6):
        row: dict[str, Any] = {"observations": np.full((4, 3), step, np.float32), "rewards": np.ones(4, np.float32)}
        row |= {"dones": np.arange(4) == step, "hidden_states": (np.full((2, 4, 5), step, np.float32), None)}
        storage.add_transitions(row)
        rollout = rollout_storage.append(rollout, row)
    if recurrent:
        batches: Any = rollout_storage.recurrent_mini_batches(rollout, 2, 2)[1]
        expected = list(storage.recurrent_mini_batch_generator(2, 2))
    else:
        batches = rollout_storage.mini_batches(rollout, 3, 2)[1]
        expected = list(storage.mini_batch_generator(3, 2))
    found = [batch.digest(index) for index, batch in enumerate(batches)]
    assert found == [batch.digest(index) for index, batch in enumerate(expected)]
    assert sum(found, StreamDigest()) == storage.digest


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_buffer_delivers_is_digested_as_it_is_delivered(package: str, x64: bool) -> None:
    """JAX narrows float64 without x64; the digest is of what came of that, and made before it goes to a device."""
    kind = {"numpy": ReplayBuffer, "torch": mouse_torch.ReplayBuffer, "jax": mouse_jax.ReplayBuffer}[package]

    def filled() -> Any:
        buffer = kind(ArrayStorage(50), batch_size=6, seed=3, digest=True)
        buffer.extend({"obs": {"x": np.arange(40.0) / 7}, "action": np.arange(40)})
        return buffer

    with jax.enable_x64(x64):
        buffer = filled()
        expected = sum((StreamDigest.of(index, buffer.sample()) for index in range(4)), StreamDigest())
        assert buffer.digest == expected
        for workers in (0, 2):
            with PACKAGES[package].PrefetchBatchifier(filled(), num_workers=workers, digest=True) as opened:
                for _ in range(4):
                    opened.next_batch()
                assert opened.digest == expected
        plain = ReplayBuffer(ArrayStorage(50), batch_size=6, seed=3, digest=True)
        plain.extend({"obs": {"x": np.arange(40.0) / 7}, "action": np.arange(40)})
        for _ in range(4):
            plain.sample()
        assert (plain.digest == expected) == (x64 or package != "jax")
