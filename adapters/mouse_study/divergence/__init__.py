"""Finds where two implementations diverge: copies weights between PyTorch and Flax NNX, and compares both models in
float64."""

from mouse_study.divergence.comparing import where_they_part
from mouse_study.divergence.models import Comparison, Difference, Layer
from mouse_study.divergence.weights import Twins, transfer, twins

__all__ = ["Comparison", "Difference", "Layer", "Twins", "transfer", "twins", "where_they_part"]
