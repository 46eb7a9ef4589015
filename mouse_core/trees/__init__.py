"""A graph of rollouts in which equal observations are one node, and the tree of the recorded rollouts that begin at an
observation.
"""

from mouse_core.trees.forest import Forest
from mouse_core.trees.tree import Steps, Tree

__all__ = ["Forest", "Steps", "Tree"]
