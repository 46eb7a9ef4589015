"""Augmentation of training batches: ``draw`` draws the random numbers, and ``apply`` changes a batch of NumPy, PyTorch
or JAX arrays.
"""

from mouse_core.augment.augmenter import Augmenter, TokenAugmenter
from mouse_core.augment.config import (
    Affine,
    AffineFields,
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    ImageFields,
    MaskFields,
    PermuteFields,
    ScaleFields,
)
from mouse_core.augment.draws import Draws, cut, draw
from mouse_core.augment.images import Crop, ImageDraws, ImageShapes, RandomCrop, RandomShift
from mouse_core.augment.stream import StreamAugment
from mouse_core.augment.transform import apply

__all__ = [
    "Affine",
    "AffineFields",
    "AugmentMaskProbConfig",
    "AugmentScalarSpec",
    "AugmentTokensConfig",
    "Augmenter",
    "Crop",
    "Draws",
    "ImageDraws",
    "ImageFields",
    "ImageShapes",
    "MaskFields",
    "PermuteFields",
    "RandomCrop",
    "RandomShift",
    "ScaleFields",
    "StreamAugment",
    "TokenAugmenter",
    "apply",
    "cut",
    "draw",
]
