"""Damaging files in a hundred ways, and reading them in a process of its own, within bounds of time and memory."""

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.programs import run_code

# Of the processor, for each: the machine may be busy. How long it takes is bounded by much more.
SECONDS = 20.0

# Reads each copy to the end; one line of JSON each, which is written before the next is begun.
READER = """
import json, sys, time
from mouse_core import formats
from mouse_core.errors import MouseError
from tests.core.peak import peak_mb
for path, options in json.load(open(sys.argv[1])):
    print(json.dumps(["begins", path]), flush=True)
    began = time.process_time()
    try:
        rows = sum(batch.num_rows for batch in formats.open(path, **options))
        said = ["read", str(rows)]
    except MouseError as error:
        said = ["refused", str(error)]
    print(json.dumps([*said, time.process_time() - began]), flush=True)
print(json.dumps(["peak", peak_mb()]))
"""


def damage(data: bytes, rng: random.Random) -> bytes:
    """The same bytes cut, with some bits flipped, or with a length that lies."""
    changed = bytearray(data)
    way = rng.random()
    if way < 0.25 or len(changed) < 9:
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    if way < 0.75:
        for _ in range(rng.randint(1, 4)):
            # Heads and tails, where lengths and offsets stand, more often than what is between.
            near = rng.randrange(min(len(changed), 3000))
            place = rng.choice([rng.randrange(len(changed)), near, len(changed) - 1 - near])
            changed[place] ^= 1 << rng.randrange(8)
    else:
        place = rng.randrange(len(changed) - 8)
        width = rng.choice([1, 4, 8])
        changed[place : place + width] = rng.choice([b"\xff", b"\x7f", b"\0", b"\x80"]) * width
    return bytes(changed)


def damaged_copies(source: Path, folder: Path, *, count: int = 100, seed: int = 0, only: str = "*") -> list[Path]:
    """Copies of a file or folder, one file damaged in each.

    Args:
        source: What to damage.
        folder: Where the copies go.
        count: How many.
        seed: Which damage.
        only: Names of the files that may be damaged.
    """
    rng = random.Random(seed)
    copies = []
    for number in range(count):
        copy = folder / f"{number:03d}{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, copy)
            files = sorted(path for path in copy.rglob(only) if path.is_file() and path.stat().st_size)
            chosen = rng.choice(files)
        else:
            shutil.copyfile(source, copy)
            chosen = copy
        data = chosen.read_bytes()
        hurt = damage(data, rng)
        while hurt == data:
            hurt = damage(data, rng)
        chosen.write_bytes(hurt)
        copies.append(copy)
    return copies


def read_all(copies: Sequence[Path], **options: object) -> Counter[str]:
    """Open every copy and read it to its end, with the same options; see ``read_each``."""
    return read_each([(str(copy), options) for copy in copies])


def read_each(copies: Sequence[tuple[str, dict[str, object]]]) -> Counter[str]:
    """Open every copy, each with options of its own, and read it to its end.

    Asserts that none ends the process, takes long or much memory, or is refused without its name.

    Returns:
        How many were read, and how many refused.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(copies, file)
        file.flush()
        done = run_code(READER, file.name, seconds=SECONDS * len(copies))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}: {done.returncode}: {done.stderr[-2000:]}"
    counts: Counter[str] = Counter()
    path = ""
    for line in lines:
        if line[0] == "begins":
            path = line[1]
        elif line[0] == "peak":
            assert line[1] < 1000, f"{line[1]} MB"
        else:
            counts[line[0]] += 1
            assert line[2] < SECONDS, (path, line)
            if line[0] == "refused":
                assert path in line[1], line[1]
                assert "\n" not in line[1].strip()
    assert sum(counts.values()) == len(copies)
    return counts
