"""Returns and advantages, computed by scans, for long rollouts under ``jax.jit``; see ``mouse_core.rollouts.returns``.

The functions have the arguments, formulas and results of the functions with the same names in ``mouse_core.rollouts``.
JAX can also trace the functions of the core, but then compiles their operations once for each row. The functions of
this module use one ``jax.lax.scan``, whose compilation takes the same time for any number of rows. ``n_step_returns``
needs no scan, so it is the function of the core.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from mouse_core.rollouts import returns
from mouse_core.rollouts.returns import n_step_returns, normalized

__all__ = ["discounted_returns", "gae", "lambda_returns", "n_step_returns", "normalized", "scan", "vtrace"]


def scan(terms: jax.Array, decays: jax.Array, last: jax.Array) -> jax.Array:
    """Compute x_t = terms_t + decays_t x_{t+1} from the last row to the first by a ``jax.lax.scan``.

    Args:
        terms, decays: The arrays of terms and decays, ``[T, ...]``.
        last: The value x_T, ``[...]``.

    Returns:
        x, ``[T, ...]``.
    """
    dtype = jnp.result_type(terms, decays, last)

    def step(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        here = (row[0] + row[1] * following).astype(dtype)
        return here, here

    found: jax.Array = jax.lax.scan(step, last.astype(dtype), (terms, decays), reverse=True)[1]
    return found


gae = partial(returns.gae, recurrence=scan)
"""Return generalized advantage estimates and the returns; see ``mouse_core.rollouts.gae``."""

lambda_returns = partial(returns.lambda_returns, recurrence=scan)
"""Return lambda-returns; see ``mouse_core.rollouts.lambda_returns``."""

discounted_returns = partial(returns.discounted_returns, recurrence=scan)
"""Return discounted sums of rewards; see ``mouse_core.rollouts.discounted_returns``."""

vtrace = partial(returns.vtrace, recurrence=scan)
"""Return V-trace targets and advantages; see ``mouse_core.rollouts.vtrace``."""
