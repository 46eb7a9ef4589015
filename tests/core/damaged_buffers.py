"""A process that opens mapped buffers and checkpoints that were damaged, for tests: FOLDER SEED ROUNDS.

It prints one line for every error that is not of the project's own family, and "done" at the end.
"""

import json
import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS: list[Any] = [-1, 0, 1, 2, 7, 10**11, 1 << 62, -(1 << 63)]
ODD: list[Any] = [None, *NUMBERS, 1 << 70, 0.5, "", "O", "|O", "V8", "<f8", [], [10**11], {}, True]


def odd(rng: np.random.Generator) -> Any:
    return ODD[int(rng.integers(len(ODD)))]


def edited(tree: Any, rng: np.random.Generator) -> Any:
    """The tree with one node somewhere in it replaced, removed or given a sibling."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return odd(rng)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = keys[int(rng.integers(len(keys)))]
    made = tree.copy()
    what = rng.random()
    if what < 0.15:
        del made[key]
    elif what < 0.2:
        if isinstance(made, dict):
            made["odd"] = odd(rng)
        else:
            made.append(odd(rng))
    else:
        made[key] = edited(made[key], rng)
    return made


def flipped(content: bytes, rng: np.random.Generator) -> bytes:
    """With some bits or bytes changed, or cut."""
    data = bytearray(content)
    what = rng.random()
    if what < 0.2:
        return bytes(data[: int(rng.integers(len(data) + 1))])
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(len(data)))
        data[place] = data[place] ^ (1 << int(rng.integers(8))) if what < 0.7 else int(rng.integers(256))
    return bytes(data)


def words(content: bytes, rng: np.random.Generator) -> bytes:
    """With a word of the head changed."""
    data = np.frombuffer(content, np.int64).copy()
    data[int(rng.integers(len(data)))] = NUMBERS[int(rng.integers(len(NUMBERS)))]
    return data.tobytes()


def described(content: bytes, rng: np.random.Generator) -> bytes:
    """A checkpoint whose description was edited, with the checksum that goes with it."""
    from mouse_core.files.checksum import checksum

    head = struct.Struct("<8sQQ")
    magic, length, _ = head.unpack_from(content)
    text = json.dumps(edited(json.loads(content[-length:]), rng)).encode()
    return head.pack(magic, len(text), checksum(text)) + content[head.size : len(content) - length] + text


def text(content: bytes, rng: np.random.Generator) -> bytes:
    return json.dumps(edited(json.loads(content), rng)).encode()


def main(folder: Path, seed: int, rounds: int) -> None:
    from mouse_core.errors import MouseError
    from mouse_core.replay import MemmapStorage, PrioritizedSliceSampler, ReplayBuffer

    def made(place: Path) -> ReplayBuffer:
        sampler = PrioritizedSliceSampler(sequence_length=2, end_key="done")
        return ReplayBuffer(MemmapStorage(40, place, ndim=2), sampler, batch_size=4)

    notes = [["x" * (3 * step), "y" * step] for step in range(30)]

    def rows(n: int) -> dict[str, Any]:
        number = np.arange(2 * n).reshape(n, 2)
        deep = {"y": np.zeros((n, 2, 3), np.int32)}
        return {"x": number * 1.0, "deep": deep, "done": number % 5 == 0, "note": notes[:n]}

    good = folder / "good"
    buffer = made(good)
    buffer.extend(rows(25))
    buffer.dumps(folder / "checkpoint")
    checkpoint = (folder / "checkpoint").read_bytes()
    damages: list[tuple[str, Callable[[bytes, np.random.Generator], bytes]]] = [
        ("head", words),
        ("head", flipped),
        ("schema", text),
        ("schema", flipped),
        ("rows-0-0", flipped),
        ("values", flipped),
        ("checkpoint", described),
        ("checkpoint", flipped),
    ]
    for number in range(rounds):
        rng = np.random.default_rng([seed, number])
        name, damage = damages[number % len(damages)]
        place = folder / "bad"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(good, place)
        try:
            if name == "checkpoint":
                (folder / "bad.checkpoint").write_bytes(damage(checkpoint, rng))
                other = made(place)
                before = other.sample(4)["index"].tolist(), other[:]["x"].tolist()
                mark = other.state_dict()
                try:
                    other.loads(folder / "bad.checkpoint")
                except MouseError:
                    again = made(folder / "again")
                    again.load_state_dict(mark)
                    if again.sample()["index"].tolist() != other.sample()["index"].tolist():
                        print(number, name, "changed something", before)
                    if other[:]["x"].tolist() != before[1]:
                        print(number, name, "changed rows")
                    continue
                other.sample()
            else:
                path = next(place.glob(f"{name}*"))
                path.write_bytes(damage(path.read_bytes(), rng))
                other = made(place)
                other.sample()
                other.extend(rows(3))
                one = {"x": np.zeros(2), "deep": {"y": np.zeros((2, 3), np.int32)}, "done": np.zeros(2, bool)}
                other.append({**one, "note": ["a", "bc"]})
                other[0] = other[1]
                other.state_dict()
        except MouseError:
            continue
        except BaseException as error:
            print(number, name, damage.__name__, repr(error)[:200], flush=True)
    print("done")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
