"""Replay buffers, and the parts that a buffer combines: storages, writers, samplers and transforms."""

from mouse_core.replay.buffer import BaseBuffer, Drawn, PrioritizedReplayBuffer, ReplayBuffer, query
from mouse_core.replay.device import Slices
from mouse_core.replay.ensemble import ReplayBufferEnsemble
from mouse_core.replay.protocols import Draw, FieldKey, Sampler, Storage, Transform, Write, Writer
from mouse_core.replay.samplers.priorities import LinearSchedule, PrioritizedSampler
from mouse_core.replay.samplers.rows import (
    ConsumingSampler,
    RandomSampler,
    ReverseSampler,
    SamplerWithoutReplacement,
    StalenessSampler,
)
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.replay.samplers.weighing import Priorities
from mouse_core.replay.source import BufferSource
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.replay.storages.list import ListStorage
from mouse_core.replay.storages.memmap import MemmapStorage
from mouse_core.replay.transforms.compose import Compose, OnWrite
from mouse_core.replay.transforms.fields import Apply, Cast, Compress, Concatenate, Exclude, Pad, Rename, Select
from mouse_core.replay.transforms.images import CenterCrop, GrayScale, Resize, ToFloatImage
from mouse_core.replay.transforms.slices import BurnIn, CatFrames, MarkSlices, RandomTimeCrop
from mouse_core.replay.transforms.transitions import HindsightRelabel, NextView, NStep, ReturnsToGo, Transitions
from mouse_core.replay.transforms.vec_norm import VecNorm
from mouse_core.replay.writers import ImmutableWriter, MaxValueWriter, RoundRobinWriter
from mouse_core.sampling.shares import Schedule

__all__ = [
    "Apply",
    "ArrayStorage",
    "BaseBuffer",
    "BufferSource",
    "BurnIn",
    "Cast",
    "CatFrames",
    "CenterCrop",
    "Compose",
    "Compress",
    "Concatenate",
    "ConsumingSampler",
    "Draw",
    "Drawn",
    "Exclude",
    "FieldKey",
    "GrayScale",
    "HindsightRelabel",
    "ImmutableWriter",
    "LinearSchedule",
    "ListStorage",
    "MarkSlices",
    "MaxValueWriter",
    "MemmapStorage",
    "NStep",
    "NextView",
    "OnWrite",
    "Pad",
    "Priorities",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "RandomTimeCrop",
    "Rename",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "Resize",
    "ReturnsToGo",
    "ReverseSampler",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "Schedule",
    "Select",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Slices",
    "StalenessSampler",
    "Storage",
    "ToFloatImage",
    "Transform",
    "Transitions",
    "VecNorm",
    "Write",
    "Writer",
    "query",
]
