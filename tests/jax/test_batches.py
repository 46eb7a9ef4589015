"""What the JAX loader delivers: dtypes, places, and memory that nobody touches again."""

import contextlib
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import mouse_core
from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, WorkerError
from mouse_core.testing import as_arrays, example_columns, example_store, stream_digest
from mouse_jax import REPLACED_DTYPES, PrefetchBatchifier, replaced_dtypes
from mouse_jax.placement import Placement
from mouse_jax.prefetch import array_maker

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 8, "seed": 5}


def store_of(**columns: Any) -> DatasetStore:
    store = DatasetStore()
    store.extend({**example_columns(64), **columns})
    return store


def test_what_is_asked_for_is_narrowed_too() -> None:
    dtypes = {"time": "int64", "reward": "float64", "done": "uint64", "action": "int8", "obs_image": "uint8"}
    with PrefetchBatchifier(example_store(), **OPTIONS, dtypes=dtypes) as loader:
        found = {name: str(loader.spec[name].dtype) for name in dtypes}
        assert found == {"time": "int32", "reward": "float32", "done": "uint32", "action": "int8", "obs_image": "uint8"}
        assert {name: str(loader.next_batch()[name].dtype) for name in dtypes} == found
    store, columns = DatasetStore(), example_columns(200)  # a field that appears later
    plain = {name: columns[name] for name in ("action", "reward", "done")}
    store.extend({**{name: values[:40] for name, values in plain.items()}, "episode_step": [None] * 40})
    with PrefetchBatchifier(store, **OPTIONS) as loader:
        assert "time" not in loader.spec
        store.extend({name: columns[name][40:] for name in (*plain, "episode_step")})
        loader.refresh()
        assert loader.spec["time"].dtype == loader.next_batch()["time"].dtype == np.int32


@pytest.mark.parametrize(
    ("column", "field", "value"),
    [
        ("observation_discrete", "obs_discrete", 2**31),
        ("observation_discrete", "obs_discrete", -(2**31) - 1),
        ("observation_discrete", "obs_discrete", 2**40 + 5),  # JAX by itself would make it 5
        ("episode_step", "time", 2**63 - 1),
        ("observation", "obs_continuous", 1e300),  # and this one infinite
    ],
)
def test_a_value_that_does_not_fit_is_an_error(column: str, field: str, value: float) -> None:
    values = example_columns(64)[column]
    values[20] = value
    store = store_of(**{column: values})
    with PrefetchBatchifier(store, **OPTIONS, sampling="last") as loader:
        with pytest.raises(WorkerError, match=f"DataError: {field}: .*fit .*32") as raised:
            loader.next_batch()
        assert isinstance(raised.value.__cause__, DataError)
    with jax.enable_x64(True), PrefetchBatchifier(store, **OPTIONS, sampling="last") as loader:
        batch = as_arrays(loader.next_batch())
        assert value in batch[field]
    if value != 1e300:
        return
    columns = example_columns(64)  # and the last values that fit
    columns["observation_discrete"][:2] = 2**31 - 1, -(2**31)
    columns["observation"][0] = [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, 1e-300]
    with PrefetchBatchifier(store_of(**columns), **OPTIONS, sampling="last") as loader:
        batch = as_arrays(loader.next_batch())
    assert (batch["obs_discrete"].min(), batch["obs_discrete"].max()) == (-(2**31), 2**31 - 1)
    np.testing.assert_array_equal(batch["obs_continuous"][0, 0], columns["observation"][0].astype(np.float32))


