"""Converts the state of a training to plain values and arrays, and back.

A *part* of the state is an object that can be restored in place: an object with ``state_dict`` and ``load_state_dict``
(modules and optimizers of torch, loaders, buffers), an object of ``flax.nnx``, a random generator, or a dict or list,
whose values are replaced. This module imports no framework, because the program has already imported each framework
that a state needs.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError, StateError

Plain = dict[str, Any]
"""Nested dicts of texts, numbers and arrays."""


def plain(value: Any, where: str) -> Plain:
    """Convert a value to nested dicts; each dict has one key, which names the type of its value."""
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
    raise ConfigError(
        f"{where}: expected numbers, texts and arrays, found {type(value).__name__}, which cannot be stored"
    )


def _plain_of_framework(value: Any) -> Plain | None:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        # NumPy lacks some of torch's dtypes, so bytes and the name of the dtype are stored.
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
    """Convert the result of ``plain`` back to the value."""
    if not isinstance(state, dict) or len(state) != 1:
        raise StateError(f"{where}: expected a value as a study stores it, found {state!r:.80}")
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
    made = jax.numpy.array(held)  # a copy, because on the host JAX could share the original memory
    return _weak(made) if kind == "weak" else made


def _weak(array: Any) -> Any:
    """Return a JAX array with a weak type: like the type of a Python number, it does not widen other dtypes."""
    import jax.numpy as jnp

    # An array filled with a Python number has a weak type and keeps it when its values are set.
    filled = jnp.full(array.shape, array.dtype.type(0).item())
    return filled.at[...].set(array) if filled.weak_type and filled.dtype == array.dtype else array


# ---------------------------------------------------------------------- generators


def generator_state(part: Any) -> Any:
    """Return the state of a random generator; None for other objects."""
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
    """Return the states of the global generators of Python, NumPy and, if it is imported, torch."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return plain(state, "generators")


def set_global_generators(saved: Plain) -> None:
    """Restore the states that ``global_generators`` returned."""
    state = unplain(saved, "generators")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            torch.cuda.set_rng_state_all(state["cuda"])


def seed_global_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and, if it is imported, torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


# ---------------------------------------------------------------------- parts


class InitialState:
    """The objects and arrays that a state contained before the first step, by path.

    An optimizer, a function or another variable may refer to a tensor or array of this state. Therefore an array of the
    initial state is overwritten in place when the run resumes. If a step has replaced an array, a new array is created
    when the run resumes.

    Args:
        part: The training's state before the first step.
        where: The name of the state in error messages.
    """

    def __init__(self, part: Any, where: str = "state") -> None:
        self._objects: dict[str, Any] = {}
        self._leaves: dict[str, list[str]] = {}
        self._parts: set[str] = set()
        if _is_container(part):
            self._look(part, where)

    def _look(self, part: Any, where: str) -> None:
        for key, child in _items(part):
            place = f"{where}[{key!r}]"
            if _is_part(child):
                self._parts.add(place)
                if _is_container(child):
                    self._look(child, place)
            elif _is_memory(child):
                self._objects[place] = weakref.ref(child)
            elif _is_own_tree(child):
                self._leaves[place] = list(_leaves(child))

    def has(self, value: Any, where: str) -> bool:
        """Whether this tensor or array object was in the initial state at ``where``."""
        return where in self._objects and self._objects[where]() is value

    def check(self, value: Any, where: str) -> None:
        """Raise ConfigError for an object that a resumed run could not create again.

        Raises:
            ConfigError: The object, for example a module, an optimizer or a tree of JAX, was added after the first
                step.
        """
        if where in self._parts if _is_part(value) else self._leaves.get(where) == list(_leaves(value)):
            return
        raise ConfigError(
            f"{where}: expected numbers, texts, arrays, dicts and lists of these, or an object of the initial state of "
            f"the training, found {type(value).__name__}, which was added or changed later and cannot be created again"
        )


