"""Where two implementations part: each difference is planted, found, and named."""

import re
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


def names(found: Comparison) -> set[str]:
    return {cause.name for cause in found.causes}


def stepping(ours: Any, theirs: Any) -> Comparison:
    return compare(FlaxModel(), torch_optimizer=ours, flax_optimizer=theirs)


@pytest.mark.long
def test_two_that_are_the_same_agree_in_everything() -> None:
    found = stepping(lambda p: torch.optim.AdamW(p, 1e-3), optax.adamw(1e-3, weight_decay=1e-2))
    assert found.first is None
    assert not found.causes
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
GELUS = [f"between output of blocks.{block}.up and input of blocks.{block}.down" for block in (0, 1)]
# What is compared, the stage and the tensor that part first, and each cause: its name, where it is, and what is said.
PARTED: dict[str, tuple[Callable[[], Comparison], str, str, list[str]]] = {
    "gelu": (
        lambda: compare(FlaxModel(gelu=nnx.gelu)),
        *("forward", "input of blocks.0.down", [f"activation @ {where}: .*erf.*, .*tanh.*" for where in GELUS]),
    ),
    "weight decay": (
        lambda: stepping(lambda p: torch.optim.AdamW(p, 1e-3), optax.adamw(1e-3)),
        *("update", "", ["weight decay @ .*"]),
    ),
    "padding of an embedding": (
        with_padding,
        *("gradients", "embed.embedding", ["padding_idx @ embed: .*row 2 never learns.*"]),
    ),
    "a mean and a sum": (with_sum, "loss", "", ["reduction of the loss @ .*, its sum over 32"]),
    "other activations": (
        lambda: images(FlaxImages(relu=lambda x: nnx.leaky_relu(x, 0.2))),
        # A mean lies between, so its name is not known.
        *("forward", "input of head", ["running variance @ norm: .*"]),
    ),
    "initialization": (
        lambda: compare(FlaxModel(), same=False),
        *("initial weights", "embed.embedding", ["initialization @ .*"]),
    ),
    "epsilon of layer norm": (
        lambda: compare(FlaxModel(epsilon=1e-6)),
        *("forward", "output of blocks.0.norm1", [f"epsilon @ {norm}: .*" for norm in NORMS]),
    ),
    "float32 inside the attention": (
        lambda: compare(FlaxModel(attention=nnx.dot_product_attention)),
        *("forward", "output of blocks.0.attention", ["float32 inside jax.nn.dot_product_attention @ 2 calls: .*"]),
    ),
    "a layer in bfloat16": (
        with_bfloat16,
        *("forward", "output of blocks.1.up", ["dtype of a layer @ blocks.1.up: .*"]),
    ),
    "running statistics of batch norm": (
        lambda: images(FlaxImages()),
        *("statistics", "norm.var", ["running variance @ norm: .*100/99.*"]),
    ),
    "momentum of batch norm": (
        lambda: images(FlaxImages(momentum=0.99)),
        *("statistics", "norm.mean", ["momentum of running statistics @ .*", "running variance @ .*"]),
    ),
}
IN_SLOW = list(PARTED)[:3]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in IN_SLOW else pytest.mark.long) for one in PARTED]
)
def test_what_parts_first_and_why_is_named(name: str) -> None:
    make, stage, tensor, causes = PARTED[name]
    found = make()
    assert found.first is not None
    assert (found.first.stage, found.first.tensor) == (stage, tensor or found.first.tensor)
    said = [f"{cause.name} @ {cause.where}: {cause.torch}, {cause.flax}" for cause in found.causes]
    assert len(said) == len(causes), said
    for cause, wanted in zip(said, causes, strict=True):
        assert re.fullmatch(wanted, cause), said
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


@pytest.mark.long
def test_mode_of_batch_norm() -> None:
    theirs = FlaxImages()
    theirs.norm.use_running_average = True
    found = images(theirs)
    assert found.first is not None
    assert found.first.tensor == "output of norm"
    assert "mode of batch norm" in names(found)


@pytest.mark.long
def test_everything_at_once_is_named() -> None:
    theirs = FlaxModel(epsilon=1e-6, gelu=nnx.gelu, attention=nnx.dot_product_attention)
    optimizers = {"torch_optimizer": lambda p: torch.optim.AdamW(p, 1e-3), "flax_optimizer": optax.adamw(1e-3)}
    found = compare(theirs, same=False, **optimizers)
    assert names(found) == {
        *("initialization", "epsilon", "activation", "float32 inside jax.nn.dot_product_attention", "weight decay")
    }


class TorchImages(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.permute(0, 3, 1, 2)))).mean((2, 3)))


class FlaxImages(nnx.Module):
    def __init__(self, *, momentum: float = 0.9, relu: Any = nnx.relu, padding: str = "SAME") -> None:
        rngs = nnx.Rngs(0)
        self.relu = relu
        self.conv = nnx.Conv(3, 6, (3, 3), padding=padding, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=momentum, use_fast_variance=False, rngs=rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.relu(self.norm(self.conv(x))).mean((1, 2)))


def images(theirs: Any, offset: float = 0.0) -> Comparison:
    ours = TorchImages()
    with torch.no_grad():
        ours.conv.bias += offset
    batch = {"x": np.random.default_rng(0).normal(size=(4, 5, 5, 3))}
    loss = {"torch_loss": lambda m, b: (m(b["x"]) ** 2).mean(), "flax_loss": lambda m, b: (m(b["x"]) ** 2).mean()}
    return compare(theirs, ours, batch=batch, **loss)


