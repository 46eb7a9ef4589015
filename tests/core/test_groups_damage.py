"""A rollout buffer's folder, of which one file after the other is removed, emptied, cut or changed by a bit."""

import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import MouseError, StoreWarning
from mouse_core.groups import GrpoBatchMaker, RolloutBuffer, RolloutColumn, RolloutRecord, Turn, open_rollouts

COLUMNS = [
    RolloutColumn("temperature", "example"),
    RolloutColumn("weights", dtype="int32", fill=-1),
    RolloutColumn("embedding", "example", shape=(40,)),
]
# Who owns the folder is said anew when it is opened.
HARMLESS = {"owner", "index.log.size", "waiting.log.size"}


def rollout(number: int) -> RolloutRecord:
    answer = Turn("4", "assistant", [number, 1], [-0.5, -0.25], columns={"weights": [number, 3]})
    turns = [Turn("?", "user", [7]), answer]
    columns = {"temperature": number / 8, "embedding": np.full(40, number)}
    key = "math", str(number // 4 % 3), 1 + number // 12
    return RolloutRecord(*key, f"r{number}", turns, number * number % 5, number, columns=columns)


def opened(folder: Path) -> RolloutBuffer:
    return RolloutBuffer(folder, 4, seal_timeout=1e6, batch_maker=GrpoBatchMaker(older_groups="keep"), sync=False)


def all_there_is(folder: Path) -> list[Any]:
    said: list[Any] = [(one, one.group_uid) for one in open_rollouts(folder)]
    with opened(folder) as buffer:
        said += [(one, one.group_uid) for one in buffer.rollouts()]
        said += [buffer.rollout(f"r{number}") for number in range(26)]
        said += [buffer.columns, buffer.num_waiting, str(buffer.summary())]
        for name in buffer.batches:
            said += [buffer.read_batch(name), buffer.batch_metadata(name), buffer.batch_staleness(name).tolist()]
        made = buffer.create_and_store_batch(4)
        assert made is not None
        said.append(buffer.read_batch(made))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("damage") / "whole"
    maker = GrpoBatchMaker(older_groups="keep")
    with RolloutBuffer(root, 4, seal_timeout=1e6, batch_maker=maker, columns=COLUMNS, sync=False) as buffer:
        buffer.set_policy_version(1)
        for numbers in (range(12), range(12, 26)):
            buffer.add_rollouts(map(rollout, numbers))
            assert buffer.create_and_store_batch(3) is not None
            buffer.set_policy_version(3)
        waiting = [replace(rollout(n), example_id="open", policy_version="1", rollout_uid=f"w{n}") for n in (1, 2)]
        buffer.add_rollouts(waiting)
        buffer.set_policy_version(2)
    return root


def damages(content: bytes, several: int) -> Iterator[tuple[str, bytes | None]]:
    yield "removed", None
    if several > 1:
        yield "emptied", b""
    rng, last = random.Random(len(content)), len(content) - 1
    for size in [last, *(rng.randrange(1, last) for _ in range(several - 1))]:
        yield f"cut to {size} of {last + 1}", content[:size]
    for place in [last - 4, *(rng.randrange(last) for _ in range(several - 1))]:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        yield f"a bit of byte {place} of {last + 1}", bytes(changed)


@pytest.mark.parametrize("several", [1, pytest.param(8, marks=pytest.mark.long)])
def test_no_damage_is_silent(several: int, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "sound")
    expected = all_there_is(tmp_path / "sound")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert {path.parts[0] for path in files} == {".state", "batches", "math"}
    assert {"columns.json", "index.log", "waiting.log"} <= {path.name for path in files}
    if several == 1:  # one of each kind
        files = list(
            {(path.parent, path.suffix, path.parent.name == ".state" and path.name): path for path in files}.values()
        )
    for file in files:
        for what, content in damages((folder / file).read_bytes(), several):
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            if content is None:
                (copy / file).unlink()
            else:
                (copy / file).write_bytes(content)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", StoreWarning)
                try:
                    said, failed = all_there_is(copy), ""
                except MouseError as error:
                    said, failed = [], str(error)
            told = "".join(str(one.message) for one in warned) + failed
            assert said == expected or file.name in told, f"{file} {what}: {told or 'silent'}"
            assert file.name not in HARMLESS or said == expected
            shutil.rmtree(copy)
