"""Stages: what becomes of a batch between the pipeline that gathered it and whoever asked for it.

A function of one's own is one, and stands here. A module that is loaded where a source has some; the plain path goes
without.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import RowError, convert
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import Plan
from mouse_core.spec import FieldSpec, check_dtype, check_list

Batch = dict[str, npt.NDArray[Any]]
DTypes = Mapping[str, np.dtype[np.generic]]


class Stage(Protocol):
    """A pure function of a batch and of the key of (seed, index), for the batches of one source.

    Stages follow each other: the ``spec`` of one is what arrives at the next. A stage that makes several views of a
    batch hands all of them on.
    """

    @property
    def spec(self) -> Mapping[str, FieldSpec]:
        """The fields of a batch behind this stage."""
        ...

    @property
    def identity(self) -> list[Any]:
        """Return the values that determine the stage, for the fingerprint: lists, texts and numbers."""
        ...

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """The dtypes that batches have to arrive in, where they would be ``dtypes`` without this stage.

        It is asked twice: with the delivered dtypes, and with those that are moved to a device and widened there.
        """
        ...

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """The views of a batch behind this stage.

        Args:
            arrived: The views of a batch, one unless a stage before made several. They may be written to.
            plan: The plan of the batch, whose key names the random numbers.
            stored: Whether fields are in the stored dtypes of ``spec``, instead of the delivered ones.
            apart: Whether views that this stage makes get arrays of their own; not where all are copied elsewhere.
        """
        ...


def staged(
    stages: Sequence[Stage],
    batch: Batch,
    plan: Plan,
    *,
    stored: bool,
    out: Mapping[str, npt.NDArray[Any]] | Sequence[Mapping[str, npt.NDArray[Any]]] | None,
) -> Any:
    """Apply stages to a batch and return it, or a tuple of its views.

    Args:
        stages: The stages, in order.
        batch: The plan's batch, as the first stage needs it; stages may modify it.
        plan: The windows of the batch.
        stored: Whether to return fields in their stored dtypes.
        out: Arrays by field to write to: a mapping for each view, or one mapping for a single one.
    """
    views: tuple[Batch, ...] = (batch,)
    for stage in stages:
        views = stage(views, plan, stored=stored, apart=out is None or stage is not stages[-1])
    if out is not None:
        targets = (out,) if isinstance(out, Mapping) else out
        for view, target in zip(views, targets, strict=True):
            for name, values in view.items():
                np.copyto(target[name], values, casting="no")
        views = tuple(dict(target) for target in targets)
    return views[0] if len(views) == 1 else cast(Any, views)


Per = Literal["batch", "rows", "window"]

# Of one batch, draws of different views are so many calls apart: more than a batch has windows.
_CALLS_OF_VIEW = 1 << 32


@dataclass(frozen=True, eq=False)
class Map:
    """A function of one's own in the workers of a source or a loader: the last thing that is done to a batch.

    The function must be pure: what it returns depends on nothing but what it is given. Then batches are the same
    whoever asks for them, in any framework, with any number of workers, and after any resumption.

    What it is given are the fields of a batch without ``map``, after normalisation and augmentation, as NumPy arrays in
    the dtypes that the spec without a framework says; it may write to them. In several views it is called for each.

    Args:
        fn: ``fn(fields, generator)`` or, with ``per="rows"``, ``fn(fields)``, which returns the fields of ``spec`` in
            arrays of their own.
        version: Names the function in the fingerprint, as in "returns/2": give another where it becomes another.
        spec: The fields that it returns, new or instead of those of the name: by name ``(dtype, shape)``, of which the
            shape is that of one step, or a ``FieldSpec``. All others stay.
        per: What it is called for. "batch": a whole batch, ``[B, S, ...]`` (or ``[B, ...]``, as ``Spec.batch_dims``
            says); not for shards, which have some of its rows. "window": every window ``[S, ...]`` (or a row
            ``[...]``), with a generator of its own, so that all shards together make what one would. "rows": the rows
            of a batch that there are, for a function that treats each for itself and draws nothing.
        drop: Fields that are left out afterwards.

    The generator is a ``numpy.random.Generator`` that depends on the seed and the number of the batch, and, with
    "window", on the number of the window in the whole batch. NumPy may change what its methods draw between versions.

    A function that cannot be pickled, as a lambda, works in threads, and not in processes that are spawned.

    Raises:
        ConfigError: No function, name or dtype, or options that do not go together.

    Example:
        >>> def noisy(fields, generator):
        ...     noise = generator.normal(size=fields["reward"].shape)
        ...     return {"reward": (fields["reward"] + noise).astype("float32")}
        >>> chosen = Map(noisy, "noisy/1", {"reward": ("float32", ())})
    """

    fn: Callable[..., Mapping[str, npt.NDArray[Any]]]
    version: str
    spec: Mapping[str, FieldSpec | tuple[npt.DTypeLike, tuple[int, ...]]]
    per: Per = "batch"
    drop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f"map: expected a function, found {self.fn!r:.80}")
        if not isinstance(self.version, str) or not self.version.strip():
            raise ConfigError(f"map: expected a version like 'name/1', found {self.version!r:.80}")
        if self.per not in get_args(Per):
            raise ConfigError(f"map: {self.version!r}: expected per as one of {get_args(Per)}, found {self.per!r:.80}")
        if not isinstance(self.spec, Mapping) or not self.spec:
            raise ConfigError(
                f"map: {self.version!r}: expected a spec like {{'reward': ('float32', ())}}, found {self.spec!r:.80}"
            )
        object.__setattr__(self, "drop", check_list("map: drop", self.drop))
        both = [name for name in self.drop if name in self.spec]
        if both:
            raise ConfigError(f"map: {self.version!r}: expected to drop others than the spec has, found {both}")
        object.__setattr__(self, "spec", {name: self._declared(name, one) for name, one in self.spec.items()})

    def _declared(self, name: str, one: Any) -> FieldSpec:
        """Check the declaration of a field that the function returns."""
        where = f"map: {self.version!r}: {name!r}"
        if isinstance(one, FieldSpec):
            if one.name != name:
                raise ConfigError(f"{where}: expected a FieldSpec of that name, found {one.name!r}")
            return one.replace(dtype=check_dtype(one.dtype, where=where))
        if not isinstance(one, tuple | list) or len(one) != 2 or not isinstance(one[1], tuple | list):
            raise ConfigError(f"{where}: expected (dtype, shape of a step) or a FieldSpec, found {one!r:.80}")
        dtype, shape = one
        if not all(is_whole(size) and size > 0 for size in shape):
            raise ConfigError(f"{where}: expected a shape of positive sizes, found {shape!r}")
        return FieldSpec(name, check_dtype(dtype, where=where), tuple(map(int, shape)))

    @property
    def fields(self) -> dict[str, FieldSpec]:
        """``spec``, as FieldSpecs by name."""
        return cast("dict[str, FieldSpec]", self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Itself, for another process.

        Raises:
            ConfigError: A function that cannot be pickled, and nobody that pickles functions by value is at it.
        """
        try:
            pickle.dumps(self.fn)
        except Exception as error:
            if not _pickled_by_value():
                raise ConfigError(
                    f"map: {self.version!r}: expected a function that can be pickled for another process, found "
                    f"{self.fn!r} ({error}); define it with def at the top of a module, and give what it needs with "
                    "functools.partial, or stay with threads"
                ) from error
        return Map, (self.fn, self.version, self.fields, self.per, tuple(self.drop))