@pytest.mark.long
def test_padding_and_fast_variance() -> None:
    assert "padding" in names(images(FlaxImages(padding="VALID")))
    theirs = FlaxImages()
    theirs.norm.use_fast_variance = True
    found = images(theirs, offset=1e4)
    assert "fast variance" in names(found)


class TorchFlattened(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x.permute(0, 3, 1, 2)).flatten(1))


class FlaxFlattened(nnx.Module):
    """Its layers are not made in the order of their names."""

    def __init__(self, *, channels_first: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)
        self.channels_first = channels_first

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.stem(x)), (2, 2), (2, 2))
        x = x.transpose(0, 3, 1, 2) if self.channels_first else x
        return self.head(x.reshape(len(x), -1))


@pytest.mark.long
def test_the_order_of_what_is_flattened() -> None:
    options = {"batch": {"x": np.random.default_rng(0).normal(size=(4, 6, 6, 3))}}
    options |= {"torch_loss": squares, "flax_loss": squares}
    found = compare(FlaxFlattened(), TorchFlattened(), **options)
    assert found.first is not None
    assert found.first.tensor == "input of head"
    assert [(cause.name, cause.where) for cause in found.causes] == [("order of what is flattened", "input of head")]
    assert compare(FlaxFlattened(channels_first=True), TorchFlattened(), **options).first is None


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
    loss = {"torch_loss": lambda m, b: (m(b["x"]) ** 2).mean(), "flax_loss": lambda m, b: (m(b["x"]) ** 2).mean()}
    optimizers = {"torch_optimizer": lambda p: torch.optim.SGD(p, 0.1), "flax_optimizer": optax.sgd(0.1)}
    found = compare(FlaxRecurrent(kind), TorchRecurrent(kind), batch=batch, **loss, **optimizers)
    assert found.first is not None
    assert found.first.stage == "update"
    assert names(found) == {"two biases"}
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
    assert not found.causes


def test_dropout_is_said() -> None:
    class Dropped(TorchModel):
        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(super().forward(x))

    assert "dropout" in names(compare(FlaxModel(), Dropped()))


def test_models_and_settings_stay_as_they_were() -> None:
    ours, theirs = TorchModel(), FlaxModel()
    transfer(ours, theirs)
    before = {name: values.clone() for name, values in ours.state_dict().items()}
    state = jax.tree.map(np.asarray, nnx.state(theirs))
    call, attention = nnx.Linear.__call__, jax.nn.dot_product_attention
    compare(theirs, ours, same=False)
    assert all(torch.equal(values, before[name]) for name, values in ours.state_dict().items())
    assert all(values.dtype == torch.float32 for values in ours.parameters())
    jax.tree.map(np.testing.assert_array_equal, state, jax.tree.map(np.asarray, nnx.state(theirs)))
    assert (nnx.Linear.__call__, jax.nn.dot_product_attention) == (call, attention)
    assert "__call__" not in vars(nnx.RNN(nnx.GRUCell(2, 2, rngs=nnx.Rngs(0))))
    assert jnp.zeros(1).dtype == jnp.float32


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of each framework"):
        compare(FlaxModel(), torch_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    with pytest.raises(ConfigError, match="flax_loss: expected a scalar, found"):
        compare(FlaxModel(), flax_loss=lambda m, b: m(b["x"]))


@pytest.mark.long
def test_ten_layers() -> None:
    ours, theirs = TorchModel(10), FlaxModel(10, epsilon=1e-6)
    optimizers = {"torch_optimizer": lambda p: torch.optim.AdamW(p, 1e-3), "flax_optimizer": optax.adamw(1e-3)}
    found = compare(theirs, ours, **optimizers)
    assert found.first is not None
    assert found.first.tensor == "output of blocks.0.norm1"
    assert names(found) == {"epsilon", "weight decay"}


class TorchAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = torch.nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mha(x, x, x)[0]


class FlaxAttention(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.mha = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.mha(x))


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [4, 5])
def test_time_first_is_named_and_a_small_cause_is_not_the_cause(batch_size: int) -> None:
    batch = {"x": np.random.default_rng(0).normal(size=(batch_size, 5, 8))}
    found = compare(FlaxAttention(), TorchAttention(), batch=batch, torch_loss=squares, flax_loss=squares)
    lines = str(found).splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("cause")] == ["cause: batch_first"]
    if batch_size == 5:
        assert any(line.startswith("also, but far too small") and "float32" in line for line in lines)
    else:
        assert [one.split(":")[0] for one in found.unaligned] == ["input of mha", "output of mha"]
        assert "not compared, for its shape: input of mha" in str(found)


@pytest.mark.long
def test_half_a_loss_a_compiled_one_and_dropout_of_flax() -> None:
    theirs = FlaxAttention()
    theirs.drop.deterministic = False
    batch = {"x": np.random.default_rng(0).normal(size=(2, 5, 8))}
    options = {"batch": batch, "torch_loss": squares}
    found = compare(theirs, TorchAttention(), flax_loss=squares, **options)
    assert [cause.where for cause in found.causes if cause.name == "dropout"] == ["drop"]
    ours, other = torch.nn.Linear(8, 8), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    found = compare(other, ours, flax_loss=lambda m, b: 0.5 * squares(m, b), **options)
    assert [(cause.name, cause.torch) for cause in found.causes] == [
        ("factor of the loss", "2 times that, or its sum over 2")
    ]
    assert str(compare(other, ours, flax_loss=nnx.jit(squares), **options)).startswith("no layer was seen")
    found = compare(other, ours, flax_loss=lambda m, b: squares(m, b) + 0.01 * m(b["x"]).mean(), **options)
    assert [cause.name for cause in found.causes] == ["what the loss makes of equal layers"]
