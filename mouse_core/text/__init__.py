"""Text data for training language models: tokenised texts, chats, preference pairs and KL penalties.

Texts are tokenised once, stored on disk, and delivered like other rows. Tokenizers come from the package ``tokenizers``
(``pip install 'mouse-data[text]'``), or are callables like the tokenizers of ``transformers``.
"""

from mouse_core.text.kl import AdaptiveKLController, ConstantKLController, kl_estimates, kl_penalized_rewards
from mouse_core.text.recipes import Encoder, Pairs, Prompts, Recipe, Texts, Tokens, as_pairs, mask_label
from mouse_core.text.tokenizing import Tokenized, tokenize

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "Encoder",
    "Pairs",
    "Prompts",
    "Recipe",
    "Texts",
    "Tokenized",
    "Tokens",
    "as_pairs",
    "kl_estimates",
    "kl_penalized_rewards",
    "mask_label",
    "tokenize",
]
