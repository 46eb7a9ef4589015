"""The layers of PyTorch and Flax models, their kinds, and the conversion of their arrays between the frameworks.

The module also defines the result of a comparison of two implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from flax import nnx

from mouse_core import SchemaError

Stage = Literal[
    "initial weights", "forward", "layer alone", "loss", "gradients", "statistics", "update", "later updates"
]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Difference:
    """The difference between the two implementations in one tensor.

    Args:
        stage: The stage that was compared: "layer alone" runs Flax's layer on the input of PyTorch's layer, "update" is
            the optimizers' first update from the same gradients, and "later updates" are the following updates.
        tensor: The name of the tensor, by the layer's path in PyTorch; for later updates with the index of the update.
        absolute: The largest difference of two values.
        scale: The largest absolute value; for gradients, at least a thousandth of the largest gradient of all tensors.
        tolerance: The largest difference that rounding explains, relative to ``scale``.
    """

    stage: Stage
    tensor: str
    absolute: float
    scale: float
    tolerance: float

    @property
    def relative(self) -> float:
        """The largest difference, as a fraction of ``scale``."""
        return self.absolute / self.scale if self.scale else float(self.absolute > 0)

    @property
    def beyond(self) -> bool:
        """Whether the difference is larger than rounding explains."""
        return not self.relative <= self.tolerance

    def __str__(self) -> str:
        rounding = f"of which rounding explains {self.tolerance:.0e}"
        return f"{self.stage}: {self.tensor}: relative difference {self.relative:.1e}, {rounding}"


def difference(
    stage: Stage, tensor: str, ours: Array, theirs: Array, tolerance: float, *, least: float = 0.0
) -> Difference:
    """Compare two arrays; the difference is infinite if shapes differ or only one has NaNs."""
    if ours.shape != theirs.shape:
        return Difference(stage, tensor, float("inf"), 1.0, tolerance)
    with np.errstate(invalid="ignore"):
        if ours.dtype.kind == "f" and np.isfinite(most := largest(ours - theirs)):  # then all values are finite
            return Difference(stage, tensor, most, max(largest(ours), least), tolerance)
        if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
            return Difference(stage, tensor, float("inf"), 1.0, tolerance)
        both = ~np.isnan(ours)
        apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))[both]
    finite = np.abs(ours[both])
    scale = max(float(finite[np.isfinite(finite)].max(initial=0)), least)
    return Difference(stage, tensor, float(apart.max(initial=0)), scale, tolerance)


def largest(values: Array) -> float:
    """Return the largest absolute value; NaN if a value is NaN."""
    return float(max(values.max(initial=0), -values.min(initial=0)))


@dataclass(frozen=True)
class Comparison:
    """The compared tensors, in the order of a training step.

    Args:
        compared: The tensors.
        unaligned: Outputs that were not compared, because their shapes do not correspond.
    """

    compared: tuple[Difference, ...]
    unaligned: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences beyond rounding."""
        return tuple(one for one in self.compared if one.beyond)

    @property
    def first(self) -> Difference | None:
        """The first difference beyond rounding."""
        return next(iter(self.differences), None)

    def of(self, stage: Stage) -> tuple[Difference, ...]:
        """Return the compared tensors of a stage."""
        return tuple(one for one in self.compared if one.stage == stage)

    def __str__(self) -> str:
        lines = [f"first: {self.first}" if self.first else self._agreed()]
        lines += [line for stage in STAGES if (line := self._line(stage))]
        lines += [f"not compared, because shapes differ: {one}" for one in self.unaligned[:6]]
        return "\n".join(lines)

    def _agreed(self) -> str:
        agreed = "no tensor differs by more than rounding"
        return agreed if self.of("forward") else f"no layer was observed; {agreed}"

    def _line(self, stage: Stage) -> str:
        """Return a line with the number of differing tensors of a stage, and the tensor with the largest difference;
        empty without tensors."""
        found = self.of(stage)
        if not found:
            unseen = "forward: no layer was observed, probably because the loss calls a compiled function"
            return unseen if stage == "forward" else ""
        parted = [one for one in found if one.beyond]
        worst = max(found, key=lambda one: one.relative if one.relative == one.relative else float("inf"))
        since = f", first {parted[0].tensor}" if parted else ""
        most = f"largest relative difference {worst.relative:.1e} in {worst.tensor}"
        return f"{stage}: {len(parted)} of {len(found)} tensors differ{since}; {most}"


Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Shapes = Mapping[str, tuple[int, ...]]
What = Literal["weights", "gradients", "updates"]


