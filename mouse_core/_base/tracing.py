"""The error for draws on the host inside a function that JAX traces, where the drawn numbers would become constants."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mouse_core.errors import ConfigError


def refuse_traced(caller: str) -> None:
    """Raise ConfigError if a stateful call (a draw, a write, a next batch) is made while JAX traces a function.

    JAX runs the Python code only once, during tracing, so the compiled function would always use the same batch. The
    core imports no framework, so the check works only if the program has imported JAX. The check takes a microsecond.

    Raises:
        ConfigError: The call is inside ``jax.jit``, ``scan``, ``vmap`` or a similar transformation. The call is allowed
            in callbacks, and in functions that ``jax.grad`` executes without compilation, because their Python code
            runs at every call.
    """
    if "jax" not in sys.modules:
        return
    asking = _asking()
    if asking is None or asking[0](convention="mouse") == asking[1] or not _is_compiled():
        return
    raise ConfigError(
        f"{caller}: expected a call outside of jax.jit, scan, vmap and other functions that JAX traces, found a call "
        "inside, which would run once, with a constant result; call it before the function and pass its result to "
        "the function as an argument, or call it in jax.experimental.io_callback"
    )


@lru_cache(maxsize=1)
def _asking() -> tuple[Callable[..., Any], Any] | None:
    """Return the function of JAX that returns the current trace, and the function's result outside of all traces; None
    if this version of JAX has no such function.
    """
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
    """Return whether the current trace compiles or maps a function, instead of computing values immediately."""
    jax: Any = sys.modules["jax"]
    # Nothing else distinguishes a mapped function from ``jax.grad``; without this name, a function that ``vmap`` runs
    # step by step is not detected.
    under_vmap = getattr(sys.modules.get("jax.extend.core"), "unsafe_am_i_under_a_vmap_DO_NOT_USE", lambda: False)
    return isinstance(jax.numpy.zeros(()), jax.core.Tracer) or bool(under_vmap())
