"""Tools for tests: a digest that says whether two streams of batches are the same, and what every adapter must do."""

from mouse_core.testing.adapters import AdapterConformance
from mouse_core.testing.digest import as_arrays, as_numpy, stream_digest
from mouse_core.testing.examples import example_columns, example_store

__all__ = ["AdapterConformance", "as_arrays", "as_numpy", "example_columns", "example_store", "stream_digest"]