def test_x64_holds_where_the_loader_was_made() -> None:
    """``jax.enable_x64`` as a context is a setting of one thread, and batches are made in others."""
    for workers in (0, 2):
        with jax.enable_x64(True):
            wide = PrefetchBatchifier(example_store(), **OPTIONS, num_workers=workers)
        narrow = PrefetchBatchifier(example_store(), **OPTIONS, num_workers=workers)
        assert replaced_dtypes() == REPLACED_DTYPES
        with jax.enable_x64(True):
            assert replaced_dtypes() == {}
            found = narrow.next_batch()
        assert found["time"].dtype == narrow.spec["time"].dtype == np.int32
        batch = wide.next_batch()
        assert batch["time"].dtype == wide.spec["time"].dtype == np.int64
        assert batch["obs_continuous"].dtype == np.float64
        np.testing.assert_array_equal(
            as_arrays(batch)["obs_continuous"], BatchSource(example_store(), **OPTIONS)[0]["obs_continuous"]
        )
        wide.close()
        narrow.close()
    found_there: list[str] = []

    def use() -> None:
        with PrefetchBatchifier(example_store(), **OPTIONS) as loader:
            found_there.append(stream_digest(loader, 5))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found_there == [stream_digest(BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **OPTIONS), 5)]


def test_devices() -> None:
    fourth = jax.devices()[3]
    for device in (fourth, "cpu:3"):
        with PrefetchBatchifier(example_store(), **OPTIONS, device=device) as loader:
            assert loader.next_batch()["reward"].devices() == {fourth}
    for device in (None, "cpu", "cpu:0"):
        with PrefetchBatchifier(example_store(), **OPTIONS, device=device) as loader:
            assert loader.next_batch()["reward"].devices() == {jax.devices()[0]}
            assert loader.next_batch()["reward"].committed == (device is not None)
    with jax.default_device(fourth):
        loader = PrefetchBatchifier(example_store(), **OPTIONS)
    with loader:
        assert loader.next_batch()["reward"].devices() == {fourth}, "a setting of the thread that made the loader"


