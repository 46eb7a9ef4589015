"""The loader of NumPy batches does what is asked of adapters; and adapters that do not are found out."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ClosedError, MouseError, PrefetchBatchifier, WorkerError
from mouse_core.replay import ReplayBuffer, ReplayBufferEnsemble
from mouse_core.rollouts import RolloutStorage
from mouse_core.testing import AdapterConformance, ReplayAdapterConformance, RolloutAdapterConformance


class TestCore(AdapterConformance):
    pass


class AnotherByte(PrefetchBatchifier):
    def next_batch(self) -> Any:
        index = self.state_dict()["next_index"]
        batch = super().next_batch()
        if index == 3:
            views = batch if isinstance(batch, tuple) else (batch,)
            views[-1]["obs_continuous"].reshape(-1).view(np.uint8)[0] ^= 1
        return batch


class AnotherDtype(PrefetchBatchifier):
    def next_batch(self) -> Any:
        batch = super().next_batch()
        return {**batch, "done": batch["done"].astype(np.int32)} if isinstance(batch, dict) else batch


class AnotherOrder(PrefetchBatchifier):
    def next_batch(self) -> Any:
        batch = super().next_batch()
        return dict(reversed(batch.items())) if isinstance(batch, dict) else batch


class AnotherArgument(PrefetchBatchifier):
    def __init__(self, store: Any, length: int, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)


class FieldsOutOfNothing(PrefetchBatchifier):
    def next_batch(self) -> Any:
        batch = super().next_batch()
        return {"q_star": np.zeros(3), **batch} if isinstance(batch, dict) else batch


class NoQuestions(PrefetchBatchifier):
    def __init__(self, store: Any, *arguments: Any, **options: Any) -> None:
        if options.get("sampling") == "all":
            options["sampling"] = "random"
        super().__init__(store, *arguments, **options)


class NoShards(PrefetchBatchifier):
    def __init__(self, store: Any, *arguments: Any, **options: Any) -> None:
        options.pop("shard", None)
        super().__init__(store, *arguments, **options)


class NeverPacked(PrefetchBatchifier):
    def __init__(self, store: Any, *arguments: Any, **options: Any) -> None:
        options.pop("packed", None)
        super().__init__(store, *arguments, **options)


class OneView(PrefetchBatchifier):
    def next_batch(self) -> Any:
        batch = super().next_batch()
        return batch[0] if isinstance(batch, tuple) else batch


class OneBuffer(PrefetchBatchifier):
    def next_batch(self) -> Any:
        batch: Any = super().next_batch()
        if not hasattr(self, "kept") or self.kept.keys() != batch.keys():
            self.kept: dict[str, Any] = batch
        for name, values in batch.items():
            self.kept[name][...] = values
        return self.kept


class EndlessLoop(PrefetchBatchifier):
    def __iter__(self) -> Any:
        return (self.next_batch() for _ in range(2 * len(self)))


class AlwaysFresh(PrefetchBatchifier):
    def __init__(self, store: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)
        self.store = store

    def next_batch(self) -> Any:
        if len(self.store) != self.source.snapshot.num_rows:
            self.refresh()
        return super().next_batch()


class StateAhead(PrefetchBatchifier):
    def state_dict(self) -> Any:
        state = super().state_dict()
        return {**state, "next_index": state["next_index"] + (state["next_index"] > 0)}


class SeedForgotten(PrefetchBatchifier):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "seed": self.source.seed})


class AnyState(PrefetchBatchifier):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "fingerprint": self.source.fingerprint})


class SkipsWhatFails(PrefetchBatchifier):
    def next_batch(self) -> Any:
        try:
            return super().next_batch()
        except WorkerError:
            self.load_state_dict({**self.state_dict(), "next_index": int(self.state_dict()["next_index"]) + 1})
            raise


class NeverClosed(PrefetchBatchifier):
    def next_batch(self) -> Any:
        try:
            return super().next_batch()
        except ClosedError:
            return {}


class LeavesAThread(PrefetchBatchifier):
    def __init__(self, store: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)
        threading.Thread(target=threading.Event().wait, args=(13,), daemon=True).start()


@pytest.mark.parametrize(
    ("loader_class", "test"),
    [
        (AnotherArgument, "test_it_takes_the_arguments_of_the_core"),
        (AnotherByte, "test_batches_are_those_of_the_core"),
        (AnotherByte, "test_shards_put_together_are_the_whole"),
        (AnotherByte, "test_other_numbers_of_processes_go_on_with_the_stream"),
        (AnotherByte, "test_a_batch_never_changes"),
        (AnotherByte, "test_a_source_of_ones_own"),
        (AnotherByte, "test_fields_at_offsets_of_an_anchor"),
        (AnotherDtype, "test_the_spec_says_what_comes"),
        (AnotherOrder, "test_the_spec_says_what_comes"),
        (FieldsOutOfNothing, "test_absent_fields_are_absent"),
        (NoQuestions, "test_bad_arguments_are_refused"),
        (NoShards, "test_shards_put_together_are_the_whole"),
        (NeverPacked, "test_windows_of_lengths_of_their_own"),
        (OneView, "test_views_come_as_a_tuple"),
        (OneBuffer, "test_a_batch_never_changes"),
        (EndlessLoop, "test_a_loop_is_an_epoch"),
        (AlwaysFresh, "test_new_rows_wait_for_refresh"),
        (StateAhead, "test_the_state_is_that_of_the_core"),
        (StateAhead, "test_it_resumes_where_it_stopped"),
        (SeedForgotten, "test_it_resumes_where_it_stopped"),
        (AnyState, "test_a_state_of_something_else_is_refused"),
        (SkipsWhatFails, "test_a_failure_comes_at_its_index_and_stays"),
        (NeverClosed, "test_closed_is_closed"),
        (LeavesAThread, "test_threads_end"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_is_wrong_is_found_out(loader_class: type[PrefetchBatchifier], test: str) -> None:
    suite = AdapterConformance()
    suite.loader_class, suite.patience = loader_class, 0.5
    with pytest.raises(AssertionError):
        getattr(suite, test)()


def test_every_demand_is_put_to_the_test() -> None:
    """Each test of the suite has an adapter above that fails it."""
    (mark,) = test_what_is_wrong_is_found_out.pytestmark  # type: ignore[attr-defined]
    tests = {name for name in dir(AdapterConformance) if name.startswith("test_")}
    assert tests == {test for _, test in mark.args[1]}


# ---------------------------------------------------------------------- replay buffers and rollouts


class TestCoreReplay(ReplayAdapterConformance):
    pass


class TestCoreRollouts(RolloutAdapterConformance):
    pass


class OtherSeed(ReplayBuffer):
    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*arguments, seed=seed + 1, **options)


class AnotherArgumentBefore(ReplayBuffer):
    def __init__(self, device: Any = None, storage: Any = None, *arguments: Any, **options: Any) -> None:
        super().__init__(storage, *arguments, **options)


class AnotherLastRow(ReplayBuffer):
    def _deliver(self, batch: Any) -> Any:
        return {**batch, "reward": batch["reward"] + (np.arange(batch["reward"].size) == 7)}


class OneMemory(ReplayBuffer):
    def _deliver(self, batch: Any) -> Any:
        if not hasattr(self, "kept") or self.kept.shape != batch["reward"].shape:
            self.kept = batch["reward"]
        self.kept[...] = batch["reward"]
        return {**batch, "reward": self.kept}


class NoPriorities(ReplayBuffer):
    def update_priority(self, index: Any, priority: Any = None) -> None:
        super().update_priority(index, None if priority is None else np.ones_like(priority))


class HalfWritten(ReplayBuffer):
    def extend(self, items: Any) -> Any:
        try:
            return super().extend(items)
        except MouseError:
            self.append(
                {
                    "obs": {"vector": np.ones(3, "f"), "pair": (1, 1.0)},
                    "action": 1,
                    "reward": np.float32(1),
                    "next": {"done": True},
                }
            )
            raise


class WritesElsewhere(ReplayBuffer):
    def __setitem__(self, index: Any, rows: Any) -> None:
        super().__setitem__(index if np.ndim(index) else index + 1, rows)


class EndlessEpoch(ReplayBuffer):
    @property
    def ran_out(self) -> bool:
        return False


class ForgetsItsNumber(ReplayBuffer):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "samples": 0} if "samples" in state else state)


class ForgetsItsDigest(ReplayBuffer):
    def state_dict(self) -> Any:
        return {name: value for name, value in super().state_dict().items() if name != "digest"}


class DigestsRows(ReplayBuffer):
    def _on_host(self, batch: Any) -> Any:
        return {name: values for name, values in batch.items() if name != "index"}


class EvenShares(ReplayBufferEnsemble):
    def __init__(self, *buffers: Any, p: Any = None, **options: Any) -> None:
        super().__init__(*buffers, **options)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (AnotherArgumentBefore, "test_it_takes_the_arguments_of_the_core"),
        (OtherSeed, "test_batches_are_those_of_the_core"),
        (AnotherLastRow, "test_batches_are_those_of_the_core"),
        (EndlessEpoch, "test_a_loop_is_an_epoch"),
        (NoPriorities, "test_priorities_come_in_its_arrays"),
        (WritesElsewhere, "test_rows_are_read_and_written_over"),
        (OneMemory, "test_a_batch_never_changes"),
        (ForgetsItsNumber, "test_a_state_is_that_of_the_core"),
        (ForgetsItsDigest, "test_a_digest_runs_along"),
        (DigestsRows, "test_a_digest_runs_along"),
        (HalfWritten, "test_what_is_refused_changes_nothing"),
        (EvenShares, "test_ensembles_are_those_of_the_core"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_replay_buffer_that_is_wrong_is_found_out(kind: Any, test: str, tmp_path: Path) -> None:
    suite = ReplayAdapterConformance()
    setattr(suite, "ensemble_class" if issubclass(kind, ReplayBufferEnsemble) else "buffer_class", kind)
    needs = {"tmp_path": tmp_path} if test == "test_a_state_is_that_of_the_core" else {}
    with pytest.raises((AssertionError, ValueError)):
        getattr(suite, test)(**needs)


class OtherReturns(RolloutStorage):
    def compute_returns(self, last_values: Any, gamma: float, lam: float, *arguments: Any, **options: Any) -> None:
        super().compute_returns(last_values, gamma, 1.0, *arguments, **options)


class SameOrderAgain(RolloutStorage):
    def clear(self) -> None:
        super().clear()
        self.epoch = 0


class NoMasks(RolloutStorage):
    def recurrent_mini_batch_generator(self, *arguments: Any, **options: Any) -> Any:
        for batch in super().recurrent_mini_batch_generator(*arguments, **options):
            yield replace(batch, masks=np.ones_like(batch.masks))


class RoomForMore(RolloutStorage):
    def add_transitions(self, transition: Any) -> None:
        if self.step == self.num_transitions_per_env:
            self.clear()
        super().add_transitions(transition)


class TakesAll(RolloutStorage):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, validate=False)


class ForgetsTruncations(RolloutStorage):
    def add_transitions(self, transition: Any) -> None:
        super().add_transitions({**transition, "dones": np.minimum(transition["dones"], 1)})


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (ForgetsTruncations, "test_truncated_episodes_need_the_values_of_their_ends"),
        (OtherReturns, "test_rows_and_returns_are_those_of_the_core"),
        (SameOrderAgain, "test_mini_batches_are_those_of_the_core"),
        (NoMasks, "test_recurrent_mini_batches_are_those_of_the_core"),
        (RoomForMore, "test_what_comes_out_of_turn_is_refused"),
        (TakesAll, "test_rows_that_do_not_fit_are_refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_rollout_storage_that_is_wrong_is_found_out(kind: Any, test: str) -> None:
    suite = RolloutAdapterConformance()
    suite.storage_class = kind
    with pytest.raises(AssertionError):
        getattr(suite, test)()


@pytest.mark.parametrize(
    ("suite", "found_out"),
    [
        (ReplayAdapterConformance, test_a_replay_buffer_that_is_wrong_is_found_out),
        (RolloutAdapterConformance, test_a_rollout_storage_that_is_wrong_is_found_out),
    ],
)
def test_every_demand_of_these_is_put_to_the_test(suite: Any, found_out: Any) -> None:
    (mark,) = found_out.pytestmark
    assert {name for name in dir(suite) if name.startswith("test_")} == {test for _, test in mark.args[1]}


# ---------------------------------------------------------------------- a framework of its own


class Tensor:
    """An array that NumPy knows nothing of."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)


