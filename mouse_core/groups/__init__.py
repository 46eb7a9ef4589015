"""Groups of language-model rollouts that are scored against each other, and batches made of them."""

from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.examples.batches import concatenate, examples_digest, make_examples, pack, pad
from mouse_core.groups.making.functions.advantages import advantages
from mouse_core.groups.making.functions.retention import (
    HeldRollouts,
    Lengths,
    MaxAge,
    Newest,
    Recency,
    Retention,
    Rewards,
    TopK,
)
from mouse_core.groups.making.functions.scoring import (
    Advantage,
    BatchAdvantage,
    DrGrpo,
    Grpo,
    ReinforcePlusPlus,
    RewardToGo,
    Rloo,
)
from mouse_core.groups.making.grpo import GrpoBatchMaker
from mouse_core.groups.making.protocol import BatchMaker, ResumableBatchMaker
from mouse_core.groups.sharing.client import RolloutClient
from mouse_core.groups.sharing.shared import SharedBuffer
from mouse_core.groups.stored.readiness import Awaited
from mouse_core.groups.stored.reading import StoredGroup, StoredRollouts, open_rollouts
from mouse_core.groups.streams.balance import plan_micro_batches
from mouse_core.groups.streams.share import BatchShare
from mouse_core.groups.streams.stream import RolloutStream
from mouse_core.groups.types.columns import RolloutColumn
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import GroupKey, RolloutGroup, RolloutRecord, Turn

__all__ = [
    "Advantage",
    "Awaited",
    "BatchAdvantage",
    "BatchMaker",
    "BatchShare",
    "DrGrpo",
    "GroupKey",
    "Grpo",
    "GrpoBatchMaker",
    "HeldRollouts",
    "Lengths",
    "MaxAge",
    "Newest",
    "RLExample",
    "Recency",
    "ReinforcePlusPlus",
    "ResumableBatchMaker",
    "Retention",
    "RewardToGo",
    "Rewards",
    "Rloo",
    "RolloutBuffer",
    "RolloutClient",
    "RolloutColumn",
    "RolloutGroup",
    "RolloutRecord",
    "RolloutStream",
    "SharedBuffer",
    "StoredGroup",
    "StoredRollouts",
    "TopK",
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
