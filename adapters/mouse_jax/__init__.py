"""The JAX adapter, which delivers the batches of ``mouse_core`` as dicts of ``jax.Array``."""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("mouse_jax needs JAX: pip install 'mouse-data[jax]'") from error

from mouse_jax import device, groups, returns, rollout_storage
from mouse_jax.augment import TokenAugmenter
from mouse_jax.dtypes import REPLACED_DTYPES, replaced_dtypes
from mouse_jax.means import global_mean
from mouse_jax.prefetch import PrefetchBatchifier, to_grain
from mouse_jax.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferEnsemble, RowMap
from mouse_jax.specs import shape_dtypes

__all__ = [
    "REPLACED_DTYPES",
    "PrefetchBatchifier",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RowMap",
    "TokenAugmenter",
    "device",
    "global_mean",
    "groups",
    "replaced_dtypes",
    "returns",
    "rollout_storage",
    "shape_dtypes",
    "to_grain",
]
