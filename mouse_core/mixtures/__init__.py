"""Mixtures, which combine several stores or sources into one; each member has a share of the windows."""

from mouse_core.mixtures.mixture import MixedWindows, Mixture
from mouse_core.mixtures.source import MixtureSource
from mouse_core.sampling.shares import Schedule, Shares

__all__ = ["MixedWindows", "Mixture", "MixtureSource", "Schedule", "Shares"]
