"""Digests of what was delivered, which are the same in every framework and for every way to share the work."""

from mouse_core.digest.states import whole_state
from mouse_core.digest.stream import StreamDigest

__all__ = ["StreamDigest", "whole_state"]
