"""One data layer for reinforcement learning on recorded experience; pure NumPy, on Arrow."""

__distribution__ = "mouse-data"

from importlib import import_module
from typing import TYPE_CHECKING

from mouse_core.batches.source import BatchSource
from mouse_core.errors import (
    ClosedError,
    ConfigError,
    DataError,
    ForkError,
    MissingFieldError,
    MouseError,
    RolloutError,
    RolloutFullError,
    SchemaError,
    StateError,
    StorageError,
    WorkerError,
)
from mouse_core.prefetch.batchifier import PrefetchBatchifier
from mouse_core.spec import Field, FieldSpec, Spec
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.augment import (
        AugmentMaskProbConfig,
        AugmentScalarSpec,
        AugmentTokensConfig,
        ImageFields,
        MaskFields,
        PermuteFields,
        RandomCrop,
        RandomShift,
        ScaleFields,
        TokenAugmenter,
    )
    from mouse_core.batches._stages import Map
    from mouse_core.sampling.offsets import Seconds

__all__ = [
    "AugmentMaskProbConfig",
    "AugmentScalarSpec",
    "AugmentTokensConfig",
    "BatchSource",
    "ClosedError",
    "ConfigError",
    "DataError",
    "DatasetStore",
    "Field",
    "FieldSpec",
    "ForkError",
    "ImageFields",
    "Map",
    "MaskFields",
    "MissingFieldError",
    "MouseError",
    "PermuteFields",
    "PrefetchBatchifier",
    "RandomCrop",
    "RandomShift",
    "RolloutError",
    "RolloutFullError",
    "ScaleFields",
    "SchemaError",
    "Seconds",
    "Snapshot",
    "Spec",
    "StateError",
    "StorageError",
    "TokenAugmenter",
    "WorkerError",
]

if not TYPE_CHECKING:  # where any name would be one

    def __getattr__(name: str) -> object:
        """Import a lazily loaded subpackage or class at its first access; most programs need only a few subpackages."""
        if name in ("augment", "images", "metadata"):
            return import_module(f"mouse_core.{name}")
        if name in __all__:
            room = {"Seconds": "sampling", "Map": "batches"}.get(name, "augment")
            return getattr(import_module(f"mouse_core.{room}"), name)
        raise AttributeError(f"module 'mouse_core' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
