"""The storage of a rollout: some steps of many environments, time-major."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from mouse_core._base.checks import state_number
from mouse_core._base.tracing import refuse_traced
from mouse_core.digest import KEY, StreamDigest, asked_for, digest_of
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
    """T steps of N environments, in arrays ``[T, N, ...]``, from which mini-batches are drawn.

    Rows have the alignment "outgoing": the action, reward and done of row t are those that left its observation. Fill
    it with ``add_transitions``, call ``compute_returns``, read mini-batches, ``clear()`` it, and begin again. A field
    is ``storage["name"]`` or ``storage.name``: the array itself, which the next rollout overwrites.

    Args:
        num_envs: N.
        num_transitions_per_env: T.
        fields: By name: a ``RolloutField``, or a shape, which stands for float32. Rewards and dones are always there.
            ``values`` brings ``returns`` and ``advantages``. One number for each row is kept as ``[T, N, 1]``.
        seed: Of the order of rows in mini-batches, in ``[0, 2**64)``.
        amp_cfg: A dict with two functions, for previous states in mini-batches: ``amp_obs_extractor(obs)`` and
            ``amp_ref_obs_extractor((ref_obs, mask))``, which returns a state or ``(state, mask)``. They are called
            with all rows, ``[T * N, ...]``.
        device: "cpu" or None; other devices are for the adapters.
        hidden_axis: Where hidden states of one step have their environments. None: ``[layers, N, ...]`` from three
            dimensions on, else ``[N, ...]``.
        validate: Whether numbers that are not finite, unknown done codes and integers that do not fit are errors.
            None: on the CPU, yes; on a device, no, since the check waits for everything queued there.
        digest: Whether a digest of what is read runs along, off by default: a third of a microsecond for each row, with
            which a mini-batch takes four times as long, and one of a device comes to the host; see ``digest``.

    Raises:
        ConfigError: An argument that cannot be used.

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
        """Return the 128-bit digest of all mini-batches read so far, over all rollouts, with their numbers.

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
        hidden_axis: int | None = None,
        validate: bool | None = None,
        digest: bool = False,
    ) -> Self:
        """A storage with the fields of motion imitation; what is not configured is not allocated, and None.

        Args:
            training_type: "rl", for mini-batches, or "distillation", for ``generator()``.
            num_envs, num_transitions_per_env, amp_cfg, device, seed, hidden_axis, validate, digest: As for the class.
            obs_shape, ref_obs_shape, privileged_obs_shape, privileged_ref_obs_shape, actions_shape: See
                ``motion_mimic_fields``.
            apply_dagger_actions, rnd_state_shape: Likewise.

        Raises:
            ConfigError: An argument that cannot be used.
        """
        shapes = (obs_shape, ref_obs_shape, privileged_obs_shape, privileged_ref_obs_shape, actions_shape)
        fields = motion_mimic_fields(training_type, *shapes, apply_dagger_actions, rnd_state_shape)
        options: dict[str, Any] = {"amp_cfg": amp_cfg, "device": device, "hidden_axis": hidden_axis}
        storage = cls(num_envs, num_transitions_per_env, fields, seed, validate=validate, digest=digest, **options)
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
        """Compute ``returns`` and ``advantages``, by generalized advantage estimation; see ``gae``.

        Args:
            last_values: Values of the observations after the last row, ``[N, 1]`` or ``[N]``.
            gamma: The discount, from 0 to 1.
            lam: From 0 to 1.
            normalize_advantage: Whether advantages are shifted and scaled to mean 0 and standard deviation 1, over all.
            time_outs: Which of the dones are truncations, bool ``[T, N, 1]`` or ``[T, N]``; with ``final_values``.
            final_values: Values of the observations with which truncated episodes ended, ``[T, N, 1]`` or ``[T, N]``;
                read only there.

        Raises:
            RolloutError: The rollout is not full.
            ConfigError: A number out of range; only one of ``time_outs`` and ``final_values``; neither of them although
                dones say 2 (truncated).
            SchemaError, DataError: Shapes that are wrong; values that are needed and not finite; a time-out where no
                episode ends. In each case nothing has changed.
        """
        self._check_returns()
        self._compute(
            last_values,
            check_unit("gamma", gamma),
            check_unit("lam", lam),
            normalize_advantage,
            time_outs,
            final_values,
        )
        self._computed = True
        self._version += 1

    def _compute(
        self, last_values: Any, discount: Any, lam: Any, normalize: bool, time_outs: Any, final_values: Any
    ) -> None:
        """Write returns and advantages."""
        arrays = self._arrays
        # bfloat16 is computed in float32: NumPy's array API does not know it.
        rewards, values, dones = (widened(arrays[name]) for name in ("rewards", "values", "dones"))
        ends = self._checks.ends(arrays["values"], dones, last_values, time_outs, final_values)
        last, time_outs, finals = map(widened, ends)
        advantages, returns = gae(
            rewards, values, dones, last, discount=discount, lam=lam, time_outs=time_outs, final_values=finals
        )
        arrays["returns"][...] = returns
        arrays["advantages"][...] = normalized(advantages) if normalize else advantages

    # ------------------------------------------------------------------ reading it

    def mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        drop_last: bool = False,
        histories: Mapping[str, int] | None = None,
    ) -> Iterator[MiniBatch]:
        """Mini-batches of rows, every row once in each epoch, in an order that is new in each.

        Args:
            num_mini_batches: Number of mini-batches in an epoch.
            num_epochs: How often the rollout is gone through.
            drop_last: Whether rows that remain are left out, others in each epoch, so that all mini-batches have the
                same size; else the first mini-batches have one row more.
            histories: Fields whose last H frames are delivered too, and H.

        Returns:
            An iterator over ``num_mini_batches * num_epochs`` mini-batches, each of which unpacks into 18 parts;
            see ``MiniBatch``.

        Raises:
            RolloutError: The rollout is not full, or has no returns yet; later, it was changed meanwhile.
            ConfigError: A number out of range; a storage for distillation; a history of an unknown field.
        """
        self._check_readable("mini_batch_generator", num_epochs)
        histories = check_histories(histories, self._arrays)
        rows_in_all = self.num_transitions_per_env * self.num_envs
        parts = cut(rows_in_all, num_mini_batches, drop_last=drop_last)
        flat, starts = self._flat(), episode_starts(self._arrays["dones"])
        options = {"amp": self._amp(), "hidden_states": self.hidden_states, "hidden_axis": self._states.axis}

        def take(rows: Array) -> MiniBatch:
            return take_mini_batch(flat, rows, starts, histories=histories, **options)

        return self._read(take, rows_in_all, parts, num_epochs, shuffle=True)

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, drop_last: bool = False, shuffle: bool = False
    ) -> Iterator[MiniBatch]:
        """Mini-batches of trajectories: every environment once in each epoch, split where episodes end, padded.

        What the policy reads is ``[T, K, ...]``, with ``masks`` and the hidden states at the starts. What its output is
        compared with is ``[T, n, ...]``: ``unpad_trajectories(output, batch.masks)`` brings the output there.

        Args:
            num_mini_batches, num_epochs: As in ``mini_batch_generator``.
            drop_last: Whether environments that remain are left out; else the first mini-batches have one more.
            shuffle: Whether environments come in an order that is new in each epoch, or in their own.

        Raises:
            RolloutError, ConfigError: As ``mini_batch_generator``.
        """
        return self._trajectories(num_mini_batches, num_epochs, drop_last, shuffle, lambda envs: None)

    def _trajectories(
        self, count: int, num_epochs: int, drop_last: bool, shuffle: bool, most: Callable[[int], int | None]
    ) -> Iterator[MiniBatch]:
        """Mini-batches of trajectories; ``most`` returns K for a number of environments, or None for all there are."""
        self._check_readable("recurrent_mini_batch_generator", num_epochs)
        parts = cut(self.num_envs, count, drop_last=drop_last, what="environments")
        arrays = self._read_arrays()
        options = {"amp": self._amp(), "hidden_states": self.hidden_states, "hidden_axis": self._states.axis}

        def take(envs: Array) -> MiniBatch:
            return take_recurrent_mini_batch(arrays, envs, num_trajectories=most(len(envs)), **options)

        return self._read(take, self.num_envs, parts, num_epochs, shuffle=shuffle)

    def generator(self) -> Iterator[tuple[Any, ...]]:
        """The rollout step by step, for distillation.

        Returns:
            An iterator over T tuples (observations, privileged_observations, (ref_obs, ref_mask) or None,
            (privileged_ref_obs, privileged_ref_mask) or None, actions, privileged_actions, dones) of arrays
            ``[N, ...]``, which are views of the storage. Without privileged observations, the observations stand in
            their place.

        Raises:
            RolloutError: The rollout is not full; later, it was changed meanwhile.
            ConfigError: A storage for reinforcement learning.
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
            self._count(partial(StreamDigest.of, batch={"step": step}))
            yield step

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """Everything that the order of rows in later mini-batches depends on: plain integers, and a digest if one runs.

        Rows are not part of it: a rollout that is resumed begins with an empty storage.
        """
        state: dict[str, Any] = {name: int(getattr(self, name)) for name in _STATE_KEYS}
        if self._digest is not None:
            state[KEY] = {**self._digest.state_dict(), "batches": self._delivered}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the epoch after those that ``state`` had seen, with its seed, and with its digest if it has one.

        Raises:
            StateError: The state is of a storage of another size, or damaged; nothing has changed then.
        """
        if not isinstance(state, Mapping) or set(state) - {KEY} != set(_STATE_KEYS):
            raise StateError(f"state: expected a dict with the keys {sorted(_STATE_KEYS)}, found {state!r:.200}")
        numbers = {name: state_number(name, state[name]) for name in _STATE_KEYS}
        for name in ("num_envs", "num_transitions_per_env"):
            if numbers[name] != getattr(self, name):
                raise StateError(f"state: expected {name} {getattr(self, name)}, found {numbers[name]}")
        digest = digest_of(state, self._digest)
        delivered = state_number("batches", state[KEY].get("batches")) if digest is not None and KEY in state else 0
        self.seed, self.epoch = numbers["seed"], numbers["epoch"]
        self._digest, self._delivered = digest, delivered

    # ------------------------------------------------------------------ details

    def _read_arrays(self) -> dict[str, Array]:
        """The arrays that this rollout filled."""
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
        """The mini-batches of so many epochs: ``take`` of the numbers, below ``count``, of rows or environments."""
        version = self._version
        for _ in range(num_epochs):
            numbers = self._order(count, shuffle=shuffle)
            self.epoch += 1
            for part in parts:
                self._check_unchanged(version)
                batch = take(numbers[part])
                self._count(batch.digest)
                yield batch

    def _order(self, count: int, *, shuffle: bool) -> Array:
        return self._kind.index(permutation(self.seed, self.epoch, count) if shuffle else np.arange(count))

    def _count(self, digest: Callable[[int], StreamDigest]) -> None:
        """Add what is delivered next to the digest."""
        if self._digest is not None:
            self._digest += digest(self._delivered)
            self._delivered += 1

    def _check_full(self, caller: str) -> None:
        refuse_traced(caller)
        if self._step < self.num_transitions_per_env:
            raise RolloutError(f"{caller}: expected {self.num_transitions_per_env} rows, found {self._step}")

    def _check_readable(self, caller: str, num_epochs: int) -> None:
        check_count("num_epochs", num_epochs)
        if self.training_type == "distillation":
            raise ConfigError(f"{caller}: expected a storage for reinforcement learning, found one for distillation")
        self._check_full(caller)
        if "values" in self._arrays and not self._has_returns():
            raise RolloutError(f"{caller}: expected returns, found none for these rows; compute_returns() first")

    def _check_returns(self) -> None:
        self._check_full("compute_returns")
        if "values" not in self._arrays:
            raise MissingFieldError(f"compute_returns: expected a field 'values', found {list(self._fields)}")

    def _has_returns(self) -> bool:
        return self._computed

    def _check_unchanged(self, version: int) -> None:
        refuse_traced("mini-batches")
        if version != self._version:
            raise RolloutError("mini-batches: expected the rollout as it was when reading began, found it changed")
