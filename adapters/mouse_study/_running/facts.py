"""What is noted of a process: memory, versions, the machine, and how long its framework compiled."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Packages by the name that is imported, of which a version is noted where they were.
_NOTED = {
    "mouse_core": "mouse-data",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "torch": "torch",
    "tensordict": "tensordict",
    "torchrl": "torchrl",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "grain": "grain",
    "gymnasium": "gymnasium",
}
# What JAX says of itself while it lowers a program and has XLA compile it.
_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


def memory_now() -> int | None:
    """Bytes of memory that this process has; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def peak_memory() -> int | None:
    """The most bytes of memory that this process had."""
    try:
        # Linux hands on to a child what its parent had at its begin, but for this line.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def versions(before: Mapping[str, str]) -> dict[str, str]:
    """The versions of Python and of what was imported; where a run had another ``before``, both."""
    found = {"python": platform.python_version()}
    for module, package in _NOTED.items():
        if module in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:  # used from where it lies
                found[package] = str(getattr(sys.modules[module], "__version__", "of a source folder"))
    for package, other in before.items():
        now = found.get(package, other)
        if now != other.rpartition(", then ")[2]:
            found[package] = f"{other}, then {now}"
        else:
            found[package] = other
    return found


def machine(threads: int) -> dict[str, Any]:
    """What this process runs on, without the machine's name."""
    said: dict[str, Any] = {
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": "cpu",
    }
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if jax is not None:
        said["device"] = jax.devices()[0].device_kind
    elif torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        said["device"] = torch.cuda.get_device_name()
    return said


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Compiling:
    """Adds up how long JAX compiled, from now on, or torch at any time.

    Args:
        kind: The framework: "torch", "jax" or "numpy".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._seconds = 0.0
        if kind == "jax":
            import jax.monitoring

            jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **more: Any) -> None:
        if event in _COMPILING:
            self._seconds += duration_secs

    @property
    def seconds(self) -> float | None:
        """How long, until now; None where torch does not say it."""
        if self._kind != "torch":
            return self._seconds
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:  # nothing was compiled
            return 0.0
        try:
            return float(sum(dynamo.compilation_time_metrics.get("_compile.compile_inner", ())))
        except (AttributeError, TypeError):  # a name of torch's own, which may change
            return None
