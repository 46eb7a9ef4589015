"""Images decoded by processes: the same bits as in a thread, whatever happens to the processes."""

import gc
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier, WorkerError
from mouse_core.dtypes import RowError
from mouse_core.images.decoding import DecodePool, DecodeProcess, Images, decode_rows, decoding_by

SHAPE, BYTE = (9, 7, 3), np.dtype(np.uint8)


def encoded(pixels: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, **{"format": "PNG", **options})
    return stream.getvalue()


def run_of(images: list[bytes], row: int = 0) -> list[tuple[int, memoryview]]:
    return list(enumerate(map(memoryview, images), row))


def frames(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE)).astype(np.uint8)


def wait_for(pool: DecodePool) -> None:
    """Until its processes have started."""
    pool._start()
    until = time.monotonic() + 60
    while any(not process.is_ready() and not process.is_dead for process in pool._all):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool() -> Any:
    made = DecodePool(2)
    wait_for(made)
    assert len(made._all) == 2 or sys.platform == "win32"
    yield made
    made.close()


def decode(pool: DecodePool, images: Images, out: np.ndarray) -> None:
    decoding_by(pool, lambda _: decode_rows(images, SHAPE, out, BYTE))(0)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
@pytest.mark.parametrize("options", [{}, {"format": "JPEG", "quality": 90}], ids=["PNG", "JPEG"])
def test_the_same_bits_in_order(pool: DecodePool, dtype: str, options: dict[str, Any]) -> None:
    pixels = frames(150)
    images = [encoded(image, **options) for image in pixels]
    runs = run_of(images)
    here, there = np.zeros((2, 150, 9 * 7 * 3), dtype)
    decode_rows(runs, SHAPE, here, BYTE)
    decode(pool, runs, there)
    np.testing.assert_array_equal(there, here)
    if not options:
        np.testing.assert_array_equal(here, pixels.reshape(150, -1))


def test_memory_grows_with_the_images(pool: DecodePool) -> None:
    """Compressible ones first, then many that are not."""
    for seed, count in enumerate((10, 40, 300)):
        pixels = frames(count, seed) if seed else np.zeros((count, *SHAPE), np.uint8)
        out = np.zeros((count, 9 * 7 * 3), np.uint8)
        decode(pool, run_of([encoded(image) for image in pixels]), out)
        np.testing.assert_array_equal(out, pixels.reshape(count, -1))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"no image at all", "expected a readable image, found 15 bytes that are no image"),
        (encoded(np.zeros((9, 8, 3), np.uint8)), r"expected shape \[9, 7, 3\], found \[9, 8, 3\]"),
        (encoded(frames(1)[0])[:-40], "expected a readable image"),
    ],
    ids=["bytes", "shape", "cut"],
)
@pytest.mark.parametrize("place", [0, 70, 99])
def test_errors_are_those_of_a_thread(pool: DecodePool, image: bytes, message: str, place: int) -> None:
    images = [encoded(pixels) for pixels in frames(100)]
    images[place] = image
    runs = run_of(images)[::-1]
    out = np.zeros((100, 9 * 7 * 3), np.uint8)
    for how in (lambda: decode(pool, runs, out), lambda: decode_rows(runs, SHAPE, out, BYTE)):
        with pytest.raises(RowError, match=message) as raised:
            how()
        assert raised.value.row == place
    images[place] = images[0 if place else 1]
    decode(pool, run_of(images), out)  # and nothing is left of it


def test_pixels_of_16_bits(pool: DecodePool) -> None:
    pixels = np.random.default_rng(0).integers(0, 2**16, (40, 5, 4)).astype(np.uint16)
    runs = run_of([encoded(image[:, :, None]) for image in pixels])
    for dtype in (np.uint16, np.int64):
        out = np.zeros((40, 20), dtype)
        decoding_by(pool, lambda _, out=out: decode_rows(runs, (5, 4, 1), out, np.dtype(np.uint16)))(0)  # type: ignore[misc]
        np.testing.assert_array_equal(out, pixels.reshape(40, -1))


def test_values_that_do_not_fit_name_their_row(pool: DecodePool) -> None:
    pixels = np.full((60, *SHAPE), 127, np.uint8)
    pixels[47, 3, 2, 1] = 128
    runs = run_of([encoded(image) for image in pixels])[::-1]
    out = np.zeros((60, 9 * 7 * 3), np.int8)
    with pytest.raises(RowError) as raised:
        decode(pool, runs, out)
    assert raised.value.row == 47