@dataclass(frozen=True)
class Kind:
    """A kind of layer in both frameworks.

    Args:
        name: The name in messages.
        torch: The PyTorch classes.
        flax: The Flax classes.
        to_flax: Function that converts PyTorch arrays (weights, gradients or updates, see ``What``) to Flax arrays of
            the requested shapes.
        to_torch: Function that converts Flax weights to PyTorch arrays of the requested shapes.
    """

    name: str
    torch: tuple[type[Any], ...]
    flax: tuple[type[Any], ...]
    to_flax: Callable[[Arrays, Shapes, What], Arrays]
    to_torch: Callable[[Arrays, Shapes], Arrays]


def _renamed(names: Mapping[str, str], convert: Callable[[Array], Array], back: Callable[[Array], Array]) -> Any:
    """Return the conversions in both directions for a kind whose arrays have different names in the two frameworks;
    only the first array also differs in layout.
    """
    first = next(iter(names))

    def to_flax(arrays: Arrays, wanted: Shapes, what: What) -> Arrays:
        return {names[name]: convert(values) if name == first else values for name, values in arrays.items()}

    def to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
        own = {other: name for name, other in names.items()}
        return {own[name]: back(values) if own[name] == first else values for name, values in arrays.items()}

    return to_flax, to_torch


def _same(values: Array) -> Array:
    return values


def _kernel_of_convolution(weight: Array) -> Array:
    # [out, in, height, width] becomes [height, width, in, out]
    return np.moveaxis(weight, (0, 1), (-1, -2))


def _weight_of_convolution(kernel: Array) -> Array:
    return np.moveaxis(kernel, (-1, -2), (0, 1))


# ---------------------------------------------------------------------- attention

_PROJECTIONS = ("query", "key", "value")


def _attention_to_flax(arrays: Arrays, wanted: Shapes, what: What) -> Arrays:
    if "in_proj_weight" in arrays:
        weights = np.split(arrays["in_proj_weight"], 3)
    else:
        weights = [arrays[f"{name[0]}_proj_weight"] for name in _PROJECTIONS]
    # weight [heads * width, in] becomes kernel [in, heads, width]
    made = {f"{name}.kernel": weight.T for name, weight in zip(_PROJECTIONS, weights, strict=True)}
    made["out.kernel"] = arrays["out_proj.weight"].T
    if "in_proj_bias" in arrays:
        biases = np.split(arrays["in_proj_bias"], 3)
        made |= {f"{name}.bias": bias for name, bias in zip(_PROJECTIONS, biases, strict=True)}
        made["out.bias"] = arrays["out_proj.bias"]
    return {name: _reshaped(values, wanted.get(name)) for name, values in made.items()} | _rest(arrays, "bias_")


def _attention_to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
    weights = [arrays[f"{name}.kernel"].reshape(len(arrays[f"{name}.kernel"]), -1).T for name in _PROJECTIONS]
    if "in_proj_weight" in wanted and len({weight.shape[1] for weight in weights}) == 1:
        made = {"in_proj_weight": np.concatenate(weights)}
    else:
        made = {f"{name[0]}_proj_weight": weight for name, weight in zip(_PROJECTIONS, weights, strict=True)}
    out = arrays["out.kernel"]
    made["out_proj.weight"] = out.reshape(-1, out.shape[-1]).T
    if "out.bias" in arrays:
        made["in_proj_bias"] = np.concatenate([arrays[f"{name}.bias"].reshape(-1) for name in _PROJECTIONS])
        made["out_proj.bias"] = arrays["out.bias"]
    return made | _rest(arrays, "query_ln", "key_ln")


