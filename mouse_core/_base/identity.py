"""Computes identities of samplers, derivations and stored values: texts that are the same in every process.

The module also finds the common prefix of two sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def canonical(value: Any) -> bytes:
    """Return bytes that are equal for equal values, even if Arrow encodes the values differently."""
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        # If the pixels are stored, their original path does not matter.
        value = os.path.basename(value["path"] or "") if value["bytes"] is None else value["bytes"]
    if isinstance(value, bytes):
        value = hashlib.sha256(value).hexdigest()
    return repr(value).encode() + b"\0"


def derivation_identity(derivation: object) -> str:
    """Return the identity of a derivation, like ``sampler_identity``; it includes all values of arrays, which ``repr``
    would abbreviate.

    Raises:
        ConfigError: An attribute, such as a function, has no identity that depends only on its value.
    """
    if "..." not in repr(derivation):
        return sampler_identity(derivation, "derived fields: expected a derivation")
    return _by_attributes(derivation, "derived fields: expected a derivation")


def sampler_identity(sampler: object, wanted: str = "sampling: expected a sampler") -> str:
    """Return the sampler's ``repr``. If the ``repr`` is Python's default, which contains an address, return the
    sampler's class and attributes instead.

    Args:
        sampler: The sampler.
        wanted: The prefix of the error text.

    Raises:
        ConfigError: An attribute, such as a function, has no identity that depends only on its value.
    """
    if _has_repr(sampler):
        shown = repr(sampler)
        if not _ADDRESS.search(shown):
            return shown
    return _by_attributes(sampler, wanted)


def _by_attributes(sampler: object, wanted: str) -> str:
    kind = type(sampler)
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    values = {name: getattr(sampler, name) for name in slots if hasattr(sampler, name)} | getattr(
        sampler, "__dict__", {}
    )
    shown = ", ".join(
        f"{name}={_canonical(values[name], f'{kind.__name__}.{name}', wanted)}" for name in sorted(values)
    )
    return f"{kind.__module__}.{kind.__qualname__}({shown})"


def _canonical(value: Any, where: str, wanted: str) -> str:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{value.dtype.str}{value.shape}:{digest}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(_canonical(item, where, wanted) for item in value)}]"
    if isinstance(value, Mapping):
        items = sorted((_canonical(key, where, wanted), _canonical(item, where, wanted)) for key, item in value.items())
        return f"{type(value).__name__}{items}"
    if isinstance(value, Set):
        return f"{type(value).__name__}{sorted(_canonical(item, where, wanted) for item in value)}"
    shown = repr(value)
    if _ADDRESS.search(shown):
        if not _has_repr(value) and hasattr(value, "__dict__"):
            return sampler_identity(value, wanted)
        raise ConfigError(
            f"{wanted} whose repr describes its value (as for a frozen dataclass), for the "
            f"fingerprint of a checkpoint; found {where} = {shown:.80}"
        )
    return shown


def _has_repr(value: object) -> bool:
    own: Any = type(value).__repr__
    return own is not object.__repr__


def fingerprint_of(identity: Sequence[Any]) -> str:
    """Return the fingerprint of a source with this identity."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def common_start(ones: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences. Example: for (3, 4, 5) and (3, 4, 6, 7), the length is
    2.
    """
    most = min(len(ones), len(others))
    if ones[:most] == others[:most]:
        return most
    return bisect_left(range(1, most + 1), True, key=lambda count: ones[:count] != others[:count])
