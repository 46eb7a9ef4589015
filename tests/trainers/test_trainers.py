"""Each trainer sees the one global stream, every rank its rows; killed and resumed by other ranks, it goes on there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import BatchSource
from tests.ranks import run_ranks, search_path
from tests.trainers import jobs

pytestmark = pytest.mark.trainers
TRAINERS = (
    "import torch, tensordict, accelerate, lightning, torchdata.stateful_dataloader, transformers, transformers.trainer"
)


def run(work: Callable[..., Any], ranks: int, **options: Any) -> list[Any]:
    """What a job returns on each of some ranks, which a launcher starts."""
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "ACCELERATE_DISABLE_RICH": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return run_ranks(work, ranks, preload=TRAINERS, launched=True, environment=environment, **options)


@cache
def stream() -> BatchSource:
    """The whole batches, by the function that they are."""
    return BatchSource(jobs.store(), **jobs.OPTIONS, dtypes={"reward": "float64"})


@cache
def weights(steps: int) -> list[float]:
    """What one process has learned after some steps of the whole batches."""
    net = jobs.Net()
    optimizer = jobs.sgd(net)
    for index in range(steps):
        batch = {name: torch.from_numpy(values) for name, values in stream()[index].items()}
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        optimizer.step()
    return net.weights()


def check(found: list[Any], begin: int, end: int) -> None:
    """The ranks saw exactly the batches ``begin .. end - 1``, in their order, and learned what one process learns."""
    assert [one["begin"] for one in found] == [begin] * len(found)
    assert [len(one["rows"]) for one in found] == [end - begin] * len(found)
    for step in range(begin, end):
        together = np.concatenate([one["rows"][step - begin] for one in found])
        np.testing.assert_array_equal(together, stream()[step]["reward"], err_msg=f"step {step}")
    for one in found:
        if "weights" in one:
            np.testing.assert_allclose(one["weights"], weights(end), rtol=1e-9)


def test_the_stops_lie_within_epochs_and_apart() -> None:
    length = len(stream())
    assert length == 5
    assert all(stop % length for stop in (6, 11, 13))


@pytest.mark.parametrize("job", ["ddp", "fsdp", "accelerate", "fabric", "lightning", "transformers"])
def test_other_ranks_go_on_with_the_same_stream(job: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    begin = 0
    for ranks, stop in ((2, 6), (4, 11), (1, 13)):
        check(run(getattr(jobs, job), ranks, folder=str(tmp_path / "kept"), stop=stop), begin, stop)
        begin = stop


def test_a_rank_is_killed_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    options = {"folder": str(tmp_path / "kept")}
    assert run(jobs.ddp, 4, **options, stop=20, kill=[2, 7]) == [None] * 4
    check(run(jobs.ddp, 3, **options, stop=9), 6, 9)


def test_accelerate_leaves_batches_alone_however_it_shares_out(tmp_path: Path) -> None:
    found = run(jobs.prepared, 2, steps=5)
    for way in found[0]:
        check([{"begin": 0, "rows": one[way]} for one in found], 0, 5)


def test_accelerate_skips_numbers(tmp_path: Path) -> None:
    found = run(jobs.skipped, 2, epoch=2, batches=3)
    check([{"begin": 13, "rows": rows} for rows in found], 13, 15)


def test_a_loader_may_be_made_before_there_are_processes(tmp_path: Path) -> None:
    (found,) = run(jobs.made_before, 1, forked=2, folder=str(tmp_path), stop=6)
    check(found, 0, 6)


def test_transformers_is_told_that_it_needs_dicts(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"as_dict: expected True for transformers\.trainer"):
        run(jobs.transformers, 1, folder=str(tmp_path / "kept"), stop=2, as_dict=False)


# A torch DataLoader over a source, which trainers share out among the ranks by whole batches, unless that is a shard's.
@pytest.mark.parametrize("way", [("fabric", "source"), ("accelerate", "dispatched"), ("accelerate", "wrapped")])
def test_parts_of_shards_are_refused(way: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="expected a source that is sharded once"):
        run(jobs.shared_out, 2, ways=[[*way, True]])


def test_what_is_not_refused_is_seen_in_whole(tmp_path: Path) -> None:
    # How many batches each rank sees of the 4 of an epoch, which have 192 rows.
    ways = {
        ("fabric", "source", False): 2,
        ("fabric", "unsampled", True): 4,
        ("accelerate", "dispatched", False): 2,
        ("accelerate", "loader", True): 4,
    }
    found = run(jobs.shared_out, 2, ways=list(ways))
    for (way, each), ranks in zip(ways.items(), zip(*found, strict=True), strict=True):
        assert [len(batches) for batches in ranks] == [each, each], way
        assert len({row for batches in ranks for rows in batches for row in rows}) == 192, way


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_with_processes_as_workers_goes_on_within_an_epoch(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made() -> Any:
        loader = jobs.data_loader(shard=(1, 2))
        loader.set_epoch(2)
        asked = {"batch_size": None, "sampler": loader.sampler, "num_workers": workers}
        return StatefulDataLoader(loader.dataset, **asked)

    first = made()
    seen, batches = [], iter(first)
    for _ in range(2):
        seen.append(jobs.rows_of(next(batches)))
    again = made()
    again.load_state_dict(first.state_dict())
    seen += [jobs.rows_of(batch) for batch in again]
    assert seen == [stream()[index]["reward"][6:].tolist() for index in range(10, 15)]


def test_nodes_of_torchdata_keep_the_state() -> None:
    from torchdata.nodes import IterableWrapper, Loader, Prefetcher

    def made() -> Any:
        return Loader(Prefetcher(IterableWrapper(jobs.data_loader(shard=(1, 2))), prefetch_factor=3))

    first = made()
    for _ in range(2):  # an epoch, and 2 batches of the next one, beyond which some are ready
        for number, batch in enumerate(first):
            last = jobs.rows_of(batch)
            if number == 1:
                state = first.state_dict()
    again = made()
    again.load_state_dict(state)
    seen = [jobs.rows_of(batch) for batch in again]
    assert seen == [stream()[index]["reward"][6:].tolist() for index in range(7, 10)]
    assert seen[-1] == last


def test_torchrun_starts_again_where_it_was(tmp_path: Path) -> None:
    script = Path(__file__).parent / "jobs.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # Where the launcher shares its store with the ranks, those that start again may read where one of the last attempt
    # listened, and find nobody there.
    alone = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **alone, "PYTHONPATH": search_path()}
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path), "8"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    check([json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)], 4, 8)


@pytest.mark.long
def test_ray_starts_again_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    monkeypatch.setenv("PYTHONPATH", search_path())
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # a report waits for the next one
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        trainer = TorchTrainer(
            jobs.by_ray,
            train_loop_config={"folder": str(tmp_path), "stop": 8},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=str(tmp_path / "kept"), failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]
    assert found[0]["begin"] in (2, 4)  # the last report may have been under way
    check(found, found[0]["begin"], 8)
    assert "Remove the call of prepare_data_loader" in (tmp_path / "told").read_text()
