"""Refusing to draw on the host while JAX traces a function, in which the draw would become a constant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mouse_core.errors import ConfigError


def refuse_traced(caller: str) -> None:
    """See that a call with a memory of its own (a draw, a write, a next batch) is not made while JAX traces.

    Python runs once there: the compiled function would have the same batch for ever. The core knows no framework, so
    this asks only where somebody else has imported JAX; it takes a microsecond.

    Raises:
        ConfigError: Inside ``jax.jit``, ``scan``, ``vmap`` and the like. In callbacks, and in functions that
            ``jax.grad`` runs step by step, every call is made, and none is refused.
    """
    if "jax" not in sys.modules:
        return
    asking = _asking()
    if asking is None or asking[0](convention="mouse") == asking[1] or not _is_compiled():
        return
    raise ConfigError(
        f"{caller}: expected a call outside of jax.jit, scan, vmap and other functions that JAX traces, found one "
        "inside, where it would be made once, and its result be a constant; make the call first and give its result to "
        "the function as an argument, or call it in jax.experimental.io_callback"
    )


@lru_cache(maxsize=1)
def _asking() -> tuple[Callable[..., Any], Any] | None:
    """Return JAX's function for the current trace, and its value outside of all traces; None if this JAX has none."""
    jax: Any = sys.modules["jax"]
    for name in ("jax.extend.core", "jax.core"):  # the second in JAX before 0.8.2
        try:
            ask = importlib.import_module(name).get_opaque_trace_state
            with jax.ensure_compile_time_eval():
                return ask, ask(convention="mouse")
        except (ImportError, AttributeError):
            continue
    return None


def _is_compiled() -> bool:
    """Whether the current trace makes a function of what it sees, or maps it, rather than computing as it goes."""
    jax: Any = sys.modules["jax"]
    # Nothing else tells that from ``jax.grad``; without it, what is mapped step by step is not found out.
    under_vmap = getattr(sys.modules.get("jax.extend.core"), "unsafe_am_i_under_a_vmap_DO_NOT_USE", lambda: False)
    return isinstance(jax.numpy.zeros(()), jax.core.Tracer) or bool(under_vmap())
