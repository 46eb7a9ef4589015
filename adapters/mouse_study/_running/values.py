"""Values and generators as nested dicts of texts, numbers and arrays, as ``write_checkpoint`` takes them, and back.

No framework is imported to store a value: what is there to be stored has been imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError, StateError

Plain = dict[str, Any]
"""Nested dicts of texts, numbers and arrays."""


def plain(value: Any, where: str) -> Plain:
    """Any value as nested dicts: what it is stands under the one key of each."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Mapping):
        keys = {str(number): plain(key, where) for number, key in enumerate(value)}
        values = {str(number): plain(child, f"{where}[{key!r}]") for number, (key, child) in enumerate(value.items())}
        return {"mapping": {"keys": keys, "values": values}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: {str(number): plain(child, f"{where}[{number}]") for number, child in enumerate(value)}}
    if isinstance(value, bytes):
        return {"bytes": np.frombuffer(value, np.uint8)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU":
        return {"array" if isinstance(value, np.ndarray) else "scalar": np.array(value)}
    if (found := _plain_of_framework(value)) is not None:
        return found
    raise ConfigError(f"{where}: expected numbers, texts and arrays, found {type(value).__name__}, which is not stored")


def _plain_of_framework(value: Any) -> Plain | None:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        # NumPy lacks some of torch's dtypes: the bytes and the dtype's name are what all have.
        flat = value.detach().cpu().contiguous().reshape(-1)
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": {"bytes": flat.view(torch.uint8).numpy(), "dtype": name, "shape": list(value.shape)}}
    if torch is not None and isinstance(value, torch.dtype | torch.device | torch.Size):
        return plain(tuple(value), "") if isinstance(value, torch.Size) else {"torch": str(value)}
    if jax is not None and isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return {"key": {"data": np.array(jax.random.key_data(value)), "of": str(jax.random.key_impl(value))}}
        return {"weak" if value.weak_type else "jax": np.array(value)}
    return None


def unplain(state: Plain, where: str) -> Any:
    """The value that ``plain`` was given."""
    if not isinstance(state, dict) or len(state) != 1:
        raise StateError(f"{where}: expected a value that was stored, found {state!r:.80}")
    ((kind, held),) = state.items()
    if kind in ("value", "array"):
        return held
    if kind == "scalar":
        return held[()]
    if kind == "mapping":
        keys = [unplain(key, where) for key in held["keys"].values()]
        return dict(zip(keys, (unplain(child, where) for child in held["values"].values()), strict=True))
    if kind in ("tuple", "list"):
        values = [unplain(child, where) for child in held.values()]
        return tuple(values) if kind == "tuple" else values
    if kind == "bytes":
        return held.tobytes()
    return _of_framework(kind, held)


def _of_framework(kind: str, held: Any) -> Any:
    if kind in ("tensor", "torch"):
        import torch

        if kind == "torch":
            name = held.removeprefix("torch.")
            return getattr(torch, name) if name != held else torch.device(held)
        flat = torch.from_numpy(np.array(held["bytes"])).view(getattr(torch, held["dtype"]))
        return flat.reshape(held["shape"])
    import jax

    if kind == "key":
        return jax.random.wrap_key_data(jax.numpy.array(held["data"]), impl=held["of"])
    made = jax.numpy.array(held)  # a copy: on the host JAX would otherwise read the memory that was given
    return _weak(made) if kind == "weak" else made


def _weak(array: Any) -> Any:
    """Return the JAX array with a weak type, like that of a Python number, which promotes to a narrower float."""
    import jax.numpy as jnp

    # An array filled with a Python number has a weak type and keeps it when its values are set.
    filled = jnp.full(array.shape, array.dtype.type(0).item())
    return filled.at[...].set(array) if filled.weak_type and filled.dtype == array.dtype else array


# ---------------------------------------------------------------------- generators


def generator_state(part: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, np.random.RandomState):
        return part.get_state(legacy=False)
    if isinstance(part, random.Random):
        return part.getstate()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Generator):
        return part.get_state()
    return None


def set_generator(part: Any, state: Any) -> None:
    if isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, random.Random):
        part.setstate(state)
    else:
        part.set_state(state)


def global_generators() -> Plain:
    """The states of the generators that a process has anyway: Python's, NumPy's, and torch's where it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return plain(state, "generators")


def set_global_generators(saved: Plain) -> None:
    """Set them to states that ``global_generators`` gave."""
    state = unplain(saved, "generators")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            torch.cuda.set_rng_state_all(state["cuda"])


def seed_global_generators(seed: int) -> None:
    """Begin them all at a seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
