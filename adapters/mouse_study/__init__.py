"""Studies: a training in several frameworks, variants and seeds, recorded and compared, with a proof of equal batches.

A framework is imported only by the runs that use it.
"""

from importlib.util import find_spec as _find_spec

if _missing := [name for name in ("torch", "jax", "flax") if _find_spec(name) is None]:
    raise ImportError(f"mouse_study needs {', '.join(_missing)}: pip install 'mouse-data[study]'")

from mouse_study._running.folder import collect
from mouse_study.comparing import Evidence, Pair, pairs, same_data, verdict
from mouse_study.results import FILE, SCHEMA, Results, Run, read
from mouse_study.study import Context, Study, Training, load_study

__all__ = [
    "FILE",
    "SCHEMA",
    "Context",
    "Evidence",
    "Pair",
    "Results",
    "Run",
    "Study",
    "Training",
    "collect",
    "load_study",
    "pairs",
    "read",
    "same_data",
    "verdict",
]
