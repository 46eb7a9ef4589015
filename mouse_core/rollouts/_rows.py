"""The rows of a rollout: arrays that are filled step by step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar

from mouse_core._base.tracing import refuse_traced
from mouse_core.digest import StreamDigest
from mouse_core.digest.states import asked_for
from mouse_core.dtypes import namespace
from mouse_core.errors import MissingFieldError, RolloutError, RolloutFullError, SchemaError
from mouse_core.randomness import check_seed
from mouse_core.rollouts.checks import HostArrays, StepChecks
from mouse_core.rollouts.fields import (
    ALIASES,
    COMPUTED,
    KNOWN,
    RolloutField,
    complete_fields,
    stored_spec,
)
from mouse_core.rollouts.fields import Transition as _Transition
from mouse_core.rollouts.motion import TrainingType, find_extractors
from mouse_core.rollouts.policy_states import PolicyStates
from mouse_core.rollouts.trajectories import episode_starts
from mouse_core.spec import check_count

Array = Any


class RolloutRows:
    """What a ``RolloutStorage`` holds, and how it is filled; see there."""

    Transition: ClassVar[type[_Transition]] = _Transition
    kind_of_arrays: ClassVar[type[HostArrays]] = HostArrays
    training_type: TrainingType | None = None

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        fields: Mapping[str, RolloutField | Sequence[int]],
        seed: int = 0,
        *,
        amp_cfg: Any = None,
        device: Any = None,
        hidden_axis: int | None = None,
        validate: bool | None = None,
        digest: bool = False,
    ) -> None:
        check_count("num_envs", num_envs)
        check_count("num_transitions_per_env", num_transitions_per_env)
        self.num_envs, self.num_transitions_per_env = int(num_envs), int(num_transitions_per_env)
        self._fields = complete_fields(fields)
        self.seed = check_seed(seed)
        self._extractors = find_extractors(amp_cfg, self._fields)
        self._kind = self.kind_of_arrays(device)
        self.device = self._kind.device
        self.epoch = 0
        self._digest = StreamDigest() if digest else None
        self._delivered = 0
        self.spec = stored_spec(self._fields)
        self._checks = StepChecks(self._fields, self.num_envs, self.spec, self._kind, validate)
        self._states = PolicyStates(self.num_transitions_per_env, self.num_envs, hidden_axis, self._kind)
        self._arrays: dict[str, Array] = {}
        for name, field in self._fields.items():
            if field.mask or not field.optional:
                self._allocate(name)
        for name in COMPUTED if "values" in self._fields else ():
            self._allocate(name)
        # The arrays that this rollout fills: all but those of optional fields that its rows lack.
        self._present: frozenset[str] = frozenset()
        self._version = 0
        self.clear()

    # ------------------------------------------------------------------ what it holds

    def __repr__(self) -> str:
        rows = f"{self._step} of {self.num_transitions_per_env} rows, num_envs={self.num_envs}"
        return f"{type(self).__name__}({rows}, fields={list(self._fields)}, seed={self.seed})"

    def __getitem__(self, name: str) -> Array:
        """The array of a field, ``[T, N, ...]``."""
        try:
            return self._arrays[ALIASES.get(name, name)]
        except KeyError:
            raise MissingFieldError(f"rollout: expected one of {list(self._arrays)}, found {name!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __getattr__(self, name: str) -> Array:
        # Only for what is no attribute. Private names come here while an instance is being unpickled.
        if not name.startswith("_"):
            canonical = ALIASES.get(name, name)
            if canonical in self._arrays:
                return self._arrays[canonical]
            if canonical in KNOWN or canonical in self.spec:
                return None
        raise AttributeError(f"{type(self).__name__}: no attribute or field {name!r}")

    @property
    def hidden_states(self) -> Any:
        """``(actor, critic)``, arrays ``[T, ...]`` in the structure in which they came; None if none came."""
        return self._states.trees

    @property
    def step(self) -> int:
        """The number of rows that are filled."""
        return self._step

    @property
    def digest(self) -> StreamDigest:
        """What was read so far, over all rollouts, in 128 bits: the mini-batches with their numbers.

        It is ``batch.digest(i)`` added up over the mini-batches that were delivered, of which the storage's first has
        ``i = 0``; of ``generator()`` each step counts as one. It is equal in every framework, is a part of the state
        and goes on from there. Of several processes each has environments of its own: the sum of their digests is that
        of all that was read, equal in a second run of as many processes, and no single storage's.

        Raises:
            ConfigError: The storage was made without ``digest=True``.
        """
        return asked_for(self._digest, "storage")

    # ------------------------------------------------------------------ filling it

    def add_transitions(self, transition: _Transition | Mapping[str, Any]) -> None:
        """Copy one step of all environments into row ``step``.

        Args:
            transition: Arrays ``[N, ...]`` by name; one number for each environment may be ``[N]`` or ``[N, 1]``. A
                field with a mask may come as ``(data, mask)``; without one it is available everywhere.
                ``hidden_states`` is ``(actor, critic)``, each an array, a tuple of arrays (LSTM), or None: the state
                *before* the step. None in the first rows, where a policy has no state before its first step, stands
                for zeros once a state comes.

        Raises:
            RolloutFullError: There is no row left (also an OverflowError).
            SchemaError, MissingFieldError: Names, shapes or dtypes that are not those of the fields.
            DataError: Rewards, values or log-probabilities that are not finite, or done codes other than 0, 1, 2.
                In each case nothing has changed.
        """
        refuse_traced("add_transitions")
        if self._step >= self.num_transitions_per_env:
            raise RolloutFullError(
                f"add_transitions: expected at most {self.num_transitions_per_env} rows, found one more; clear() first"
            )
        given = self._checks.given(transition)
        rows = self._checks.rows(given, self._step)
        self._check_optional(rows)
        states = self._states.check(given.get("hidden_states"), self._step)
        for name in rows.keys() - self._arrays.keys():
            self._allocate(name)
        for name, row in rows.items():
            self._arrays[name][self._step] = row
        self._states.write(states, self._step)
        self._present = frozenset(rows)
        self._step += 1
        self._version += 1

    def clear(self) -> None:
        """Begin a new rollout; the order of rows in mini-batches goes on being new in every epoch."""
        self._step = 0
        self._computed = False
        self._states.clear()
        self._present = frozenset()
        self._version += 1

    def get_statistics(self) -> tuple[Any, Any]:
        """The mean length of trajectories, which the end of the rollout cuts, and the mean reward; changes nothing.

        Raises:
            RolloutError: There is no row yet.
        """
        if not self._step:
            raise RolloutError("get_statistics: expected at least one row, found none")
        dones, rewards = self._arrays["dones"][: self._step], self._arrays["rewards"][: self._step]
        xp = namespace(rewards)
        starts = episode_starts(dones)
        number = xp.sum(xp.astype(starts, xp.int64))
        return self._step * self.num_envs / number, xp.mean(rewards)

    # ------------------------------------------------------------------ details

    def _allocate(self, name: str) -> None:
        field = self._fields.get(name)
        for each in (name, f"{name}_mask") if field is not None and field.mask else (name,):
            spec = self.spec[each]
            shape = (self.num_transitions_per_env, self.num_envs, *spec.shape)
            self._arrays[each] = self._kind.zeros(shape, spec.dtype)

    def _check_optional(self, rows: Container[str]) -> None:
        """See that an optional field is in all rows of a rollout or in none; not knowing is what masks are for."""
        for name, field in self._fields.items():
            if not field.optional or field.mask or not self._step or (name in rows) == (name in self._present):
                continue
            if name in rows:
                raise SchemaError(f"{name}: expected it in every row or in none, found it first in row {self._step}")
            raise MissingFieldError(f"{name}: expected it in every row or in none, found none in row {self._step}")
