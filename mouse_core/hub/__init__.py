"""Publishing stores as a dataset on the Hugging Face Hub: one schema, one commit, nothing half done."""

from mouse_core.hub._push import (
    PushOptions,
    PushResult,
    push_named_stores_to_hub,
    push_stores_to_hub,
    push_to_hub,
    read_alignment,
)
from mouse_core.hub._reading import NamedStores, from_hub

__all__ = [
    "NamedStores",
    "PushOptions",
    "PushResult",
    "from_hub",
    "push_named_stores_to_hub",
    "push_stores_to_hub",
    "push_to_hub",
    "read_alignment",
]
