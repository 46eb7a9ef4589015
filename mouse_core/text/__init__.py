"""What training language models needs before there are rollouts, and beside them."""

from mouse_core.text.kl import AdaptiveKLController, ConstantKLController, kl_estimates, kl_penalized_rewards

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "kl_estimates",
    "kl_penalized_rewards",
]
