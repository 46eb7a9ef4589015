"""Groups of language-model rollouts that are scored relative to each other, and batches of such rollouts."""

from mouse_core.groups.buffer import BatchMaker, RolloutBuffer
from mouse_core.groups.examples import concatenate, examples_digest, make_examples, pack, pad
from mouse_core.groups.grpo import GrpoBatchMaker
from mouse_core.groups.records import GroupKey, RLExample, RolloutColumn, RolloutRecord, Turn
from mouse_core.groups.scoring import (
    Advantage,
    DrGrpo,
    Grpo,
    HeldRollouts,
    Retention,
    Rloo,
    TopK,
)
from mouse_core.groups.stored import StoredGroup, StoredRollouts, open_rollouts
from mouse_core.groups.stream import BatchShare, RolloutStream, plan_micro_batches

__all__ = [
    "Advantage",
    "BatchMaker",
    "BatchShare",
    "DrGrpo",
    "GroupKey",
    "Grpo",
    "GrpoBatchMaker",
    "HeldRollouts",
    "RLExample",
    "Retention",
    "Rloo",
    "RolloutBuffer",
    "RolloutColumn",
    "RolloutRecord",
    "RolloutStream",
    "StoredGroup",
    "StoredRollouts",
    "TopK",
    "Turn",
    "concatenate",
    "examples_digest",
    "make_examples",
    "open_rollouts",
    "pack",
    "pad",
    "plan_micro_batches",
]
