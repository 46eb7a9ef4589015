"""The loader of NumPy batches does what is asked of adapters; and adapters that do not are found out."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ClosedError, MouseError, PrefetchBatchifier, WorkerError
from mouse_core.replay import ReplayBuffer, ReplayBufferEnsemble
from mouse_core.rollouts import RolloutStorage
from mouse_core.testing import AdapterConformance, ReplayAdapterConformance, RolloutAdapterConformance
from tests.core.faults import wrong


class TestCore(AdapterConformance):
    pass


def loader(**others: Any) -> Any:
    return wrong(PrefetchBatchifier, **others)


def delivering(change: Callable[[Any], Any]) -> Any:
    """A loader that changes the batches that are no views."""

    def next_batch(self: Any, right: Any) -> Any:
        batch = right()
        return change(batch) if isinstance(batch, dict) else batch

    return loader(next_batch=next_batch)


def one_view(self: Any, right: Any) -> Any:
    batch = right()
    return batch[0] if isinstance(batch, tuple) else batch


def deaf_to(name: str) -> Any:
    def make(self: Any, right: Any, store: Any, *arguments: Any, **options: Any) -> None:
        right(store, *arguments, **{key: value for key, value in options.items() if key != name})

    return loader(__init__=make)


def another_byte(self: Any, right: Any) -> Any:
    index = self.state_dict()["next_index"]
    batch = right()
    if index == 3:
        views = batch if isinstance(batch, tuple) else (batch,)
        views[-1]["obs_continuous"].reshape(-1).view(np.uint8)[0] ^= 1
    return batch


class AnotherArgument(PrefetchBatchifier):
    def __init__(self, store: Any, length: int, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)


class Endless(PrefetchBatchifier):
    def __iter__(self) -> Any:
        return (self.next_batch() for _ in range(2 * len(self)))


def no_questions(self: Any, right: Any, store: Any, *arguments: Any, **options: Any) -> None:
    right(store, *arguments, **options | ({"sampling": "random"} if options.get("sampling") == "all" else {}))


def one_buffer(self: Any, right: Any) -> Any:
    batch: Any = right()
    if not hasattr(self, "kept") or self.kept.keys() != batch.keys():
        self.kept = batch
    for name, values in batch.items():
        self.kept[name][...] = values
    return self.kept


def always_fresh(self: Any, right: Any) -> Any:
    if len(self.store) != self.source.snapshot.num_rows:
        self.refresh()
    return right()


def with_store(self: Any, right: Any, store: Any, *arguments: Any, **options: Any) -> None:
    right(store, *arguments, **options)
    self.store = store


def state_ahead(self: Any, right: Any) -> Any:
    state = right()
    return {**state, "next_index": state["next_index"] + (state["next_index"] > 0)}


def skips_what_fails(self: Any, right: Any) -> Any:
    try:
        return right()
    except WorkerError:
        self.load_state_dict({**self.state_dict(), "next_index": int(self.state_dict()["next_index"]) + 1})
        raise


def never_closed(self: Any, right: Any) -> Any:
    with suppress(ClosedError):
        return right()
    return {}


def leaves_a_thread(self: Any, right: Any, *arguments: Any, **options: Any) -> None:
    right(*arguments, **options)
    threading.Thread(target=threading.Event().wait, args=(13,), daemon=True).start()


ANOTHER_BYTE = loader(next_batch=another_byte)
SPEC = "test_the_spec_says_what_comes"
WRONG_LOADERS: list[tuple[str, Any]] = [
    ("test_it_takes_the_arguments_of_the_core", AnotherArgument),
    ("test_batches_are_those_of_the_core", ANOTHER_BYTE),
    ("test_shards_put_together_are_the_whole", ANOTHER_BYTE),
    ("test_other_numbers_of_processes_go_on_with_the_stream", ANOTHER_BYTE),
    ("test_a_batch_never_changes", ANOTHER_BYTE),
    ("test_windows_of_all_kinds_and_sources_of_ones_own", ANOTHER_BYTE),
    (SPEC, delivering(lambda batch: {**batch, "done": batch["done"].astype(np.int32)})),
    (SPEC, delivering(lambda batch: dict(reversed(batch.items())))),
    ("test_absent_fields_are_absent", delivering(lambda batch: {"q_star": np.zeros(3), **batch})),
    ("test_bad_arguments_are_refused", loader(__init__=no_questions)),
    ("test_shards_put_together_are_the_whole", deaf_to("shard")),
    ("test_windows_of_all_kinds_and_sources_of_ones_own", deaf_to("packed")),
    ("test_windows_of_all_kinds_and_sources_of_ones_own", loader(next_batch=one_view)),
    ("test_a_batch_never_changes", loader(next_batch=one_buffer)),
    ("test_a_loop_is_an_epoch", Endless),
    ("test_new_rows_wait_for_refresh", loader(__init__=with_store, next_batch=always_fresh)),
    ("test_the_state_is_that_of_the_core", loader(state_dict=state_ahead)),
    ("test_it_resumes_where_it_stopped", loader(state_dict=state_ahead)),
    (
        "test_it_resumes_where_it_stopped",
        loader(load_state_dict=lambda self, right, state: right({**state, "seed": self.source.seed})),
    ),
    (
        "test_a_state_of_something_else_is_refused",
        loader(load_state_dict=lambda self, right, state: right({**state, "fingerprint": self.source.fingerprint})),
    ),
    ("test_a_failure_comes_at_its_index_and_stays", loader(next_batch=skips_what_fails)),
    ("test_closed_is_closed", loader(next_batch=never_closed)),
    ("test_threads_end", loader(__init__=leaves_a_thread)),
]


@pytest.mark.parametrize(("test", "loader_class"), WRONG_LOADERS)
def test_what_is_wrong_is_found_out(loader_class: type[PrefetchBatchifier], test: str) -> None:
    suite = AdapterConformance()
    suite.loader_class, suite.patience = loader_class, 0.5
    with pytest.raises(AssertionError):
        getattr(suite, test)()


class TestCoreReplay(ReplayAdapterConformance):
    pass


class TestCoreRollouts(RolloutAdapterConformance):
    pass


class AnotherArgumentBefore(ReplayBuffer):
    def __init__(self, device: Any = None, storage: Any = None, *arguments: Any, **options: Any) -> None:
        super().__init__(storage, *arguments, **options)


def another_last_row(self: Any, right: Any, batch: Any) -> Any:
    return {**batch, "reward": batch["reward"] + (np.arange(batch["reward"].size) == 7)}


def one_memory(self: Any, right: Any, batch: Any) -> Any:
    if not hasattr(self, "kept") or self.kept.shape != batch["reward"].shape:
        self.kept = batch["reward"]
    self.kept[...] = batch["reward"]
    return {**batch, "reward": self.kept}


def half_written(self: Any, right: Any, items: Any) -> Any:
    try:
        return right(items)
    except MouseError:
        seen = {"vector": np.ones(3, "f"), "pair": (1, 1.0)}
        self.append({"obs": seen, "action": 1, "reward": np.float32(1), "next": {"done": True}})
        raise


def no_priorities(self: Any, right: Any, index: Any, priority: Any = None) -> None:
    right(index, None if priority is None else np.ones_like(priority))


def other_environments(self: Any, right: Any, row: Any) -> Any:
    return right({**row, "reward": row["reward"][::-1]})


def buffer(**others: Any) -> Any:
    return wrong(ReplayBuffer, **others)


WRONG_BUFFERS: list[tuple[str, Any]] = [
    ("test_it_takes_the_arguments_of_the_core", AnotherArgumentBefore),
    (
        "test_batches_are_those_of_the_core",
        buffer(__init__=lambda self, right, *arguments, seed=0, **options: right(*arguments, seed=seed + 1, **options)),
    ),
    ("test_batches_are_those_of_the_core", buffer(_deliver=another_last_row)),
    ("test_environments_lie_side_by_side", buffer(append=other_environments)),
    ("test_a_loop_is_an_epoch", buffer(ran_out=False)),
    ("test_priorities_come_in_its_arrays", buffer(update_priority=no_priorities)),
    (
        "test_rows_are_read_and_written_over",
        buffer(__setitem__=lambda self, right, index, rows: right(index if np.ndim(index) else index + 1, rows)),
    ),
    ("test_a_batch_never_changes", buffer(_deliver=one_memory)),
    (
        "test_a_state_is_that_of_the_core",
        buffer(
            load_state_dict=lambda self, right, state: right({**state, "samples": 0} if "samples" in state else state)
        ),
    ),
    ("test_what_is_refused_changes_nothing", buffer(extend=half_written)),
    (
        "test_ensembles_are_those_of_the_core",
        wrong(
            ReplayBufferEnsemble, __init__=lambda self, right, *buffers, p=None, **options: right(*buffers, **options)
        ),
    ),
]


@pytest.mark.parametrize(("test", "kind"), WRONG_BUFFERS)
def test_a_replay_buffer_that_is_wrong_is_found_out(kind: Any, test: str, tmp_path: Path) -> None:
    suite = ReplayAdapterConformance()
    setattr(suite, "ensemble_class" if issubclass(kind, ReplayBufferEnsemble) else "buffer_class", kind)
    needs = {"tmp_path": tmp_path} if test == "test_a_state_is_that_of_the_core" else {}
    with pytest.raises((AssertionError, ValueError)):
        getattr(suite, test)(**needs)


def same_order_again(self: Any, right: Any) -> None:
    right()
    self.epoch = 0


def no_masks(self: Any, right: Any, *arguments: Any, **options: Any) -> Any:
    return (replace(batch, masks=np.ones_like(batch.masks)) for batch in right(*arguments, **options))


def room_for_more(self: Any, right: Any, transition: Any) -> None:
    if self.step == self.num_transitions_per_env:
        self.clear()
    right(transition)


def forgets_truncations(self: Any, right: Any, transition: Any) -> None:
    right({**transition, "dones": np.minimum(transition["dones"], 1)})


def takes_all(self: Any, right: Any, *arguments: Any, **options: Any) -> None:
    right(*arguments, **options, validate=False)


def other_returns(self: Any, right: Any, *arguments: Any, **options: Any) -> None:
    right(*arguments, **options | {"lam": 1.0})


WRONG_ROLLOUTS: list[tuple[str, Any]] = [
    (test, wrong(RolloutStorage, **others))
    for test, others in (
        ("test_truncated_episodes_need_the_values_of_their_ends", {"add_transitions": forgets_truncations}),
        ("test_rows_and_returns_are_those_of_the_core", {"compute_returns": other_returns}),
        ("test_mini_batches_are_those_of_the_core", {"clear": same_order_again}),
        ("test_recurrent_mini_batches_are_those_of_the_core", {"recurrent_mini_batch_generator": no_masks}),
        ("test_what_comes_out_of_turn_is_refused", {"add_transitions": room_for_more}),
        ("test_rows_that_do_not_fit_are_refused", {"__init__": takes_all}),
    )
]


@pytest.mark.parametrize(("test", "kind"), WRONG_ROLLOUTS)
def test_a_rollout_storage_that_is_wrong_is_found_out(kind: Any, test: str) -> None:
    suite = RolloutAdapterConformance()
    suite.storage_class = kind
    with pytest.raises(AssertionError):
        getattr(suite, test)()


@pytest.mark.parametrize(
    ("suite", "faults"),
    [
        (AdapterConformance, WRONG_LOADERS),
        (ReplayAdapterConformance, WRONG_BUFFERS),
        (RolloutAdapterConformance, WRONG_ROLLOUTS),
    ],
)
def test_every_demand_is_put_to_the_test(suite: Any, faults: Any) -> None:
    """Each test of a suite has something above that fails it."""
    assert {name for name in dir(suite) if name.startswith("test_")} == {test for test, _ in faults}
