"""Studies that are declared, run, killed, and go on; and those of the guide."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mouse_study
from mouse_core import ConfigError, PrefetchBatchifier
from mouse_core.digest import StreamDigest
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_study import Results, Study
from scripts.house import ROOT
from tests.study import networks, trained
from tests.study.trained import study
from tests.test_docs import blocks

pytestmark = pytest.mark.slow

#: What a run had that does not depend on how long anything took.
VALUES = ("loss", "size", "taken")


def values_of(results: Results, run: str) -> dict[str, tuple[list[int], list[float]]]:
    found = {name: results.series(name).get(run, (np.empty(0), np.empty(0))) for name in VALUES}
    return {name: (steps.tolist(), values.tolist()) for name, (steps, values) in found.items()}


OF_STORE = {"frameworks": {"numpy": trained.train}, "store": trained.made_store, "batches": trained.BATCHES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Results:
    """Runs that nobody killed."""
    return study(seeds=[0, 1], **OF_STORE).run(folder, jobs=2)


def test_a_run_records_every_step(whole: Results) -> None:
    assert [(run.run, run.status, run.steps, run.error) for run in whole.runs] == [
        ("default/numpy/0", "done", 20, None),
        ("default/numpy/1", "done", 20, None),
    ]
    for name in ("loss", "wait", "compute", "size"):
        for steps, _ in whole.series(name).values():
            assert steps.tolist() == list(range(20)), name
    steps, taken = whole.series("taken")["default/numpy/0"]
    assert (steps.tolist(), taken.tolist()) == ([7, 15, 19], [8.0, 16.0, 20.0])
    assert whole.series("memory")["default/numpy/0"][0].tolist() == [0, 19]
    assert whole.series("setup")["default/numpy/0"][0].tolist() == [0]


def test_a_run_trains_on_what_a_loader_gives(whole: Results) -> None:
    digest, losses = StreamDigest(), []
    with PrefetchBatchifier(trained.made_store(), seed=1, **trained.BATCHES) as loader:
        np.random.seed(1)  # noqa: NPY002
        random = np.random.default_rng(1)
        weights = random.normal(size=3)
        for step in range(20):
            batch = loader.next_batch()
            digest += StreamDigest.of(step, batch)
            x = batch["obs_continuous"][..., :3].reshape(-1, 3)
            noise = random.normal() + np.random.normal()  # noqa: NPY002
            error = x @ weights - batch["reward"].reshape(-1) + noise
            weights = weights - 1e-3 * (x.T @ error) / len(error)
            losses.append(np.mean(error**2))
        assert whole.series("loss")["default/numpy/1"][1].tolist() == losses
        run = whole.runs[1]
        assert (run.seed, run.digest, run.fingerprint) == (1, digest.hexdigest(), loader.source.fingerprint)
    assert whole.runs[0].digest != run.digest
    assert {"python", "numpy", "pyarrow", "mouse-data"} == run.versions.keys()
    assert run.machine["threads"] == 1
    assert run.seconds > run.first_step_seconds > 0
    assert run.peak_memory > 10e6


ENDS: dict[str, dict[str, Any]] = {
    "early": {"killed_at": 3},
    "saved": {"killed_at": 6},
    "late": {"killed_at": 16},
    "fails": {"fails_at": 9},
}


@pytest.mark.long
def test_runs_that_are_killed_or_fail_go_on_with_equal_results(whole: Results, tmp_path: Path) -> None:
    killed = study(variants=ENDS)
    first = killed.run(tmp_path, jobs=2)
    assert {run.variant: (run.status, run.error) for run in first.runs} == {
        "early": ("partial", None),  # before any checkpoint: nothing shows that it would get further
        "saved": ("done", None),
        "late": ("done", None),
        "fails": ("failed", "ValueError: a training that fails"),
    }
    assert "Traceback" in (tmp_path / "runs" / "fails" / "numpy" / "0" / "log.txt").read_text()
    again = killed.run(tmp_path, jobs=2)
    for run in again.runs:
        assert (run.status, run.error, run.steps) == ("done", None, 20)
        assert values_of(again, run.run) == values_of(whole, "default/numpy/0"), run.run
        assert run.digest == whole.runs[0].digest
        log = (tmp_path / "runs" / run.run / "log.txt").read_text()
        begins = {"early": [], "saved": ["6"], "late": ["12"], "fails": ["6"]}
        assert re.findall(r"goes on at step (\d+)", log) == begins[run.variant]
    assert mouse_study.read(tmp_path).table.equals(again.table)


def test_a_training_without_state_begins_again(whole: Results, tmp_path: Path) -> None:
    frameworks = {"numpy": trained.train_without_state, "numpy-none": trained.train_without_batches}
    killed = study(frameworks=frameworks, variants={"default": {"killed_at": 16}})
    first = killed.run(tmp_path, jobs=2)
    assert {run.framework: run.status for run in first.runs} == {"numpy": "partial", "numpy-none": "done"}
    done = killed.run(tmp_path)
    assert values_of(done, "default/numpy/0") == values_of(whole, "default/numpy/0")
    assert {run.framework: (run.status, run.digest) for run in done.runs} == {
        "numpy": ("done", whole.runs[0].digest),
        "numpy-none": ("done", None),
    }


def test_online_training_goes_on_with_its_buffer(tmp_path: Path) -> None:
    variants: dict[str, dict[str, int]] = {"late": {"killed_at": 16}, "whole": {}}
    online = study(frameworks={"numpy": trained.train_online}, variants=variants).run(tmp_path, jobs=2)
    assert [run.status for run in online.runs] == ["done", "done"]
    assert "goes on at step 12" in (tmp_path / "runs" / "late" / "numpy" / "0" / "log.txt").read_text()
    assert values_of(online, "late/numpy/0") == values_of(online, "whole/numpy/0")
    assert online.runs[0].digest == online.runs[1].digest is not None


# Whoever began the tests may have had Ctrl-C ignored, as shells do for what runs in the background.
SCRIPT = """
import signal, sys
from pathlib import Path
from tests.study import trained

