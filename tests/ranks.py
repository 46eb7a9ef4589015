"""Functions on the ranks of one job, forked from one interpreter that has imported what they need.

Run by `run_ranks`: ranks.py FUNCTION COUNT FOLDER ARGUMENTS, these as JSON.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT, KILLED = Path(__file__).resolve().parent.parent, -9


def search_path() -> str:
    """Where programs find the tests, and what they test."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_ranks(
    work: Callable[..., Any],
    count: int,
    *arguments: Any,
    preload: str | None = None,
    launched: bool = False,
    seconds: float = 120,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """What ``work(rank, *arguments, **options)`` returns on each of ``count`` ranks: plain values, by rank.

    Args:
        work: A function of a module.
        count: How many ranks.
        arguments, options: Plain values.
        preload: What the interpreter has imported; by default PyTorch.
        launched: Whether ranks are told who they are by their environment, and the first that ends with an error, or
            kills itself, ends all, as with a launcher; it gives None. Otherwise they are in a gloo group.
        seconds: When they are given up.
        environment: Variables beside those of this process.
    """
    from tests.programs import FRAMEWORKS, interpreter

    known = {**os.environ, **(environment or {}), "PYTHONPATH": search_path()}
    given = json.dumps([arguments, options, launched, seconds])
    with tempfile.TemporaryDirectory(prefix="mouse-tests-") as folder:
        asked = (f"{work.__module__}:{work.__qualname__}", str(count), folder, given)
        forked = interpreter(preload or FRAMEWORKS)
        done = forked.run(Path(__file__), *asked, folder=Path(folder), environment=known, seconds=seconds + 10)
        said = f"{asked[0]} on {count} ranks: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, said
        files = [Path(folder, str(rank)) for rank in range(count)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _rank(work: str, rank: int, count: int, port: int, folder: str, given: list[Any]) -> None:
    import torch

    arguments, options, launched, seconds = given
    signal.alarm(int(seconds))  # nobody waits for ever for one that is gone
    module, name = work.split(":")
    if launched:
        torch.set_num_threads(1)
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "NODE_RANK": 0}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in told.items()}
    else:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    value = getattr(importlib.import_module(module), name)(rank, *arguments, **options)
    Path(folder, str(rank)).write_text(json.dumps(value))
    if not launched:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main(work: str, ranks: str, folder: str, given: str) -> int:
    """Fork the ranks and wait for them; how the first ended that did not end well."""
    from tests.ports import free_port

    port, children, worst = free_port(), list[int](), 0
    launched = json.loads(given)[2]
    for rank in range(int(ranks)):
        child = os.fork()
        if not child:
            status = 1
            try:
                _rank(work, rank, int(ranks), port, folder, json.loads(given))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    while children:
        child, ended = os.wait()
        children.remove(child)
        if code := os.waitstatus_to_exitcode(ended):
            worst = worst or code
            for other in children if launched else ():
                os.kill(other, 9)
    return 0 if worst == KILLED and launched else worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
