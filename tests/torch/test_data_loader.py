"""A DataLoader of ours gives what a PrefetchBatchifier gives, and is to others what they expect of a DataLoader."""

import gc
import inspect
import pickle
import weakref
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data.distributed import DistributedSampler

from mouse_core import BatchSource, ConfigError, DatasetStore
from mouse_core.digest import StreamDigest, whole_state
from mouse_core.mixtures import MixtureSource
from mouse_core.replay import ArrayStorage
from mouse_core.testing import AdapterConformance, example_store, stream_digest
from mouse_torch import DataLoader, PrefetchBatchifier, ReplayBuffer, WindowDataset

OPTIONS: dict[str, Any] = {"sequence_length": 4, "batch_size": 8, "seed": 5}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.slow  # it is a PrefetchBatchifier, of which the suite asks in the default lane
class TestDataLoader(AdapterConformance):
    loader_class = DataLoader

    def test_it_takes_the_arguments_of_the_core(self) -> None:
        taken = inspect.signature(PrefetchBatchifier).parameters
        defaults = {name: taken[name].default for name in taken.keys() - {"store", "shard", "options"}}
        DataLoader(example_store(), **{**defaults, "sequence_length": 4, "drop_last": False})


@pytest.mark.parametrize("as_dict", [False, True])
def test_it_is_a_data_loader_with_the_same_batches(as_dict: bool) -> None:
    store = example_store()
    with DataLoader(store, **OPTIONS, as_dict=as_dict) as loader, PrefetchBatchifier(store, **OPTIONS) as other:
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert type(loader.next_batch()) is (dict if as_dict else TensorDict)
        other.next_batch()
        assert stream_digest(loader, 2 * len(loader)) == stream_digest(other, 2 * len(other))
        assert loader.state_dict() == other.state_dict()
        # Others take it for one that is distributed already.
        assert isinstance(loader.sampler, DistributedSampler)
        assert loader.batch_size is None
        assert loader.batch_sampler is None
        assert len(loader.sampler) == len(loader.dataset) == len(loader)
    with DataLoader(store, **OPTIONS, views=2, as_dict=as_dict) as loader:
        assert {type(view) for view in loader.next_batch()} == {dict if as_dict else TensorDict}
    forgotten = DataLoader(store, **OPTIONS)
    next(iter(forgotten))
    gone = weakref.ref(forgotten)
    gc.disable()
    try:
        del forgotten
        assert gone() is None  # at once
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "instead"),
    [("shuffle", "sampling='sequential'"), ("collate_fn", "map"), ("persistent_workers", "num_work")],
)
def test_arguments_of_torchs_alone_are_refused(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"no argument {name} of torch's DataLoader, found {name}; use {instead}"):
        DataLoader(example_store(), **OPTIONS, **{name: True})
    ours = inspect.signature(PrefetchBatchifier).parameters
    assert name in inspect.signature(torch.utils.data.DataLoader).parameters.keys() - ours.keys()


def test_an_epoch_is_gone_to_unless_it_is_the_current_one() -> None:
    with DataLoader(example_store(), **OPTIONS) as loader:
        length = len(loader)
        numbers = []
        for epoch in (0, 0, 3, 3, 1):
            loader.set_epoch(epoch)
            numbers.append(loader.state_dict()["next_index"])
            loader.next_batch()
        assert numbers == [0, 1, 3 * length, 3 * length + 1, length]
        # As a trainer asks: from its first batch to its last, epoch by epoch.
        loader.set_epoch(2)
        assert len([*loader]) == length
        loader.set_epoch(3)
        assert loader.state_dict()["next_index"] == 3 * length


def test_epochs_are_counted_on_after_a_refresh() -> None:
    store = DatasetStore()
    rows = {"action": np.zeros(40, np.int64), "reward": np.zeros(40), "done": np.zeros(40, np.int64)}
    store.extend(rows)
    with DataLoader(store, **OPTIONS) as loader:
        loader.set_epoch(0)
        first = len([*loader])
        store.extend(rows)
        loader.refresh()
        loader.set_epoch(1)  # the one that began with the refresh
        assert loader.state_dict()["next_index"] == first
        loader.set_epoch(2)
        assert loader.state_dict()["next_index"] == first + len(loader)
        state = loader.state_dict()
        assert [*loader.sampler] == [[index] for index in range(state["next_index"], state["next_index"] + len(loader))]
    with DataLoader(store, **OPTIONS) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert loader.state_dict() == state


def test_batches_without_steps_have_one_axis() -> None:
    options = {**OPTIONS, "sequence_length": None, "windows": {"action": range(3)}}
    with DataLoader(example_store(), **options) as loader:
        batch = next(iter(loader))
        assert batch.batch_size == (OPTIONS["batch_size"],)
        asked = {"batch_size": None, "sampler": loader.sampler, "collate_fn": loader.collate_fn}
        other = next(iter(torch.utils.data.DataLoader(loader.dataset, **asked)))
        assert other.batch_size == batch.batch_size
        assert (other == batch).all()