signal.signal(signal.SIGINT, signal.default_int_handler)
trained.main(Path(sys.argv[1]), **{})
"""


def begun(folder: Path, **options: Any) -> subprocess.Popen[str]:
    """A process that runs the study."""
    told = SCRIPT.replace("{}", repr(options))
    return subprocess.Popen([sys.executable, "-c", told, str(folder)], stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_runs_which_save_their_state(whole: Results, tmp_path: Path) -> None:
    options = {"variants": {"default": {"interrupts_at": 9}}, "checkpoint_every": 1000, "steps": 20}
    process = begun(tmp_path / "out", **options)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
    assert "the same command goes on" in said
    stopped = mouse_study.read(tmp_path / "out").runs[0]
    assert (stopped.status, stopped.steps) == ("partial", 10)
    checkpoint = tmp_path / "out" / "runs" / "default" / "numpy" / "0" / "checkpoint"
    records = checkpoint.with_name("records.log")
    records.write_bytes(records.read_bytes() + records.read_bytes()[:30])  # a torn record, as a machine may leave it
    assert mouse_study.collect(tmp_path / "out").table.equals(mouse_study.read(tmp_path / "out").table)
    saved = read_checkpoint(checkpoint)
    saved["facts"]["versions"]["numpy"] = "1.0"
    write_checkpoint(checkpoint, saved)
    done = study(**options).run(tmp_path / "out")
    assert values_of(done, "default/numpy/0") == values_of(whole, "default/numpy/0")
    assert done.runs[0].versions["numpy"] == f"1.0, then {np.__version__}"


def is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_runs_end_with_a_study_that_is_killed(tmp_path: Path) -> None:
    process = begun(tmp_path / "out", steps=10**9)
    records = tmp_path / "out" / "runs" / "default" / "numpy" / "0" / "records.log"
    while not records.exists() or not records.stat().st_size:
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="expected to be the only writer"):
        study(steps=10**9).run(tmp_path / "out")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until = time.monotonic() + 30
    while is_alive(int(children[0])) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(int(children[0]))


def test_another_study_in_the_folder_is_refused_by_name(whole: Results, folder: Path) -> None:
    for changed, message in (
        ({"steps": 21}, r"expected steps 20, .*found 21"),
        ({"batches": {**trained.BATCHES, "batch_size": 3}}, r"expected batches \{.*'batch_size': 2.*\}, .*found .*3"),
        ({"variants": {"default": {"rate": 1.0}}}, r"expected variants: default \{\}, .*found \{'rate': 1\.0\}"),
        ({"seeds": [1]}, r"expected seeds \[0, 1\], .*found \[1\]"),
        (
            {"frameworks": {"numpy": trained.train_without_state}},
            r"expected frameworks: numpy .*:train, .*found .*:train_without_state",
        ),
        ({"name": "large"}, "expected name 'small', .*found 'large'"),
    ):
        with pytest.raises(ConfigError, match=message):
            study(**{**OF_STORE, "seeds": [0, 1], **changed}).run(folder)
    more = study(**{**OF_STORE, "seeds": [1, 0, 11], "checkpoint_every": 5}).run(folder, only=["default/*/1"])
    assert more.table.equals(whole.table)


def test_only_some_runs_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"seeds": [0, 1, 11], "variants": {"a": {}, "b": {}}, "steps": 1}
    told["frameworks"] = {"numpy": trained.train_without_batches}
    results = study(**told).run(tmp_path, only=["b/*/11"], jobs=2, progress=True)
    assert [run.run for run in results.runs] == ["b/numpy/11"]
    assert "b/numpy/11" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"expected VARIANT/FRAMEWORK/SEED of a run, such as a/numpy/0, found 'c'"):
        study(**told).run(tmp_path, only=["c"])


def test_what_cannot_be_declared_is_refused() -> None:
    for changed, message in (
        ({"frameworks": {"tensorflow": trained.train}}, "frameworks: expected torch, jax or numpy"),
        ({"frameworks": {}}, "frameworks: expected at least one"),
        ({"frameworks": {"numpy": lambda context: None}}, "expected a function at the top level of a module"),
        ({"frameworks": {"numpy": "train"}}, "expected a function, found 'train'"),
        ({"variants": {"a/b": {}}}, "variants: expected names of letters"),
        ({"variants": {"a": {"rate": np.float32(1)}}}, r"variants\['a'\]\['rate'\]: expected numbers, texts"),
        ({"variants": {"a": {"sizes": {1: 2}}}}, r"variants\['a'\]\['sizes'\]: expected numbers, texts"),
        ({"seeds": []}, "seeds: expected one or more"),
        ({"seeds": [1, 1]}, "seeds: expected one or more different seeds"),
        ({"steps": 0}, "steps"),
        ({"seeds": 3}, "seeds: expected a list of integers, found 3"),
        ({"seeds": [2**63]}, r"seeds: expected integers below 2\*\*63"),
        ({"variants": {"a": None}}, "variants: a: expected a dict of options, which may be empty, found None"),
        ({"batches": 3}, "batches: expected the loader's options by name, found 3"),
        ({"store": ""}, "store: expected a path, .* found ''"),
        ({"store": {"format": "minari"}}, "store: expected a path, .* found {'format'"),
        ({"environment": {"A": 1}}, "environment: A: expected a text, found 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            study(**changed)


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "unguarded_script.py"
    script.write_text(
        "from mouse_study import Study, Training\n"
        "def train(context): return Training(lambda: 1.0)\n"
        "results = Study('unguarded', {'numpy': train}, steps=1).run('out')\n"
        "print(results.runs[0].error)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert "put the call under if __name__ == '__main__':" in done.stdout, done.stderr


def test_a_study_is_loaded_by_its_name(tmp_path: Path) -> None:
    declared = "from tests.study.trained import study\none = study()\ntwo = study(seeds=[3])\n"
    (tmp_path / "declared_here.py").write_text(declared)
    with pytest.raises(ConfigError, match=r"expected one Study at its top level, found \['one', 'two'\]"):
        mouse_study.load_study(tmp_path / "declared_here.py")
    assert mouse_study.load_study(f"{tmp_path / 'declared_here.py'}:two").seeds == [3]
    with pytest.raises(ConfigError, match="expected a Python file, found none"):
        mouse_study.load_study(tmp_path / "missing.py")


def test_what_a_training_gives_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gives_wrong.py"
    file.write_text(
        "from mouse_study import Training, Study\n"
        "def nothing(context): return None\n"
        "def texts(context): return Training(lambda: 'high')\n"
        "def ours(context): return Training(lambda: {'loss': 1, 'wait': 2})\n"
        "def stored(context): return Training(lambda: 1.0, state={'f': object()})\n"
        "def objects(context): return Training(lambda batch: 1.0, batches=object)\n"
        "study = Study('wrong', {f'numpy-{f.__name__}': f for f in (nothing, texts, ours, stored, objects)}, steps=1)\n"
    )
    errors = {run.framework: str(run.error) for run in mouse_study.load_study(file).run(tmp_path / "out", jobs=2).runs}
    objects = errors.pop("numpy-objects")
    assert objects.startswith("ConfigError: batches: expected a dict from names to arrays, because")
    assert objects.endswith("to run without digests, pass digest=False to the Study")
    assert errors == {
        "numpy-nothing": "ConfigError: nothing: expected a Training as result, found NoneType",
        "numpy-texts": "ConfigError: loss: expected a number, or an array with one element, found str",
        "numpy-ours": "ConfigError: step: expected names other than step, wait, compute, memory, setup, which are "
        "recorded anyway, found ['wait']",
        "numpy-stored": "ConfigError: state['f']: expected numbers, texts and arrays, found object, which cannot be "
        "stored",
    }
    assert Study is mouse_study.Study


def steps_of(folder: Path) -> int:
    """Steps that all runs have recorded."""
    begun = (folder / "study.json").exists()
    return sum(run.steps for run in mouse_study.collect(folder).runs) if begun else 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_kills_change_nothing(tmp_path: Path) -> None:
    whole = networks.study().run(tmp_path / "whole", jobs=2)
    folder = tmp_path / "killed"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-m", "tests.study.networks", folder], cwd=ROOT)
        for kill_run in (True, False):
            before = steps_of(folder)
            while process.poll() is None and steps_of(folder) < before + 25:
                time.sleep(0.02)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]) if kill_run and children else process.pid, signal.SIGKILL)
        process.wait()
    again = networks.study().run(folder, jobs=2)
    for name in ("loss", "evaluation"):
        expected, found = whole.series(name), again.series(name)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[run][1], found[run][1]) for run in expected)
    assert [run.digest for run in whole.runs] == [run.digest for run in again.runs]
    assert len({run.digest for run in whole.runs}) == 2


@pytest.mark.long
def test_the_guides_trainings_run(tmp_path: Path) -> None:
    page = blocks((ROOT / "docs" / "guides" / "studies.md").read_text(encoding="utf-8"))
    code = "".join(block.code for block in page if "train_by_hand" in block.code or 'title="my_study.py"' in block.info)
    (tmp_path / "guide_trainings.py").write_text(code)
    declared = mouse_study.load_study(tmp_path / "guide_trainings.py")
    results = Study(
        "guide",
        {**declared.frameworks, "jax-hand": sys.modules["guide_trainings"].train_by_hand},
        steps=30,
        seeds=[3],
        variants={"wide": {"width": 256}},
        store=declared.store,
        batches=declared.batches,
    ).run(tmp_path / "out", jobs=2)
    assert {run.status for run in results.runs} == {"done"}
    assert len({run.digest for run in results.runs}) == 1
