"""Two implementations of one small model, and what can be different in them."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import numpy as np
import optax
import torch

WIDTH, HEADS, TOKENS = 16, 2, 11


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class TorchModel(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(layers)])
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def exact_attention(query: Any, key: Any, value: Any, **_: Any) -> Any:
    scores = jax.numpy.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    return jax.numpy.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)


class FlaxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, epsilon: float, attention: Any, gelu: Callable[[Any], Any]) -> None:
        self.gelu = gelu
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=epsilon, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=attention, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=epsilon, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


def exact_gelu(x: Any) -> Any:
    return nnx.gelu(x, approximate=False)


class FlaxModel(nnx.Module):
    """As TorchModel, but for what is asked for."""

    def __init__(
        self,
        layers: int = 2,
        *,
        epsilon: float = 1e-5,
        attention: Any = exact_attention,
        gelu: Callable[[Any], Any] = exact_gelu,
    ) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        block = {"epsilon": epsilon, "attention": attention, "gelu": gelu}
        self.blocks = nnx.List([FlaxBlock(rngs, **block) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.integers(0, TOKENS, (4, 8)), "y": rng.integers(0, TOKENS, (4, 8))}


def torch_loss(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def flax_loss(model: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def squares(model: Any, batch: Any) -> Any:
    """A loss of any model, in either framework."""
    return (model(batch["x"]) ** 2).mean()
