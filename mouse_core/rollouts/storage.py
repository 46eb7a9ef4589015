"""RolloutStorage, which stores the steps of many environments in time-major arrays."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from mouse_core._base.checks import state_number
from mouse_core._base.tracing import refuse_traced
from mouse_core.dtypes import namespace, widened
from mouse_core.errors import ConfigError, MissingFieldError, RolloutError, RolloutFullError, SchemaError, StateError
from mouse_core.randomness import check_seed
from mouse_core.rollouts.fields import (
    ALIASES,
    COMPUTED,
    KNOWN,
    HostArrays,
    RolloutField,
    StepChecks,
    TrainingType,
    complete_fields,
    motion_mimic_fields,
    stored_spec,
)
from mouse_core.rollouts.fields import Transition as _Transition
from mouse_core.rollouts.mini_batches import (
    AmpStates,
    MiniBatch,
    amp_states,
    check_histories,
    cut,
    find_extractors,
    pair,
    permutation,
    take_mini_batch,
    take_recurrent_mini_batch,
)
from mouse_core.rollouts.policy_states import PolicyStates
from mouse_core.rollouts.returns import gae, normalized
from mouse_core.rollouts.trajectories import episode_starts
from mouse_core.spec import check_count, check_unit

Array = Any


_STATE_KEYS = ("seed", "epoch", "num_envs", "num_transitions_per_env")


class RolloutStorage:
    """Stores T steps of N environments in arrays ``[T, N, ...]``, and delivers mini-batches.

    Rows have the alignment "outgoing": the action, reward and done of row t belong to the transition that leaves the
    observation of row t. Fill the storage with ``add_transitions``, call ``compute_returns``, read mini-batches, call
    ``clear()``, and begin again. ``storage["name"]`` or ``storage.name`` returns the array of a field without a copy,
    so the next rollout overwrites this array.

    Args:
        num_envs: The number of environments, N.
        num_transitions_per_env: The number of steps, T.
        fields: For each field name, a ``RolloutField`` or a shape of float32 values. Rewards and dones always exist. If
            there is a field ``values``, the storage also has ``returns`` and ``advantages``. A field with one number
            for each row is stored as ``[T, N, 1]``. If rewards and values have the shape ``(K,)``, returns and
            advantages are ``[T, N, K]``.
        seed: Seed of the order of rows in mini-batches, in ``[0, 2**64)``.
        amp_cfg: A dict of two functions, ``amp_obs_extractor(obs)`` and ``amp_ref_obs_extractor((ref_obs, mask))``; the
            second function returns a state or ``(state, mask)``. Mini-batches contain the outputs of both functions for
            the previous observation of each row. Both extractors are called with all rows, ``[T * N, ...]``.
        device: "cpu" or None; adapters support other devices.
        validate: Whether non-finite numbers, unknown done codes, and integers that the field's dtype cannot represent
            raise DataError. None: True on the CPU and False on other devices, because on other devices the check would
            wait for all queued work.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        >>> import numpy as np
        >>> from mouse_core.rollouts import RolloutStorage
        >>> storage = RolloutStorage(num_envs=2, num_transitions_per_env=3, fields={"obs": (4,), "values": ()})
        >>> for step in range(3):
        ...     storage.add_transitions(
        ...         {"obs": np.ones((2, 4)), "values": np.zeros(2), "rewards": np.ones(2), "dones": [False, False]}
        ...     )
        >>> storage.compute_returns(np.zeros(2), gamma=0.5, lam=1.0)
        >>> storage.returns[:, 0, 0]
        array([1.75, 1.5 , 1.  ], dtype=float32)
    """

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
        validate: bool | None = None,
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
        self.spec = stored_spec(self._fields)
        self._checks = StepChecks(self._fields, self.num_envs, self.spec, self._kind, validate)
        self._states = PolicyStates(self.num_transitions_per_env, self.num_envs, self._kind)
        self._arrays: dict[str, Array] = {}
        for name, field in self._fields.items():
            if field.mask or not field.optional:
                self._allocate(name)
        for name in COMPUTED if "values" in self._fields else ():
            self._allocate(name)
        # The arrays that this rollout fills: all except optional fields that its rows lack.
        self._present: frozenset[str] = frozenset()
        self._version = 0
        self.clear()

    # ------------------------------------------------------------------ what it holds

    def __repr__(self) -> str:
        rows = f"{self._step} of {self.num_transitions_per_env} rows, num_envs={self.num_envs}"
        return f"{type(self).__name__}({rows}, fields={list(self._fields)}, seed={self.seed})"

    def __getitem__(self, name: str) -> Array:
        """Return the array of a field, ``[T, N, ...]``."""
        try:
            return self._arrays[ALIASES.get(name, name)]
        except KeyError:
            raise MissingFieldError(f"rollout: expected one of {list(self._arrays)}, found {name!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __getattr__(self, name: str) -> Array:
        # Called only for unknown attributes. Private names are looked up while an instance is unpickled.
        if not name.startswith("_"):
            canonical = ALIASES.get(name, name)
            if canonical in self._arrays:
                return self._arrays[canonical]
            if canonical in KNOWN or canonical in self.spec:
                return None
        raise AttributeError(f"{type(self).__name__}: no attribute or field {name!r}")

    @property
    def hidden_states(self) -> Any:
        """The hidden states ``(actor, critic)``: arrays ``[T, ...]``, nested as in the transitions; None without hidden
        states.
        """
        return self._states.trees

    @property
    def step(self) -> int:
        """The number of filled rows."""
        return self._step

    # ------------------------------------------------------------------ filling it

    def add_transitions(self, transition: _Transition | Mapping[str, Any]) -> None:
        """Copy one step of all environments into row ``step``.

        Args:
            transition: Arrays ``[N, ...]`` by name; a field with one number for each environment may be ``[N]`` or
                ``[N, 1]``. A field with a mask may be ``(data, mask)``; if only ``data`` is passed, the field is
                available in all environments. ``hidden_states`` is ``(actor, critic)``, the states *before* the step;
                each state is an array, a tuple of arrays (LSTM), or None. If the first rows have None and later rows
                have states, the states of the first rows are zeros.

        Raises:
            RolloutFullError: The storage is full (the error is also an OverflowError).
            SchemaError, MissingFieldError: Names, shapes or dtypes do not match the fields.
            DataError: A reward, value or log-probability is not finite, or a done code is not 0, 1 or 2.
                After each of these errors the storage is unchanged.
        """
        refuse_traced("add_transitions")
        if self._step >= self.num_transitions_per_env:
            raise RolloutFullError(
                f"add_transitions: expected at most {self.num_transitions_per_env} rows, found one more row; "
                "call clear() first"
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
        """Remove all rows and begin a new rollout. The count of epochs is not reset, so every epoch has a different
        order of rows.
        """
        self._step = 0
        self._computed = False
        self._states.clear()
        self._present = frozenset()
        self._version += 1

    def get_statistics(self) -> tuple[Any, Any]:
        """Return the mean length of trajectories, and the mean reward (``[K]`` for vector rewards). The end of the
        rollout also ends a trajectory.

        Raises:
            RolloutError: The storage has no row.
        """
        if not self._step:
            raise RolloutError("get_statistics: expected at least one row, found none")
        dones, rewards = self._arrays["dones"][: self._step], self._arrays["rewards"][: self._step]
        xp = namespace(rewards)
        starts = episode_starts(dones)
        number = xp.sum(xp.astype(starts, xp.int64))
        axes = None if rewards.shape[-1] == 1 else (0, 1)
        return self._step * self.num_envs / number, xp.mean(rewards, axis=axes)

    def _allocate(self, name: str) -> None:
        field = self._fields.get(name)
        for each in (name, f"{name}_mask") if field is not None and field.mask else (name,):
            spec = self.spec[each]
            shape = (self.num_transitions_per_env, self.num_envs, *spec.shape)
            self._arrays[each] = self._kind.zeros(shape, spec.dtype)

    def _check_optional(self, rows: Container[str]) -> None:
        """Check that an optional field without a mask is present in all rows of a rollout or in none."""
        for name, field in self._fields.items():
            if not field.optional or field.mask or not self._step or (name in rows) == (name in self._present):
                continue
            if name in rows:
                raise SchemaError(
                    f"{name}: expected a value in every row or in none, found the first value in row {self._step}"
                )
            raise MissingFieldError(
                f"{name}: expected a value in every row or in none, found no value in row {self._step}"
            )

    @classmethod
    def motion_mimic(
        cls,
        training_type: TrainingType,
        num_envs: int,
        num_transitions_per_env: int,
        obs_shape: Sequence[int],
        ref_obs_shape: Sequence[int | None] | None = None,
        privileged_obs_shape: Sequence[int | None] | None = None,
        privileged_ref_obs_shape: Sequence[int | None] | None = None,
        actions_shape: Sequence[int] | None = None,
        apply_dagger_actions: bool = False,
        rnd_state_shape: Sequence[int | None] | None = None,
        amp_cfg: Any = None,
        device: Any = None,
        *,
        seed: int = 0,
        validate: bool | None = None,
    ) -> Self:
        """Create a storage with the fields of motion imitation; the attributes of fields that are not configured are
        None.

        Args:
            training_type: "rl", for mini-batches, or "distillation", for ``generator()``.
            num_envs, num_transitions_per_env, amp_cfg, device, seed, validate: See ``RolloutStorage``.
            obs_shape, ref_obs_shape, privileged_obs_shape, privileged_ref_obs_shape, actions_shape: See
                ``motion_mimic_fields``.
            apply_dagger_actions, rnd_state_shape: See ``motion_mimic_fields``.

        Raises:
            ConfigError: An argument is invalid.
        """
        shapes = (obs_shape, ref_obs_shape, privileged_obs_shape, privileged_ref_obs_shape, actions_shape)
        fields = motion_mimic_fields(training_type, *shapes, apply_dagger_actions, rnd_state_shape)
        options: dict[str, Any] = {"amp_cfg": amp_cfg, "device": device, "validate": validate}
        storage = cls(num_envs, num_transitions_per_env, fields, seed, **options)
        storage.training_type = training_type
        return storage

    # ------------------------------------------------------------------ returns

    def compute_returns(
        self,
        last_values: Any,
        gamma: float,
        lam: float,
        normalize_advantage: bool = True,
        time_outs: Any = None,
        final_values: Any = None,
    ) -> None:
        """Compute ``returns`` and ``advantages`` by generalized advantage estimation; see ``gae``.

        Args:
            last_values: Values of the observations after the last row, ``[N, 1]`` or ``[N]``; for vector values ``[N,
                K]``.
            gamma: The discount, in ``[0, 1]``.
            lam: The lambda of the estimator, in ``[0, 1]``.
            normalize_advantage: Whether advantages are normalised to mean 0 and standard deviation 1 over all rows;
                components of vectors are normalised separately.
            time_outs: Whether the episode is truncated at a row, bool ``[T, N, 1]`` or ``[T, N]``; pass ``time_outs``
                only together with ``final_values``.
            final_values: Values of the final observations of truncated episodes, ``[T, N, 1]`` or ``[T, N]``, or ``[T,
                N, K]`` for vector values; only elements at rows with a time-out are read.

        Raises:
            RolloutError: The rollout is not full.
            ConfigError: A number is out of range, only one of ``time_outs`` and ``final_values`` is given, or a done
                code is 2 (truncated) and both are missing.
            SchemaError, DataError: A shape is wrong, a needed value is not finite, or a time-out is set where no
                episode ends. After each of these errors the storage is unchanged.
        """
        self._check_full("compute_returns")
        arrays = self._arrays
        if "values" not in arrays:
            raise MissingFieldError(f"compute_returns: expected a field 'values', found {list(self._fields)}")
        gamma, lam = check_unit("gamma", gamma), check_unit("lam", lam)
        # bfloat16 is computed in float32: NumPy's array API does not support it.
        rewards, values, dones = (widened(arrays[name]) for name in ("rewards", "values", "dones"))
        ends = self._checks.ends(arrays["values"], dones, last_values, time_outs, final_values)
        last, time_outs, finals = map(widened, ends)
        advantages, returns = gae(
            rewards, values, dones, last, discount=gamma, lam=lam, time_outs=time_outs, final_values=finals
        )
        arrays["returns"][...] = returns
        arrays["advantages"][...] = normalized(advantages, by_component=True) if normalize_advantage else advantages
        self._computed = True
        self._version += 1

    # ------------------------------------------------------------------ reading it

    def mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        drop_last: bool = False,
        histories: Mapping[str, int] | None = None,
    ) -> Iterator[MiniBatch]:
        """Return mini-batches of rows; each epoch contains every row once, in a new order.

        Args:
            num_mini_batches: Number of mini-batches in an epoch.
            num_epochs: Number of passes over the rollout.
            drop_last: Whether the rows that remain after a division into mini-batches of equal size are dropped (in
                each epoch different rows); otherwise the first mini-batches have one additional row.
            histories: A dict from field to a number of frames H; mini-batches also contain the last H frames of these
                fields.

        Returns:
            An iterator over ``num_mini_batches * num_epochs`` mini-batches; see ``MiniBatch``.

        Raises:
            RolloutError: The rollout is not full or has no returns, or the rollout was changed during the iteration.
            ConfigError: An argument is out of range, the storage is for distillation, or a history's field is unknown.
        """
        self._check_readable("mini_batch_generator", num_epochs)
        histories = check_histories(histories, self._arrays)
        rows_in_all = self.num_transitions_per_env * self.num_envs
        parts = cut(rows_in_all, num_mini_batches, drop_last=drop_last)
        flat, starts = self._flat(), episode_starts(self._arrays["dones"])
        options = {"amp": self._amp(), "hidden_states": self.hidden_states}

        def take(rows: Array) -> MiniBatch:
            return take_mini_batch(flat, rows, starts, histories=histories, **options)

        return self._read(take, rows_in_all, parts, num_epochs, shuffle=True)

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, drop_last: bool = False, shuffle: bool = False
    ) -> Iterator[MiniBatch]:
        """Return mini-batches of padded trajectories; each epoch contains every environment once, split at the ends of
        episodes.

        The policy's inputs are ``[T, K, ...]``, with ``masks`` and the hidden states at the starts of trajectories. The
        training targets are ``[T, n, ...]``: ``unpad_trajectories(output, batch.masks)`` converts the policy's output
        to that shape.

        Args:
            num_mini_batches, num_epochs: See ``mini_batch_generator``.
            drop_last: Whether the environments that remain after a division into mini-batches of equal size are
                dropped; otherwise the first mini-batches have one additional environment.
            shuffle: Whether the environments are in a new random order in each epoch; otherwise in ascending order.

        Raises:
            RolloutError, ConfigError: See ``mini_batch_generator``.
        """
        self._check_readable("recurrent_mini_batch_generator", num_epochs)
        parts = cut(self.num_envs, num_mini_batches, drop_last=drop_last, what="environments")
        arrays = self._read_arrays()
        options = {"amp": self._amp(), "hidden_states": self.hidden_states}

        def take(envs: Array) -> MiniBatch:
            return take_recurrent_mini_batch(arrays, envs, **options)

        return self._read(take, self.num_envs, parts, num_epochs, shuffle=shuffle)

    def generator(self) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over the steps of the rollout, for distillation.

        Returns:
            An iterator over T tuples (observations, privileged_observations, (ref_obs, ref_mask) or None,
            (privileged_ref_obs, privileged_ref_mask) or None, actions, privileged_actions, dones) of arrays ``[N,
            ...]``, which are views of the storage. If there are no privileged observations, the tuple contains the
            observations in their place.

        Raises:
            RolloutError: The rollout is not full, or the rollout was changed during the iteration.
            ConfigError: The storage is for reinforcement learning.
        """
        self._check_full("generator")
        if self.training_type == "rl" or "privileged_actions" not in self._arrays:
            found = self.training_type or list(self._fields)
            raise ConfigError(f"generator: expected a storage for distillation, with privileged_actions, found {found}")
        return self._steps()

    def _steps(self) -> Iterator[tuple[Any, ...]]:
        version, arrays = self._version, self._read_arrays()
        for number in range(self.num_transitions_per_env):
            self._check_unchanged(version)
            row = {name: values[number] for name, values in arrays.items()}
            step = (
                row.get("observations"),
                row.get("privileged_observations", row.get("observations")),
                pair(row.get("reference_observations"), row.get("reference_observations_mask")),
                pair(row.get("privileged_reference_observations"), row.get("privileged_reference_observations_mask")),
                row.get("actions"),
                row["privileged_actions"],
                row["dones"],
            )
            yield step

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state, a dict of integers; it determines the order of rows in later mini-batches.

        The state does not contain rows: after a restart, a rollout begins with an empty storage.
        """
        return {name: int(getattr(self, name)) for name in _STATE_KEYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the seed and the count of epochs from ``state``, so that the next epoch continues after the saved
        epochs.

        Raises:
            StateError: The state belongs to a storage of another size, or is damaged; the storage is unchanged.
        """
        if not isinstance(state, Mapping) or set(state) != set(_STATE_KEYS):
            raise StateError(f"state: expected a dict with the keys {sorted(_STATE_KEYS)}, found {state!r:.200}")
        numbers = {name: state_number(name, state[name]) for name in _STATE_KEYS}
        for name in ("num_envs", "num_transitions_per_env"):
            if numbers[name] != getattr(self, name):
                raise StateError(f"state: expected {name} {getattr(self, name)}, found {numbers[name]}")
        self.seed, self.epoch = numbers["seed"], numbers["epoch"]

    # ------------------------------------------------------------------ details

    def _read_arrays(self) -> dict[str, Array]:
        """Return, by name, the arrays that contain rows of this rollout."""
        return {
            name: values
            for name, values in self._arrays.items()
            if name in self._present or (name in COMPUTED and self._computed)
        }

    def _flat(self) -> dict[str, Array]:
        rows = self.num_transitions_per_env * self.num_envs
        return {name: values.reshape((rows, *values.shape[2:])) for name, values in self._read_arrays().items()}

    def _amp(self) -> AmpStates | None:
        if self._extractors is None:
            return None
        with self._kind.without_gradients():
            return amp_states(self._flat(), *self._extractors)

    def _read(
        self, take: Callable[[Array], MiniBatch], count: int, parts: list[slice], num_epochs: int, *, shuffle: bool
    ) -> Iterator[MiniBatch]:
        """Yield the mini-batches of ``num_epochs`` epochs; ``take`` is a function that creates a mini-batch from
        indices of rows or environments, ``0 <= index < count``.
        """
        version = self._version
        for _ in range(num_epochs):
            numbers = self._order(count, shuffle=shuffle)
            self.epoch += 1
            for part in parts:
                self._check_unchanged(version)
                yield take(numbers[part])

    def _order(self, count: int, *, shuffle: bool) -> Array:
        return self._kind.index(permutation(self.seed, self.epoch, count) if shuffle else np.arange(count))

    def _check_full(self, caller: str) -> None:
        refuse_traced(caller)
        if self._step < self.num_transitions_per_env:
            raise RolloutError(f"{caller}: expected {self.num_transitions_per_env} rows, found {self._step}")

    def _check_readable(self, caller: str, num_epochs: int) -> None:
        check_count("num_epochs", num_epochs)
        if self.training_type == "distillation":
            raise ConfigError(
                f"{caller}: expected a storage for reinforcement learning, found a storage for distillation"
            )
        self._check_full(caller)
        if "values" in self._arrays and not self._computed:
            raise RolloutError(f"{caller}: expected returns, found none for these rows; call compute_returns() first")

    def _check_unchanged(self, version: int) -> None:
        refuse_traced("mini-batches")
        if version != self._version:
            raise RolloutError(
                "mini-batches: expected an unchanged rollout while mini-batches are read, found a changed rollout"
            )
