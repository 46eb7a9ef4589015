"""One study in PyTorch and in JAX: recurrent networks with dropout, so that all that can be forgotten counts."""

import sys
from typing import Any

from mouse_core import DatasetStore
from mouse_core.testing import example_store
from mouse_study import Context, Study, Training

WIDTH = 32
BATCHES = {
    "sequence_length": 16,
    "batch_size": 8,
    "fields": ("obs_continuous", "reward"),
    "dtypes": {"obs_continuous": "float32", "reward": "float32"},
}


def made_store() -> DatasetStore:
    return example_store(2000)


def train_torch(context: Context) -> Training:
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.dropout = nn.LazyLinear(WIDTH), nn.Dropout(0.1)
            self.memory, self.value = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            remembered, _ = self.memory(self.dropout(self.encode(rows).relu()))
            return self.value(remembered)[..., 0]

    network = Network()  # of torch's own generator, which the study has seeded
    network(context.loader(num_workers=0).next_batch()["obs_continuous"])  # which says how wide rows are
    adam = torch.optim.Adam(network.parameters(), context.options["rate"])

    def step(batch: Any) -> torch.Tensor:
        loss = (network(batch["obs_continuous"]) - batch["reward"]).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        return loss

    return Training(step, state=(network, adam), evaluate=lambda: network.value.bias)


def train_jax(context: Context) -> Training:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, inputs: int, rngs: nnx.Rngs) -> None:
            self.encode, self.dropout = nnx.Linear(inputs, WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
            self.memory, self.value = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)), nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, rows: jax.Array) -> jax.Array:
            return self.value(self.memory(self.dropout(nnx.relu(self.encode(rows)))))[..., 0]

    inputs = context.loader(num_workers=0).next_batch()["obs_continuous"].shape[-1]
    network = Network(inputs, nnx.Rngs(context.seed))
    adam = nnx.Optimizer(network, optax.adam(context.options["rate"]), wrt=nnx.Param)

    @nnx.jit
    def step(network: Network, adam: nnx.Optimizer[Any], batch: dict[str, jax.Array]) -> jax.Array:
        def loss_of(network: Network) -> jax.Array:
            return jnp.square(network(batch["obs_continuous"]) - batch["reward"]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(network)
        adam.update(network, gradients)
        return loss

    return Training(
        lambda batch: step(network, adam, batch), state=(network, adam), evaluate=lambda: network.value.bias[...]
    )


def study() -> Study:
    return Study(
        "networks",
        {"torch": train_torch, "jax": train_jax},
        steps=80,
        seeds=[0, 1],
        variants={"small": {"rate": 1e-3}},
        store=made_store,
        batches=BATCHES,
        evaluate_every=30,
        checkpoint_every=10,
    )


if __name__ == "__main__":
    study().run(sys.argv[1], jobs=2)
