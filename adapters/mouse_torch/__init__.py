"""The PyTorch adapter, which delivers the batches of ``mouse_core`` as ``TensorDict[B, S]``."""

try:
    import tensordict as _tensordict  # noqa: F401
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("mouse_torch needs PyTorch and tensordict: pip install 'mouse-data[torch]'") from error

from mouse_torch import groups
from mouse_torch.augment import TokenAugmenter
from mouse_torch.data_loader import DataLoader, WindowDataset
from mouse_torch.means import global_count, global_mean
from mouse_torch.prefetch import PrefetchBatchifier
from mouse_torch.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferEnsemble, RowMap
from mouse_torch.rollouts import RolloutStorage
from mouse_torch.specs import from_torchrl, to_torchrl
from mouse_torch.storage import TensorStorage
from mouse_torch.trees import as_nested

__all__ = [
    "DataLoader",
    "PrefetchBatchifier",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RolloutStorage",
    "RowMap",
    "TensorStorage",
    "TokenAugmenter",
    "WindowDataset",
    "as_nested",
    "from_torchrl",
    "global_count",
    "global_mean",
    "groups",
    "to_torchrl",
]