def test_short_runs_are_given_together(pool: DecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single rows in any order, as transitions are drawn, do not go to a process one by one."""
    given: list[int] = []
    give = DecodeProcess.give

    def count(self: DecodeProcess, task: Images, *wanted: Any) -> bool:
        given.append(len(task))
        return give(self, task, *wanted)

    pixels, rows = frames(200), np.random.default_rng(1).permutation(200)
    out = np.zeros((200, 9 * 7 * 3), np.uint8)
    monkeypatch.setattr(DecodeProcess, "give", count)
    decode(pool, [(int(row), memoryview(encoded(pixels[row]))) for row in rows], out)
    np.testing.assert_array_equal(out, pixels.reshape(200, -1))
    assert given
    assert min(given[:-1]) >= 16


def test_processes_that_die_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """One before it gets work, the other one at work."""
    pixels, pool, give = frames(200), DecodePool(2), DecodeProcess.give
    runs = run_of([encoded(image) for image in pixels])
    wait_for(pool)

    def check() -> None:
        out = np.zeros((200, 9 * 7 * 3), np.uint8)
        decode(pool, runs, out)
        np.testing.assert_array_equal(out, pixels.reshape(200, -1))

    pool._all[0]._process.send_signal(signal.SIGKILL)
    pool._all[0]._process.wait()
    check()

    def give_and_kill(self: DecodeProcess, *arguments: Any) -> bool:
        self._process.send_signal(signal.SIGSTOP)  # it takes the task, and does not come to answer
        taken = give(self, *arguments)
        self._process.send_signal(signal.SIGKILL)
        return taken

    monkeypatch.setattr(DecodeProcess, "give", give_and_kill)
    check()
    check()
    pool.close()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no signals that stop a process on this system")
def test_a_process_ends_in_silence_when_nobody_reads_its_answer(capfd: pytest.CaptureFixture[str]) -> None:
    process = DecodeProcess()
    while not process.is_ready():
        time.sleep(0.01)
    os.kill(process._process.pid, signal.SIGSTOP)  # it has its task, and who gave it ends before there is an answer
    assert process.give(run_of([encoded(frames(1)[0])]), SHAPE, BYTE)
    process._process.stdin.close()
    process._process.stdout.close()
    os.kill(process._process.pid, signal.SIGCONT)
    assert process._process.wait(60) == 0
    assert capfd.readouterr().err == ""


def test_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError("no processes here")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    pixels, out = frames(20), np.zeros((20, 9 * 7 * 3), np.uint8)
    decode(DecodePool(2), run_of([encoded(image) for image in pixels]), out)
    np.testing.assert_array_equal(out, pixels.reshape(20, -1))


def test_closed_or_dropped_no_process_remains() -> None:
    closed, dropped = DecodePool(1), DecodePool(1)
    wait_for(closed)
    wait_for(dropped)
    processes = [pool._all[0]._process for pool in (closed, dropped)]
    closed.close()
    del dropped
    gc.collect()
    assert all(process.poll() is not None for process in processes)
    pixels, out = frames(20), np.zeros((20, 9 * 7 * 3), np.uint8)
    decode(closed, run_of([encoded(image) for image in pixels]), out)  # by the thread
    np.testing.assert_array_equal(out, pixels.reshape(20, -1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_decodes_itself(pool: DecodePool) -> None:
    pixels = frames(40)
    runs = run_of([encoded(image) for image in pixels])
    child = os.fork()
    if not child:
        out = np.zeros((40, 9 * 7 * 3), np.uint8)
        decode(pool, runs, out)
        os._exit(int(not np.array_equal(out, pixels.reshape(40, -1))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    out = np.zeros((40, 9 * 7 * 3), np.uint8)
    decode(pool, runs, out)
    np.testing.assert_array_equal(out, pixels.reshape(40, -1))


def store_of(images: list[bytes]) -> DatasetStore:
    store = DatasetStore()
    for number, image in enumerate(images):
        store.append({"action": 0, "reward": number * 0.5, "done": 0, "observation_image": image})
    return store


def test_batches_of_a_loader() -> None:
    store = store_of([encoded(image) for image in frames(60)])
    source = BatchSource(store, 6, 8, seed=3)
    for workers in (0, 1, 2):
        with PrefetchBatchifier(store, 6, 8, seed=3, num_workers=workers, prefetch=2) as loader:
            for index in range(12):
                batch = loader.next_batch()
                if index == 2 and loader._decoders is not None:
                    wait_for(loader._decoders)  # from here on they decode
                for name, values in source[index].items():
                    np.testing.assert_array_equal(batch[name], values)


def test_a_bad_image_names_its_row() -> None:
    images = [encoded(image) for image in frames(40)]
    images[17] = images[17][:50]
    # Appending would have refused it.
    import datasets

    columns = {"action": [0] * 40, "reward": [0.5] * 40, "done": [0] * 40, "observation_image": images}
    store = DatasetStore().from_dataset(datasets.Dataset.from_dict(columns))
    with (
        PrefetchBatchifier(store, 40, 1, sampling="last", num_workers=1, prefetch=1) as loader,
        pytest.raises(WorkerError, match=r"obs_image: .* at row 17"),
    ):
        loader.next_batch()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "import os; os._exit(0)",
        *(pytest.param(end, marks=pytest.mark.long) for end in ("loader.close()", "del loader")),
    ],
)
def test_the_interpreter_ends_at_once_and_in_silence(ending: str, tmp_path: Path) -> None:
    """No process of it is left, also of a script that does not guard what it does."""
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent.parent)!r})
from tests.core.test_decoding import encoded, frames, store_of, wait_for
from mouse_core import PrefetchBatchifier
loader = PrefetchBatchifier(store_of([encoded(image) for image in frames(60)]), 6, 8, num_workers=2)
loader.next_batch()
wait_for(loader._decoders)
for _ in range(5):
    loader.next_batch()
print(*(process._process.pid for process in loader._decoders._all), flush=True)
{ending}
"""
    script = tmp_path / "unguarded.py"
    script.write_text(program, encoding="utf-8")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    (line,) = ran.stdout.splitlines()  # the script was run once
    assert len(line.split()) == 2
    until = time.monotonic() + 60
    while any(is_running(int(number)) for number in line.split()):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{number}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
