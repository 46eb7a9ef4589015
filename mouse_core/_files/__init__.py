"""mouse_core._files: to be said."""
