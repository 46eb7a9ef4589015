"""Rows of a compiled loop in a store: each of them once, in order, episode by episode."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mouse_core import ClosedError, ConfigError, DatasetStore, MissingFieldError, SchemaError, StorageError
from mouse_jax import device

SEEDS, ENVS, TIME, CALLS = 2, 3, 4, 40


def ends(stream: Any, step: Any) -> Any:
    """Episodes of 3 to 13 steps."""
    return (step + stream) % (3 + stream * 2) == 2


def columns_of(stream: Any, step: Any) -> dict[str, Any]:
    return {
        "observation": jnp.stack([step, stream], -1).astype(jnp.float32),
        "action": (step % 2).astype(jnp.int32),
        "reward": 1.0 * step,
        "done": ends(stream, step).astype(jnp.int8),
        "metadata_stream": stream.astype(jnp.int32),
        "of": {"half": step.astype(jnp.bfloat16), "key": jax.vmap(jax.vmap(jax.random.key))(step)},
    }


def test_no_row_of_a_loop_over_seeds_is_lost(tmp_path: Path) -> None:
    """The loop is mapped over seeds and compiled as a whole; the last episodes of its 6 streams have not ended."""

    def collect(seed: Any, call: Any) -> Any:
        stream = seed * ENVS + jnp.arange(ENVS)
        step = call * TIME + jnp.arange(TIME)[:, None]
        return columns_of(*jnp.broadcast_arrays(stream, step))

    store = DatasetStore.open(tmp_path / "store", "a", alignment="outgoing")
    with store, device.Spill(store, axes=("seed", "time", "env")) as spill:

        def step(count: Any, call: Any) -> Any:
            rows = jax.vmap(collect, (0, None))(jnp.arange(SEEDS), call)
            spill(rows)
            return count + rows["done"].sum(), None

        count, _ = jax.jit(lambda: jax.lax.scan(step, jnp.int32(0), jnp.arange(CALLS)))()
    opened = DatasetStore.open(tmp_path / "store")
    found = rows_of(opened, "reward", "done", "metadata_stream")
    for reward, half, key in rows_of(opened, "reward", "of_half", "of_key")[:40]:
        assert half == reward
        assert list(key) == [0, reward]
    expected: list[tuple[int, int, int]] = []
    running: dict[int, list[tuple[int, int, int]]] = {stream: [] for stream in range(SEEDS * ENVS)}
    for number in range(TIME * CALLS):
        for stream, rows in running.items():
            over = bool(ends(stream, number))
            rows.append((number, int(over), stream))
            if over:
                expected += rows
                running[stream] = []
    assert int(count) == sum(done for _, done, _ in expected)
    for rows in running.values():
        expected += [*rows[:-1], *((number, 2, stream) for number, _, stream in rows[-1:])]
    assert found == expected


def rows_of(store: DatasetStore, *names: str) -> list[tuple[int, ...]]:
    rows = store.snapshot().rows(range(len(store)), {*names})
    return [*zip(*(rows[name] for name in names), strict=True)]


def test_what_the_store_did_not_take_is_written_at_the_end() -> None:
    class Full(DatasetStore):
        full = True

        def extend(self, columns: Any) -> None:
            if self.full:
                raise StorageError("no room")
            super().extend(columns)

    store = Full(alignment="outgoing")
    spill = device.Spill(store, axes=())
    compiled = jax.jit(lambda number: spill({"action": number, "reward": 0.0, "done": (number == 1).astype(jnp.int8)}))

    def write(number: int) -> None:
        compiled(number)
        jax.effects_barrier()  # a GPU goes on meanwhile

    write(0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        write(1)
    with pytest.raises(Exception, match="no room"):
        spill.close()
    store.full = False
    write(2)
    spill.close()
    assert rows_of(store, "action", "done") == [(0, 0), (1, 1), (2, 2)]
    spill.close()
    with pytest.raises(ClosedError, match="found a closed spill"):
        spill({"done": True})


def test_what_cannot_be_written_is_refused_before_anything_runs() -> None:
    rows = {"reward": jnp.zeros((3, 2)), "done": jnp.zeros((3, 2), jnp.int8)}
    for given, error, words in (
        ({"reward": jnp.zeros((3, 2))}, MissingFieldError, "one of the columns"),
        (rows["done"], SchemaError, "one for each column"),
        ({**rows, "obs": {"x": rows["reward"]}, "obs_x": rows["reward"]}, SchemaError, "'obs_x' twice"),
        ({**rows, "done": jnp.zeros((3, 2), bool)}, SchemaError, "'done' of integers"),
        ({**rows, "reward": jnp.zeros(3)}, SchemaError, r"\['time', 'env'\] in front, found \[3\]"),
        ({**rows, "reward": jnp.zeros((3, 4))}, SchemaError, "of equal length in all columns"),
        ({**rows, "wave": jnp.zeros((3, 2), jnp.complex64)}, SchemaError, "a store supports, found complex64"),
        ({**rows, "words": "many"}, SchemaError, "'words': expected an array, found 'many'"),
    ):
        with pytest.raises(error, match=words):
            device.Spill(DatasetStore(), axes=("time", "env"))(given)
    spill = device.Spill(DatasetStore(), axes=("time",))
    with pytest.raises(ConfigError, match=r"outside of jax\.vmap"):
        jax.vmap(spill)(rows)
    with pytest.raises(SchemaError, match="columns as before"):
        spill({name: value[0].astype(jnp.int16) for name, value in rows.items()})
    for options, words in (
        ({"axes": "time"}, "different names"),
        ({"axes": ("env", "env")}, "different names"),
    ):
        with pytest.raises(ConfigError, match=words):
            device.Spill(DatasetStore(), **options)
    with pytest.raises(ConfigError, match="expected a DatasetStore"):
        device.Spill("folder")  # type: ignore[arg-type]
