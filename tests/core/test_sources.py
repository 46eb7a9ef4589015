"""Sources of one's own: what a loader does with them, and that the conformance suite finds those that are wrong."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, FieldSpec, PrefetchBatchifier, Spec, StateError
from mouse_core.testing import SourceConformance, example_store
from tests.core.faults import wrong
from tests.core.oracle import assert_same

SPEC = Spec({name: FieldSpec(name, np.dtype(np.int64), shape) for name, shape in (("a", ()), ("b", (2,)))}, "arrived")


class Numbers:
    """Batch ``i`` is all ``i``."""

    spec = SPEC
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {"a": np.full((4, 2), index), "b": np.full((4, 2, 2), index)}


class TestNumbers(SourceConformance):
    def make(self) -> Any:
        return Numbers()


class TestBatchSource(SourceConformance):
    def make(self) -> Any:
        return BatchSource(example_store(), 8, 4, views=2, seed=3)


class Counting(Numbers):
    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return super().__getitem__(self.asked)


# A cache, and memory, that all sources have in common.
_memory = np.zeros((4, 2), np.int64)
_cached = lru_cache(lambda index: Numbers()[index])


def _shared(index: int) -> Any:
    _memory[...] = index
    return _memory


def _finite(self: Numbers, right: Any, index: int) -> Any:
    if index >= len(self):
        raise IndexError(index)
    return right(index)


class OthersWindows(BatchSource):
    """Packed windows, of which each row is said to be of the next one."""

    def __init__(self) -> None:
        super().__init__(example_store(), 8, 4, lengths=range(1, 9), packed=True)

    def __getitem__(self, index: int) -> Any:
        batch: Any = super().__getitem__(index)
        return {**batch, "sequence_id": batch["sequence_id"] + 1}


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (OthersWindows, "test_packed_windows_lie_where_it_says"),
        (Counting, "test_a_batch_is_a_function_of_its_number"),
        (wrong(Numbers, __getitem__=lambda self, right, index: dict(_cached(index))), "test_batches_are_the_callers"),
        (
            wrong(Numbers, __getitem__=lambda self, right, index: {**right(index), "a": _shared(index)}),
            "test_batches_are_the_callers",
        ),
        (wrong(Numbers, __getitem__=_finite), "test_a_batch_is_a_function_of_its_number"),
        (
            wrong(Numbers, __getitem__=lambda self, right, index: {k: v.astype("i4") for k, v in right(index).items()}),
            "test_the_spec_says_what_comes",
        ),
    ],
)
def test_the_suite_finds_what_is_wrong(kind: Any, test: str) -> None:
    class Suite(SourceConformance):
        def make(self) -> Any:
            return kind()

    with pytest.raises((AssertionError, IndexError)):
        getattr(Suite(), test)()


@pytest.mark.parametrize("change", [{"fingerprint": "x"}, {"next_index": -1}, {"next_index": "1"}, {"seed": 0}])
def test_states_of_others_change_nothing(change: dict[str, Any]) -> None:
    with PrefetchBatchifier(Numbers()) as loader:
        loader.next_batch()
        state = loader.state_dict()
        assert state == {"next_index": 1, "fingerprint": "numbers"}
        with pytest.raises(StateError):
            loader.load_state_dict(state | change)
        assert loader.state_dict() == state
        with pytest.raises(ConfigError, match="refresh"):
            loader.refresh()
        assert int(loader.next_batch()["a"][0, 0]) == 1


def test_a_batch_source_is_taken_as_it_is() -> None:
    """With its seed and its shard, and a state that is that of a loader over its snapshot."""
    store, options = example_store(), {"seed": 5, "shard": (1, 2)}
    source = BatchSource(store, 8, 4, **options)
    with PrefetchBatchifier(source) as loader, PrefetchBatchifier(store.snapshot(), 8, 4, **options) as other:
        assert loader.source is source
        for _ in range(4):
            assert_same(loader.next_batch(), other.next_batch())
        assert loader.state_dict() == other.state_dict()


class Odd:
    """A source with one part that is not what it should be."""

    def __init__(self, **parts: Any) -> None:
        whole = {"spec": SPEC, "fingerprint": "odd", "length": 3}
        self.spec, self.fingerprint, self.length = (whole | parts).values()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("parts", "pattern"),
    [
        ({"spec": {"reward": "float32"}}, "source: expected a mouse_core.Spec as spec, found {'reward'"),
        ({"fingerprint": 3}, "source: expected a text as fingerprint, found 3"),
        ({"length": 0}, "source: expected batches, found a length of 0"),
    ],
)
def test_what_is_no_source(parts: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        PrefetchBatchifier(Odd(**parts))


@pytest.mark.parametrize(
    "options", [{"sequence_length": 8}, {"batch_size": 4}, {"sampling": "batch"}, {"seed": 1}, {"views": 2}], ids=str
)
def test_what_only_stores_are_asked_for(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}: expected the default, .* cannot be used with a source, .*found"):
        PrefetchBatchifier(Odd(), **options)
