"""Which runs are compared, and what their record proves."""

import dataclasses
from typing import Any

import pytest

import mouse_study
from mouse_study import Results, Run, pairs, same_data
from mouse_study.comparing import verdict
from tests.study.planted import planted, table_of


def run(framework: str = "torch", **facts: Any) -> Run:
    usual = {"status": "done", "steps": 50, "digest": "ab" * 16, "fingerprint": "cd" * 8}
    return Run(run=f"v/{framework}/0", variant="v", framework=framework, seed=0, **usual | facts)


@pytest.mark.parametrize(
    ("both", "other", "said"),
    [
        ({}, {}, ["steps 0 to 49", "ab" * 16, "fingerprint " + "cd" * 8]),
        ({"status": "partial", "steps": 20}, {}, ["steps 0 to 19", "later steps are unknown"]),
        ({}, {"fingerprint": "ef" * 8}, ["differ"]),
        ({}, {"fingerprint": None}, ["not recorded"]),
    ],
)
def test_equal_digests_over_equal_steps_prove_it_and_say_of_what(both: Any, other: Any, said: list[str]) -> None:
    found = same_data(run(**both), run("jax", **both, **other))
    assert found.proven
    assert all(one in found.reason for one in said)
    assert ("are unknown" in found.reason) == bool(both)


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ({"digest": None}, {}, "no digest of the batches of torch"),
        ({"digest": ""}, {"digest": None}, "no digest of the batches of torch and jax"),
        ({}, {"digest": "ff" * 16}, "the digests differ"),
        ({}, {"steps": 49, "status": "partial"}, "torch took 50 steps and jax 49"),
        ({"steps": 0}, {"steps": 0}, "torch took no step"),
    ],
)
def test_nothing_is_proven_without_a_reason_being_said(left: Any, right: Any, said: str) -> None:
    found = same_data(run(**left), run("jax", **right))
    assert not found.proven
    assert said in found.reason


def test_pairs_differ_in_nothing_but_the_framework() -> None:
    results = planted(variants=("b", "a"), frameworks=("torch", "jax", "numpy"), seeds=2)
    found = pairs(results)
    assert [(pair.left.run, pair.right.run) for pair in found[:4]] == [
        ("a/jax/0", "a/numpy/0"),
        ("a/jax/0", "a/torch/0"),
        ("a/numpy/0", "a/torch/0"),
        ("a/jax/1", "a/numpy/1"),
    ]
    assert len(found) == 12
    assert verdict(found).reason == "same data: proven, for 12 pairs of runs"


def test_pairs_are_compared_where_both_have_values() -> None:
    left, right = run(), run("jax")
    rows = [(left, step, "loss", 1.0) for step in (0, 2, 4, 6)]
    rows += [(right, step, "loss", value) for step, value in ((2, 1.0), (3, 9.0), (4, 1.0), (6, 1.5))]
    (pair,) = pairs(Results("one", 50, (left, right), table_of(rows)))
    assert pair.steps.tolist() == [2, 4, 6]
    assert pair.difference.tolist() == pytest.approx([0.0, 0.0, 1 / 3])
    assert (pair.parts(0.1), pair.parts(0.5)) == (6, None)
    (none,) = pairs(Results("one", 50, (left, right), table_of([])))
    assert none.steps.size == 0
    assert none.parts(0.0) is None


def test_the_verdict_is_over_all_pairs() -> None:
    assert "nothing to prove" in verdict([]).reason
    results = planted(seeds=3, unlike={"default/jax/1": {"digest": None}})
    found = verdict(mouse_study.pairs(results))
    assert (found.proven, found.reason) == (False, "same data: not proven for 1 of 3 pairs")
    missing = verdict(mouse_study.pairs(planted(seeds=2)), ["default/jax/2", "default/torch/2", "b/jax/0"])
    assert (missing.proven, missing.reason) == (
        False,
        "same data: proven, for 2 pairs of runs; not begun: b/jax/0, default/jax/2, default/torch/2",
    )
    runs = tuple(dataclasses.replace(one, status="partial") for one in planted(seeds=1).runs)
    begun = dataclasses.replace(planted(seeds=1), runs=runs)
    assert verdict(pairs(begun)).reason == "same data: proven, for 1 pair of runs, for their steps so far"
