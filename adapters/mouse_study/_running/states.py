"""What a training must remember to go on, as plain values and arrays, and back.

A *part* of the state is what can be set anew where it lies: something with ``state_dict`` and ``load_state_dict``
(modules and optimizers of torch, loaders, buffers), an object of ``flax.nnx``, a generator of random numbers, and a
dict or a list, whose values are replaced. No framework is imported: what is there to be stored has been imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError, StateError

Plain = dict[str, Any]
"""Nested dicts of texts, numbers and arrays, as ``write_checkpoint`` takes them."""


# ---------------------------------------------------------------------- parts


def taken(part: Any, where: str = "state") -> Plain:
    """The state of a part.

    Raises:
        ConfigError: Something that cannot be stored, or not be set anew.
    """
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return _plain(part.state_dict(), where)
    if _is_nnx(part):
        return _plain_leaves(_nnx().state(part), where)
    if (state := _generator_state(part)) is not None:
        return _plain(state, where)
    if isinstance(part, Mapping | list | tuple):
        return {str(key): _taken_child(part, child, f"{where}[{key!r}]") for key, child in _items(part)}
    raise ConfigError(
        f"{where}: expected something with state_dict and load_state_dict, an object of flax.nnx, a generator of "
        f"random numbers, or a dict, list or tuple of these, found {type(part).__name__}"
    )


def give(part: Any, state: Plain, where: str = "state") -> None:
    """Set a part to a state that was taken of it, or of one like it.

    Raises:
        StateError: It is of another part.
    """
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        part.load_state_dict(_unplain(state, where))
    elif _is_nnx(part):
        nnx = _nnx()
        nnx.update(part, _with_leaves(nnx.state(part), state, where))
    elif _generator_state(part) is not None:
        _set_generator(part, _unplain(state, where))
    else:
        keys = [str(key) for key, _ in _items(part)]
        if keys != list(state):
            raise StateError(f"{where}: expected {keys}, found {list(state)} in what was saved")
        for key, child in list(_items(part)):
            place = f"{where}[{key!r}]"
            if _is_part(child):
                give(child, state[str(key)], place)
            else:
                part[key] = _like(child, state[str(key)], place)


def _taken_child(parent: Any, child: Any, where: str) -> Plain:
    if _is_part(child):
        return taken(child, where)
    if not isinstance(parent, MutableMapping | MutableSequence):
        raise ConfigError(
            f"{where}: expected something that can be set anew where it lies, found {type(child).__name__}; put it in "
            "a dict, whose values are replaced"
        )
    # A tree of JAX may be of classes that only the training knows: its leaves are saved, and set into the one there.
    if "jax" in sys.modules and _is_tree(child):
        return {"leaves": _plain_leaves(child, where)}
    return {"whole": _plain(child, where)}


def _is_part(value: Any) -> bool:
    return (
        (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
        or _is_nnx(value)
        or _generator_state(value) is not None
        or isinstance(value, dict | list)
        or (isinstance(value, tuple) and any(map(_is_part, value)) and not hasattr(value, "_fields"))
    )


def _items(part: Any) -> list[tuple[Any, Any]]:
    return list(part.items()) if isinstance(part, Mapping) else list(enumerate(part))


def _like(before: Any, state: Plain, where: str) -> Any:
    """A value that was in a dict, of the kind and on the device of the one that is there."""
    if "leaves" in state:
        return _with_leaves(before, state["leaves"], where)
    return _leaf_like(before, _unplain(state["whole"], where))


# ---------------------------------------------------------------------- generators


def _generator_state(part: Any) -> Any:
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


def _set_generator(part: Any, state: Any) -> None:
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
    return _plain(state, "generators")


def set_global_generators(saved: Plain) -> None:
    """Set them to states that ``global_generators`` gave."""
    state = _unplain(saved, "generators")
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


# ---------------------------------------------------------------------- trees of jax


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_nnx(part: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(part, nnx.Pytree)


def _is_tree(value: Any) -> bool:
    from jax.tree_util import all_leaves

    return value is not None and not all_leaves([value])


def _plain_leaves(tree: Any, where: str) -> Plain:
    """The leaves of a tree by where they are in it."""
    from jax.tree_util import keystr, tree_flatten_with_path

    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path): _plain(leaf, f"{where}{keystr(path)}") for path, leaf in leaves}


def _with_leaves(tree: Any, state: Plain, where: str) -> Any:
    """A tree like this one with the leaves that were saved."""
    from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

    leaves, form = tree_flatten_with_path(tree)
    places = [keystr(path) for path, _ in leaves]
    if places != list(state):
        different = (sorted(set(places) ^ set(state)) or places)[:3]
        raise StateError(f"{where}: expected the same tree as was saved, found another, which differs at {different}")
    return tree_unflatten(
        form, [_leaf_like(leaf, _unplain(state[place], where)) for place, (_, leaf) in zip(places, leaves, strict=True)]
    )


def _leaf_like(before: Any, saved: Any) -> Any:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(before, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(before.device).requires_grad_(before.requires_grad)
    if jax is None:
        return saved
    if isinstance(before, jax.Array) and isinstance(saved, jax.Array) and before.committed:
        return jax.device_put(saved, before.sharding)
    return saved


# ---------------------------------------------------------------------- values


def _plain(value: Any, where: str) -> Plain:
    """Any value as nested dicts: what it is stands under the one key of each."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Mapping):
        keys = {str(number): _plain(key, where) for number, key in enumerate(value)}
        values = {str(number): _plain(child, f"{where}[{key!r}]") for number, (key, child) in enumerate(value.items())}
        return {"mapping": {"keys": keys, "values": values}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: {str(number): _plain(child, f"{where}[{number}]") for number, child in enumerate(value)}}
    if isinstance(value, bytes):
        return {"bytes": np.frombuffer(value, np.uint8)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU":
        return {"array": np.array(value)}
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
        return _plain(tuple(value), "") if isinstance(value, torch.Size) else {"torch": str(value)}
    if jax is not None and isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return {"key": {"data": np.array(jax.random.key_data(value)), "of": str(jax.random.key_impl(value))}}
        return {"jax": np.array(value)}
    return None


def _unplain(state: Plain, where: str) -> Any:
    """The value that ``_plain`` was given."""
    if not isinstance(state, dict) or len(state) != 1:
        raise StateError(f"{where}: expected a value that was stored, found {state!r:.80}")
    ((kind, held),) = state.items()
    if kind in ("value", "array"):
        return held
    if kind == "mapping":
        keys = [_unplain(key, where) for key in held["keys"].values()]
        return dict(zip(keys, (_unplain(child, where) for child in held["values"].values()), strict=True))
    if kind in ("tuple", "list"):
        values = [_unplain(child, where) for child in held.values()]
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
    return jax.numpy.array(held)  # a copy: on the host JAX would otherwise read the memory that was given
