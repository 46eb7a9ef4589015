"""Several processes of one JAX job, each with some virtual devices: how they are started, and what each does.

Run by `run`: processes.py PROGRAM RANK COUNT PORT FOLDER
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mouse_core import BatchSource, ConfigError, DatasetStore
from mouse_core.testing import as_numpy, example_columns, example_store, stream_digest
from mouse_jax import REPLACED_DTYPES, PrefetchBatchifier, global_mean

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 8, "seed": 5}
# Batches of 10 windows, and 9 at the end of an epoch.
TRAINED: dict[str, Any] = {
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


def run(program: str, count: int, folder: Path, *, devices: int) -> list[dict[str, Any]]:
    """What each of several processes with some devices returns from a program in a folder."""
    from tests.ports import free_port

    folder.mkdir(exist_ok=True)
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, program, str(rank), str(count), port, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **flags},
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    assert not any("Exception ignored" in output for output in outputs), "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def training(rank: int, count: int, folder: Path) -> dict[str, Any]:
    """Train with Flax on one global batch: what it ends with, and what the process is told."""
    jax.config.update("jax_enable_x64", True)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    ways = {"by hand": {"shard": "auto"}, "by sharding": {"sharding": sharding}}
    found: dict[str, Any] = {name: trained(sharding, way) for name, way in ways.items()}
    found["gone on"] = [gone_on(folder.parent / "state.json", 4, **way) for way in ways.values()]
    if count > 1:
        for what in ("nothing", "seed", "rows", "missed"):
            found[what] = [disagree(rank, what, **way) for way in ways.values()]
    return found


def trained(sharding: NamedSharding, way: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of two epochs, and the weights after them.

    By hand each process makes its rows, and the global array of them itself; by a sharding the loader does.
    """
    import optax
    from flax import nnx

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

    with PrefetchBatchifier(example_store(200), **{"shard": "auto", **way}, **TRAINED) as loader:

        def batches() -> Batch:
            batch: Batch = loader.next_batch()
            if "sharding" in way:
                return batch
            return {
                name: jax.make_array_from_process_local_data(sharding, np.asarray(values))
                for name, values in batch.items()
            }

        assert "sharding" not in way or loader.source.shard == (0, 1)
        losses = [float(step(model, optimizer, batches())) for _ in range(2 * len(loader))]
    return losses, [*np.asarray(model.kernel[...]).reshape(-1).tolist()]


def disagree(rank: int, what: str, **way: Any) -> str:
    """What a process is told that has another seed, or other rows, or misses a refresh."""
    store = DatasetStore()
    store.extend(example_columns(100))
    options = {**TRAINED, "seed": rank if what == "seed" else 0}
    with PrefetchBatchifier(store, **options, **way) as loader:
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


def gone_on(state: Path, steps: int, **way: Any) -> dict[str, Any]:
    """The state of this process some batches after one that is there, or after the beginning; with its digest."""
    with PrefetchBatchifier(example_store(200), digest=True, **TRAINED, **way) as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        for _ in range(steps):
            loader.next_batch()
        return loader.state_dict()


def loading(rank: int, count: int, folder: Path) -> dict[str, Any]:
    """Check what each device of two processes gets of global batches, and go on from checkpoints of one process."""
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    assert [device.process_index for device in devices] == [0, 0, 1, 1]
    line, square = np.array(devices), np.array(devices).reshape(2, 2)
    data, axes = P("data"), P("data", "time")
    by_process = NamedSharding(Mesh(line, ("data",)), data)
    found: dict[str, Any] = {
        "by process": digest_of(by_process, 4),
        "in turns": digest_of(NamedSharding(Mesh(line[[0, 2, 1, 3]], ("data",)), data), 4),
        "rows and time": digest_of(NamedSharding(Mesh(square, ("data", "time")), axes), 4),
        "time between processes": digest_of(NamedSharding(Mesh(square.T, ("data", "time")), axes), 8),
        "replicated": digest_of(NamedSharding(Mesh(line, ("data",)), P()), 8),
        "no thread": digest_of(by_process, 4, num_workers=0),
    }
    found = {"digests": found, "uneven": []}
    rest = {"sampling": "sequential", "drop_last": False, "sequence_length": 10, "batch_size": 16}
    for options in ({"sequence_length": 8, "batch_size": 6}, rest):
        try:
            PrefetchBatchifier(example_store(), sharding=by_process, **options)
        except ConfigError as error:
            found["uneven"].append(str(error))
    # A checkpoint of two processes that one process can go on from, and the other way round.
    with PrefetchBatchifier(example_store(), sharding=by_process, **OPTIONS) as loader:
        for _ in range(3):
            loader.next_batch()
        with ocp.CheckpointManager(folder / "two") as manager:
            found["state"] = loader.state_dict()
            weights = jax.device_put(np.arange(8.0, dtype=np.float32), by_process)
            saved = {"weights": ocp.args.StandardSave({"w": weights}), "batches": ocp.args.JsonSave(found["state"])}
            manager.save(0, args=ocp.args.Composite(**saved))
            manager.wait_until_finished()
        with ocp.CheckpointManager(folder / "one") as manager:
            loader.load_state_dict(manager.restore(0, args=ocp.args.Composite(batches=ocp.args.JsonRestore())).batches)
        found["went on"] = stream_digest([multihost_utils.process_allgather(loader.next_batch(), tiled=True)], 1)
    return found


def digest_of(sharding: NamedSharding, rows_here: int, num_workers: int = 2) -> str:
    """See that global batches hold what the whole source says, wherever it lies; return the stream's digest."""
    from jax.experimental import multihost_utils

    store = example_store()
    source = BatchSource(store, replace_dtypes=REPLACED_DTYPES, **OPTIONS)
    batches = []
    with PrefetchBatchifier(store, sharding=sharding, num_workers=num_workers, **OPTIONS) as loader:
        for index in range(6):
            batch = loader.next_batch()
            assert list(batch) == list(source.spec)
            for field, values in batch.items():
                expected = source[index][field]
                assert values.shape == expected.shape, field
                assert values.sharding.is_equivalent_to(sharding, values.ndim), field
                for shard in values.addressable_shards:
                    np.testing.assert_array_equal(as_numpy(shard.data), expected[shard.index], field)
            rows = {shard.index[0].indices(len(expected)) for shard in values.addressable_shards}
            assert sum(end - begin for begin, end, _ in rows) == rows_here
            batches.append(multihost_utils.process_allgather(batch, tiled=True))
        assert loader.state_dict()["next_index"] == 6
    return stream_digest(batches, 6)


def main(program: str, rank: int, count: int, port: str, folder: Path) -> None:
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank)
    programs: dict[str, Callable[..., Any]] = {"training": training, "loading": loading}
    (folder / f"{rank}.json").write_text(json.dumps(programs[program](rank, count, folder)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
