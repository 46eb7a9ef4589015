"""What is done to batches on their way out of a replay buffer, and to rows on their way in.

A transform is any callable from a batch to a batch. Those here are pure functions of nested dicts of arrays, of NumPy
or torch on any device, and share with the batch that they are given what they do not change. ``protocols.Transform``
says what else a transform may have.
"""

from mouse_core.replay.transforms.compose import Compose, OnWrite, delivered_alignment
from mouse_core.replay.transforms.crop import RandomTimeCrop
from mouse_core.replay.transforms.fields import Cast, Exclude, Rename, Select
from mouse_core.replay.transforms.hindsight import HindsightRelabel
from mouse_core.replay.transforms.images import Resize, ToFloatImage
from mouse_core.replay.transforms.next_view import NextView
from mouse_core.replay.transforms.pad import Pad
from mouse_core.replay.transforms.returns import NStep, ReturnsToGo

__all__ = [
    "Cast",
    "Compose",
    "Exclude",
    "HindsightRelabel",
    "NStep",
    "NextView",
    "OnWrite",
    "Pad",
    "RandomTimeCrop",
    "Rename",
    "Resize",
    "ReturnsToGo",
    "Select",
    "ToFloatImage",
    "delivered_alignment",
]
