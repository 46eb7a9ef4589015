"""Learning from a store in object storage: what is learnt, and what is read of the storage."""

import sys

import pytest

from tests.core.object_server import ObjectServer

pytest.importorskip("obstore")


@pytest.mark.parametrize("example", ["from_object_storage"], indirect=True)
def test_pushes_are_learnt_and_the_second_run_reads_the_cache(example, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(example, "BATCHES", 40)
    with ObjectServer() as server:
        for name, value in server.options.items():
            monkeypatch.setenv(name.upper(), value)
        told = ["--url", "s3://data/runs/carts", "--output", str(tmp_path)]
        sent = []
        for _ in range(2):
            monkeypatch.setattr(sys, "argv", ["from_object_storage.py", *told])
            example.main()
            said = capsys.readouterr().out
            agreed = [float(line.split(": ")[1]) for line in said.splitlines() if line.startswith("pushes")]
            # A fifth of the recorded pushes are at random: no policy chooses more than four fifths of them.
            assert 0.7 < agreed[1] < 0.85
            sent.append(server.sent("segments"))
        size = sum(one.size for path, one in server.objects.items() if path.endswith(".arrow"))
    assert 0 < sent[0] <= 1.5 * size
    assert sent[1] == sent[0]  # all of it was in the cache