def check_map(chosen: Any, shard: tuple[int, int]) -> None:
    """Raise ConfigError unless ``chosen`` is a ``Map`` that works on this shard's rows of a batch."""
    if not isinstance(chosen, Map):
        raise ConfigError(f"map: expected a mouse_core.Map, found {chosen!r:.80}")
    if shard[1] > 1 and chosen.per == "batch":
        raise ConfigError(
            f"map: {chosen.version!r}: expected per='window' or per='rows' with a shard, which has some rows of each "
            f"batch, found per='batch' with shard {shard}"
        )


def _pickled_by_value() -> bool:
    """Whether cloudpickle, or a copy of it as Ray has one, is pickling, which takes any function."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if "cloudpickle" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, eq=False)
class StreamMap:
    """A function of the user's for the batches of one source.

    Args:
        map: What is asked for.
        arriving: The fields of a batch before.
        delivered: Those behind, in the dtypes of the framework.
        batch_dims: How many axes come before those of a field.
    """

    map: Map
    arriving: Mapping[str, FieldSpec]
    delivered: Mapping[str, FieldSpec]
    batch_dims: int

    @classmethod
    def of(
        cls,
        chosen: Map,
        arriving: Mapping[str, FieldSpec],
        replaced: Mapping[np.dtype[Any], np.dtype[Any]],
        batch_dims: int,
    ) -> StreamMap:
        """The function for batches of some fields; ``replaced`` is ``replace_dtypes`` of ``BatchSource``.

        Raises:
            MissingFieldError: A field to leave out that is not there.
        """
        for name in chosen.drop:
            if name not in arriving:
                raise MissingFieldError(f"map: drop: expected fields among {list(arriving)}, found {name!r}")
        made = {name: one for name, one in {**arriving, **chosen.fields}.items() if name not in chosen.drop}
        delivered = {name: one.replace(dtype=replaced.get(one.dtype, one.dtype)) for name, one in made.items()}
        return cls(chosen, arriving, delivered, batch_dims)

    @property
    def spec(self) -> Mapping[str, FieldSpec]:
        """The fields of a batch behind the function, stored and moved as they are delivered."""
        return self.delivered

    @property
    def identity(self) -> list[Any]:
        """The version that the user gave it, what it is called for, and what it makes of the fields."""
        shapes = {name: list(one.shape) for name, one in self.map.fields.items()}
        return ["map", self.map.version, self.map.per, shapes, list(self.map.drop)]

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """Return the dtypes of ``arriving``, independent of how batches are transferred later."""
        return {name: self.arriving[name].dtype for name in dtypes}

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """Apply the function to each view; see ``Stage``.

        Raises:
            SchemaError: The function's result does not match its spec.
            DataError: The framework's dtype cannot hold a number.
            Exception: The function raises it; a note names the batch.
        """
        made = []
        for number, view in enumerate(arrived):
            own = Key(plan.key.seed, Purpose.MAP, plan.key.index, number * _CALLS_OF_VIEW)
            made.append(self._delivered(self._made(view, own, plan.global_size, plan.first)))
        return tuple(made)

    def _made(self, view: Batch, key: Key, size: int, first: int) -> Batch:
        """The fields of a view behind the function."""
        axes = next(iter(view.values())).shape[: self.batch_dims]
        fields = self.map.fields
        if self.map.per != "window":
            given: tuple[Any, ...] = () if self.map.per == "rows" else (key.generator(),)
            made = self._checked(self._called(dict(view), *given, index=key.index), axes, key.index)
        else:
            made = {name: np.empty((*axes, *one.shape), one.dtype) for name, one in fields.items()}
            for row in range(axes[0]):
                window = {name: values[row, ...] for name, values in view.items()}
                generator = key.with_call(key.call + (first + row) % size).generator()
                found = self._checked(self._called(window, generator, index=key.index), axes[1:], key.index)
                for name, values in found.items():
                    made[name][row] = values
        return {name: made[name] if name in made else view[name] for name in self.delivered}

    def _called(self, *given: Any, index: int) -> Any:
        try:
            return self.map.fn(*given)
        except Exception as error:
            error.add_note(f"map: {self.map.version!r}, batch {index}")
            raise

    def _checked(self, found: Any, axes: tuple[int, ...], index: int) -> Batch:
        """Return the function's result after checking it against the spec."""
        fields = self.map.fields
        if not isinstance(found, Mapping) or found.keys() != fields.keys():
            has = list(found) if isinstance(found, Mapping) else type(found).__name__
            raise self._unexpected(index, f"expected fields {list(fields)}, found {has}")
        made = {}
        for name, one in fields.items():
            values = found[name]
            is_array, shape = isinstance(values, np.ndarray | np.generic), (*axes, *one.shape)
            if not is_array or values.dtype != one.dtype or values.shape != shape:
                has = f"{values.dtype} {list(values.shape)}" if is_array else type(values).__name__
                raise self._unexpected(index, f"{name!r}: expected an array {one.dtype} {[*shape]}, found {has}")
            made[name] = cast("npt.NDArray[Any]", values)
        return made

    def _unexpected(self, index: int, what: str) -> SchemaError:
        return SchemaError(f"map: {self.map.version!r}, batch {index}: {what}")

    def _delivered(self, view: Batch) -> Batch:
        """A view in the dtypes of the framework, in arrays that others may keep and write to."""
        for name, values in view.items():
            if values.dtype != self.delivered[name].dtype:
                try:
                    view[name] = values = convert(values, self.delivered[name].dtype)
                except RowError as error:
                    raise DataError(f"map: {self.map.version!r}: {name!r}: {error}") from error
            if name in self.map.spec and not (values.flags.c_contiguous and values.flags.writeable):
                view[name] = np.array(values, order="C")
        return view