def _reshaped(values: Array, shape: tuple[int, ...] | None) -> Array:
    """Split the axis of the heads. With 4 heads of size 8, the query's kernel [32, 32] becomes [32, 4, 8], and the
    output's kernel becomes [4, 8, 32].
    """
    if shape is None or int(np.prod(shape)) != values.size:
        return values
    return values.reshape(shape)


def _rest(arrays: Arrays, *prefixes: str) -> Arrays:
    """Return the arrays without a counterpart, with unchanged names; a later error reports these arrays as missing."""
    return {name: values for name, values in arrays.items() if name.startswith(prefixes)}


# ---------------------------------------------------------------------- recurrent layers


def _one_bias(arrays: Arrays, what: What) -> Array | None:
    """Combine PyTorch's two biases of a recurrent layer into Flax's one bias: values are added, gradients are equal."""
    if "bias_ih" not in arrays:
        return None
    return arrays["bias_ih"] if what == "gradients" else arrays["bias_ih"] + arrays["bias_hh"]


def _gru_to_flax(arrays: Arrays, wanted: Shapes, what: What) -> Arrays:
    made = {"dense_i.kernel": arrays["weight_ih"].T, "dense_h.kernel": arrays["weight_hh"].T}
    bias = _one_bias(arrays, what)
    hidden = arrays["weight_hh"].shape[1]
    if bias is None:
        made["dense_i.bias"] = np.zeros(3 * hidden, made["dense_i.kernel"].dtype)
        return made
    # The gates r and z add both biases. In n, the recurrent bias is first multiplied by r, and Flax has no such bias.
    inner = arrays["bias_hh"][2 * hidden :]
    if what == "weights" and inner.any():
        raise SchemaError(
            f"bias_hh: expected zeros in its last {hidden} values, the recurrent bias of n, which has no twin in "
            f"nnx.GRUCell, found values up to {np.abs(inner).max():.3g}; before training begins, set bias_hh to 0 and "
            "keep it so (requires_grad_(False)), or make the GRU with bias=False"
        )
    made["dense_i.bias"] = np.concatenate([bias[: 2 * hidden], arrays["bias_ih"][2 * hidden :]])
    return made


def _gru_to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
    return _recurrent_to_torch(arrays["dense_i.kernel"], arrays["dense_h.kernel"], arrays["dense_i.bias"], wanted)


def _recurrent_to_torch(inputs: Array, hidden: Array, bias: Array, wanted: Shapes) -> Arrays:
    made = {"weight_ih": inputs.T, "weight_hh": hidden.T}
    if "bias_ih" in wanted or bias.any():  # a bias of zeros counts as no bias
        made |= {"bias_ih": bias, "bias_hh": np.zeros_like(bias)}
    return made


_GATES = ("i", "f", "g", "o")


def _lstm_to_flax(arrays: Arrays, wanted: Shapes, what: What) -> Arrays:
    bias = _one_bias(arrays, what)
    if bias is None:
        bias = np.zeros(len(arrays["weight_hh"]), arrays["weight_hh"].dtype)
    if "dense_h.kernel" in wanted:
        inputs, hidden = arrays["weight_ih"].T, arrays["weight_hh"].T
        return {"dense_i.kernel": inputs, "dense_h.kernel": hidden, "dense_h.bias": bias}
    made: Arrays = {}
    parts = (np.split(values, 4) for values in (arrays["weight_ih"], arrays["weight_hh"], bias))
    for gate, own, recurrent, one in zip(_GATES, *parts, strict=True):
        made[f"i{'f_' if gate == 'f' else gate}.kernel"] = own.T
        made[f"h{gate}.kernel"], made[f"h{gate}.bias"] = recurrent.T, one
    return made


def _lstm_to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
    if "dense_h.kernel" in arrays:
        inputs, hidden, bias = (arrays[name] for name in ("dense_i.kernel", "dense_h.kernel", "dense_h.bias"))
    else:
        inputs = np.concatenate([arrays[f"i{'f_' if gate == 'f' else gate}.kernel"] for gate in _GATES], axis=1)
        hidden = np.concatenate([arrays[f"h{gate}.kernel"] for gate in _GATES], axis=1)
        bias = np.concatenate([arrays[f"h{gate}.bias"] for gate in _GATES])
    return _recurrent_to_torch(inputs, hidden, bias, wanted)


