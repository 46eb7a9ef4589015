"""What a loader says it waits for."""

import copy
import io
import threading
import time
from typing import Any

import pytest
from PIL import Image

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
from mouse_core.mixtures import MixtureSource
from mouse_core.prefetch import LoaderReport
from mouse_core.testing import example_store


class Slow:
    """A source that says it waited for the network all the time, as those do who read from elsewhere."""

    def __init__(self) -> None:
        self._source = BatchSource(example_store(), 8, 4)
        self.spec, self.fingerprint = self._source.spec, "slow"
        self._said = {"seconds": 7.0, "fetched": 1000}  # before the loader began
        self._lock = threading.Lock()
        self.snapshot, self.counted = self, "one set of counters"
        self.backings = [self, copy.copy(self)]

    def __len__(self) -> int:
        return len(self._source)

    def counters(self) -> dict[str, float]:
        return dict(self._said)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            self._said["seconds"] += 9.0
            self._said["fetched"] += 100
        return self._source[index]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_fetched_is_waited_for(workers: int) -> None:
    with PrefetchBatchifier(Slow(), num_workers=workers) as loader:
        assert loader.report() == LoaderReport()
        for _ in range(10):
            loader.next_batch()
        report = loader.report()
        batch = loader.next_batch()
    assert report.waits_for == "network"
    made = 10 if not workers else 14
    assert 10 <= report.network_bytes / 100 <= made + workers
    assert report.network == pytest.approx(report.network + report.decode + report.disk + report.processor)
    assert 0 <= report.ready <= report.ready_at_most == (4 if workers else 0)
    assert report.batches == 10
    assert report.delivered_bytes == 10 * sum(values.nbytes for values in batch.values())
    waits = report.waits
    assert sum(waits.values()) == pytest.approx(report.waited / report.seconds)
    assert "network" in report.line()
    mixed = MixtureSource({"a": BatchSource(example_store(), 8, 4), "b": Slow()}, [1, 1], field=None)
    with PrefetchBatchifier(mixed, shard=(0, 1), uneven="pad", num_workers=workers) as loader:
        for _ in range(9):
            loader.next_batch()
        assert loader.report().network_bytes >= 100


@pytest.mark.parametrize("workers", [0, 2])
def test_the_time_of_who_uses_batches_is_not_waited(workers: int) -> None:
    with PrefetchBatchifier(example_store(), 8, 4, num_workers=workers) as loader:
        loader.next_batch()
        before = loader.report()
        for _ in range(5):
            time.sleep(0.02)
            loader.next_batch()
        report = loader.report() - before
    assert report.batches == 5
    assert report.seconds - report.waited >= 0.1


def test_decoding_is_waited_for() -> None:
    store = DatasetStore()
    for number in range(40):
        image = io.BytesIO()
        Image.new("RGB", (48, 48), (number, 0, 0)).save(image, "PNG")
        store.append({"action": 0, "reward": number * 0.5, "done": 0, "observation_image": image.getvalue()})
    for workers in (0, 1):
        with PrefetchBatchifier(store, 8, 4, num_workers=workers, fields=["obs_image", "reward"]) as loader:
            for _ in range(6):
                loader.next_batch()
            report = loader.report()
        assert report.decode > 0
        assert report.stored_bytes is not None
        assert report.stored_bytes < report.delivered_bytes / 4  # pixels are widened to int64


def test_counts_go_on_over_states_and_refreshes() -> None:
    store = example_store()
    with PrefetchBatchifier(store, 8, 4, num_workers=1) as loader:
        state = loader.state_dict()
        for _ in range(3):
            loader.next_batch()
        loader.load_state_dict(state)
        loader.next_batch()
        loader.refresh()
        loader.next_batch()
        assert loader.report().batches == 5


def test_a_line_says_it_all() -> None:
    report = LoaderReport(
        seconds=10,
        waited=4,
        batches=2500,
        disk=6,
        processor=2,
        delivered_bytes=5e9,
        stored_bytes=2e9,
        disk_bytes=4_000_000_000,
        network_bytes=800_000_000,
        ready=3,
        ready_at_most=4,
    )
    assert report.line() == (
        "2,500 batches, 250.0/s, 500 MB/s; waits 40% (disk 30%, processor 10%); reads 2.40 bytes for each; 3 of 4 ready"
    )
    assert (report.waits_for, report.amplification) == ("disk", 2.4)
    assert LoaderReport(seconds=10, waited=0.4, batches=9, disk=6).waits_for == "consumer"
    assert LoaderReport().line() == "0 batches, 0.0/s, 0 B/s; waits 0%; 0 of 0 ready"
