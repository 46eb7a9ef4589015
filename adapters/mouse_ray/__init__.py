"""Ray adapter: buffers and writers of ``mouse_core`` as actors."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("mouse_ray needs Ray: pip install 'mouse-data[ray]'") from error

from mouse_ray.actors import ActorBatches, ReplayBuffer, RolloutBuffer, StoreWriter, store_client

__all__ = ["ActorBatches", "ReplayBuffer", "RolloutBuffer", "StoreWriter", "store_client"]
