"""What all tests share: the hypothesis profiles, no network, and skipping what this machine cannot run."""

import gc
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A run has its own folder for what `datasets`, the Hub's client and we cache, and no host to ask; tests that need
# a Hub start one on the loopback interface. Must stand before anything imports those packages.
_home = tempfile.TemporaryDirectory(prefix="mouse-tests-")
os.environ["HF_HOME"] = _home.name
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["MOUSE_CACHE"] = os.path.join(_home.name, "mouse-cache")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("MPLBACKEND", "agg")
# What JAX compiled once is taken from there by the other processes of a run, by the same one where a test compiles it
# again, and by the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Ray asks nobody before it reports how it is used.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

# No deadlines: the machine may be busy. In CI the examples are the same in every run. More examples, which take ten
# times as long: make test ARGS=--hypothesis-profile=thorough
settings.register_profile("default", max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=200)
settings.load_profile("ci" if os.environ.get("CI") else "default")


# Whether bytes are on the disk shows only where the power fails, which its tests simulate. So no test waits for the
# disk, 10 ms a file where the disk is busy.
def _sync_nothing(file: int) -> None:
    os.fstat(file)  # a file that is closed is an error, as for fsync


os.fsync = os.fdatasync = _sync_nothing


# What is imported while tests are collected, every framework, stays to the end: 770,000 objects that each look for
# garbage would go through, half a second of it. So nobody looks meanwhile, and afterwards they are left out.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Lanes do without importing the modules in which no test is one of theirs."""
    lane = config.getoption("markexpr")
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    if lane.startswith(("slow", "long")):
        return None if f"mark.{lane.split(' ')[0]}" in text else True
    all_slow = re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow", text, flags=re.MULTILINE)
    return True if all_slow and lane.startswith("not slow") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
