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


WAYS = ("flip", "cut", "fill", "double", "swap", "remove")


def damaged(content: bytes, way: str, rng: random.Random) -> bytes:
    """The same bytes with some bits flipped, cut, filled with a value, as a length that lies, or with a part twice."""
    changed = bytearray(content)
    size = len(changed)
    # Heads and tails, where lengths and offsets stand, more often than what is between.
    near = rng.randrange(min(size, 3000))
    at = rng.choice([rng.randrange(size), near, size - 1 - near])
    if way == "flip":
        for _ in range(rng.randint(1, 4)):
            changed[min(at + rng.choice([0, 0, 1, 9, 99]), size - 1)] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del changed[at:]
    elif way == "fill":
        end = min(at + rng.choice([1, 4, 8, 64, 4096]), size)
        changed[at:end] = rng.choice([b"\0", b"\0", b"\xff", b"\x7f", b"\x80"]) * (end - at)
    elif way == "double":
        changed[at:at] = changed[at : at + rng.choice([8, 4096, size])]
    return bytes(changed)


def damage(place: Path, rng: random.Random, only: str = "*") -> str:
    """Damage a file, or one file of a folder; return what was done.

    Args:
        place: The file or folder.
        rng: Which damage.
        only: Names of the files of the folder that may be damaged.
    """
    files = sorted(path for path in place.rglob(only) if path.is_file() and path.stat().st_size) or [place]
    while True:
        path = rng.choice(files)
        content = path.read_bytes()
        way = rng.choice(WAYS if place.is_dir() else WAYS[:4])
        if way == "remove":
            path.unlink()
        elif way == "swap":
            others = [one for one in files if one.suffix == path.suffix and one.read_bytes() != content]
            if not others:
                continue
            other = rng.choice(others)
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif (changed := damaged(content, way, rng)) != content:
            path.write_bytes(changed)
        else:
            continue
        return f"{way} {path.relative_to(place.parent)}"


def damaged_copies(source: Path, folder: Path, *, count: int = 100, seed: int = 0, only: str = "*") -> list[Path]:
    """Copies of a file or folder, one file damaged in each; see ``damage``."""
    rng = random.Random(seed)
    copies = [folder / f"{number:03d}{source.suffix}" for number in range(count)]
    for copy in copies:
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
        damage(copy, rng, only)
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
