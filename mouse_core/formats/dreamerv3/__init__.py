"""Replays that DreamerV3 saved, read without it."""

from mouse_core.formats.dreamerv3.reading import read_dreamerv3

__all__ = ["read_dreamerv3"]