SETTINGS = {
    "none": contextlib.nullcontext,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "disable_jit": jax.disable_jit,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "set_mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])),
    "default_device": lambda: jax.default_device(jax.devices()[2]),
    "enable_x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("rows", [2, 4096])
@pytest.mark.parametrize("name", SETTINGS)
def test_arrays_are_put_as_device_put_puts_them(name: str, rows: int) -> None:
    rng = np.random.default_rng(1)
    arrays = [
        rng.integers(0, 1 << 32, (rows, 65), np.uint32).view(np.float32),  # every kind of NaN, and subnormals
        rng.integers(0, 256, (rows, 2), np.uint8),
        rng.integers(0, 2, (rows, 3)).astype(bool),
        rng.integers(0, 1 << 16, (rows, 1), np.uint16).view(np.float16),
        np.array([np.nan, np.inf, -0.0, 1e-40], np.float32),
    ]
    with SETTINGS[name]():
        found, wanted = Placement().put(arrays, recurring=True), jax.device_put(arrays)
        assert isinstance(found, list)
    for one, other, values in zip(found, wanted, arrays, strict=True):
        assert isinstance(one, jax.Array)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes() == values.tobytes()
        assert (one.aval, one.sharding, one.committed) == (other.aval, other.sharding, other.committed)


def mesh(*shape: int, names: tuple[str, ...] = ("data", "time")) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


SHARDINGS = {
    "rows": ((4,), P("data")),
    "rows and steps": ((2, 2), P("data", "time")),
    "steps": ((4,), P(None, "data")),
    "both axes over rows": ((2, 2), P(("data", "time"))),
    "everywhere": ((4,), P()),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings(name: str) -> None:
    shape, spec = SHARDINGS[name]
    sharding = NamedSharding(mesh(*shape), spec)
    workers = 0 if name == "steps" else 2
    options = {**OPTIONS, "sharding": sharding, "num_workers": workers, "pin_memory": True}  # which has no meaning here
    with PrefetchBatchifier(example_store(), **options) as loader:
        assert loader.source.shard == (0, 1)
        source = BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **OPTIONS)
        assert stream_digest(loader, 4) == stream_digest(source, 4)
        for values in loader.next_batch().values():
            assert values.sharding.is_equivalent_to(sharding, values.ndim)
    padded = {**OPTIONS, "batch_size": 7, "sampling": "sequential", "drop_last": False, "uneven": "pad"}
    store = example_store(200)
    source = BatchSource(store, replace_dtypes=REPLACED_DTYPES, **padded)
    with (
        PrefetchBatchifier(store, **padded, sharding=sharding, digest=True) as loader,
        mouse_core.PrefetchBatchifier(source, digest=True) as expected,
    ):
        for index in range(len(source) + 1):
            batch = as_arrays(loader.next_batch())
            expected.next_batch()
            there = batch["mask"].any(axis=1)
            parts = {"steps": 1, "everywhere": 1, "rows and steps": 2}.get(name, 4)
            assert len(there) == -(-len(source[index]["mask"]) // parts) * parts
            for field, values in source[index].items():
                np.testing.assert_array_equal(batch[field][there], values, field)
        assert loader.digest == expected.digest


@pytest.mark.parametrize("steps", [None, 8])
def test_shardings_of_fields_at_offsets(steps: int | None) -> None:
    options = {**OPTIONS, "sequence_length": steps, "windows": {"action": range(5), "obs_continuous": [-1, 0]}}
    sharding = NamedSharding(mesh(4), P("data"))
    source = BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **options)
    with PrefetchBatchifier(example_store(), **options, sharding=sharding) as loader:
        assert stream_digest(loader, 4) == stream_digest(source, 4)
        for values in loader.next_batch().values():
            assert values.sharding.is_equivalent_to(sharding, values.ndim)
    padded = {**options, "batch_size": 7, "uneven": "pad"}
    with PrefetchBatchifier(example_store(), **padded, sharding=sharding) as loader:
        batch = as_arrays(loader.next_batch())
        there = batch["mask"].reshape(8, -1).any(axis=1)
        assert not batch["action_mask"][~there].any()
        whole = BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **padded)[0]
        np.testing.assert_array_equal(batch["action"][there], whole["action"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6}, r"expected a sharding that divides action of shape \[6, 8\] evenly"),
        ({"sampling": "sequential", "drop_last": False}, r"divides action of shape \[5, 8\] evenly"),
        ({"device": "cpu"}, "device: when sharding is given, expected None, found 'cpu'"),
        ({"shard": (0, 2)}, r"shard: when sharding is given, expected \(0, 1\)"),
        ({"sharding": "data"}, "expected a jax.sharding.Sharding, found 'data'"),
        ({"sharding": NamedSharding(mesh(2, 2), P("data", None, "time"))}, "action"),
    ],
)
def test_what_does_not_go_with_a_sharding_is_refused(options: dict[str, Any], message: str) -> None:
    sharding = NamedSharding(mesh(4), P("data"))
    with pytest.raises(ConfigError, match=message):
        PrefetchBatchifier(example_store(), **{**OPTIONS, "sharding": sharding, **options})


def test_rows_that_a_refresh_makes_uneven() -> None:
    store = example_store(128)
    sharding = NamedSharding(mesh(4), P("data"))
    options = {**OPTIONS, "sampling": "sequential", "drop_last": False}
    with PrefetchBatchifier(store, **options, sharding=sharding) as loader:
        assert [len(batch["reward"]) for batch in loader] == [8, 8]
        store.extend(example_columns(32, first=128))
        loader.refresh()
        assert [len(batch["reward"]) for batch in loader] == [8, 8, 4]
        store.extend(example_columns(8, first=160))
        loader.refresh()
        with pytest.raises(WorkerError, match=r"divides action of shape \[5, 8\] evenly"):
            loader.next_batch()


def test_narrow_bytes_travel_to_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "on_host", property(lambda self: False))
    for x64 in (False, True):
        with jax.enable_x64(x64):
            source = BatchSource(example_store(), replace_dtypes=replaced_dtypes(), **OPTIONS)
        maker = array_maker(source, placement=Placement(jax.devices()[1]), x64=x64, default_device=None)
        gathered = maker.gather(3)
        assert gathered["obs_image"].dtype == np.uint8
        batch = maker.transfer(gathered)
        assert {name: values.dtype for name, values in batch.items()} == {
            name: spec.dtype for name, spec in source.spec.items()
        }
        assert batch["obs_image"].devices() == {jax.devices()[1]}
        assert stream_digest([batch], 1) == stream_digest([source[3]], 1)


