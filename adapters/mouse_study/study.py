"""The class ``Study``, which declares a training for all combinations of variants, frameworks and seeds; and the
argument and the result of training functions.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mouse_core.errors import ConfigError
from mouse_core.spec import check_count

if TYPE_CHECKING:
    from mouse_study.results import Results

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*")


def check_names(where: str, names: Iterable[object]) -> None:
    """Raise ConfigError for a name that cannot be the name of a folder and a part of a run's name."""
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: expected names of letters, digits and any of ._+=-, found {name!r}")
    if not names:
        raise ConfigError(f"{where}: expected at least one name, found none")


def reference(function: Callable[..., Any], where: str) -> dict[str, str | None]:
    """Return the location of a function: its ``module``, its ``name``, and a ``file`` if the module has no import name.

    Args:
        function: A function at the top level of a module or script.
        where: The prefix of error messages.

    Raises:
        ConfigError: Another process could not import the function.
    """
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    if not callable(function) or not name:
        raise ConfigError(f"{where}: expected a function, found {function!r:.80}")
    if "<" in name:
        raise ConfigError(
            f"{where}: expected a function at the top level of a module that another process can import, found {name}"
        )
    if module != "__main__":
        return {"module": module, "file": _loaded_from.get(module), "name": name}
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return {"module": spec.name, "file": None, "name": name}
    file = getattr(main, "__file__", None)
    if file is None:
        raise ConfigError(
            f"{where}: expected a function that is defined in a file, which another process can import, found {name}, "
            "defined interactively"
        )
    return {"module": Path(file).stem, "file": str(Path(file).resolve()), "name": name}


def found(place: dict[str, str | None], where: str) -> Any:
    """Import the function at a location that ``reference`` returned.

    Raises:
        ConfigError: The module or the name does not exist.
    """
    module, name = str(place["module"]), str(place["name"])
    try:
        holder: Any = load_file(Path(place["file"])) if place["file"] else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise ConfigError(f"{where}: expected a module {module!r} that can be imported, found none") from error
    for part in name.split("."):
        if not hasattr(holder, part):
            raise ConfigError(f"{where}: expected {name!r} in module {module!r}, found no such name")
        holder = getattr(holder, part)
    return holder


