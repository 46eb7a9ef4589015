"""Weights from PyTorch to Flax and back."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mouse_core import ConfigError, SchemaError
from mouse_study.weights import transfer

R = nnx.Rngs(0)
T = torch.nn


def gru(layers: int, bias: bool = True) -> torch.nn.GRU:
    made = T.GRU(3, 4, layers, bias=bias, batch_first=True)
    with torch.no_grad():
        for name, values in made.named_parameters():
            if name.startswith("bias_hh"):
                values[8:] = 0
    return made


def images(values: Any) -> Any:
    return np.moveaxis(values, 1, -1) if values.ndim > 2 else values


def rnns(cell: Any, layers: int) -> Any:
    return nnx.Sequential(*(nnx.RNN(cell(3 if number == 0 else 4, 4, rngs=R)) for number in range(layers)))


def ours_of(kind: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(*arguments, **options)


def theirs_of(kind: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(*arguments, rngs=R, **options)


def rnn_of(cell: Any) -> Callable[[], Any]:
    return lambda: nnx.RNN(cell(3, 4, rngs=R))


# What a layer is made as in both, and a shape of its input.
LAYERS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "Linear": (ours_of(T.Linear, 3, 5), theirs_of(nnx.Linear, 3, 5), (2, 3)),
    "Linear without bias": (ours_of(T.Linear, 3, 5, bias=False), theirs_of(nnx.Linear, 3, 5, use_bias=False), (2, 3)),
    "Embedding": (ours_of(T.Embedding, 7, 3), theirs_of(nnx.Embed, 7, 3), ()),
    "LayerNorm": (ours_of(T.LayerNorm, 3), theirs_of(nnx.LayerNorm, 3, epsilon=1e-5), (2, 3)),
    "RMSNorm": (ours_of(T.RMSNorm, 3, eps=1e-6), theirs_of(nnx.RMSNorm, 3, epsilon=1e-6), (2, 3)),
    "GroupNorm": (ours_of(T.GroupNorm, 2, 6), theirs_of(nnx.GroupNorm, 6, num_groups=2, epsilon=1e-5), (2, 6, 5, 5)),
    "BatchNorm": (lambda: T.BatchNorm1d(3).eval(), theirs_of(nnx.BatchNorm, 3, use_running_average=True), (4, 3)),
    "Conv1d": (ours_of(T.Conv1d, 3, 4, 3), theirs_of(nnx.Conv, 3, 4, 3, padding="VALID"), (2, 3, 9)),
    "Conv2d in groups": (
        ours_of(T.Conv2d, 4, 6, (2, 3), groups=2),
        theirs_of(nnx.Conv, 4, 6, (2, 3), padding="VALID", feature_group_count=2),
        (2, 4, 7, 7),
    ),
    "Attention": (
        ours_of(T.MultiheadAttention, 8, 2, batch_first=True),
        theirs_of(nnx.MultiHeadAttention, 2, 8, decode=False),
        (2, 5, 8),
    ),
    "GRU": (lambda: gru(1), rnn_of(nnx.GRUCell), (2, 5, 3)),
    "GRU without bias": (lambda: gru(1, False), rnn_of(nnx.GRUCell), (2, 5, 3)),
    "GRU of three layers": (lambda: gru(3), lambda: rnns(nnx.GRUCell, 3), (2, 5, 3)),
    "LSTM": (ours_of(T.LSTM, 3, 4, batch_first=True), rnn_of(nnx.OptimizedLSTMCell), (2, 5, 3)),
    "LSTM of two layers": (ours_of(T.LSTM, 3, 4, 2, batch_first=True), lambda: rnns(nnx.LSTMCell, 2), (2, 5, 3)),
}


def randomize(module: torch.nn.Module) -> None:
    """Other values than those that all have at first, such as a scale of 1; zeros stay, which a GRU needs."""
    with torch.no_grad():
        for name, values in module.state_dict().items():
            if values.is_floating_point():
                values += (
                    torch.rand_like(values) * (values != 0) if name.startswith("bias_hh") else torch.rand_like(values)
                )


def run(ours: Any, values: torch.Tensor) -> np.ndarray:
    made = ours(values, values, values) if isinstance(ours, T.MultiheadAttention) else ours(values)
    return (made[0] if isinstance(made, tuple) else made).detach().numpy()


# Beside others of the same kind: two dimensions and groups, two layers of an LSTM.
OF_ONE_KIND = ("Conv1d", "LSTM", "GRU of three layers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in OF_ONE_KIND else []) for name in LAYERS]
)
def test_both_give_the_same_and_weights_come_back(name: str) -> None:
    make, make_other, shape = LAYERS[name]
    moved = name.startswith(("GroupNorm", "Conv"))
    torch.manual_seed(0)
    ours, theirs = make(), make_other()
    randomize(ours)
    transfer(ours, theirs)
    given = torch.randn(shape) if shape else torch.arange(7)
    other = images(given.numpy()) if moved else given.numpy()
    expected = images(run(ours, given)) if moved else run(ours, given)
    np.testing.assert_allclose(np.asarray(theirs(jnp.asarray(other))), expected, rtol=1e-4, atol=1e-5)
    back = make()
    transfer(theirs, back)
    np.testing.assert_allclose(run(back, given), run(ours, given), rtol=1e-5, atol=1e-6)
    for one, (key, values) in zip(back.state_dict().values(), ours.state_dict().items(), strict=True):
        if "bias_" not in key:
            assert torch.equal(one, values), key
    again = make_other()
    transfer(back, again)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again, nnx.Param), nnx.state(theirs, nnx.Param))


def same(theirs: Any, ours: torch.nn.Linear) -> None:
    np.testing.assert_array_equal(theirs.kernel[...], ours.weight.detach().numpy().T)


class Ours(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = T.Sequential(T.Linear(2, 3), T.ReLU(), T.ModuleDict({"up": T.Linear(3, 4)}))
        self.heads = T.ModuleList([T.Linear(4, 2), T.Linear(4, 2)])
        self.scale = T.Parameter(torch.randn(4))


class Theirs(nnx.Module):
    def __init__(self, heads: str = "heads", scale: int = 4) -> None:
        self.body = nnx.Sequential(nnx.Linear(2, 3, rngs=R), nnx.relu, nnx.Dict(up=nnx.Linear(3, 4, rngs=R)))
        setattr(self, heads, nnx.List([nnx.Linear(4, 2, rngs=R), nnx.Linear(4, 2, rngs=R)]))
        self.scale = nnx.Param(jnp.zeros(scale))


def test_nested_modules_by_structure_and_by_names() -> None:
    ours, theirs, other = Ours(), Theirs(), Theirs("outputs")
    transfer(ours, theirs)
    same(theirs.heads[1], ours.heads[1])
    np.testing.assert_array_equal(theirs.scale[...], ours.scale.detach().numpy())
    with pytest.raises(SchemaError, match=r"heads.0.*torch.nn.Linear.*outputs.0.*names=\{'heads.0': 'outputs.0'"):
        transfer(ours, other)
    transfer(ours, other, names={"heads": "outputs"})
    same(other.outputs[1], ours.heads[1])
    transfer(ours, other, names={"heads.0": "outputs.1", "heads.1": "outputs.0"})
    same(other.outputs[0], ours.heads[1])
    back = Ours()
    transfer(other, back, names={"heads.0": "outputs.1", "heads.1": "outputs.0"})
    assert all(
        torch.equal(one, two) for one, two in zip(back.state_dict().values(), ours.state_dict().values(), strict=True)
    )


ZEROS = r"torch.nn.GRU: .*bias_hh: expected zeros.*bias of n.*set bias_hh to 0.*or create the GRU with bias=False"
NO_TWINS: list[tuple[Any, Any, str]] = [
    (ours_of(T.Linear, 2, 3), theirs_of(nnx.Linear, 2, 4), r"kernel \[2, 4\].*weight \[3, 2\]"),
    (ours_of(T.Linear, 2, 3), theirs_of(nnx.Linear, 2, 3, use_bias=False), "found differences in bias"),
    (ours_of(T.Bilinear, 2, 2, 3), theirs_of(nnx.Linear, 2, 3), r"known in both.*found .. \(torch.nn.Bilinear: "),
    (ours_of(T.LayerNorm, 3), theirs_of(nnx.RMSNorm, 3), "two layers of the same kind.*LayerNorm.*RMSNorm"),
    (ours_of(T.GRU, 3, 4), rnn_of(nnx.GRUCell), ZEROS),
    (ours_of(T.GRU, 3, 4, bidirectional=True), rnn_of(nnx.GRUCell), "torch.nn.GRU with bidirectional=False"),
    (ours_of(T.LSTM, 3, 4, proj_size=2), rnn_of(nnx.LSTMCell), "LSTM with bidirectional=False and proj_size=0"),
    (
        ours_of(T.MultiheadAttention, 8, 2, add_bias_kv=True),
        theirs_of(nnx.MultiHeadAttention, 2, 8),
        "found differences in bias_k, bias_v",
    ),
    (lambda: Ours(), lambda: Theirs(scale=5), r"'scale' \(a parameter of torch.nn.Ours: value \[4\]\)"),
    (ours_of(T.Tanh), theirs_of(nnx.Linear, 2, 3), "without a twin in PyTorch: '' .nnx.Linear"),
    (
        ours_of(T.ConvTranspose2d, 3, 3, 3),
        theirs_of(nnx.ConvTranspose, 3, 3, (3, 3)),
        r"known in both.*found '' \(torch.nn.ConvTranspose2d.*nnx.ConvTranspose",
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "message"), NO_TWINS, ids=range(len(NO_TWINS)))
def test_what_has_no_twin_is_named_and_nothing_is_copied(ours: Any, theirs: Any, message: str) -> None:
    one, other = ours(), theirs()
    before = jax.tree.map(np.asarray, nnx.state(other, nnx.Param))
    with pytest.raises(SchemaError, match=message):
        transfer(one, other)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(other, nnx.Param)))


def test_dtypes_are_kept_and_what_is_no_pair_of_models_is_refused() -> None:
    ours, theirs = T.Linear(2, 3).bfloat16(), nnx.Linear(2, 3, rngs=R)
    transfer(ours, theirs)
    assert theirs.kernel[...].dtype == jnp.bfloat16
    back = T.Linear(2, 3)
    transfer(theirs, back)
    assert back.weight.dtype == torch.bfloat16
    assert torch.equal(back.weight, ours.weight)
    with pytest.raises(ConfigError, match="jax_enable_x64"):
        transfer(T.Linear(2, 3).double(), theirs)
    with pytest.raises(ConfigError, match=r"expected a torch.nn.Module and a flax.nnx.Module, found Linear and int"):
        transfer(back, 5)
    with pytest.raises(ConfigError, match="names: expected paths"):
        transfer(back, theirs, names={"nowhere": "there"})
    with jax.enable_x64(True):
        transfer(T.Linear(2, 3).double(), theirs)
        assert theirs.kernel[...].dtype == jnp.float64


def test_tied_weights_are_one() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = T.Embedding(7, 4)
            self.head = T.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

    class Attending(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(7, 4, rngs=R)

    ours, theirs = Tied(), Attending()
    transfer(ours, theirs)
    np.testing.assert_array_equal(theirs.embed.embedding[...], ours.head.weight.detach().numpy())
    ours.head.weight = T.Parameter(torch.zeros(7, 4))
    with pytest.raises(SchemaError, match="'head'"):
        transfer(ours, theirs)

    class Untied(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(7, 4, rngs=R)
            self.head = nnx.Linear(4, 7, use_bias=False, rngs=R)

    one, apart = Tied(), Untied()
    before = one.embed.weight.detach().clone()
    with pytest.raises(SchemaError, match=r"equal weights for 'embed' .* and 'head' .* tied in one tensor"):
        transfer(apart, one)
    assert torch.equal(one.embed.weight, before)
    transfer(one, apart)
    transfer(apart, one)
    assert torch.equal(one.embed.weight, before)


class Several(torch.nn.Module):
    """Linear layers 4 to 4 by their names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, T.Linear(4, 4))


