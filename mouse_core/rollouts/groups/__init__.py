"""Groups of language-model rollouts that are scored against each other, and batches made of them."""

from mouse_core.rollouts.groups.advantages import advantages
from mouse_core.rollouts.groups.batches import pack, pad
from mouse_core.rollouts.groups.buffer import RolloutBuffer
from mouse_core.rollouts.groups.examples import make_examples
from mouse_core.rollouts.groups.grpo import GrpoBatchMaker
from mouse_core.rollouts.groups.protocol import BatchMaker, ResumableBatchMaker
from mouse_core.rollouts.groups.reading import StoredGroup, StoredRollouts, open_rollouts
from mouse_core.rollouts.groups.types import GroupKey, RLExample, RolloutGroup, RolloutRecord, Turn

__all__ = [
    "BatchMaker",
    "GroupKey",
    "GrpoBatchMaker",
    "RLExample",
    "ResumableBatchMaker",
    "RolloutBuffer",
    "RolloutGroup",
    "RolloutRecord",
    "StoredGroup",
    "StoredRollouts",
    "Turn",
    "advantages",
    "make_examples",
    "open_rollouts",
    "pack",
    "pad",
]
