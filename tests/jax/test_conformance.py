"""The JAX adapter does what an adapter must do."""

from __future__ import annotations

import mouse_jax
from mouse_core.testing import AdapterConformance


class TestJax(AdapterConformance):
    loader_class = mouse_jax.PrefetchBatchifier
    narrow = mouse_jax.NARROWED
