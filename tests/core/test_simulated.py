"""Simulated worlds of everything durable: some for each kind, and more of stores in the slow lane."""

import gc
from collections.abc import Iterator

import pytest

from tests.mutate import PLANTED, planted
from tests.simulate import KINDS, end_other_process, fault_of, warm

SEEDS = {
    "log": (1000, 3113),
    "pages": (3000, 3002, 3011, 3060),
    "store": (3003, 3010, 3043, 3122),
    "clients": (3001, 3012, 3045),
    "memmap": (407, 481, 1000, 3068, 3117),
    "rollouts": (3023, 3055, 9004),
    "cache": (1000, 1001),
}
"""Seeds of each kind, most of which find faults that ``python -m tests.mutate --planted`` plants."""


@pytest.fixture(scope="module")
def _warm() -> Iterator[None]:
    warm()
    yield
    end_other_process()
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_worlds_keep_their_promises(kind: str) -> None:
    broken = {seed: fault for seed in SEEDS[kind] if (fault := fault_of(seed, kind=kind))}
    assert not broken, f"python -m tests.simulate --kind {kind} --seed {min(broken)}"


def test_planted_faults_are_texts_of_the_code() -> None:
    assert len(planted()) == len(PLANTED) >= 30


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
def test_many_worlds_of_stores_keep_their_promises() -> None:
    assert not [seed for seed in range(2000, 2060) if fault_of(seed, kind="store")]
