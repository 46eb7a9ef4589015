"""Where two implementations part: each planted difference is found in its stage and tensor."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from mouse_core import ConfigError
from mouse_study.divergence import Comparison, transfer, where_they_part
from tests.study.implementations import FlaxModel, TorchModel, flax_loss, squares, tokens, torch_loss

# Both frameworks compile every layer in float64.
pytestmark = pytest.mark.slow


def compare(theirs: Any, ours: Any = None, *, same: bool = True, **options: Any) -> Comparison:
    torch.manual_seed(3)
    ours = TorchModel() if ours is None else ours
    if same:
        transfer(ours, theirs)
    return where_they_part(
        ours, theirs, options.pop("batch", tokens()), **{"torch_loss": torch_loss, "flax_loss": flax_loss} | options
    )


def stepping(ours: Any, theirs: Any) -> Comparison:
    return compare(FlaxModel(), torch_optimizer=ours, flax_optimizer=theirs)


@pytest.mark.long
def test_two_that_are_the_same_agree_in_everything() -> None:
    found = stepping(lambda p: torch.optim.AdamW(p, 1e-3), optax.adamw(1e-3, weight_decay=1e-2))
    assert found.first is None
    assert str(found).startswith("no tensor differs by more than rounding")
    assert {one.stage for one in found.compared} == {
        *("initial weights", "forward", "layer alone", "loss", "gradients", "update", "later updates")
    }
    # Each layer's input and output, and 35 tensors that have gradients.
    assert len(found.of("forward")) == 2 * (2 + 2 * 5)
    assert len(found.of("gradients")) == len(found.of("update")) == 1 + 2 * (2 * 2 + 8 + 2 * 2) + 2


@pytest.mark.long
def test_weights_drawn_alike_are_no_difference() -> None:
    theirs = FlaxModel()
    torch.manual_seed(4)
    transfer(TorchModel(), theirs)
    assert compare(theirs, same=False).first is None


def with_padding() -> Comparison:
    ours = TorchModel()
    ours.embed = torch.nn.Embedding(11, 16, padding_idx=2)
    return compare(FlaxModel(), ours)


def with_sum() -> Comparison:
    def summed(model: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).sum()

    return compare(FlaxModel(), flax_loss=summed)


def with_bfloat16() -> Comparison:
    theirs = FlaxModel()
    theirs.blocks[1].up.dtype = jnp.bfloat16
    return compare(theirs)


NORMS = [f"blocks.{block}.norm{norm}" for block in (0, 1) for norm in (1, 2)]
# What is compared, and the stage and the tensor that part first.
PARTED: dict[str, tuple[Callable[[], Comparison], str, str]] = {
    "gelu": (lambda: compare(FlaxModel(gelu=nnx.gelu)), "forward", "input of blocks.0.down"),
    "weight decay": (lambda: stepping(lambda p: torch.optim.AdamW(p, 1e-3), optax.adamw(1e-3)), "update", ""),
    "padding of an embedding": (with_padding, "gradients", "embed.embedding"),
    "a mean and a sum": (with_sum, "loss", ""),
    "another activation": (
        lambda: images(FlaxImages(relu=lambda x: nnx.leaky_relu(x, 0.2))),
        *("forward", "input of head"),
    ),
    "initialization": (lambda: compare(FlaxModel(), same=False), "initial weights", "embed.embedding"),
    "epsilon of layer norm": (lambda: compare(FlaxModel(epsilon=1e-6)), "forward", "output of blocks.0.norm1"),
    "float32 inside the attention": (
        lambda: compare(FlaxModel(attention=nnx.dot_product_attention)),
        *("forward", "output of blocks.0.attention"),
    ),
    "a layer in bfloat16": (with_bfloat16, "forward", "output of blocks.1.up"),
    "running variance of batch norm": (lambda: images(FlaxImages()), "statistics", "norm.var"),
    "momentum of batch norm": (lambda: images(FlaxImages(momentum=0.99)), "statistics", "norm.mean"),
    "mode of batch norm": (lambda: images(FlaxImages(running=True)), "forward", "output of norm"),
    "padding of a convolution": (lambda: images(FlaxImages(padding="VALID")), "forward", "input of head"),
    "order of flattened channels": (lambda: flattened(channels_first=False), "forward", "input of head"),
}
IN_SLOW = list(PARTED)[:3]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in IN_SLOW else pytest.mark.long) for one in PARTED]
)
def test_the_tensor_that_parts_first(name: str) -> None:
    make, stage, tensor = PARTED[name]
    found = make()
    assert found.first is not None
    assert (found.first.stage, found.first.tensor) == (stage, tensor or found.first.tensor)
    if name == "gelu":
        assert 1e-6 < found.first.relative < 1e-3
    elif name == "float32 inside the attention":
        assert 1e-11 < found.first.relative < 1e-6
    elif name == "initialization":
        assert not any(one.beyond for one in found.of("gradients"))  # made with the same weights
    elif name == "epsilon of layer norm":
        assert [one.tensor for one in found.of("layer alone") if one.beyond] == NORMS
    elif name == "padding of an embedding":
        assert len(found.differences) == 1
    elif name == "padding of a convolution":
        assert found.unaligned[0].startswith("output of conv: [4, 6, 5, 5] in PyTorch")
        assert "not compared, because shapes differ: output of conv" in str(found)


class TorchImages(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.permute(0, 3, 1, 2)))).mean((2, 3)))


class FlaxImages(nnx.Module):
    def __init__(
        self, *, momentum: float = 0.9, relu: Any = nnx.relu, padding: str = "SAME", running: bool = False
    ) -> None:
        rngs = nnx.Rngs(0)
        self.relu = relu
        self.conv = nnx.Conv(3, 6, (3, 3), padding=padding, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=momentum, use_fast_variance=False, use_running_average=running, rngs=rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.relu(self.norm(self.conv(x))).mean((1, 2)))


def images(theirs: Any) -> Comparison:
    batch = {"x": np.random.default_rng(0).normal(size=(4, 5, 5, 3))}
    return compare(theirs, TorchImages(), batch=batch, torch_loss=squares, flax_loss=squares)


class TorchFlattened(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x.permute(0, 3, 1, 2)).flatten(1))


class FlaxFlattened(nnx.Module):
    """Its layers are not made in the order of their names."""

    def __init__(self, *, channels_first: bool) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)
        self.channels_first = channels_first

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.stem(x)), (2, 2), (2, 2))
        x = x.transpose(0, 3, 1, 2) if self.channels_first else x
        return self.head(x.reshape(len(x), -1))


def flattened(*, channels_first: bool) -> Comparison:
    options = {"batch": {"x": np.random.default_rng(0).normal(size=(4, 6, 6, 3))}}
    theirs = FlaxFlattened(channels_first=channels_first)
    return compare(theirs, TorchFlattened(), **options, torch_loss=squares, flax_loss=squares)


@pytest.mark.long
def test_channels_flattened_in_one_order_agree() -> None:
    assert flattened(channels_first=True).first is None


class TorchRecurrent(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells = getattr(torch.nn, kind)(3, 5, 2, batch_first=True)
        self.head = torch.nn.Linear(5, 1)
        with torch.no_grad():
            for name, values in self.cells.named_parameters():
                if name.startswith("bias_hh"):
                    values[10:15] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


class FlaxRecurrent(nnx.Module):
    def __init__(self, kind: str) -> None:
        rngs = nnx.Rngs(0)
        make = {"GRU": nnx.GRUCell, "LSTM": nnx.OptimizedLSTMCell}[kind]
        self.cells = nnx.List([nnx.RNN(make(3, 5, rngs=rngs)), nnx.RNN(make(5, 5, rngs=rngs))])
        self.head = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for cell in self.cells:
            x = cell(x)
        return self.head(x)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_recurrent_layers_agree_until_their_biases_learn(kind: str) -> None:
    batch = {"x": np.random.default_rng(0).normal(size=(4, 6, 3))}
    optimizers = {"torch_optimizer": lambda p: torch.optim.SGD(p, 0.1), "flax_optimizer": optax.sgd(0.1)}
    options = {"batch": batch, "torch_loss": squares, "flax_loss": squares}
    found = compare(FlaxRecurrent(kind), TorchRecurrent(kind), **options, **optimizers)
    assert found.first is not None
    assert found.first.stage == "update"
    assert {one.tensor for one in found.differences} == {
        f"cells.{number}.dense_{'i' if kind == 'GRU' else 'h'}.bias" for number in (0, 1)
    }


@pytest.mark.parametrize("kind", ["GRU", pytest.param("LSTM", marks=pytest.mark.long)])
def test_recurrent_layers_whose_second_bias_stays_0_agree_in_everything(kind: str) -> None:
    ours = TorchRecurrent(kind)
    for name, values in ours.cells.named_parameters():
        if name.startswith("bias_hh"):
            values.requires_grad_(False).zero_()
    batch = {"x": np.random.default_rng(0).normal(size=(4, 6, 3))}
    optimizers = {
        "torch_optimizer": lambda p: torch.optim.AdamW(p, 1e-3),
        "flax_optimizer": optax.adamw(1e-3, weight_decay=1e-2),
    }
    found = compare(FlaxRecurrent(kind), ours, batch=batch, torch_loss=squares, flax_loss=squares, **optimizers)
    assert found.first is None


def test_models_and_settings_stay_as_they_were() -> None:
    ours, theirs = TorchModel(), FlaxModel()
    transfer(ours, theirs)
    before = {name: values.clone() for name, values in ours.state_dict().items()}
    state = jax.tree.map(np.asarray, nnx.state(theirs))
    call = nnx.Linear.__call__
    compare(theirs, ours, same=False)
    assert all(torch.equal(values, before[name]) for name, values in ours.state_dict().items())
    assert all(values.dtype == torch.float32 for values in ours.parameters())
    jax.tree.map(np.testing.assert_array_equal, state, jax.tree.map(np.asarray, nnx.state(theirs)))
    assert nnx.Linear.__call__ == call
    assert "__call__" not in vars(nnx.RNN(nnx.GRUCell(2, 2, rngs=nnx.Rngs(0))))
    assert jnp.zeros(1).dtype == jnp.float32


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an optimizer of each framework"):
        compare(FlaxModel(), torch_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    with pytest.raises(ConfigError, match="flax_loss: expected a scalar, found"):
        compare(FlaxModel(), flax_loss=lambda m, b: m(b["x"]))
    with pytest.raises(ConfigError, match="updates: expected 1 or more, found 0"):
        compare(FlaxModel(), updates=0)


def test_layers_inside_a_compiled_loss_are_not_seen() -> None:
    ours, theirs = TorchSmall(), FlaxSmall()
    options = {"batch": ROWS, "torch_loss": squares}
    assert str(compare(theirs, ours, flax_loss=nnx.jit(squares), **options)).startswith("no layer was observed")
    found = compare(theirs, ours, flax_loss=lambda m, b: 0.5 * squares(m, b), **options)
    assert found.first is not None
    assert found.first.stage == "loss"


def adam(rate: float = 1e-3, **options: Any) -> Any:
    return lambda parameters: torch.optim.Adam(parameters, rate, **options)


def sgd(**options: Any) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, 1e-2, **options)


def clipped_and_scheduled(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters, 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, 0.1 + 0.9 * n / 7))

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_value_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def matrices_decay(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in parameters if one.ndim > 1]},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, 1e-3)


ROWS = {"x": np.random.default_rng(0).normal(size=(8, 3))}
WARM_UP = optax.linear_schedule(1e-4, 1e-3, 7)
# Both optimizers, the number of updates, and the first stage and tensor that part; None if the optimizers agree.
OPTIMIZERS: dict[str, tuple[Any, Any, int, tuple[str, str] | None]] = {
    "clipping and a schedule": (
        *(clipped_and_scheduled, optax.chain(optax.clip(0.1), optax.adam(WARM_UP))),
        *(10, None),
    ),
    "decay of the first moment": (adam(), optax.adam(1e-3, b1=0.95), 10, ("later updates", "up.kernel, update 3")),
    "decay of matrices": (
        matrices_decay,
        optax.adamw(1e-3, weight_decay=1e-2, mask=lambda tree: jax.tree.map(lambda one: one.ndim > 1, tree)),
        *(10, None),
    ),
    "nesterov": (sgd(momentum=0.9, nesterov=True), optax.sgd(1e-2, 0.9, nesterov=True), 10, None),
    "no nesterov": (sgd(momentum=0.9, nesterov=True), optax.sgd(1e-2, 0.9), 10, ("update", "up.kernel")),
    "decay of biases": (
        *(matrices_decay, optax.adamw(1e-3, weight_decay=1e-2)),
        *(10, ("update", "up.bias")),
    ),
    "a schedule that has not begun": (adam(), optax.adam(lambda n: jax.numpy.where(n < 12, 1e-3, 1e-4)), 10, None),
    "a schedule": (
        *(adam(), optax.adam(lambda n: jax.numpy.where(n < 12, 1e-3, 1e-4))),
        *(15, ("later updates", "up.kernel, update 13")),
    ),
    "maximize": (adam(maximize=True), optax.adam(1e-3), 1, ("update", "up.kernel")),
}


class TorchSmall(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.down = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class FlaxSmall(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(3, 4, rngs=rngs)
        self.down = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.tanh(self.up(x)))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if number < 2 else pytest.mark.long) for number, one in enumerate(OPTIMIZERS)]
)
def test_where_two_optimizers_part(name: str) -> None:
    ours, theirs, updates, parted = OPTIMIZERS[name]
    options = {
        "batch": {"x": np.random.default_rng(0).normal(size=(8, 3))},
        "torch_loss": squares,
        "flax_loss": squares,
    }
    optimizers = {"torch_optimizer": ours, "flax_optimizer": theirs, "updates": updates}
    found = compare(FlaxSmall(), TorchSmall(), **options, **optimizers)
    assert (None if found.first is None else (found.first.stage, found.first.tensor)) == parted
    assert len(found.of("update")) == 4
    assert len(found.of("later updates")) == (0 if updates == 1 else 4 - sum(one.beyond for one in found.of("update")))


def test_a_frozen_tensor_parts_in_its_update() -> None:
    ours = TorchSmall()
    ours.up.weight.requires_grad_(False)
    options = {
        "batch": {"x": np.random.default_rng(0).normal(size=(8, 3))},
        "torch_loss": squares,
        "flax_loss": squares,
    }
    found = compare(FlaxSmall(), ours, **options, torch_optimizer=adam(), flax_optimizer=optax.adam(1e-3))
    assert {one.tensor for one in found.differences} == {"up.kernel"}
