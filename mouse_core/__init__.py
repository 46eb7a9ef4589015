"""One data layer for reinforcement learning on recorded experience; pure NumPy, on Arrow."""

__distribution__ = "mouse-data"

from mouse_core.augment import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    RandomCrop,
    RandomShift,
    TokenAugmenter,
)
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
    "MissingFieldError",
    "MouseError",
    "PrefetchBatchifier",
    "RandomCrop",
    "RandomShift",
    "RolloutError",
    "RolloutFullError",
    "SchemaError",
    "Snapshot",
    "Spec",
    "StateError",
    "StorageError",
    "TokenAugmenter",
    "WorkerError",
]
