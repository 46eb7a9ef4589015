"""RLlib: batches of samples as lines of JSON."""

from mouse_core.formats.rllib.reading import read_rllib

__all__ = ["read_rllib"]
