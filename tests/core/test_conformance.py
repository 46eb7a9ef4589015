"""The loader of NumPy batches does what is asked of adapters, so that what is asked of them is possible."""

from __future__ import annotations

from mouse_core.testing import AdapterConformance


class TestCore(AdapterConformance):
    pass
