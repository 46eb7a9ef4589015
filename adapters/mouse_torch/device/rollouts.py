"""Rollouts as a module, whose buffers are the rows, the counters and the seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mouse_core import rollouts
from mouse_core.errors import ConfigError, RolloutError, RolloutFullError, SchemaError
from mouse_core.nested import FieldKey, Leaf
from mouse_core.randomness import check_seed
from mouse_core.rollouts import MiniBatch, RolloutField, Transition, episode_starts, policy_states
from mouse_core.rollouts.fields import StepChecks, complete_fields, stored_spec
from mouse_core.rollouts.mini_batches import find_extractors
from mouse_core.spec import check_count, check_unit
from mouse_torch import _philox
from mouse_torch.device.fields import BufferModule, Fields, Row
from mouse_torch.placement import check_device
from mouse_torch.rollouts import TensorArrays
from mouse_torch.tracing import is_known
from mouse_torch.transfer import torch_dtype


class States(torch.nn.Module):
    """The hidden states of the actor and the critic in each time step.

    Args:
        example: ``(actor, critic)`` of one step, trees of tensors; None without states.
        steps: The number of time steps.
        num_envs: The number of environments.
        axis: The axis of environments in a state; see ``policy_states.env_axis``.
        arrays: The kind of arrays.

    Raises:
        ConfigError: States have no axis of environments.
        SchemaError: ``example`` is not a pair, or its states have another number of environments.
    """

    def __init__(self, example: Any, steps: int, num_envs: int, axis: int | None, arrays: TensorArrays) -> None:
        super().__init__()
        rows: dict[FieldKey, Row] = {}
        self.axis = policy_states.check_axis(axis)
        self._arrays, self._names = arrays, None
        if not policy_states.is_empty(example):
            if not isinstance(example, tuple | list) or len(example) != 2:
                raise SchemaError(f"hidden_states: expected (actor, critic), found {type(example).__name__}")

            def named(path: str, leaf: Any) -> str:
                state = arrays.array(leaf)
                policy_states.check_envs(path, tuple(state.shape), num_envs, axis)
                rows[path] = Row(tuple(state.shape), state.dtype)
                return path

            self._names = policy_states.tree_map(named, example)
        self.memory = Fields(None, rows, steps, None, arrays.device)

    @property
    def trees(self) -> Any:
        """Return the arrays of all steps except the last, ``[steps - 1, ...]``, nested like the example; None without
        states.
        """
        if self._names is None:
            return None
        arrays = {path: memory[:-1] for path, memory in self.memory.each()}
        return policy_states.tree_map(lambda _, path: arrays[path], self._names)

    def check(self, given: Any, step: int | None) -> dict[Any, torch.Tensor]:
        """Return the states of one step by name.

        None means the zero states of a policy before its first step.

        Args:
            given: ``(actor, critic)``, each a tree or None; or None.
            step: The index of the row; None if it is unknown.

        Raises:
            SchemaError: States are missing after the first row, or differ from the example in structure or shape.
        """
        pair = isinstance(given, tuple | list) and len(given) == 2
        if self._names is None or not pair:
            if self._names is not None or not policy_states.is_empty(given):
                raise SchemaError(
                    "hidden_states: expected states both in the constructor and in every row, or in neither"
                )
            return {}
        found: dict[Any, torch.Tensor] = {}
        rows, device = self.memory.rows, self._arrays.device

        def zeros(path: str, name: str) -> torch.Tensor:
            return torch.zeros(rows[name].shape, dtype=rows[name].dtype, device=device)

        def check(path: str, name: str, leaf: Any) -> None:
            found[name] = self._arrays.array(leaf)
            if tuple(found[name].shape) != rows[name].shape:
                expected, shape = list(rows[name].shape), list(found[name].shape)
                raise SchemaError(f"{path}: expected shape {expected}, found {shape}")

        for place, (names, states) in enumerate(zip(self._names, given, strict=True)):
            path = f"hidden_states[{place}]"
            if policy_states.is_empty(states) and not policy_states.is_empty(names):
                if step:
                    raise SchemaError(f"{path}: expected a value in every row, found none in row {step}")
                states = policy_states.tree_map(zeros, names)
            policy_states.tree_map(check, names, states, path=path)
        return found


class _Arrays(TensorArrays):
    """Access to tensors. Values are read if reading does not wait for a device and the values are not traced."""

    def may_look(self, array: torch.Tensor) -> bool:
        return is_known(array)


class RolloutStorage(BufferModule, rollouts.RolloutStorage):
    """T steps of N environments on a device, in eager code, compiled code and CUDA graphs, without waiting for values.

    The storage has the methods of ``mouse_torch.RolloutStorage``, and returns the same mini-batches in the same order
    for the same seed and rows. Rows and epochs are counted on the device, so that each replay of a CUDA graph writes
    the next row, or reads the rows in a new order. All memory is allocated in the constructor. For this reason,
    optional fields need a mask, which marks missing values, and ``hidden_states`` must define the shapes of hidden
    states. If the storage is part of a module, the module's ``state_dict`` includes rows and counters. The array of a
    field, ``[T, N, ...]``, is ``storage["name"]``.

    On the host, calls in a wrong order and values that are not finite raise the errors of
    ``mouse_torch.RolloutStorage``. On other devices and in compiled code, values are not checked, and steps after the
    first T steps are ignored.

    Args:
        num_envs, num_transitions_per_env, fields, seed, hidden_axis: The arguments of
            ``mouse_core.rollouts.RolloutStorage``.
        amp_cfg: The argument of ``mouse_core.rollouts.RolloutStorage``; its extractors are called without gradients.
        hidden_states: ``(actor, critic)`` of one step, with the shapes and dtypes to allocate; None: no states.
        device: The device of the tensors; None: the host.

    Raises:
        ConfigError: An argument is invalid.
        SchemaError: ``hidden_states`` has another number of environments.

    Example:
        >>> import torch
        >>> from mouse_torch import device
        >>> storage = device.RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={"values": ()})
        >>> storage.add_transitions({"values": torch.zeros(2), "rewards": torch.ones(2), "dones": torch.zeros(2)})
        >>> storage.compute_returns(torch.zeros(2), gamma=0.99, lam=0.95)
        >>> sum(len(batch.returns) for batch in storage.mini_batch_generator(2, num_epochs=1))
        2
    """

    epoch: torch.Tensor  # type: ignore[assignment]
    """Number of epochs of mini-batches that were read, over all rollouts, int64 ``[]``."""
    seed: torch.Tensor  # type: ignore[assignment]
    _step: Any
    _computed: Any
    _states: Any

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        fields: Mapping[str, RolloutField | Sequence[int]],
        seed: int = 0,
        *,
        amp_cfg: Any = None,
        hidden_states: Any = None,
        hidden_axis: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.num_envs = int(check_count("num_envs", num_envs))
        self.num_transitions_per_env = int(check_count("num_transitions_per_env", num_transitions_per_env))
        self._fields = complete_fields(fields)
        for name, one in self._fields.items():
            if one.optional and not one.mask:
                raise ConfigError(
                    f"fields[{name!r}]: when optional=True, expected mask=True, since memory is "
                    f"allocated in advance and the mask marks missing values"
                )
        self.spec, self._version = stored_spec(self._fields), 0
        target, word = check_device(device), _philox.signed(check_seed(seed))
        self._kind = _Arrays(target)
        self._checks = StepChecks(self._fields, self.num_envs, self.spec, self._kind)
        self._extractors = find_extractors(amp_cfg, self._fields)
        with torch.inference_mode(False):
            rows: dict[FieldKey, Row] = {
                name: Row(tuple(one.shape), torch_dtype(one.dtype)) for name, one in self.spec.items()
            }
            # One more step, to which rows beyond the last one are written.
            steps = self.num_transitions_per_env + 1
            self.rows = Fields({name: Leaf(name) for name in rows}, rows, steps * self.num_envs, self.num_envs, target)
            self._states = States(hidden_states, steps, self.num_envs, hidden_axis, self._kind)
            for name, value in (("_step", 0), ("epoch", 0), ("seed", word)):
                self.register_buffer(name, torch.full((), value, dtype=torch.int64, device=target))
            self.register_buffer("_computed", torch.zeros((), dtype=torch.bool, device=target))

    def extra_repr(self) -> str:
        """Return the arguments of the storage as text."""
        return f"num_envs={self.num_envs}, num_transitions_per_env={self.num_transitions_per_env}"

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.epoch.device

    # ------------------------------------------------------------------ filling it

    @torch.no_grad()
    def add_transitions(self, transition: Transition | Mapping[str, Any]) -> None:
        """Copy one step of all environments into the next row.

        Args:
            transition: The transition, as in ``mouse_core.rollouts.RolloutStorage``. With hidden states, None for the
                states of the actor or critic means zeros; on the host, this is allowed only in the first row.

        Raises:
            RolloutFullError: No row is left (checked only on the host in eager code).
            SchemaError, MissingFieldError, DataError: An error of ``mouse_core.rollouts.RolloutStorage``; values are
                checked only on the host.
        """
        step, most = self._known_step(), self.num_transitions_per_env
        if step is not None and step >= most:
            raise RolloutFullError(
                f"add_transitions: expected at most {most} rows, found one more row; call clear() first"
            )
        given = self._checks.given(transition)
        rows, states = self._checks.rows(given, step), self._states.check(given.get("hidden_states"), step)
        place = self._step.clamp(max=most).reshape(1)
        for memory, values in ((self.rows, rows), (self._states.memory, states)):
            memory.put({name: memory.rows[name].as_held(row)[None] for name, row in values.items()}, place)
        self._step.add_(1)
        self._computed.fill_(False)

    def clear(self) -> None:
        """Begin a new rollout; later epochs still have new orders of rows."""
        self._step.zero_()
        self._computed.fill_(False)

    def get_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean length of trajectories, ``[]``, and the mean reward, ``[]`` or ``[K]``.

        A trajectory that has not ended counts up to the last row of the rollout.
        """
        arrays = self._arrays
        there = torch.arange(self.num_transitions_per_env, device=self.device)[:, None] < self._step
        rows = there.sum() * self.num_envs
        mean = torch.where(there[..., None], arrays["rewards"], 0).sum((0, 1)) / rows
        lengths = rows / (episode_starts(arrays["dones"]) & there).sum()
        return lengths, mean[0] if mean.numel() == 1 else mean

    @torch.no_grad()
    def compute_returns(
        self,
        last_values: Any,
        gamma: Any,
        lam: Any,
        normalize_advantage: bool = True,
        time_outs: Any = None,
        final_values: Any = None,
    ) -> None:
        """Compute ``returns`` and ``advantages`` by generalized advantage estimation; see ``mouse_core.rollouts.gae``.

        Args:
            last_values, normalize_advantage, time_outs, final_values: The arguments of
                ``mouse_core.rollouts.RolloutStorage.compute_returns``.
            gamma, lam: Numbers from 0 to 1, or tensors ``[]``.

        Raises:
            RolloutError, ConfigError, SchemaError, DataError, MissingFieldError: An error of
                ``mouse_core.rollouts.RolloutStorage``; values are checked only on the host.
        """
        self._check_returns()
        discount, decay = (
            value if isinstance(value, torch.Tensor) else check_unit(name, value)
            for name, value in (("gamma", gamma), ("lam", lam))
        )
        self._compute(last_values, discount, decay, normalize_advantage, time_outs, final_values)
        self._computed.fill_(True)

    # ------------------------------------------------------------------ reading it

    def recurrent_mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        num_trajectories: int | None = None,
    ) -> Iterator[MiniBatch]:
        """Yield mini-batches of padded trajectories, equal to the mini-batches of
        ``mouse_core.rollouts.RolloutStorage``.

        Args:
            num_mini_batches, num_epochs, drop_last, shuffle: The arguments of ``mouse_core.rollouts.RolloutStorage``.
            num_trajectories: Number of trajectories in a mini-batch, K; surplus trajectories are empty. None means the
                actual number on the host, and T times the number of environments on other devices and in compiled code.

        Raises:
            RolloutError, ConfigError: An error of ``mini_batch_generator``.
        """

        def most(envs: int) -> int | None:
            known = num_trajectories is not None or is_known(self._step)
            return num_trajectories if known else self.num_transitions_per_env * envs

        return self._trajectories(num_mini_batches, num_epochs, drop_last, shuffle, most)

    def _order(self, count: int, *, shuffle: bool) -> torch.Tensor:
        if shuffle:
            return _philox.permutation(self.seed, self.epoch, count)
        return torch.arange(count, device=self.device)

    @property
    def _arrays(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        lead = self.num_transitions_per_env, self.num_envs
        rows = self.num_transitions_per_env * self.num_envs
        return {str(name): memory[:rows].reshape(*lead, *memory.shape[1:]) for name, memory in self.rows.each()}

    def _read_arrays(self) -> dict[str, torch.Tensor]:
        return self._arrays

    def _known_step(self) -> int | None:
        return int(self._step.numpy()) if is_known(self._step) else None

    def _check_full(self, caller: str) -> None:
        step = self._known_step()
        if step is not None and step != self.num_transitions_per_env:
            raise RolloutError(f"{caller}: expected {self.num_transitions_per_env} rows, found {step}")

    def _has_returns(self) -> bool:
        return not is_known(self._computed) or bool(self._computed.numpy())

    def _check_unchanged(self, version: int) -> None:
        """Do nothing, because compiled code and CUDA graphs cannot read values."""
