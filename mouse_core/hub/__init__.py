"""Datasets on the Hugging Face Hub from stores: one schema and one commit for each push."""

from mouse_core.hub._push import PushResult, push_named_stores_to_hub, push_stores_to_hub, push_to_hub
from mouse_core.hub._reading import NamedStores, from_hub

__all__ = [
    "NamedStores",
    "PushResult",
    "from_hub",
    "push_named_stores_to_hub",
    "push_stores_to_hub",
    "push_to_hub",
]
