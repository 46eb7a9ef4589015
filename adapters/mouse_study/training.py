"""The argument and the result of a training function, the part of a study that its user writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError

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