# ---------------------------------------------------------------------- the kinds

_NORM = {"weight": "scale", "bias": "bias"}
_BATCH_NORM = _NORM | {"running_mean": "mean", "running_var": "var"}
_AFFINE = {"weight": "kernel", "bias": "bias"}

PARAMETER = Kind("parameter", (), (), *_renamed({"value": "value"}, _same, _same))
FOREIGN = Kind("layer without a twin", (), (), *_renamed({"value": "value"}, _same, _same))
KINDS = (
    Kind("Linear", (torch.nn.Linear,), (nnx.Linear,), *_renamed(_AFFINE, np.transpose, np.transpose)),
    Kind("Embedding", (torch.nn.Embedding,), (nnx.Embed,), *_renamed({"weight": "embedding"}, _same, _same)),
    Kind("LayerNorm", (torch.nn.LayerNorm,), (nnx.LayerNorm,), *_renamed(_NORM, _same, _same)),
    Kind("RMSNorm", (torch.nn.RMSNorm,), (nnx.RMSNorm,), *_renamed(_NORM, _same, _same)),
    Kind("GroupNorm", (torch.nn.GroupNorm,), (nnx.GroupNorm,), *_renamed(_NORM, _same, _same)),
    Kind(
        "BatchNorm",
        (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d),
        (nnx.BatchNorm,),
        *_renamed(_BATCH_NORM, _same, _same),
    ),
    Kind(
        "Conv",
        (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
        (nnx.Conv,),
        *_renamed(_AFFINE, _kernel_of_convolution, _weight_of_convolution),
    ),
    Kind(
        "Attention", (torch.nn.MultiheadAttention,), (nnx.MultiHeadAttention,), _attention_to_flax, _attention_to_torch
    ),
    Kind("GRU", (torch.nn.GRU, torch.nn.GRUCell), (nnx.GRUCell,), _gru_to_flax, _gru_to_torch),
    Kind(
        "LSTM",
        (torch.nn.LSTM, torch.nn.LSTMCell),
        (nnx.LSTMCell, nnx.OptimizedLSTMCell),
        _lstm_to_flax,
        _lstm_to_torch,
    ),
)


# Containers of the frameworks, whose parameters the user defines.
_HOLD = (
    *(torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict),
    *(torch.nn.ParameterList, torch.nn.ParameterDict),
    *(torch.nn.Transformer, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer),
    *(torch.nn.TransformerDecoder, torch.nn.TransformerDecoderLayer),
    *(*nnx.Module.__mro__, nnx.Sequential, *nnx.List.__mro__, *nnx.Dict.__mro__, nnx.RNN),
)


def is_foreign(module: Any) -> bool:
    """Whether a module is, or derives from, a layer of a framework; this determines the layout of its arrays."""
    packages = ("torch.nn.", "flax.nnx.")
    return any(base not in _HOLD and base.__module__.startswith(packages) for base in type(module).__mro__)


@dataclass(frozen=True)
class Layer:
    """A layer with weights, or a single parameter outside of layers.

    Args:
        path: The names from the model to the layer, joined by dots, without containers that only one framework has.
        kind: The kind of layer.
        module: The layer, or the module that has the parameter.
        arrays: PyTorch tensors or Flax variables, by the names that the kind defines.
    """

    path: str
    kind: Kind
    module: Any
    arrays: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays by name."""
        return {name: tuple(values.shape) for name, values in self.arrays.items()}

    def __str__(self) -> str:
        of = type(self.module)
        package = "torch.nn" if isinstance(self.module, torch.nn.Module) else "nnx"
        what = f"a parameter of {package}.{of.__name__}" if self.kind is PARAMETER else f"{package}.{of.__name__}"
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.path!r} ({what}: {shapes})"


def torch_layers(module: torch.nn.Module, path: str = "") -> Iterator[Layer]:
    """Yield the layers of a PyTorch model, and parameters outside layers, in the order of their creation."""
    kind = next((kind for kind in KINDS if isinstance(module, kind.torch)), None)
    if kind is not None:
        yield from (
            _recurrent_layers(module, kind, path)
            if kind.name in ("GRU", "LSTM")
            else [Layer(path, kind, module, _tensors(module))]
        )
        return
    if is_foreign(module) and any(parameter is not None for parameter in module._parameters.values()):
        yield Layer(path, FOREIGN, module, _tensors(module))
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Layer(_joined(path, name), PARAMETER, module, {"value": parameter})
    for name, child in module._modules.items():
        if child is not None:
            yield from torch_layers(child, _joined(path, name))


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if name != "num_batches_tracked"}
    return tensors | buffers


def _recurrent_layers(module: Any, kind: Kind, path: str) -> Iterator[Layer]:
    tensors = _tensors(module)
    if isinstance(module, torch.nn.GRUCell | torch.nn.LSTMCell):
        yield Layer(path, kind, module, tensors)
        return
    if module.bidirectional or getattr(module, "proj_size", 0):
        raise SchemaError(f"{path!r}: expected a torch.nn.{kind.name} without bidirectional and proj_size, as in Flax")
    for number in range(module.num_layers):
        own = {name.removesuffix(f"_l{number}"): values for name, values in tensors.items()}
        own = {name: values for name, values in own.items() if "_l" not in name}
        yield Layer(path if module.num_layers == 1 else _joined(path, str(number)), kind, module, own)


def flax_layers(module: Any, path: str = "") -> Iterator[Layer]:
    """Yield the layers of a Flax model, and parameters outside layers, in the order of their creation."""
    kind = next((kind for kind in KINDS if isinstance(module, kind.flax)), None)
    if kind is not None:
        yield Layer(path, kind, module, dict(_variables(module, "")))
        return
    if is_foreign(module) and any(isinstance(child, nnx.Param) for _, child in _children(module)):
        yield Layer(path, FOREIGN, module, dict(_variables(module, "")))
        return
    for name, child in _children(module):
        inside = isinstance(module, nnx.Sequential) and name == "layers"
        inside = inside or (isinstance(module, nnx.RNN) and name == "cell")
        below = path if inside else _joined(path, name)
        if isinstance(child, nnx.Param):
            yield Layer(below, PARAMETER, module, {"value": child})
        elif not isinstance(child, nnx.Variable):
            yield from flax_layers(child, below)


def _variables(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in _children(module):
        if isinstance(child, nnx.Param | nnx.BatchStat):
            yield _joined(path, name), child
        elif not isinstance(child, nnx.Variable):
            yield from _variables(child, _joined(path, name))


def _children(module: Any) -> list[tuple[str, Any]]:
    if isinstance(module, Mapping):
        children: dict[str, Any] = {str(name): child for name, child in module.items()}
    elif isinstance(module, list | tuple):
        children = {str(number): child for number, child in enumerate(module)}
    else:
        # Flax has internal state there: _pytree__state or _object__state.
        own = vars(module).items()
        children = {name: child for name, child in own if not name.startswith(("_pytree__", "_object__"))}
    kept = (nnx.Module, nnx.Variable, list, tuple, dict)
    return [(name, child) for name, child in children.items() if isinstance(child, kept)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def tensor_name(path: str, name: str) -> str:
    """Return the full name of a layer's array; the name of a parameter outside of layers is its path."""
    return f"{path}.{name}".removesuffix(".value")


def arrays_of(layer: Layer, *, zeros: bool = False) -> Arrays:
    """Return the arrays of a layer on the host, or zeros of their shapes."""
    if zeros:
        return {name: np.zeros(shape, np.float32) for name, shape in layer.shapes.items()}
    return {name: array_of(values) for name, values in layer.arrays.items()}


def array_of(values: Any) -> Array:
    """Return a PyTorch tensor, a Flax variable or a JAX array on the host."""
    if isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        found: Array = tensor.numpy()
        return found
    return np.asarray(values.get_value() if isinstance(values, nnx.Variable) else values)
