"""The loader of NumPy batches does what is asked of adapters; and adapters that do not are found out."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mouse_core import ClosedError, PrefetchBatchifier, WorkerError
from mouse_core.testing import AdapterConformance


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
    def next_batch(self) -> Any:
        if self._store is not None and len(self._store) != self.source.snapshot.num_rows:
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
        (AnotherByte, "test_a_batch_never_changes"),
        (AnotherDtype, "test_the_spec_says_what_comes"),
        (AnotherOrder, "test_the_spec_says_what_comes"),
        (FieldsOutOfNothing, "test_absent_fields_are_absent"),
        (NoQuestions, "test_bad_arguments_are_refused"),
        (NoShards, "test_shards_put_together_are_the_whole"),
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
