"""Specs of every kind for tests of laws, and values by a plain oracle."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from mouse_core import spec

INTEGERS = ("int8", "int32", "int64", "uint8", "uint64")
SHAPES = st.sampled_from([(), (1,), (2,), (2, 3)])


def masks(shape: tuple[int, ...], seed: int) -> Any:
    """Booleans of a shape, of which every last axis has a true one."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., seed % shape[-1]] = True
    return mask


@st.composite
def leaves(draw: Any, *, countable: bool = False) -> Any:
    """Specs of one array; with ``countable`` of few values."""
    shape = draw(SHAPES)
    kinds = ["integers", "binary", "codes", "many codes", "hot", "many hot"]
    kind = draw(st.sampled_from(kinds if countable else [*kinds, "floats", "unbounded"]))
    seed = draw(st.integers(0, 99))
    n = draw(st.integers(1, 3 if countable else 9))
    mask = draw(st.booleans())
    match kind:
        case "integers":
            low = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3
            return spec.Bounded(low, low + n - 1, dtype=draw(st.sampled_from(INTEGERS)))
        case "binary":
            return spec.Binary(shape[-1:], draw(st.sampled_from([bool, "int8", "float32"])))
        case "codes":
            return spec.Categorical(
                n, shape, draw(st.sampled_from(INTEGERS)), masks((*shape, n), seed) if mask else None
            )
        case "many codes":
            nvec = [n, 2]
            whole = np.concatenate([masks((*shape, n), seed), masks((*shape, 2), seed + 1)], -1)
            return spec.MultiCategorical(nvec, (*shape, 2), mask=whole if mask else None)
        case "hot":
            return spec.OneHot(
                n,
                (*shape, n),
                draw(st.sampled_from([bool, "int64", "float32"])),
                masks((*shape, n), seed) if mask else None,
            )
        case "many hot":
            whole = np.concatenate([masks((*shape, n), seed), masks((*shape, 2), seed + 1)], -1)
            return spec.MultiOneHot([n, 2], (*shape, n + 2), mask=whole if mask else None)
        case "floats":
            ends = draw(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
            return spec.Bounded(min(ends), max(ends), shape, draw(st.sampled_from(["float32", "float64"])))
        case _:
            return spec.Unbounded(shape, draw(st.sampled_from([*INTEGERS, bool, "float16", "float32", "float64"])))


def composites(entries: Any) -> Any:
    """Nested specs of some leaves, and stacks of them."""
    names = st.sampled_from(["a", "b", "reward"])
    nested = st.dictionaries(names, entries, min_size=1, max_size=2)
    return st.one_of(
        nested.map(spec.Composite),
        nested.map(lambda one: spec.Composite({"next": one, "other": spec.Categorical(3)})),
        st.lists(nested.map(spec.Composite), min_size=1, max_size=3).map(spec.stack_specs),
        nested.map(lambda one: spec.Composite({"x": spec.stack_specs([spec.OneHot(2), spec.OneHot(3)]), **one})),
    )


def domains(*, countable: bool = False) -> Any:
    return st.one_of(leaves(countable=countable), composites(leaves(countable=countable)))


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, their dtypes too."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and one.dtype.kind == "f":
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    return bool(np.asarray(one).dtype == np.asarray(other).dtype and np.array_equal(one, other))


def rows(values: Any, number: Any) -> Any:
    if isinstance(values, dict):
        return {name: rows(one, number) for name, one in values.items()}
    return tuple(rows(one, number) for one in values) if isinstance(values, tuple) else values[number]
