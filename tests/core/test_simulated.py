"""Simulated worlds of everything durable: some for each kind, and those that once broke a promise."""

import pytest

from tests.simulate import KINDS, fault_of, warm


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


@pytest.mark.parametrize("kind", KINDS)
def test_simulated_worlds_keep_their_promises(kind: str) -> None:
    broken = {seed: fault for seed in range(1000, 1003) if (fault := fault_of(seed, kind=kind))}
    assert not broken, f"python -m tests.simulate --kind {kind} --seed {min(broken)}"


# A buffer named its owner in one write; after half of it, every step refused the buffer that had opened the folder.
# A log was rewritten and became shorter; after a power cut, the old note beside it said that records were missing. Of a
# record in two pages, a power cut left the second page, which looked like damage. Of several records that were not
# synced, a power cut left a later page. Sealed rows were on the disk before the log that says which client sent them,
# and of several writes whose rows were lost, only the last counted as lost.
# Mapped rows whose change was in the journal lost their texts; and no mapped row was left, so that no file was there.
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("rollouts", 145),
        ("log", 1003),
        ("rollouts", 124),
        ("log", 50019),
        ("log", 50062),
        ("clients", 4),
        ("clients", 7019),
        ("memmap", 100),
        ("memmap", 4),
    ],
)
def test_worlds_that_broke_a_promise_keep_it(kind: str, seed: int) -> None:
    assert not fault_of(seed, kind=kind)


@pytest.mark.slow
def test_many_worlds_of_stores_keep_their_promises() -> None:
    assert not [seed for seed in range(2000, 2060) if fault_of(seed, kind="store")]
