"""Study: variants x frameworks x seeds of a training function, declared in Python or YAML, and what it gets."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
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
    """Raise ConfigError where a name cannot be a folder's and a part of a run's."""
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: expected names of letters, digits and any of ._+=-, found {name!r}")
    if not names:
        raise ConfigError(f"{where}: expected one or more, found none")


def reference(function: Callable[..., Any] | str, where: str) -> dict[str, str | None]:
    """Return the location of a function: its ``module``, its ``name``, and a ``file`` if the module has no import name.

    Args:
        function: A function at the top of a module or script, or "module:name".
        where: The prefix of error messages.

    Raises:
        ConfigError: Another process could not import the function.
    """
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not colon or not module or not name:
            raise ConfigError(f"{where}: expected a function, or a text 'module:function', found {function!r}")
        return {"module": module, "file": None, "name": name}
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    if not callable(function) or not name:
        raise ConfigError(f"{where}: expected a function, or a text 'module:function', found {function!r:.80}")
    if "<" in name:
        raise ConfigError(
            f"{where}: expected a function at the top of a module, which another process can import, found {name}"
        )
    if module != "__main__":
        return {"module": module, "file": _loaded_from.get(module), "name": name}
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return {"module": spec.name, "file": None, "name": name}
    file = getattr(main, "__file__", None)
    if file is None:
        raise ConfigError(
            f"{where}: expected a function that stands in a file, which another process can import, found {name}, "
            "typed into this one"
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


# The modules that were loaded from a file, by name; other processes load them in the same way.
_loaded_from: dict[str, str] = {}


def load_file(path: Path) -> ModuleType:
    """The module that a Python file is, with its folder on the path, as ``python path`` has it, but not ``__main__``.

    Raises:
        ConfigError: There is no such file.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"study: expected a Python file, found none at {str(path)!r}")
    if _loaded_from.get(path.stem) == str(path):
        return sys.modules[path.stem]
    if path.stem in sys.modules:
        raise ConfigError(
            f"study: expected a file whose name is not that of a module in use, found {path.name}; give it another"
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
"""Whose batches there are; the name of a framework is one of these, or begins with it and a hyphen."""


def kind_of(framework: str) -> str:
    """Whose batches a framework of this name has.

    Raises:
        ConfigError: The name begins with none of ``KINDS``.
    """
    kind = framework.split("-")[0]
    if kind not in KINDS:
        raise ConfigError(
            f"frameworks: expected torch, jax or numpy, alone or with more after a hyphen, found {framework!r}"
        )
    return kind


@dataclass(frozen=True)
class Context:
    """The run for which a training function is called.

    Args:
        variant: The name of the variant.
        options: The variant's options.
        framework: The name of the framework.
        seed: The run's seed. Python's, NumPy's and torch's global generators have been seeded with it.
        steps: How many steps will be taken.
        folder: The folder of this run.
        batches: The arguments of the loader, except ``seed``.
        opened: How the store is opened, for ``store``.
        digest: Whether the loaders of ``loader()`` digest their batches.
        made: The loaders that ``loader()`` has made.
    """

    variant: str
    options: Mapping[str, Any]
    framework: str
    seed: int
    steps: int
    folder: Path
    batches: Mapping[str, Any] = field(default_factory=dict)
    opened: Callable[[], Any] | None = field(default=None, repr=False)
    digest: bool = False
    made: list[Any] = field(default_factory=list, repr=False)

    @property
    def kind(self) -> str:
        """Whose batches the run has: "torch", "jax" or "numpy"."""
        return kind_of(self.framework)

    @cached_property
    def store(self) -> Any:
        """The study's store, or another source that its ``store`` names.

        Raises:
            ConfigError: The study has none.
        """
        if self.opened is None:
            raise ConfigError("store: expected a study with a store, found one without")
        return self.opened()

    def loader(self, **options: Any) -> Any:
        """A loader of the study's store for the framework of this run, with the study's options.

        Without ``batches``, a ``Training`` gets this one. What loaders give that are made here, before the first step,
        is in the run's digest, and their state in its checkpoints.

        Args:
            options: Other values than the study's, for instance ``seed``, which otherwise is the run's.

        Raises:
            ConfigError: The study has no store.
        """
        loader = self._loader({"digest": self.digest, **options})
        self.made.append(loader)
        return loader

    def _loader(self, options: Mapping[str, Any]) -> Any:
        if self.kind == "torch":
            from mouse_torch import PrefetchBatchifier
        elif self.kind == "jax":
            from mouse_jax import PrefetchBatchifier  # type: ignore[assignment]
        else:
            from mouse_core import PrefetchBatchifier  # type: ignore[assignment]
        return PrefetchBatchifier(self.store, **{"seed": self.seed, **self.batches, **options})


@dataclass(frozen=True)
class Training:
    """The result of a training function: how to take a step, and the state that a resumed run needs.

    Args:
        step: Takes one step on a batch and returns its loss: a number or an array of one; or a mapping of names to
            such, "loss" among them. Without a store and without ``batches`` it is called without arguments. It is timed
            until the loss is a number, so nothing that was begun counts as done.
        state: All that a step changes, but for the batches: what has ``state_dict`` and ``load_state_dict`` (modules
            and optimizers of torch, buffers), objects of ``flax.nnx``, generators of random numbers, and dicts, whose
            values are replaced (parameters of JAX, counters); or a list, tuple or dict of these. Global generators are
            remembered anyway. Without a state, a run that was killed begins again.
        batches: Where batches come from, instead of ``Context.loader()``: a loader, whose state is remembered, or a
            function without arguments, for instance ``buffer.sample``.
        evaluate: Called without arguments every ``Study.evaluate_every`` steps and after the last; a number, which is
            recorded as "evaluation", or a mapping of names to numbers.
        digest: Called without arguments at the end, where there are no batches: a digest of what the run was given.
    """

    step: Callable[..., Any]
    state: Any = None
    batches: Any = None
    evaluate: Callable[[], Any] | None = None
    digest: Callable[[], str] | None = None


Train = Callable[[Context], Training]


@dataclass(frozen=True)
class Study:
    """A training in several frameworks, variants and seeds, of which each combination is a run.

    Every run is a process of its own, which imports the functions that are named here: they stand at the top of a
    module or script, or are given as "module:function". All else is plain: numbers, texts, lists and dicts of these.

    Args:
        name: What it is called.
        frameworks: The training function of each, which takes a ``Context`` and gives a ``Training``. A name is
            "torch", "jax" or "numpy", or one of them with more after a hyphen ("torch-compiled"); it says whose batches
            there are.
        steps: Steps of every run.
        seeds: The seeds; each run's data, and what is drawn from global generators, come from its own.
        variants: Options that the training function finds in ``Context.options``, by name of the variant. Loader
            options under ``batches`` go before the study's.
        store: What runs are trained on: the path of recorded data of any format; a dict of ``path`` and other arguments
            of ``mouse_core.formats.open``; or a function without arguments that makes a ``DatasetStore``, which is
            called once, and whose store is kept in the study's folder. None where a training has its own batches.
        batches: Arguments of the loader, the same for all frameworks; or a function that makes them of a variant's
            options, where they are more than plain values.
        evaluate_every: Steps between two evaluations; None: only after the last step.
        checkpoint_every: Steps after which the state is saved, from where a run that was killed goes on.
        threads: Threads that the arithmetic of a run has. With another number sums are rounded otherwise.
        environment: Variables of the environment that runs have.
        digest: Whether what runs are given is digested, which takes a few percent of loading and none of ``wait`` or
            ``compute``.

    Raises:
        ConfigError: A name that cannot be a folder's, an option that is not plain, a function that no other process
            would find, a number out of range.
    """

    name: str
    frameworks: Mapping[str, Train | str]
    steps: int
    seeds: Sequence[int] = (0,)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    store: str | os.PathLike[str] | Mapping[str, Any] | Callable[[], Any] | None = None
    batches: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default_factory=dict)
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
                raise ConfigError(f"variants: {variant}: expected options by name, or {{}}, found {options!r:.80}")
        self._check_data()
        self._check_seeds()
        self.declaration()

    def _check_names(self) -> None:
        """Raise ConfigError where the study, a variant or a framework is named as none can be."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"name: expected a text, found {self.name!r}")
        for where in ("frameworks", "variants", "environment"):
            if not isinstance(getattr(self, where), Mapping):
                raise ConfigError(f"{where}: expected names and what they mean, found {getattr(self, where)!r:.80}")
        check_names("variants", self.variants)
        check_names("frameworks", self.frameworks)
        for framework in self.frameworks:
            kind_of(framework)

    def _check_seeds(self) -> None:
        """Raise ConfigError where the seeds are not integers in range, each given once."""
        seeds: Any = self.seeds
        if isinstance(seeds, str) or not isinstance(seeds, Sequence):
            raise ConfigError(f"seeds: expected a list of integers, found {seeds!r:.80}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds: expected one or more, each once, found {list(self.seeds)}")
        for seed in self.seeds:
            if check_count("seeds", seed, lowest=0) >= 1 << 63:
                raise ConfigError(f"seeds: expected integers below 2**63, found {seed}")

    def _check_data(self) -> None:
        """Raise ConfigError where store, batches or environment are of no kind that they can be."""
        store, path = self.store, self.store
        if isinstance(store, Mapping):
            path = store.get("path")
        if not (store is None or callable(store) or (isinstance(path, str | os.PathLike) and os.fspath(path))):
            raise ConfigError(f"store: expected the path of data, a dict with it, or a function, found {store!r:.80}")
        if not isinstance(self.batches, Mapping) and not callable(self.batches):
            raise ConfigError(
                f"batches: expected the loader's options by name, or a function that makes them, found "
                f"{self.batches!r:.80}"
            )
        for name, value in self.environment.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(f"environment: {name}: expected a text, found {value!r:.80}")

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs, "variant/framework/seed", in the order in which they are begun: all of a seed, then the next."""
        return tuple(
            f"{variant}/{framework}/{seed}"
            for seed in self.seeds
            for variant in self.variants
            for framework in self.frameworks
        )

    def declaration(self) -> dict[str, Any]:
        """Return the study's declaration as plain values, with functions by location.

        Raises:
            ConfigError: As the class says.
        """
        said: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        said["frameworks"] = {name: reference(train, f"frameworks: {name}") for name, train in self.frameworks.items()}
        said["seeds"] = [int(seed) for seed in self.seeds]
        if isinstance(self.store, str | os.PathLike):
            said["store"] = {"path": os.fspath(self.store)}
        elif callable(self.store):
            said["store"] = {"function": reference(self.store, "store")}
        if callable(self.batches):
            said["batches"] = {"function": reference(self.batches, "batches")}
        return {name: _plain(value, name) for name, value in said.items()}

    def run(
        self, folder: str | os.PathLike[str], *, jobs: int = 1, only: Sequence[str] = (), progress: bool | None = None
    ) -> Results:
        """Take all runs to their end, in processes of their own, and go on with those that had begun.

        A script that calls it does so under ``if __name__ == "__main__":``, since the runs import the script.

        Args:
            folder: Where everything is kept: logs, records, checkpoints, results. Made if it is not there; what was
                begun there goes on.
            jobs: How many runs are at work at a time.
            only: Runs to take, "variant/framework/seed", in which ``*`` stands for anything, and the end may be left
                out; by default all.
            progress: Whether a view of the runs is drawn; None: where somebody looks on.

        Returns:
            What was recorded, of all runs so far, which is also written to ``results.parquet`` in the folder.

        Raises:
            ConfigError: Another study is in the folder, or this one with other options, or somebody else at work.
            KeyboardInterrupt: After runs that were at work have saved their state.
        """
        from mouse_study._running.jobs import run_study

        return run_study(self, Path(folder), jobs=jobs, only=only, progress=progress)


