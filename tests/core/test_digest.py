"""The digest of a stream. Which values have equal digests is stated in ``test_running_digest``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, PrefetchBatchifier
from mouse_core.testing import as_arrays, as_numpy, example_columns, example_store, stream_digest


def test_loaders_sources_and_iterables() -> None:
    store = example_store()
    source = BatchSource(store, 8, 4)
    batches = [source[index] for index in range(100)]
    expected = stream_digest(batches, 100)
    assert stream_digest(source, 100) == expected
    assert stream_digest((batch for batch in batches), 100) == expected
    with PrefetchBatchifier(store, 8, 4) as loader:
        assert stream_digest(loader, 100) == expected
        assert loader.state_dict()["next_index"] == 100
    later = source.with_snapshot(store.snapshot(), epoch_start=7)
    assert stream_digest(later, 2) == stream_digest([later[7], later[8]], 2)


def test_too_few_batches_and_things_without_any() -> None:
    with pytest.raises(ConfigError, match="expected 3 batches, found 1"):
        stream_digest([{"x": np.zeros(1)}], 3)
    with pytest.raises(ConfigError, match="expected a loader or batches, found int"):
        stream_digest(5, 1)


def test_what_is_no_array_of_numbers_is_refused() -> None:
    for values in ("text", np.array(["text"]), np.array([None]), np.array([1j])):
        with pytest.raises(TypeError, match="expected an array of numbers"):
            as_numpy(values)


class Exported:
    """An array of a framework that speaks DLPack and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Tensor:
    """A tensor as torch's are on a device: NumPy gets it only from the host, and only without its gradient."""

    def __init__(self, values: np.ndarray, steps: tuple[str, ...] = ()) -> None:
        self.values, self.steps = values, steps

    def detach(self) -> Tensor:
        return Tensor(self.values, (*self.steps, "detach"))

    def cpu(self) -> Tensor:
        return Tensor(self.values, (*self.steps, "cpu"))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert self.steps == ("detach", "cpu")
        return self.values


def test_arrays_of_other_frameworks() -> None:
    values = np.arange(6.0).reshape(2, 3)
    for other in (Exported(values), Tensor(values), values.tolist()):
        np.testing.assert_array_equal(as_arrays({"x": other})["x"], values)


def test_example_steps_are_whole_and_agree() -> None:
    columns = example_columns(200)
    for name, values in example_columns(150, first=50).items():
        np.testing.assert_array_equal(values, columns[name][50:])
    step, done = columns["episode_step"], columns["done"]
    assert set(done.tolist()) == {0, 1, 2}
    begins = np.flatnonzero(step == 0)
    assert (columns["action"][begins] == 0).all()
    assert (columns["reward"][begins] == 0).all()
    ends = np.flatnonzero(done)
    assert set(ends.tolist()) <= set((begins - 1).tolist()) | {199}
    longer = begins[:-1][np.diff(begins) > 1]
    assert (done[begins[np.searchsorted(begins, longer) + 1] - 1] > 0).all()
