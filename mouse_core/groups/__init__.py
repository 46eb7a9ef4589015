"""Groups of language-model rollouts that are scored against each other, and batches made of them."""

from mouse_core.groups._files.reading import StoredGroup, StoredRollouts, open_rollouts
from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.examples.batches import concatenate, examples_digest, make_examples, pack, pad
from mouse_core.groups.making.advantages import advantages
from mouse_core.groups.making.grpo import GrpoBatchMaker
from mouse_core.groups.making.protocol import BatchMaker, ResumableBatchMaker
from mouse_core.groups.types.columns import RolloutColumn
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import GroupKey, RolloutGroup, RolloutRecord, Turn

__all__ = [
    "BatchMaker",
    "GroupKey",
    "GrpoBatchMaker",
    "RLExample",
    "ResumableBatchMaker",
    "RolloutBuffer",
    "RolloutColumn",
    "RolloutGroup",
    "RolloutRecord",
    "StoredGroup",
    "StoredRollouts",
    "Turn",
    "advantages",
    "concatenate",
    "examples_digest",
    "make_examples",
    "open_rollouts",
    "pack",
    "pad",
]
