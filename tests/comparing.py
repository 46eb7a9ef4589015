"""Trees of a framework's arrays beside trees of NumPy's."""

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mouse_core.nested import flatten


def leaves(tree: Any) -> dict[Any, Any]:
    """The arrays of a tree by name: of dicts, tuples, lists, TensorDicts and dataclasses."""
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {field.name: getattr(tree, field.name) for field in fields(tree)}
    return flatten(tree.to_dict() if hasattr(tree, "batch_size") and hasattr(tree, "to_dict") else tree)


def host(values: Any) -> Any:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def same(found: Any, expected: Any, *, close: float = 0.0, but: Collection[str] = (), strict: bool = False) -> None:
    """The same names and values, which are equal unless ``close`` says how far sums may differ; with dtypes if strict.

    ``but`` has names of fields that are not compared.
    """
    ours, theirs = leaves(found), leaves(expected)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        if name not in but:
            np.testing.assert_allclose(
                host(ours[name]), host(values), rtol=close, atol=close, err_msg=str(name), strict=strict
            )
