"""Streams, fingerprints and states are what they were."""

import json

import pytest

from tests.core import golden

KNOWN = json.loads(golden.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", ["sources", "mixtures", "buffers", "rollouts", "digests", "specs"])
def test_streams_are_what_they_were(part: str) -> None:
    assert getattr(golden, part)() == KNOWN[part]


def test_a_loader_goes_on_from_a_state_that_was_saved_before() -> None:
    assert golden.resumed(KNOWN["loader"]["state"]) == KNOWN["loader"]["next"]
    found = golden.loader_states()
    assert found["next"] == KNOWN["loader"]["next"]
    assert {name: found["state"][name] for name in KNOWN["loader"]["state"]} == KNOWN["loader"]["state"]


def test_a_buffer_goes_on_from_its_state() -> None:
    assert golden.after(golden.buffer_state()) == KNOWN["buffer after its state"]
