"""Publishing stores as a dataset on the Hugging Face Hub: one schema, one commit, nothing half done."""

from mouse_core.hub._push import PushOptions, PushResult, push_stores_to_hub, push_to_hub, read_alignment

__all__ = ["PushOptions", "PushResult", "push_stores_to_hub", "push_to_hub", "read_alignment"]
