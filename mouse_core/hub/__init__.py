"""Pushes stores to datasets on the Hugging Face Hub; each push writes a single schema in a single commit."""

from mouse_core.hub._push import PushResult, from_hub, push_named_stores_to_hub, push_stores_to_hub, push_to_hub

__all__ = ["PushResult", "from_hub", "push_named_stores_to_hub", "push_stores_to_hub", "push_to_hub"]
