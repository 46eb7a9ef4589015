"""Comparisons for tests: of streams, of a framework's arrays with NumPy arrays, of signatures, and of errors."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import as_arrays, as_numpy, canonical
from mouse_core.errors import ConfigError
from mouse_core.nested import is_node


def stream_digest(loader: Any, n: int) -> str:
    """Return a digest of the next ``n`` batches of a loader: names, kinds, shapes, and the bits of every value.

    Batches of NumPy, PyTorch and JAX have the same digest if and only if they have the same fields with the same
    values. The width of a number is ignored: an integer counts as int32 if all values of its array fit, and otherwise
    as int64. A float counts as float32 if the conversion is exact, and otherwise as float64. For example, a stream that
    JAX without x64 stores in 32 bits has the digest of the 64-bit stream, unless narrowing changed a value. All NaNs
    count as equal; -0.0 and 0.0 count as different.

    Args:
        loader: A loader, which advances by ``n`` batches; a ``BatchSource``, whose first batches are used; or any
            iterable of batches. A batch is a mapping of names to arrays, or a tuple of such views.
        n: Number of batches.

    Returns:
        32 hexadecimal digits.

    Raises:
        ConfigError: There are fewer than ``n`` batches.

    Example:
        >>> stream_digest([{"reward": np.zeros((2, 3))}], 1) == stream_digest([{"reward": np.zeros((2, 3), "f4")}], 1)
        True
    """
    digest = hashlib.sha256()
    taken = 0
    for batch in islice(_batches(loader), n):
        for view in batch if isinstance(batch, tuple) else (batch,):
            for name, values in sorted(as_arrays(view).items()):
                same = canonical(values)
                digest.update(f"{name!r} {same.dtype.str} {same.shape};".encode())
                digest.update(same.tobytes())
            digest.update(b"end of view;")
        digest.update(b"end of batch;")
        taken += 1
    if taken < n:
        raise ConfigError(f"stream_digest: expected {n} batches, found {taken}")
    return digest.hexdigest()[:32]


def _batches(loader: Any) -> Iterator[Any]:
    if hasattr(loader, "next_batch"):
        return (loader.next_batch() for _ in count())
    if hasattr(loader, "plan"):
        return (loader[index] for index in count(loader.epoch_start))
    if isinstance(loader, Iterable):
        return iter(loader)
    raise ConfigError(f"stream_digest: expected a loader or batches, found {type(loader).__name__}")


class InArrays:
    """Conversions and comparisons between the arrays of an adapter's framework and NumPy arrays.

    Attributes:
        replaced_dtypes: The dtype that the adapter delivers for each dtype that the framework does not have.
    """

    replaced_dtypes: Mapping[Any, npt.DTypeLike] = {}

    def to_numpy(self, values: Any) -> npt.NDArray[Any]:
        """Convert a delivered array to NumPy; override it for a framework that ``as_numpy`` does not know."""
        return as_numpy(values)

    def from_numpy(self, values: npt.NDArray[Any]) -> Any:
        """Convert a NumPy array to an array of the framework, as a user would pass it; override this method."""
        return values

    def given(self, tree: Any) -> Any:
        """Convert rows of NumPy arrays to rows of the framework's arrays."""
        if isinstance(tree, dict):
            return {name: self.given(child) for name, child in tree.items()}
        return tuple(map(self.given, tree)) if isinstance(tree, tuple) else self.from_numpy(np.array(tree))

    def same(self, found: Any, expected: Any, where: str, *, exact: bool = True) -> None:
        """Assert that two trees have the same fields and values, in the framework's dtypes; with ``exact``, values must
        be equal bit by bit.
        """
        for (path, actual), (expected_path, wanted_leaf) in zip(leaves(found), leaves(expected), strict=True):
            place = f"{where}: {'.'.join(path)}"
            assert path == expected_path, f"{place}: expected the field {expected_path}"
            if actual is None or wanted_leaf is None:
                assert actual is wanted_leaf, f"{place}: expected {wanted_leaf!r}, found {actual!r}"
                continue
            array, wanted = self.to_numpy(actual), np.asarray(wanted_leaf)
            replaced = {np.dtype(dtype): np.dtype(instead) for dtype, instead in self.replaced_dtypes.items()}
            wanted = wanted.astype(replaced.get(wanted.dtype, wanted.dtype))
            assert array.dtype == wanted.dtype, f"{place}: expected {wanted.dtype}, found {array.dtype}"
            assert array.shape == wanted.shape, f"{place}: expected shape {wanted.shape}, found {array.shape}"
            if exact:
                np.testing.assert_array_equal(array, wanted, place)
            else:  # a framework may add numbers in another order, with other rounding
                np.testing.assert_allclose(array, wanted, 1e-5, 1e-5, err_msg=place)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each leaf of nested mappings, tuples, lists and dataclasses, sorted by name."""
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


def same_arguments(adapter: Callable[..., Any], core: Callable[..., Any]) -> None:
    """Assert that an adapter takes the arguments of ``core``, in the same order and with the same defaults.

    An argument that only the adapter has must be keyword-only. If the adapter has ``*args`` and ``**options``, the test
    assumes that the adapter forwards the arguments that it does not name.
    """
    found, expected = inspect.signature(adapter).parameters, inspect.signature(core).parameters
    kinds = {parameter.kind for parameter in found.values()}
    for name, parameter in expected.items():
        assert name in found or parameter.VAR_KEYWORD in kinds, f"the argument {name} is missing"
        if name in found:
            assert found[name].default == parameter.default, f"{name}: expected the default {parameter.default!r}"
    positional, wanted = (
        [parameter.name for parameter in parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        for parameters in (found, expected)
    )
    wanted = wanted[: len(positional)] if inspect.Parameter.VAR_POSITIONAL in kinds else wanted
    assert positional == wanted, f"expected the positional arguments {wanted}, found {positional}"


def refused(kind: type[Exception], call: Callable[[], Any], says: str = "") -> Exception:
    """Assert that a call raises an error of the given kind, with the text ``says`` in its message; return the error."""
    raised: Exception | None = None
    result = None
    try:
        result = call()
    except kind as error:
        raised = error
    assert raised is not None, f"expected {kind.__name__}, found {result!r:.80}"
    assert says in str(raised), f"expected a message with {says!r}, found {raised}"
    return raised