def taken(
    part: Any, where: str = "state", begun: InitialState | None = None, numbers: dict[int, int] | None = None
) -> Plain:
    """Return the state of a part.

    Args:
        part: The part.
        where: The name of the state in error messages.
        begun: The state before the first step; None: the current state.
        numbers: The index of each array of the whole state, by its identity, because an array may occur at several
            paths.

    Raises:
        ConfigError: A value cannot be stored, or cannot be restored.
    """
    numbers = {} if numbers is None else numbers
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return {"part": plain(part.state_dict(), where), "modes": _modes(part)}
    if _is_nnx(part):
        return {"part": _plain_leaves(_nnx().state(part), where), "modes": _modes(part)}
    if (state := generator_state(part)) is not None:
        return {"part": plain(state, where)}
    if isinstance(part, Mapping | list | tuple):
        children, fixed = _items(part), not isinstance(part, MutableMapping | MutableSequence)
        return {
            "list" if isinstance(part, list) else "tuple" if isinstance(part, tuple) else "dict": {
                str(number): {
                    "key": plain(key, where),
                    **_taken_child(child, f"{where}[{key!r}]", fixed, begun, numbers),
                }
                for number, (key, child) in enumerate(children)
            }
        }
    raise ConfigError(
        f"{where}: expected an object with state_dict and load_state_dict, an object of flax.nnx, a generator of "
        f"random numbers, or a dict, list or tuple of these, found {type(part).__name__}"
    )


def _taken_child(child: Any, where: str, fixed: bool, begun: InitialState | None, numbers: dict[int, int]) -> Plain:
    if _is_part(child):
        if begun is not None and not isinstance(child, dict | list):
            begun.check(child, where)
        return taken(child, where, begun, numbers)
    if fixed:
        raise ConfigError(
            f"{where}: expected an object that can be restored in place, found {type(child).__name__}; put it in "
            "a dict, whose values are replaced"
        )
    # A tree of JAX may contain classes that only the training defines, so only its leaves are saved, and put into the
    # current tree.
    if _is_own_tree(child):
        if begun is not None:
            begun.check(child, where)
        return {"leaves": _plain_leaves(child, where)}
    if not _is_memory(child):
        return {"whole": plain(child, where)}
    stays = begun is None or begun.has(child, where)
    return {"whole": plain(child, where), "memory": numbers.setdefault(id(child), len(numbers)), "stays": stays}


def give(part: Any, state: Plain, where: str = "state", made: dict[int, Any] | None = None) -> None:
    """Restore a part from a state that ``taken`` returned, for the same part or for an equal part of another process.

    Args:
        part: The part.
        state: The state.
        where: The name of the state in error messages.
        made: The restored arrays by the indices under which they were saved.

    Raises:
        StateError: The state belongs to another part.
    """
    forms = ("dict", "list", "tuple") if _is_container(part) else ("part",)
    form = next((name for name in forms if name in state), None)
    if form is None:
        raise StateError(f"{where}: expected the state of a {type(part).__name__}, found the state of another type")
    if form != "part":
        _give_children(part, state[form], where, {} if made is None else made)
        return
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        part.load_state_dict(unplain(state["part"], where))
    elif _is_nnx(part):
        nnx = _nnx()
        nnx.update(part, _with_leaves(nnx.state(part), state["part"], where))
    else:
        set_generator(part, unplain(state["part"], where))
    _set_modes(part, state.get("modes", {}))


def _give_children(part: Any, saved: Plain, where: str, made: dict[int, Any]) -> None:
    before = dict(_items(part))
    after: dict[Any, Any] = {}
    for entry in saved.values():
        key = unplain(entry["key"], where)
        after[key] = _child(before.get(key), entry, f"{where}[{key!r}]", made)
    if isinstance(part, MutableMapping):
        if list(before) != list(after):
            part.clear()
        part.update(after)
    elif isinstance(part, MutableSequence):
        part[:] = list(after.values())
    elif list(before) != list(after):
        raise StateError(f"{where}: expected the entries {list(before)}, found {list(after)} in the saved state")


def _child(before: Any, entry: Plain, where: str, made: dict[int, Any]) -> Any:
    """Return the restored value of a dict's or list's entry, whose current value is ``before``."""
    if "whole" in entry:
        number = entry.get("memory")
        if number is None or number not in made:
            value = _leaf_like(before, unplain(entry["whole"], where), stays=entry.get("stays", False))
            if number is None:
                return value
            made[number] = value
        return made[number]
    if "leaves" in entry:
        return _with_leaves(before, entry["leaves"], where)
    part = before
    if "dict" in entry and not isinstance(before, dict):
        part = {}
    elif "list" in entry and not isinstance(before, list):
        part = []
    if not _is_part(part):
        raise StateError(
            f"{where}: expected an object of the same type as the saved object, found {type(before).__name__}"
        )
    give(part, entry, where, made)
    return part


