"""Stages: what becomes of a batch between the pipeline that gathered it and whoever asked for it.

A module that is loaded where a source has some; the plain path goes without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mouse_core.randomness import Key
from mouse_core.sampling.plan import Plan
from mouse_core.spec import FieldSpec

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
        """What decides about the stage, for the fingerprint: lists, texts and numbers."""
        ...

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """The dtypes that batches have to arrive in, where they would be ``dtypes`` without this stage.

        It is asked twice: with the delivered dtypes, and with those that are moved to a device and widened there.
        """
        ...

    def __call__(
        self,
        arrived: tuple[Batch, ...],
        key: Key,
        *,
        shape: tuple[int, int],
        first: int,
        stored: bool = False,
        apart: bool = True,
    ) -> tuple[Batch, ...]:
        """The views of a batch behind this stage.

        Args:
            arrived: The views of a batch, one unless a stage before made several. They may be written to.
            key: Names the random numbers; see ``Plan.key``.
            shape: ``(B, S)`` of the whole batch, of which these may be the rows of a shard.
            first: Which row of the whole batch the first of these is.
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
    """What becomes of a batch: itself, or a tuple of its views.

    Args:
        stages: What is done to it, in this order.
        batch: Of the plan, as the first stage needs it; it may be written to.
        plan: Which windows it is.
        stored: Whether fields are to come in their stored dtypes.
        out: Arrays by field to write to: a mapping for each view, or one mapping for a single one.
    """
    views: tuple[Batch, ...] = (batch,)
    shape = (plan.global_size, plan.length)
    for stage in stages:
        views = stage(views, plan.key, shape=shape, first=plan.first, stored=stored, apart=out is None)
    if out is not None:
        targets = (out,) if isinstance(out, Mapping) else out
        for view, target in zip(views, targets, strict=True):
            for name, values in view.items():
                np.copyto(target[name], values, casting="no")
        views = tuple(dict(target) for target in targets)
    return views[0] if len(views) == 1 else cast(Any, views)
