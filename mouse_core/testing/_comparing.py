"""Comparisons for the test suites: arrays of a framework with NumPy's, argument lists, errors."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import as_numpy
from mouse_core.nested import is_node


class InArrays:
    """An adapter's arrays, and how they compare with NumPy's.

    Attributes:
        replaced_dtypes: Dtypes that the framework cannot hold, and what the adapter delivers instead.
    """

    replaced_dtypes: Mapping[Any, npt.DTypeLike] = {}

    def to_numpy(self, values: Any) -> npt.NDArray[Any]:
        """A delivered array as a NumPy array; override it for a framework that ``as_numpy`` does not know."""
        return as_numpy(values)

    def from_numpy(self, values: npt.NDArray[Any]) -> Any:
        """A NumPy array as one of the framework's, as a user would hand it over; override it."""
        return values

    def given(self, tree: Any) -> Any:
        """Rows of NumPy arrays as the user of a framework has them."""
        if isinstance(tree, dict):
            return {name: self.given(child) for name, child in tree.items()}
        return tuple(map(self.given, tree)) if isinstance(tree, tuple) else self.from_numpy(np.array(tree))

    def same(self, found: Any, expected: Any, where: str, *, exact: bool = True) -> None:
        """Check that two batches have equal fields and values, in the dtypes of the framework."""
        for (path, mine), (other, yours) in zip(leaves(found), leaves(expected), strict=True):
            place = f"{where}: {'.'.join(path)}"
            assert path == other, f"{place}: expected the field {other}"
            if mine is None or yours is None:
                assert mine is yours, f"{place}: expected {yours!r}, found {mine!r}"
                continue
            array, wanted = self.to_numpy(mine), np.asarray(yours)
            replaced = {np.dtype(wide): np.dtype(less) for wide, less in self.replaced_dtypes.items()}
            wanted = wanted.astype(replaced.get(wanted.dtype, wanted.dtype))
            assert array.dtype == wanted.dtype, f"{place}: expected {wanted.dtype}, found {array.dtype}"
            assert array.shape == wanted.shape, f"{place}: expected shape {wanted.shape}, found {array.shape}"
            if exact:
                np.testing.assert_array_equal(array, wanted, place)
            else:  # sums of other orders
                np.testing.assert_allclose(array, wanted, 1e-5, 1e-5, err_msg=place)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The arrays of nested mappings, tuples, lists and dataclasses with their names, in the order of names."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if hasattr(tree, "keys"):
        for name in sorted(tree.keys()):
            yield from leaves(tree[name], (*path, name))
    elif isinstance(tree, tuple) or (isinstance(tree, list) and is_node(tree)):
        for number, child in enumerate(tree):
            yield from leaves(child, (*path, str(number)))
    elif tree is not None:
        yield path, tree


def same_arguments(mine: Callable[..., Any], core: Callable[..., Any]) -> None:
    """Check that a function has the core's arguments in order and with defaults; additional ones are keyword-only."""
    found, expected = inspect.signature(mine).parameters, inspect.signature(core).parameters
    for name, parameter in expected.items():
        assert name in found, f"the argument {name} is missing"
        assert found[name].default == parameter.default, f"{name}: expected the default {parameter.default!r}"
    places = [[one.name for one in both.values() if one.kind is not one.KEYWORD_ONLY] for both in (found, expected)]
    assert places[0] == places[1], f"expected the arguments {places[1]} by place, found {places[0]}"


def refused(kind: type[Exception], call: Callable[[], Any], says: str = "") -> Exception:
    """The error of a kind, and with a text, that a call raises."""
    raised: Exception | None = None
    found = None
    try:
        found = call()
    except kind as error:
        raised = error
    assert raised is not None, f"expected {kind.__name__}, found {found!r:.80}"
    assert says in str(raised), f"expected a message with {says!r}, found {raised}"
    return raised