@pytest.mark.parametrize(
    ("as_dict", "workers"), [(False, 0), (True, 0), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_another_data_loader_makes_the_same_epoch(as_dict: bool, workers: int) -> None:
    with DataLoader(example_store(), **OPTIONS, as_dict=as_dict) as loader:
        loader.set_epoch(2)
        asked = {"batch_size": None, "sampler": loader.sampler}
        other: Any = torch.utils.data.DataLoader(loader.dataset, **asked)
        assert {type(batch) for batch in other} == {dict}
        asked["num_workers"] = workers
        batches = list(torch.utils.data.DataLoader(loader.dataset, **asked, collate_fn=loader.collate_fn))
        assert {type(batch) for batch in batches} == {dict if as_dict else TensorDict}
        assert stream_digest(batches, len(loader)) == stream_digest(loader, len(loader))


def test_a_dataset_travels_and_gives_one_batch_at_a_time() -> None:
    loader = DataLoader(example_store(), **OPTIONS)
    dataset = pickle.loads(pickle.dumps(loader.dataset))
    assert stream_digest([dataset[index] for index in range(3)], 3) == stream_digest(loader, 3)
    assert torch.equal(dataset[[1]]["reward"], dataset[1]["reward"])
    with pytest.raises(ConfigError, match="expected the index of one batch, found 2 indices"):
        dataset[[1, 2]]


def test_every_process_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    store = example_store()
    whole = BatchSource(store, **OPTIONS)
    for given in (store, store.snapshot(), whole):
        parts = []
        options = {} if given is whole else OPTIONS
        for rank in range(2):
            ranks(monkeypatch, rank, 2)
            with DataLoader(given, **options) as loader:
                parts.append(loader.next_batch()["reward"])
        np.testing.assert_array_equal(torch.cat(parts), whole[0]["reward"])
    mixture = MixtureSource({"a": whole, "b": BatchSource(store, **{**OPTIONS, "seed": 1})})
    for late in (False, True):
        parts = []
        for rank in range(2):
            with DataLoader(mixture) as loader:
                ranks(monkeypatch, rank, 2)
                loader = loader if late else DataLoader(mixture)
                parts.append(loader.next_batch()["reward"])
                loader.close()
            monkeypatch.delenv("RANK")
            monkeypatch.delenv("WORLD_SIZE")
        np.testing.assert_array_equal(torch.cat(parts), mixture[0]["reward"])
    with DataLoader(BatchSource(store, **OPTIONS, shard=(3, 4))) as loader:
        np.testing.assert_array_equal(loader.next_batch()["reward"], whole[0]["reward"][6:])
    with DataLoader(store, **OPTIONS, shard=(0, 1)) as loader:
        np.testing.assert_array_equal(loader.next_batch()["reward"], whole[0]["reward"])


def test_a_digest_of_all_ranks_goes_on_in_other_numbers_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = None
    for count, late in ((2, False), (4, True), (1, False), (2, True)):
        states = []
        for rank in range(count):
            ranks(monkeypatch, *((0, 1) if late else (rank, count)))
            with DataLoader(example_store(), **OPTIONS, digest=True) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                ranks(monkeypatch, rank, count)
                for _ in range(3):
                    loader.next_batch()
                states.append(loader.state_dict())
        state = whole_state(states)
    with PrefetchBatchifier(example_store(), **OPTIONS, shard=(0, 1), digest=True) as whole:
        for _ in range(12):
            whole.next_batch()
        assert whole.state_dict() == state
    ranks(monkeypatch, 0, 3)
    with pytest.raises(ConfigError, match="shard: expected a count that divides batch_size 8, found 3"):
        DataLoader(example_store(), **OPTIONS)


def test_a_digest_goes_on_over_a_jump_to_another_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    source = BatchSource(example_store(), **OPTIONS)
    begin, parts = 3 * len(source), []
    for rank in range(2):
        ranks(monkeypatch, rank, 2)
        with DataLoader(example_store(), **OPTIONS, digest=True) as loader:
            loader.next_batch()
            loader.set_epoch(3)
            loader.next_batch()
            parts.append(loader.digest)
    assert sum(parts, StreamDigest()) == StreamDigest.of(0, source[0]) + StreamDigest.of(begin, source[begin])


def test_who_it_is_may_be_known_late(monkeypatch: pytest.MonkeyPatch) -> None:
    store = example_store()
    whole = BatchSource(store, **OPTIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")  # half of what a launcher says
    loader = DataLoader(store, **OPTIONS)
    elsewhere = DataLoader(store, **OPTIONS)
    loader.load_state_dict({**loader.state_dict(), "next_index": 3})
    ranks(monkeypatch, 1, 2)
    np.testing.assert_array_equal(loader.next_batch()["reward"], whole[3]["reward"][4:])
    assert loader.state_dict()["next_index"] == 4
    made: Any = torch.utils.data.DataLoader(elsewhere.dataset, batch_size=None, sampler=elsewhere.sampler)
    np.testing.assert_array_equal(next(iter(made))["reward"], whole[0]["reward"][4:])
    loader.refresh()
    assert len(loader.next_batch()) == 4


def test_a_replay_buffer_gives_every_process_its_own() -> None:
    buffer = ReplayBuffer(ArrayStorage(100), batch_size=4)
    buffer.extend({"x": torch.arange(40.0), "n": {"i": torch.arange(40)}})
    with DataLoader(buffer, as_dict=True) as loader:
        loader.set_epoch(3)  # there are none
        batch = loader.next_batch()
        assert type(batch["n"]) is dict
        assert batch["x"].shape == (4,)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(ConfigError, match="found a loader of a replay buffer"):
            loader.dataset[0]


BY_OPTIONS: list[dict[str, Any]] = [
    {"sequence_length": 5},
    {"sequence_length": 5, "fields": ["reward", "observation.image"], "dtypes": {"reward": "float16"}},
    {"sequence_length": 5, "normalize": {"observation.state": "mean_std"}, "layout": "stored"},
    {"sequence_length": 5, "layout": "mouse", "required_fields": ["obs_image"]},
    *({"sequence_length": 5, "boundary": "episode", "pad": pad} for pad in (True, False, 7)),
    {"windows": {}},
    {"windows": {"action": range(3), "observation.state": [-1, 0]}},
    {"sequence_length": 4, "windows": {"reward": [-1, 0]}},
    {"transitions": True},
    {"transitions": True, "sequence_length": 4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of episodes of 9, 6, 11 and 3 transitions, on disk."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("windows") / "s"
    with DatasetStore.open(path, "a") as store:
        for steps in (9, 6, 11, 3):
            image = rng.integers(0, 256, (steps + 1, 4, 4, 3), dtype=np.uint8)
            state = rng.normal(size=(steps + 1, 3)).astype(np.float32)
            given = {"observations": {"image": image, "state": state}, "actions": rng.normal(size=(steps, 2))}
            store.add_episode(given, rewards=rng.normal(size=steps), terminated=True)
    return path


def plain(window: Any) -> dict[str, tuple[str, list[int], bytes]]:
    arrays = {name: np.asarray(values) for name, values in window.items()}
    return {name: (one.dtype.str, [*one.shape], one.tobytes()) for name, one in arrays.items()}


@pytest.mark.parametrize(("place", "options"), [*zip(cycle(["memory", "disk"]), BY_OPTIONS, strict=False)], ids=str)
def test_each_window_is_the_sources_own_and_comes_once(place: str, options: dict[str, Any], folder: Path) -> None:
    store = DatasetStore.open(folder)
    store = store if place == "disk" else DatasetStore().from_dataset(store.to_dataset())
    source = BatchSource(store, batch_size=1, sampling="sequential", **options)
    batches = [({name: one[0] for name, one in source[at].items()}, source.plan(at)) for at in range(len(source))]
    expected = [plain(window) for window, _ in sorted(batches, key=lambda both: int(both[1].starts[0]))]
    dataset = WindowDataset(store, **options)
    assert [plain(dataset[at]) for at in range(len(dataset))] == expected
    assert [plain(window) for window in dataset.__getitems__([-1, 0, 2, 2])] == [expected[at] for at in (-1, 0, 2, 2)]
    again = pickle.loads(pickle.dumps(dataset))
    assert [plain(window) for window in again] == expected
    generator = torch.Generator().manual_seed(3)
    orders = []
    for _ in range(2):
        loader = torch.utils.data.DataLoader(dataset, batch_size=3, shuffle=True, generator=generator)
        seen = [
            plain({name: one[at] for name, one in batch.items()})
            for batch in loader
            for at in range(len(batch[next(iter(batch))]))
        ]
        orders.append([expected.index(one) for one in seen])
        assert sorted(orders[-1]) == sorted(map(expected.index, expected))
    assert orders[0] != orders[1]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_worker_processes_deliver_the_same_windows(context: str, folder: Path) -> None:
    dataset = WindowDataset(DatasetStore.open(folder), 5, boundary="episode")
    options: dict[str, Any] = {"batch_size": 3, "num_workers": 2, "multiprocessing_context": context}
    other = [*torch.utils.data.DataLoader(dataset, batch_size=3)]
    assert [*map(plain, torch.utils.data.DataLoader(dataset, **options))] == [*map(plain, other)]


def test_what_a_dataset_of_windows_has_not_is_refused(folder: Path) -> None:
    store = DatasetStore.open(folder)
    dataset = WindowDataset(store, 5)
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[index]
    with pytest.raises(ConfigError, match="sampling: expected at least 1 window of 99 steps"):
        WindowDataset(store, 99)
    given: list[dict[str, Any]] = [{"sampling": "random"}, {"augment": None, "shard": (0, 2)}, {"lengths": [1, 2]}]
    for options in given:
        words = f"WindowDataset: expected options among .*, found .*{next(iter(options))}"
        with pytest.raises(ConfigError, match=words):
            WindowDataset(example_store(), 4, **options)
