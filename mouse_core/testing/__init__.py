"""Tools for tests: a digest to compare streams, and conformance tests for extensions."""

from mouse_core.digest import as_arrays, as_numpy
from mouse_core.testing._comparing import stream_digest
from mouse_core.testing.adapters import AdapterConformance, ReplayAdapterConformance, RolloutAdapterConformance
from mouse_core.testing.examples import example_columns, example_store
from mouse_core.testing.formats import FormatConformance, SourceConformance
from mouse_core.testing.replay.devices import DeviceReplayConformance
from mouse_core.testing.replay.storages import StorageConformance
from mouse_core.testing.replay.transforms import TransformConformance
from mouse_core.testing.samplers import ReplaySamplerConformance, WindowSamplerConformance

__all__ = [
    "AdapterConformance",
    "DeviceReplayConformance",
    "FormatConformance",
    "ReplayAdapterConformance",
    "ReplaySamplerConformance",
    "RolloutAdapterConformance",
    "SourceConformance",
    "StorageConformance",
    "TransformConformance",
    "WindowSamplerConformance",
    "as_arrays",
    "as_numpy",
    "example_columns",
    "example_store",
    "stream_digest",
]
