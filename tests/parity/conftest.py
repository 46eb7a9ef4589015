"""What tests of parity share."""

from collections.abc import Iterator
from contextlib import nullcontext

import jax
import pytest


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether JAX has numbers of 64 bits."""
    with jax.enable_x64(True) if request.param else nullcontext():
        yield request.param
