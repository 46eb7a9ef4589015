"""`formats.open` and the commands on what the real writers of every format wrote."""

import json
import os
import threading
from pathlib import Path

import pytest

from mouse_core import ConfigError, formats
from mouse_core.cli import main
from tests.core.formats import test_flat_files as flat_files
from tests.core.formats.recording import Counting, record, rlds_episode

LENGTHS = (4, -3, 1, -1, 9, 2)


def made(name: str, folder: Path) -> Path:
    logs = list(record(Counting(LENGTHS, "image" if name == "dopamine" else "vector"), len(LENGTHS)))
    if name == "d4rl":
        return flat_files.write_d4rl(folder / "x.hdf5", flat_files.flat(logs), ["next_observations"])
    if name == "ogbench":
        flat_files.write_ogbench(folder / "x.npz", "regular", logs)
        return folder / "x.npz"
    if name == "dopamine":
        flat_files.write_dopamine(folder / "replay_logs", flat_files.atari())
        return folder
    if name == "minari":
        minari = pytest.importorskip("minari")
        from tests.core.formats.test_minari import collect

        collect("test/counting-v0", Counting(LENGTHS, "vector"), episodes=len(LENGTHS))
        assert minari is not None
        return folder / "test" / "counting-v0"
    pytest.importorskip("tensorflow_datasets")
    from tests.core.formats.test_tfds import features_of, write

    write(folder / "counting" / "1.2.3", features_of("vector"), {"train": [rlds_episode(log) for log in logs]})
    return folder


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files there")
@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_no_command_waits_for_a_pipe(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("x.parquet", "x.arrow", "x.mcap", "x.npz", "x.npy", "x.h5", "x.json", "x.tar", "x.gz", "x.zip")
    for name in names:
        os.mkfifo(tmp_path / name)
        words = [command, str(tmp_path / name), *([str(tmp_path / "out")] if command == "convert" else [])]
        said: list[int] = []
        reader = threading.Thread(target=lambda words=words, said=said: said.append(main(words)), daemon=True)
        reader.start()
        reader.join(30)
        assert said == [2], f"{name} is waited for"
        assert "expected" in capsys.readouterr().err


NEEDS_FINAL = {"d4rl", "dopamine"}


@pytest.mark.parametrize("name", ["d4rl", "ogbench", "dopamine", "minari", "tfds"])
def test_every_format_is_recognised_inspected_and_converted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    source = made(name, tmp_path)
    final = ["--final", "drop"] if name in NEEDS_FINAL else []
    if name in NEEDS_FINAL:
        with pytest.raises(ConfigError, match="final='drop'"):
            formats.open(source)
        assert main(["inspect", str(source)]) == 2
        capsys.readouterr()
    stream = formats.open(source, final="drop" if final else None)
    assert stream.format in (name, "rlds")
    assert main(["inspect", str(source), *final, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["episodes"]["count"] == len(LENGTHS)
    assert report["alignment"] == "arrived"
    assert main(["convert", str(source), str(tmp_path / "converted"), *final]) == 0
    assert stream.digest() in capsys.readouterr().out
    assert formats.open(tmp_path / "converted").digest() == stream.digest()