@pytest.mark.parametrize("size", [8, 256])
def test_donating_a_view_leaves_the_others(size: int) -> None:
    options = {**OPTIONS, "batch_size": size}
    donated = jax.jit(lambda view: jax.tree.map(lambda values: values + 1, view), donate_argnums=0)
    expected = BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **options)[0]
    views: Any = PrefetchBatchifier(example_store(), **options, views=3, num_workers=0).next_batch()
    assert isinstance(views, tuple)
    for number, view in enumerate(views):
        assert all(not values.is_deleted() for values in jax.tree.leaves(views[number:]))
        np.testing.assert_array_equal(view["obs_image"], expected["obs_image"])
        jax.block_until_ready({name: donated({name: view[name]}) for name in ("reward", "obs_image")})


@pytest.mark.parametrize("batch_size", [8, 256])
def test_nothing_is_written_to_after_delivery(batch_size: int) -> None:
    """Every array that the pipeline got from the source and does not share with JAX is scribbled over.

    Batches of more than a megabyte lie in memory that is used again once it is free; small ones do not.
    """
    options = {**OPTIONS, "batch_size": batch_size, "sequence_length": 32}
    source = BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **options)
    with PrefetchBatchifier(example_store(), **options, prefetch=3) as loader:
        held = []
        for index in range(100 if batch_size == 8 else 20):
            held.append(loader.next_batch())
            scribble = loader.source[index]  # memory that the source took again
            for values in scribble.values():
                values.fill(99)
            del scribble
        for index, batch in enumerate(held):
            for name, values in batch.items():
                np.testing.assert_array_equal(np.asarray(values), source[index][name], f"{name} of batch {index}")


def test_work_that_is_still_running_reads_the_right_memory() -> None:
    options = {**OPTIONS, "batch_size": 256, "sequence_length": 32}
    source = BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **options)
    slow = jax.jit(lambda image, noise: image.astype(jnp.float32).sum() + 0 * jnp.linalg.matrix_power(noise, 20).sum())
    noise = jnp.eye(200)
    with PrefetchBatchifier(example_store(), **options, prefetch=2) as loader:
        sums = [slow(loader.next_batch()["obs_image"], noise) for _ in range(30)]
    for index, found in enumerate(sums):
        assert float(found) == pytest.approx(float(source[index]["obs_image"].sum(dtype=np.float64)), rel=1e-5)


@pytest.mark.parametrize(("missing", "what"), [("jax", "mouse_jax needs JAX"), ("grain", "to_grain needs grain")])
def test_without_its_framework_it_says_what_to_install(missing: str, what: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; import mouse_jax; mouse_jax.to_grain(None)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"ImportError: {what}: pip install 'mouse-data[jax]'"


LENGTHS: Any = {"lengths": range(1, 9), "fields": ["obs_discrete", "reward"], "seed": 3}


def test_a_step_is_compiled_once_and_leaves_out_what_fills_up() -> None:
    compiled = []

    @jax.jit
    def sums(batch: Any) -> Any:
        compiled.append(batch["reward"].shape)
        by_number = jax.ops.segment_sum(batch["reward"], batch["sequence_id"], num_segments=4)
        return by_number, jnp.where(batch["mask"], batch["reward"], 0).sum()

    source = BatchSource(example_store(), 8, 4, **LENGTHS)
    with PrefetchBatchifier(example_store(), 8, 4, packed=32, **LENGTHS) as loader:
        for index in range(8):
            by_number, total = sums(loader.next_batch())
            padded = source[index]
            expected = np.where(padded["mask"], padded["reward"], 0).sum(axis=1)
            np.testing.assert_allclose(by_number, expected, 1e-5, 1e-6)
            np.testing.assert_allclose(total, expected.sum(), 1e-5, 1e-5)
    assert compiled == [(32,)]


def test_a_sharding_of_packed_batches_is_refused() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    with pytest.raises(ConfigError, match="sharding: when packed= is given, expected None"):
        PrefetchBatchifier(example_store(), 8, 4, packed=32, sharding=sharding, **LENGTHS)
