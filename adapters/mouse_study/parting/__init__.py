"""Where two implementations part: weights carried between PyTorch and Flax NNX, and both compared in float64."""

from mouse_study.parting.comparing import where_they_part
from mouse_study.parting.models import Layer
from mouse_study.parting.report import Cause, Comparison, Difference
from mouse_study.parting.weights import Twins, transfer, twins

__all__ = ["Cause", "Comparison", "Difference", "Layer", "Twins", "transfer", "twins", "where_they_part"]
