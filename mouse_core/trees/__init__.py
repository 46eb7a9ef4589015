"""Rollouts that share observations as one graph, and the tree of the known continuations of an observation."""

from mouse_core.trees.forest import Forest
from mouse_core.trees.tree import Steps, Tree

__all__ = ["Forest", "Steps", "Tree"]