def load_study(path: str | os.PathLike[str]) -> Study:
    """The study that a file declares.

    Args:
        path: A Python file with one ``Study`` at its top, or with several and ``:name`` behind the path; or a YAML file
            that has the arguments of ``Study`` by name. Functions in it are "module:function", in modules that lie
            beside it or can be imported.

    Raises:
        ConfigError: There is none, or what it declares cannot be used.
    """
    file, name = _split(os.fspath(path))
    if file.suffix in (".yaml", ".yml"):
        return _from_yaml(file)
    module = load_file(file)
    if name is not None:
        study = getattr(module, name, None)
        if not isinstance(study, Study):
            raise ConfigError(f"{file}: expected a Study named {name!r}, found {type(study).__name__}")
        return study
    studies = {name: value for name, value in vars(module).items() if isinstance(value, Study)}
    if len(studies) != 1:
        raise ConfigError(
            f"{file}: expected one Study at its top, found {sorted(studies) or 'none'}"
            + ("; say which with FILE.py:NAME" if studies else "")
        )
    return next(iter(studies.values()))


def _split(path: str) -> tuple[Path, str | None]:
    before, colon, name = path.rpartition(":")
    return (Path(before), name) if colon and name.isidentifier() else (Path(path), None)


def _from_yaml(file: Path) -> Study:
    import sys

    import yaml  # type: ignore[import-untyped]

    try:
        said = yaml.load(file.read_text(encoding="utf-8"), _yaml_loader())
    except OSError as error:
        said = f"study: expected a file that can be read, found {error.strerror} at {str(file)!r}"
        raise ConfigError(said) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: expected YAML, found {error}") from error
    if not isinstance(said, dict):
        raise ConfigError(f"{file}: expected the arguments of Study by name, found {type(said).__name__}")
    known = [one.name for one in fields(Study)]
    for name in said:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            raise ConfigError(
                f"{file}: expected some of {', '.join(known)}, found {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    for name in ("name", "frameworks", "steps"):
        if name not in said:
            raise ConfigError(f"{file}: expected {name}, found none")
    if str(file.resolve().parent) not in sys.path:
        sys.path.insert(0, str(file.resolve().parent))
    for name in ("store", "batches"):
        if isinstance(said.get(name), str) and _is_function(said[name]):
            said[name] = found(reference(said[name], name), name)
    return Study(**said)


def _yaml_loader() -> Any:
    """A safe loader that reads 1e-3 as a number, as YAML 1.2 does; to 1.1 it is a text, for want of a point."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _is_function(text: str) -> bool:
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


def _plain(value: Any, where: str) -> Any:
    """A value as JSON has it: tuples are lists there."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(child, f"{where}[{number}]") for number, child in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(child, f"{where}[{key!r}]") for key, child in value.items()}
    raise ConfigError(f"{where}: expected numbers, texts, and lists and dicts of these by name, found {value!r:.80}")
