"""The most memory that a process ever had."""

import resource
import sys
from pathlib import Path


def peak_mb() -> float:
    """Megabytes that were resident at most, since the program began.

    ``ru_maxrss`` would not do on Linux: a child begins with what its parent had when it was forked.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
