"""One of two processes with two devices each: what it gets of the global batches, checked, and a checkpoint.

Run by test_processes.py: one_of_two.py RANK PORT FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mouse_core import BatchSource, ConfigError
from mouse_core.testing import as_numpy, example_store, stream_digest
from mouse_jax import REPLACED_DTYPES, PrefetchBatchifier

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 8, "seed": 5}


def check(name: str, sharding: NamedSharding, rows_here: int, num_workers: int = 2) -> str:
    """See that global batches hold what the whole source says, wherever it lies; return the stream's digest."""
    store = example_store()
    source = BatchSource(store, replace_dtypes=REPLACED_DTYPES, **OPTIONS)
    batches = []
    with PrefetchBatchifier(store, sharding=sharding, num_workers=num_workers, **OPTIONS) as loader:
        for index in range(6):
            batch = loader.next_batch()
            assert list(batch) == list(source.spec), name
            for field, values in batch.items():
                expected = source[index][field]
                assert values.shape == expected.shape, (name, field)
                assert values.sharding.is_equivalent_to(sharding, values.ndim), (name, field)
                for shard in values.addressable_shards:
                    np.testing.assert_array_equal(as_numpy(shard.data), expected[shard.index], f"{name}: {field}")
            rows = {shard.index[0].indices(len(expected)) for shard in values.addressable_shards}
            assert sum(end - begin for begin, end, _ in rows) == rows_here, name
            batches.append(multihost_utils.process_allgather(batch, tiled=True))
        assert loader.state_dict()["next_index"] == 6
    return stream_digest(batches, 6)


def main(rank: int, port: int, folder: Path) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    assert [device.process_index for device in devices] == [0, 0, 1, 1]
    mesh = Mesh(np.array(devices), ("data",))
    crossed = Mesh(np.array([devices[place] for place in (0, 2, 1, 3)]), ("data",))
    square = Mesh(np.array(devices).reshape(2, 2), ("data", "time"))
    across = Mesh(np.array(devices).reshape(2, 2).T, ("data", "time"))
    rest = {"sampling": "sequential", "drop_last": False, "sequence_length": 10, "batch_size": 16}

    digests = {
        "by process": check("by process", NamedSharding(mesh, P("data")), 4),
        "in turns": check("in turns", NamedSharding(crossed, P("data")), 4),
        "rows and time": check("rows and time", NamedSharding(square, P("data", "time")), 4),
        "time between processes": check("time between processes", NamedSharding(across, P("data", "time")), 8),
        "replicated": check("replicated", NamedSharding(mesh, P()), 8),
        "no thread": check("no thread", NamedSharding(mesh, P("data")), 4, num_workers=0),
    }
    try:
        PrefetchBatchifier(example_store(), 8, 6, sharding=NamedSharding(mesh, P("data")))
    except ConfigError as error:
        uneven = str(error)
    try:
        PrefetchBatchifier(example_store(), sharding=NamedSharding(mesh, P("data")), **rest)
    except ConfigError as error:
        rest_uneven = str(error)

    # A checkpoint of two processes that one process can go on from, and the other way round.
    with PrefetchBatchifier(example_store(), sharding=NamedSharding(mesh, P("data")), **OPTIONS) as loader:
        for _ in range(3):
            loader.next_batch()
        with ocp.CheckpointManager(folder / "two") as manager:
            state = loader.state_dict()
            weights = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("data")))
            saved = ocp.args.Composite(weights=ocp.args.StandardSave({"w": weights}), batches=ocp.args.JsonSave(state))
            manager.save(0, args=saved)
            manager.wait_until_finished()
        with ocp.CheckpointManager(folder / "one") as manager:
            loader.load_state_dict(manager.restore(0, args=ocp.args.Composite(batches=ocp.args.JsonRestore())).batches)
        went_on = multihost_utils.process_allgather(loader.next_batch(), tiled=True)
    (folder / f"result-{rank}.json").write_text(
        json.dumps(
            {
                "digests": digests,
                "uneven": uneven,
                "rest uneven": rest_uneven,
                "state": state,
                "went on": stream_digest([went_on], 1),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