def wrapped(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(map(wrapped, tree))
    return {name: wrapped(child) for name, child in tree.items()} if isinstance(tree, dict) else Tensor(tree)


def unwrapped(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(map(unwrapped, tree))
    if isinstance(tree, dict):
        return {name: unwrapped(child) for name, child in tree.items()}
    return tree.values if isinstance(tree, Tensor) else tree


class ToyLoader(PrefetchBatchifier):
    """Batches of these, otherwise as the core's."""

    def next_batch(self) -> Any:
        return wrapped(super().next_batch())


class ToyBuffer(ReplayBuffer):
    def _accept(self, rows: Any) -> Any:
        return unwrapped(rows)

    def _deliver(self, batch: Any) -> Any:
        return wrapped(batch)

    def update_priority(self, index: Any, priority: Any = None) -> None:
        super().update_priority(unwrapped(index), unwrapped(priority))

    def extend(self, items: Any) -> Any:
        return Tensor(super().extend(items))


class ToyEnsemble(ReplayBufferEnsemble):
    def _accept(self, rows: Any) -> Any:
        return unwrapped(rows)

    def _deliver(self, batch: Any) -> Any:
        return wrapped(batch)

    def update_priority(self, index: Any, priority: Any = None, buffer_ids: Any = None) -> None:
        super().update_priority(unwrapped(index), unwrapped(priority), unwrapped(buffer_ids))


class ToyRollouts(RolloutStorage):
    def __getitem__(self, name: str) -> Any:
        return Tensor(super().__getitem__(name))

    def add_transitions(self, transition: Any) -> None:
        super().add_transitions(unwrapped(transition))

    def compute_returns(self, *arguments: Any, **options: Any) -> None:
        super().compute_returns(*unwrapped(arguments), **unwrapped(options))


class InToy:
    def to_numpy(self, values: Any) -> Any:
        assert isinstance(values, Tensor), f"expected a Tensor, found {type(values).__name__}"
        return values.values

    def from_numpy(self, values: Any) -> Tensor:
        return Tensor(values)


class TestToy(InToy, AdapterConformance):
    loader_class = ToyLoader


class TestToyReplay(InToy, ReplayAdapterConformance):
    buffer_class = ToyBuffer
    ensemble_class = ToyEnsemble


class TestToyRollouts(InToy, RolloutAdapterConformance):
    storage_class = ToyRollouts

    def to_numpy(self, values: Any) -> Any:
        return values.values if isinstance(values, Tensor) else values  # mini-batches are the core's
