"""Stages, which change a batch after the pipeline has gathered it and before it is delivered.

One of the stages applies a ``Map``, which contains a user's function. The module is imported only if a source has
stages.
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
    """A change of the batches of one source: a pure function of a batch and of a key, which depends on the seed and the
    batch's index.

    The ``spec`` of a stage describes its output, which is the input of the next stage. If a stage creates several views
    of a batch, later stages receive all views.
    """

    @property
    def spec(self) -> Mapping[str, FieldSpec]:
        """The fields of a batch after this stage."""

    @property
    def identity(self) -> list[Any]:
        """Return the values that determine the stage, as lists, texts and numbers, for the fingerprint."""

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """Return the dtypes that the stage's input must have, given the ``dtypes`` that batches have without this
        stage.

        A source calls this method twice: with the delivered dtypes, and with the stored dtypes, for batches that are
        converted to the delivered dtypes later on a device.
        """

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """Return the views of a batch after this stage.

        Args:
            arrived: The views of a batch; a single view unless an earlier stage created several views. The stage may
                modify the views.
            plan: The plan of the batch; its key determines the random numbers.
            stored: Whether fields have the stored dtypes of ``spec`` instead of the delivered dtypes.
            apart: Whether each view that this stage creates needs its own arrays; False if all views are copied later.
        """


Per = Literal["batch", "rows", "window"]

# Distance between the call numbers of two views of a batch: larger than the number of windows in any batch.
_CALLS_OF_VIEW = 1 << 32


@dataclass(frozen=True, eq=False)
class Map:
    """A user's function that a source or the workers of a loader apply to each batch, as the last change of the batch.

    The function must be pure: its result depends only on its arguments. With a pure function, batches are the same in
    every process and framework, with any number of workers, and after a resume.

    The function receives the fields that a batch has without ``map``, after normalisation and augmentation. The fields
    are NumPy arrays, with the dtypes that a source for NumPy delivers, and the function may modify the arrays. With
    several views, the function is called once for each view.

    Args:
        fn: A function that is called as ``fn(fields, generator)`` or, with ``per="rows"``, as ``fn(fields)``, and that
            returns the fields of ``spec`` in new arrays.
        version: Identifies the function in the fingerprint, as in "returns/2"; change it when the function changes.
        spec: A dict from the name of each field that the function returns to ``(dtype, shape)``, where ``shape`` is the
            shape of one step, or to a ``FieldSpec``. The returned fields are added to the batch or replace fields of
            the same name; all other fields are unchanged.
        per: The unit of a call. "batch": the function receives a complete batch, ``[B, S, ...]`` (or ``[B, ...]``; see
            ``Spec.batch_dims``); not possible with shards. "window": the function receives one window ``[S, ...]`` (or
            one row ``[...]``) and a generator for this window, so that all shards together have the same result as a
            single process. "rows": the function receives this shard's rows of a batch; it must treat each row
            independently and draw no random numbers.
        drop: Fields that are removed after the call.

    The generator is a ``numpy.random.Generator`` that depends on the seed, the index of the batch, and, with "window",
    the index of the window in the batch over all shards. The streams of the generator's methods may differ between
    versions of NumPy.

    A function that cannot be pickled, such as a lambda, works in threads but not in spawned processes.

    Raises:
        ConfigError: The function, a name or a dtype is invalid, or options contradict each other.

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
            raise ConfigError(f"map: {self.version!r}: per: expected one of {get_args(Per)}, found {self.per!r:.80}")
        if not isinstance(self.spec, Mapping) or not self.spec:
            raise ConfigError(
                f"map: {self.version!r}: expected a spec like {{'reward': ('float32', ())}}, found {self.spec!r:.80}"
            )
        object.__setattr__(self, "drop", check_list("map: drop", self.drop))
        both = [name for name in self.drop if name in self.spec]
        if both:
            raise ConfigError(
                f"map: {self.version!r}: expected different fields in drop and in the spec, found {both} in both"
            )
        object.__setattr__(self, "spec", {name: self._declared(name, one) for name, one in self.spec.items()})

    def _declared(self, name: str, one: Any) -> FieldSpec:
        """Check the declaration of a field that the function returns."""
        where = f"map: {self.version!r}: {name!r}"
        if isinstance(one, FieldSpec):
            if one.name != name:
                raise ConfigError(f"{where}: expected a FieldSpec with the name {name!r}, found {one.name!r}")
            return one.replace(dtype=check_dtype(one.dtype, where=where))
        if not isinstance(one, tuple | list) or len(one) != 2 or not isinstance(one[1], tuple | list):
            raise ConfigError(f"{where}: expected (dtype, shape of a step) or a FieldSpec, found {one!r:.80}")
        dtype, shape = one
        if not all(is_whole(size) and size > 0 for size in shape):
            raise ConfigError(f"{where}: expected a shape of positive sizes, found {shape!r}")
        return FieldSpec(name, check_dtype(dtype, where=where), tuple(map(int, shape)))

    @property
    def fields(self) -> dict[str, FieldSpec]:
        """The fields of ``spec`` as ``FieldSpec`` objects, by name."""
        return cast("dict[str, FieldSpec]", self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the map for another process.

        Raises:
            ConfigError: The function cannot be pickled, and the pickler does not pickle functions by value.
        """
        try:
            pickle.dumps(self.fn)
        except Exception as error:
            if not _pickled_by_value():
                raise ConfigError(
                    f"map: {self.version!r}: expected a function that can be pickled for another process, found "
                    f"{self.fn!r} ({error}); define it with def at the top of a module, and bind its arguments with "
                    "functools.partial, or use threads"
                ) from error
        return Map, (self.fn, self.version, self.fields, self.per, tuple(self.drop))


def check_map(chosen: Any, shard: tuple[int, int]) -> None:
    """Raise ConfigError unless ``chosen`` is a ``Map`` that supports this shard."""
    if not isinstance(chosen, Map):
        raise ConfigError(f"map: expected a mouse_core.Map, found {chosen!r:.80}")
    if shard[1] > 1 and chosen.per == "batch":
        raise ConfigError(
            f"map: {chosen.version!r}: with a shard, expected per='window' or per='rows', because a shard has only "
            f"some rows of each batch, found per='batch' and shard {shard}"
        )


def _pickled_by_value() -> bool:
    """Return whether cloudpickle, or Ray's copy of cloudpickle, is pickling the map; cloudpickle can pickle any
    function by value.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if "cloudpickle" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back
    return False


class StreamMap:
    """The stage that applies a ``Map`` to the batches of one source; ``spec`` describes a batch after this stage.

    Args:
        chosen: The user's function and its options.
        arriving: The fields of a batch before the function.
        replaced: The option ``replace_dtypes`` of the source. After a ``Map``, delivered dtypes equal stored dtypes.
        batch_dims: The number of batch axes, which precede the axes of a field.

    Raises:
        MissingFieldError: ``drop`` names a field that batches lack.
    """

    def __init__(
        self,
        chosen: Map,
        arriving: Mapping[str, FieldSpec],
        replaced: Mapping[np.dtype[Any], np.dtype[Any]],
        batch_dims: int,
    ) -> None:
        for name in chosen.drop:
            if name not in arriving:
                raise MissingFieldError(f"map: drop: expected fields among {list(arriving)}, found {name!r}")
        self.map, self.arriving, self.batch_dims = chosen, arriving, batch_dims
        made = {name: one for name, one in {**arriving, **chosen.fields}.items() if name not in chosen.drop}
        self.spec: Mapping[str, FieldSpec] = {
            name: one.replace(dtype=replaced.get(one.dtype, one.dtype)) for name, one in made.items()
        }

    @property
    def identity(self) -> list[Any]:
        """Return the version of the function, the unit of a call (``per``), and the fields that are added, replaced or
        removed.
        """
        shapes = {name: list(one.shape) for name, one in self.map.fields.items()}
        return ["map", self.map.version, self.map.per, shapes, list(self.map.drop)]

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """Return the dtypes of ``arriving``, whether or not a device converts dtypes later."""
        return {name: self.arriving[name].dtype for name in dtypes}

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """Apply the function to each view; see ``Stage``.

        Raises:
            SchemaError: The function's result does not match the ``spec`` of the ``Map``.
            DataError: The framework's dtype cannot represent a number of the result.
            Exception: The error that the function raises, with a note that names the batch.
        """
        made = []
        for number, view in enumerate(arrived):
            own = Key(plan.key.seed, Purpose.MAP, plan.key.index, number * _CALLS_OF_VIEW)
            made.append(self._delivered(self._made(view, own, plan.global_size, plan.first)))
        return tuple(made)

    def _made(self, view: Batch, key: Key, size: int, first: int) -> Batch:
        """Apply the function to a view; return the view's fields."""
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
        return {name: made[name] if name in made else view[name] for name in self.spec}

    def _called(self, *given: Any, index: int) -> Any:
        try:
            return self.map.fn(*given)
        except Exception as error:
            error.add_note(f"map: {self.map.version!r}, batch {index}")
            raise

    def _checked(self, found: Any, axes: tuple[int, ...], index: int) -> Batch:
        """Check that the function's result matches the spec, and return the result."""
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
        """Convert a view to the dtypes of the framework, in arrays that the caller may keep and modify."""
        for name, values in view.items():
            if values.dtype != self.spec[name].dtype:
                try:
                    view[name] = values = convert(values, self.spec[name].dtype)
                except RowError as error:
                    raise DataError(f"map: {self.map.version!r}: {name!r}: {error}") from error
            if name in self.map.spec and not (values.flags.c_contiguous and values.flags.writeable):
                view[name] = np.array(values, order="C")
        return view
