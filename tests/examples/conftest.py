"""What tests of examples share: an example as a module."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.programs import EXAMPLES


@pytest.fixture
def import_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example by its name, as a script that stands beside it does."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def example(request: pytest.FixtureRequest, import_example: Callable[[str], ModuleType]) -> ModuleType:
    """The example that the test is parametrised with, or that its file names as `EXAMPLE`."""
    return import_example(getattr(request, "param", None) or request.module.EXAMPLE)
