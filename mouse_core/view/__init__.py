"""A browser viewer of recorded data, which shows every episode step by step, and the windows of batches."""

from mouse_core.view.viewer import Viewer, view

__all__ = ["Viewer", "view"]