# Modules that were loaded from files, by name; other processes load them in the same way.
_loaded_from: dict[str, str] = {}


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a module, with its folder on ``sys.path``, as ``python path`` does, but not as
    ``__main__``.

    Raises:
        ConfigError: The file does not exist.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"study: expected a Python file, found none at {str(path)!r}")
    if _loaded_from.get(path.stem) == str(path):
        return sys.modules[path.stem]
    if path.stem in sys.modules:
        raise ConfigError(
            f"study: expected a file name that differs from the names of imported modules, found "
            f"{path.name}; rename the file"
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    _loaded_from[path.stem] = str(path)
    return module


KINDS = ("torch", "jax", "numpy")
"""Kinds of batches. The name of a framework is one of these kinds, or a kind followed by a hyphen and a suffix."""


def kind_of(framework: str) -> str:
    """Return the kind of batches that a framework with a given name gets.

    Raises:
        ConfigError: The name does not begin with one of ``KINDS``.
    """
    kind = framework.split("-")[0]
    if kind not in KINDS:
        raise ConfigError(
            f"frameworks: expected torch, jax or numpy, or one of them with a hyphen and a suffix, found {framework!r}"
        )
    return kind


@dataclass(frozen=True)
class Context:
    """Describes the run for which a training function is called. A ``Context`` is the argument of the training
    function.

    Args:
        variant: The name of the variant.
        options: The variant's options.
        framework: The name of the framework.
        seed: The run's seed, with which the global generators of Python, NumPy and torch were seeded.
        steps: The number of steps.
        folder: The folder of this run.
        batches: The arguments of the loader, except ``seed``.
        opened: A function that opens the store; None if the study has no store.
    """

    variant: str
    options: Mapping[str, Any]
    framework: str
    seed: int
    steps: int
    folder: Path
    batches: Mapping[str, Any] = field(default_factory=dict)
    opened: Callable[[], Any] | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """The kind of batches of the run: "torch", "jax" or "numpy"."""
        return kind_of(self.framework)

    @cached_property
    def store(self) -> Any:
        """Return the study's store, or the other source that ``Study.store`` names.

        Raises:
            ConfigError: The study has no store.
        """
        if self.opened is None:
            raise ConfigError("store: expected a study with a store, found a study without a store")
        return self.opened()

    def loader(self, **options: Any) -> Any:
        """Return a loader of the study's store for the framework of this run, with the study's options.

        A ``Training`` without ``batches`` uses such a loader. If the steps draw from another loader, that loader must
        be a part of the training's ``state``.

        Args:
            options: Options that override the study's options, and ``seed``, which is the run's seed by default.

        Raises:
            ConfigError: The study has no store.
        """
        if self.kind == "torch":
            from mouse_torch import PrefetchBatchifier
        elif self.kind == "jax":
            from mouse_jax import PrefetchBatchifier  # type: ignore[assignment]
        else:
            from mouse_core import PrefetchBatchifier  # type: ignore[assignment]
        return PrefetchBatchifier(self.store, **{"seed": self.seed, **self.batches, **options})


@dataclass(frozen=True)
class Training:
    """The result of a training function: the function that takes a training step, and the state that a resumed run
    needs.

    Args:
        step: A function that takes one training step on a batch and returns the loss, as a number or an array of one
            number. The function may also return a mapping of names to such values, with the name "loss". Without a
            store and without ``batches``, the function is called without arguments. The measured time of a step ends
            when the loss is available as a number, so the time includes asynchronous work.
        state: All objects that a step changes, except the batches, as a single object or a list, tuple or dict. Allowed
            objects have ``state_dict`` and ``load_state_dict`` (modules and optimizers of torch, loaders, buffers), or
            are objects of ``flax.nnx``, random generators, or dicts, whose values are replaced (parameters of JAX,
            counters). Global generators are always saved. Without a state, a killed run starts again from the first
            step.
        batches: The source of batches instead of ``Context.loader()``: a loader, whose state is saved, or a function
            without arguments, for example ``buffer.sample``.
        evaluate: A function that is called without arguments every ``Study.evaluate_every`` steps and after the last
            step. The function returns a number, which is recorded as "evaluation", or a mapping of names to numbers.
    """

    step: Callable[..., Any]
    state: Any = None
    batches: Any = None
    evaluate: Callable[[], Any] | None = None


Train = Callable[[Context], Training]


@dataclass(frozen=True)
class Study:
    """A training in several frameworks, variants and seeds; each combination is a run.

    Every run is a separate process, which imports the functions of the study. Functions must be at the top level of a
    module or script. All other values must be numbers, texts, or lists and dicts of numbers and texts.

    Args:
        name: The name of the study.
        frameworks: The training function of each framework, which takes a ``Context`` and returns a ``Training``. The
            name of a framework is "torch", "jax" or "numpy", or such a name with a suffix after a hyphen
            ("torch-compiled"); the name determines the kind of batches.
        steps: The number of steps of every run.
        seeds: The seeds of the runs. The seed of a run determines its data, and its draws from global generators.
        variants: Options for ``Context.options``, by the name of the variant. Loader options under the key ``batches``
            of a variant override the study's options.
        store: The data of the runs: the path of recorded data of any format; a dict of ``path`` and other arguments of
            ``mouse_core.DatasetStore.open``; or a function without arguments that creates a ``DatasetStore``. The
            function is called once, and its store is saved in the study's folder. If ``store`` is None, the training
            functions create their batches themselves.
        batches: Arguments of the loader, the same for all frameworks. Arguments that are not numbers or texts can be
            passed to ``Context.loader`` in the training functions.
        evaluate_every: The number of steps between two evaluations; None: only after the last step.
        checkpoint_every: The number of steps between two checkpoints, from which a killed run continues.
        threads: The number of threads for computations of a run. With another number of threads, sums may be rounded
            differently.
        environment: Environment variables of the runs.
        digest: Whether to compute a digest of the batches of each run. The digest takes a few percent of the loading
            time; this time is not included in ``wait`` or ``compute``.

    Raises:
        ConfigError: A name cannot be the name of a folder, an option is not plain, another process could not import a
            function, or a number is out of range.
    """

    name: str
    frameworks: Mapping[str, Train]
    steps: int
    seeds: Sequence[int] = (0,)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    store: str | os.PathLike[str] | Mapping[str, Any] | Callable[[], Any] | None = None
    batches: Mapping[str, Any] = field(default_factory=dict)
    evaluate_every: int | None = None
    checkpoint_every: int = 100
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    digest: bool = True

    def __post_init__(self) -> None:
        self._check_names()
        for where in ("steps", "checkpoint_every", "threads"):
            check_count(where, getattr(self, where), lowest=1)
        if self.evaluate_every is not None:
            check_count("evaluate_every", self.evaluate_every, lowest=1)
        for variant, options in self.variants.items():
            if not isinstance(options, Mapping):
                raise ConfigError(
                    f"variants: {variant}: expected a dict of options, which may be empty, found {options!r:.80}"
                )
        self._check_data()
        self._check_seeds()
        self.declaration()

    def _check_names(self) -> None:
        """Raise ConfigError for an invalid name of the study, a variant or a framework."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"name: expected a text, found {self.name!r}")
        for where in ("frameworks", "variants", "environment"):
            if not isinstance(getattr(self, where), Mapping):
                raise ConfigError(f"{where}: expected a mapping with names as keys, found {getattr(self, where)!r:.80}")
        check_names("variants", self.variants)
        check_names("frameworks", self.frameworks)
        for framework in self.frameworks:
            kind_of(framework)

    def _check_seeds(self) -> None:
        """Raise ConfigError unless the seeds are different integers in range."""
        seeds: Any = self.seeds
        if isinstance(seeds, str) or not isinstance(seeds, Sequence):
            raise ConfigError(f"seeds: expected a list of integers, found {seeds!r:.80}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds: expected one or more different seeds, found {list(self.seeds)}")
        for seed in self.seeds:
            if check_count("seeds", seed, lowest=0) >= 1 << 63:
                raise ConfigError(f"seeds: expected integers below 2**63, found {seed}")

    def _check_data(self) -> None:
        """Raise ConfigError for an invalid type of store, batches or environment."""
        store, path = self.store, self.store
        if isinstance(store, Mapping):
            path = store.get("path")
        if not (store is None or callable(store) or (isinstance(path, str | os.PathLike) and os.fspath(path))):
            raise ConfigError(f"store: expected a path, a dict with a 'path', or a function, found {store!r:.80}")
        if not isinstance(self.batches, Mapping):
            raise ConfigError(f"batches: expected the loader's options by name, found {self.batches!r:.80}")
        for name, value in self.environment.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(f"environment: {name}: expected a text, found {value!r:.80}")

    @property
    def runs(self) -> tuple[str, ...]:
        """Return the runs, "variant/framework/seed", in the order in which they begin: all runs of a seed, then the
        next seed.
        """
        return tuple(
            f"{variant}/{framework}/{seed}"
            for seed in self.seeds
            for variant in self.variants
            for framework in self.frameworks
        )

    def declaration(self) -> dict[str, Any]:
        """Return the study's declaration as plain values, with functions by location.

        Raises:
            ConfigError: An error of the class ``Study``.
        """
        declared: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        declared["frameworks"] = {
            name: reference(train, f"frameworks: {name}") for name, train in self.frameworks.items()
        }
        declared["seeds"] = [int(seed) for seed in self.seeds]
        if isinstance(self.store, str | os.PathLike):
            declared["store"] = {"path": os.fspath(self.store)}
        elif callable(self.store):
            declared["store"] = {"function": reference(self.store, "store")}
        return {name: _plain(value, name) for name, value in declared.items()}

    def run(
        self, folder: str | os.PathLike[str], *, jobs: int = 1, only: Sequence[str] = (), progress: bool | None = None
    ) -> Results:
        """Execute all runs to their end, each in a separate process; runs that began in an earlier call continue.

        A script must call this method under ``if __name__ == "__main__":``, as the runs import the script.

        Args:
            folder: The folder of logs, records, checkpoints and results, created if it is missing. Runs that began in
                this folder continue.
            jobs: The number of concurrent runs.
            only: Patterns of the runs to execute, "variant/framework/seed", in which ``*`` matches anything, and the
                end may be omitted; by default all runs.
            progress: Whether to show the progress of the runs; None: only if stderr is a terminal.

        Returns:
            The results of all runs so far, which are also written to ``results.parquet`` in the folder.

        Raises:
            ConfigError: The folder has another study, or this study with other options, or another process is running
                the study in this folder.
            KeyboardInterrupt: Ctrl-C was pressed; raised after the active runs have saved their states.
        """
        from mouse_study._running.jobs import run_study

        return run_study(self, Path(folder), jobs=jobs, only=only, progress=progress)


def load_study(path: str | os.PathLike[str]) -> Study:
    """Load the study that a file declares.

    Args:
        path: A Python file with one ``Study`` at its top level; if it has several, append ``:name`` to the path.

    Raises:
        ConfigError: The file does not declare a study, or the study is invalid.
    """
    before, colon, name = os.fspath(path).rpartition(":")
    is_named = bool(colon) and name.isidentifier()
    file = Path(before if is_named else path)
    module = load_file(file)
    if is_named:
        study = getattr(module, name, None)
        if not isinstance(study, Study):
            raise ConfigError(f"{file}: expected a Study named {name!r}, found {type(study).__name__}")
        return study
    studies = {name: value for name, value in vars(module).items() if isinstance(value, Study)}
    if len(studies) != 1:
        raise ConfigError(
            f"{file}: expected one Study at its top level, found {sorted(studies) or 'none'}"
            + ("; say which with FILE.py:NAME" if studies else "")
        )
    return next(iter(studies.values()))


def _plain(value: Any, where: str) -> Any:
    """Convert a value to JSON values, with tuples as lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(child, f"{where}[{number}]") for number, child in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(child, f"{where}[{key!r}]") for key, child in value.items()}
    raise ConfigError(f"{where}: expected numbers, texts, lists, and dicts with names as keys, found {value!r:.80}")
