"""Groups of language-model rollouts that are scored against each other, and batches made of them."""

from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.examples.batches import concatenate, examples_digest, make_examples, pack, pad
from mouse_core.groups.making.advantages import advantages
from mouse_core.groups.making.grpo import GrpoBatchMaker
from mouse_core.groups.making.protocol import BatchMaker, ResumableBatchMaker
from mouse_core.groups.stored.readiness import Awaited
from mouse_core.groups.stored.reading import StoredGroup, StoredRollouts, open_rollouts
from mouse_core.groups.streams.balance import plan_micro_batches
from mouse_core.groups.streams.share import BatchShare
from mouse_core.groups.streams.stream import RolloutStream
from mouse_core.groups.types.columns import RolloutColumn
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import GroupKey, RolloutGroup, RolloutRecord, Turn

__all__ = [
    "Awaited",
    "BatchMaker",
    "BatchShare",
    "GroupKey",
    "GrpoBatchMaker",
    "RLExample",
    "ResumableBatchMaker",
    "RolloutBuffer",
    "RolloutColumn",
    "RolloutGroup",
    "RolloutRecord",
    "RolloutStream",
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
    "plan_micro_batches",
]
