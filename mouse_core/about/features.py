"""The features that ``datasets`` writes to the metadata of a schema, read and made without ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

HUGGINGFACE = b"huggingface"
"""Key of the features in the metadata of a schema."""


def features_in(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the features of columns by name."""
    try:
        features = json.loads(metadata.get(HUGGINGFACE, b"{}"))["info"]["features"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # written by another program
    return {name: item for name, item in features if isinstance(item, dict)}


def feature_of(data_type: pa.DataType) -> dict[str, Any] | None:
    """Return the feature of a column of numbers or flags; None for others."""
    numbers = pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_boolean(data_type)
    return {"dtype": np.dtype(data_type.to_pandas_dtype()).name, "_type": "Value"} if numbers else None
