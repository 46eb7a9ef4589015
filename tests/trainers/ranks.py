"""Some ranks of a job, forked from one interpreter that has imported every trainer: a start costs them no imports."""

import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.programs import interpreter

TRAINERS = (
    "import torch, tensordict, accelerate, lightning, torchdata.stateful_dataloader, transformers, transformers.trainer"
)
KILLED, SECONDS = -9, 120
ROOT = Path(__file__).resolve().parents[2]


def search_path() -> str:
    """Where programs find the tests, and what they test."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(module: str, name: str, ranks: int, place: Path, **options: Any) -> list[Any]:
    """What the function ``name(rank, **options)`` of a module beside this one returns on each of some ranks.

    Rank 0 comes first. A rank that kills itself gives None; the others are killed soon after, as a launcher does it.

    Args:
        module: A file beside this one, without its ending.
        name: Of a function in it; what it returns is JSON.
        ranks: How many processes.
        place: Where they work.
        options: JSON, handed on.
    """
    environment = {**os.environ, "PYTHONPATH": search_path()}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "ACCELERATE_DISABLE_RICH": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = place / "found"
    found.mkdir(exist_ok=True)
    for old in found.iterdir():
        old.unlink()
    arguments = [str(ROOT / "tests" / "trainers" / f"{module}.py"), name, str(ranks), str(found), json.dumps(options)]
    done = interpreter(TRAINERS).run(
        Path(__file__), *arguments, folder=place, environment=environment, seconds=SECONDS + 10
    )
    assert done.returncode == 0, f"{name} on {ranks} ranks:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    files = [found / str(rank) for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _rank(rank: int, ranks: int, port: int, script: str, name: str, found: Path, options: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
    spec = importlib.util.spec_from_file_location("in_ranks", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["in_ranks"] = module
    spec.loader.exec_module(module)
    value = getattr(module, name)(rank, **options)
    (found / str(rank)).write_text(json.dumps(value))


def _main(script: str, name: str, ranks: str, found: str, options: str) -> int:
    """Fork the ranks and wait for them; the first that ends with an error, or is killed, ends all."""
    port, children = free_port(), {}
    for rank in range(int(ranks)):
        child = os.fork()
        if not child:
            status = 1
            signal.alarm(SECONDS)  # nobody waits for ever for one that is gone
            try:
                _rank(rank, int(ranks), port, script, name, Path(found), json.loads(options))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children[child] = rank
    worst = 0
    while children:
        child, status = os.wait()
        children.pop(child, None)
        code = os.waitstatus_to_exitcode(status)
        if code:
            worst = worst or code
            for other in children:
                os.kill(other, 9)
    return 0 if worst == KILLED else worst


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