def _modes(part: Any) -> Plain:
    """Return the training and evaluation flags of a module and its submodules, by name.

    The flags are ``training`` in torch, and boolean attributes in NNX (``deterministic``, ``use_running_average``).
    """
    return {f"{name}:{mode}": getattr(module, mode) for name, module, mode in _modes_of(part)}


def _set_modes(part: Any, saved: Plain) -> None:
    for name, module, mode in _modes_of(part):
        now = saved.get(f"{name}:{mode}")
        if now is not None and getattr(module, mode) != now:
            setattr(module, mode, now)


def _modes_of(part: Any) -> list[tuple[str, Any, str]]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.nn.Module):
        return [(name, module, "training") for name, module in part.named_modules()]
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(part, nnx.Module):
        return []
    return [
        ("/".join(map(str, path)), module, mode)
        for path, module in nnx.iter_modules(part)
        for mode, value in vars(module).items()
        if isinstance(value, bool)
    ]


def _is_part(value: Any) -> bool:
    return (
        (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
        or _is_nnx(value)
        or generator_state(value) is not None
        or isinstance(value, dict | list)
        or (isinstance(value, tuple) and any(map(_is_part, value)) and not hasattr(value, "_fields"))
    )


def _is_container(value: Any) -> bool:
    """Whether a value is a dict, list or tuple without the methods ``state_dict`` and ``load_state_dict``."""
    if hasattr(value, "state_dict") or _is_nnx(value):
        return False
    return isinstance(value, Mapping | list) or (isinstance(value, tuple) and _is_part(value))


def _is_memory(value: Any) -> bool:
    """Whether a value is an array that can be overwritten in place."""
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _items(part: Any) -> list[tuple[Any, Any]]:
    return list(part.items()) if isinstance(part, Mapping) else list(enumerate(part))


# ---------------------------------------------------------------------- trees of jax


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_nnx(part: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(part, nnx.Pytree)


def _is_own_tree(value: Any) -> bool:
    """Whether a value is a JAX pytree that contains more than plain containers and plain values."""
    if "jax" not in sys.modules or value is None or _is_simple(value):
        return False
    from jax.tree_util import all_leaves

    return not all_leaves([value])


def _is_simple(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_simple, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | np.ndarray | np.generic)


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    from jax.tree_util import keystr, tree_leaves_with_path

    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _plain_leaves(tree: Any, where: str) -> Plain:
    return {place: plain(leaf, f"{where}{place}") for place, leaf in _leaves(tree).items()}


def _with_leaves(tree: Any, state: Plain, where: str) -> Any:
    """Return a tree with the structure of ``tree`` and the saved leaves."""
    from jax.tree_util import tree_structure, tree_unflatten

    leaves = _leaves(tree)
    if list(leaves) != list(state):
        different = (sorted(leaves.keys() ^ state.keys()) or list(leaves))[:3]
        raise StateError(f"{where}: expected a tree with the saved structure, found different names: {different}")
    return tree_unflatten(
        tree_structure(tree), [_leaf_like(leaf, unplain(state[place], where)) for place, leaf in leaves.items()]
    )


def _leaf_like(before: Any, saved: Any, *, stays: bool = False) -> Any:
    """Return a saved value on the device of ``before``. If ``stays``, and shape and dtype match, the value is written
    to the memory of ``before``."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(before, torch.Tensor) and isinstance(saved, torch.Tensor):
        if stays and (before.shape, before.dtype) == (saved.shape, saved.dtype):
            with torch.no_grad():
                return before.copy_(saved)
        return saved.to(before.device).requires_grad_(before.requires_grad)
    if isinstance(before, np.ndarray) and isinstance(saved, np.ndarray):
        if stays and before.flags.writeable and (before.shape, before.dtype) == (saved.shape, saved.dtype):
            before[...] = saved
            return before
        return saved
    if jax is not None and isinstance(before, jax.Array) and isinstance(saved, jax.Array) and before.committed:
        return jax.device_put(saved, before.sharding)
    return saved
