"""A function in several processes of one torch.distributed group, forked from one that has imported PyTorch already.

Run by `run_ranks`, or by hand: several.py MODULE FUNCTION COUNT PORT ARGUMENTS, these as JSON.
"""

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_ranks(work: Callable[..., Any], count: int, *arguments: Any, seconds: float = 120) -> list[Any]:
    """What ``work(rank, *arguments)`` returns in each of ``count`` processes of a gloo group: plain values, by rank.

    Args:
        work: A function of a module.
        count: How many processes.
        arguments: Plain values.
        seconds: When they are given up.
    """
    from tests.ports import free_port
    from tests.programs import run_program

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    asked = (work.__module__, work.__qualname__, str(count), str(free_port()), json.dumps(arguments))
    ran = run_program(Path(__file__), *asked, environment=environment, frameworks=True, seconds=seconds)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: list[Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main(module: str, function: str, count: int, port: str, arguments: list[Any]) -> None:
    work = getattr(importlib.import_module(module), function)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=one_rank, args=(work, rank, count, port, arguments, results)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"exit codes {[process.exitcode for process in processes]}")
    found = dict(results.get() for _ in processes)
    print(json.dumps([found[rank] for rank in range(count)]))


def one_rank(work: Callable[..., Any], rank: int, count: int, port: str, arguments: list[Any], results: Any) -> None:
    import torch.distributed

    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    results.put((rank, work(rank, *arguments)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