class SeveralOfFlax(nnx.Module):
    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, nnx.Linear(4, 4, rngs=R))


def linear(count: int) -> Any:
    return [nnx.Linear(4, 4, rngs=R) for _ in range(count)]


def test_numbers_count_layers_with_weights() -> None:
    ours, theirs, other, short = Several(), SeveralOfFlax(), SeveralOfFlax(), SeveralOfFlax("last")
    ours.layers = T.Sequential(T.Linear(4, 4), T.ReLU(), T.Linear(4, 4), T.ReLU(), T.Linear(4, 4))
    theirs.layers, other.stack, short.layers = nnx.List(linear(3)), nnx.List(linear(3)), nnx.List(linear(2))
    transfer(ours, theirs)
    for number in range(3):
        same(theirs.layers[number], ours.layers[2 * number])
    transfer(ours, other, names={"layers": "stack"})
    same(other.stack[1], ours.layers[2])
    with pytest.raises(SchemaError, match=r"'layers.4' .*'last' "):
        transfer(ours, short)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (("fc1", "fc2"), ("fc0", "fc1"), "'fc2' .*'fc0' .*names="),
        (("q", "k", "v"), ("q", "v", "out"), "'k' .*'out' .*names="),
        (("one", "two"), ("first", "last"), r"pass names=\{'one': 'first', 'two': 'last'\}"),
        (("_enc",), ("_enc",), None),
    ],
    ids=["numbers begin elsewhere", "another order", "other names", "an underscore in front"],
)
def test_what_would_change_the_order_is_refused_with_names_that_pair_layers(
    ours: tuple[str, ...], theirs: tuple[str, ...], message: str | None
) -> None:
    one, other = Several(*ours), SeveralOfFlax(*theirs)
    if message is not None:
        with pytest.raises(SchemaError, match=message):
            transfer(one, other)
    transfer(one, other, names=dict(zip(ours, theirs, strict=True)) if message else None)
    for name, twin in zip(ours, theirs, strict=True):
        same(getattr(other, twin), getattr(one, name))
