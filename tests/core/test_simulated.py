"""Simulated worlds of everything durable: some for each kind, and more of stores in the slow lane."""

import gc
from collections.abc import Iterator

import pytest

from tests.simulate import KINDS, end_other_process, fault_of, warm


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    warm()
    yield
    end_other_process()
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_simulated_worlds_keep_their_promises(kind: str) -> None:
    broken = {seed: fault for seed in range(1000, 1004) if (fault := fault_of(seed, kind=kind))}
    assert not broken, f"python -m tests.simulate --kind {kind} --seed {min(broken)}"


@pytest.mark.slow
def test_many_worlds_of_stores_keep_their_promises() -> None:
    assert not [seed for seed in range(2000, 2060) if fault_of(seed, kind="store")]
