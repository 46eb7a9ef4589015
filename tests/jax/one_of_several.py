"""One of several processes that train with Flax on one global batch: what it ends with, and what it is told.

Run by test_ranks.py: one_of_several.py RANK COUNT PORT FOLDER
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mouse_core import ConfigError, DatasetStore
from mouse_core.testing import example_columns, example_store
from mouse_jax import PrefetchBatchifier, global_mean

# Batches of 10 windows, and 9 at the end of an epoch.
OPTIONS: dict[str, Any] = {
    "sequence_length": 5,
    "batch_size": 10,
    "sampling": "sequential",
    "drop_last": False,
    "boundary": "episode",
    "fields": ["obs_continuous", "reward"],
    "dtypes": {"obs_continuous": "float64", "reward": "float64"},
    "uneven": "pad",
    "seed": 4,
}
Batch = dict[str, jax.Array]


def train(batches: Callable[[], Batch], epoch: int, sharding: NamedSharding) -> tuple[list[float], list[float]]:
    """The losses of two epochs, and the weights after them."""
    model = nnx.Linear(4, 1, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        def loss(model: nnx.Linear) -> jax.Array:
            errors = (model(batch["obs_continuous"][..., :4])[..., 0] - batch["reward"]) ** 2
            return global_mean(errors, batch["mask"])

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    losses = [float(step(model, optimizer, batches())) for _ in range(2 * epoch)]
    return losses, [*np.asarray(model.kernel[...]).reshape(-1).tolist()]


def by_hand(sharding: NamedSharding) -> Any:
    """Each process makes its rows, and the global array of them itself."""
    with PrefetchBatchifier(example_store(200), shard="auto", **OPTIONS) as loader:

        def batches() -> Batch:
            return {
                name: jax.make_array_from_process_local_data(sharding, np.asarray(values))
                for name, values in loader.next_batch().items()
            }

        return train(batches, len(loader), sharding)


def by_sharding(sharding: NamedSharding) -> Any:
    """The loader makes the global arrays."""
    with PrefetchBatchifier(example_store(200), sharding=sharding, shard="auto", **OPTIONS) as loader:
        assert loader.source.shard == (0, 1)
        return train(loader.next_batch, len(loader), sharding)


def disagree(rank: int, what: str, **where: Any) -> str:
    """What a process is told that has another seed, or other rows, or misses a refresh."""
    store = DatasetStore()
    store.extend(example_columns(100))
    options = {**OPTIONS, "seed": rank if what == "seed" else 0}
    with PrefetchBatchifier(store, **options, **where) as loader:
        try:
            loader.next_batch()
            store.extend(example_columns(20 + (what == "rows" and rank == 1), first=100))
            if what == "missed" and rank == 1:
                loader.next_batch()
                return "missed"
            loader.refresh()
            loader.next_batch()
        except ConfigError as error:
            return str(error)
    return "nothing"


def gone_on(state: Path, steps: int, **where: Any) -> dict[str, Any]:
    """The state of this process some batches after one that is there, or after the beginning; with its digest."""
    with PrefetchBatchifier(example_store(200), digest=True, **OPTIONS, **where) as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        for _ in range(steps):
            loader.next_batch()
        return loader.state_dict()


def main(rank: int, count: int, port: int, folder: Path) -> None:
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank)
    jax.config.update("jax_enable_x64", True)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    found: dict[str, Any] = {"by hand": by_hand(sharding), "by sharding": by_sharding(sharding)}
    state = folder.parent / "state.json"
    found["gone on"] = [gone_on(state, 4, **where) for where in ({"shard": "auto"}, {"sharding": sharding})]
    if count > 1:
        for what in ("nothing", "seed", "rows", "missed"):
            found[what] = disagree(rank, what, shard="auto")
            found[f"{what}, sharding"] = disagree(rank, what, sharding=sharding)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
