"""What a function gives in a process of its own: python -m tests.bench.child MODULE FUNCTION ARGUMENTS, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from tests.limited import can_limit, run_limited


def ask(module: str, function: str, *arguments: Any, python: str = sys.executable, nbytes: int = 0) -> Any:
    """What a function of a module of ``tests.bench`` gives.

    Args:
        module: Name of the module.
        function: Name of the function.
        arguments: Plain values and paths; paths come as text.
        python: The Python that runs it, which may have other packages.
        nbytes: How much memory it has, where memory can be limited; 0: as much as there is.
    """
    command = [python, "-m", "tests.bench.child", module, function, json.dumps(arguments, default=str)]
    if nbytes and can_limit():
        said = run_limited(command, nbytes)
    else:
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    work = getattr(importlib.import_module(f"tests.bench.{sys.argv[1]}"), sys.argv[2])
    print(json.dumps(work(*json.loads(sys.argv[3]))), flush=True)
    os._exit(0)  # threads of some peers go on
