"""Rollouts as a module whose buffers are rows, counters and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mouse_core.dtypes import widened
from mouse_core.errors import ConfigError, MissingFieldError, RolloutError, RolloutFullError, SchemaError
from mouse_core.nested import FieldKey, Leaf
from mouse_core.randomness import check_seed
from mouse_core.rollouts import MiniBatch, RolloutField, Transition, episode_starts, gae, normalized, policy_states
from mouse_core.rollouts.fields import ALIASES, StepChecks, complete_fields, stored_spec
from mouse_core.rollouts.mini_batches import (
    AmpStates,
    amp_states,
    check_histories,
    cut,
    find_extractors,
    take_mini_batch,
    take_recurrent_mini_batch,
)
from mouse_core.spec import check_count, check_unit
from mouse_torch import _philox
from mouse_torch.device.fields import BufferModule, Fields, Row
from mouse_torch.placement import check_device
from mouse_torch.rollouts import TensorArrays
from mouse_torch.tracing import is_known
from mouse_torch.transfer import torch_dtype


class States(torch.nn.Module):
    """The hidden states of actor and critic in each of some time steps.

    Args:
        example: ``(actor, critic)`` of one step, trees of tensors; None where there are none.
        steps: How many.
        num_envs: Of how many environments each is.
        axis: Where a state has its environments; see ``policy_states.env_axis``.
        arrays: The kind of arrays they are.

    Raises:
        SchemaError: No pair, or states of other environments.
    """

    def __init__(self, example: Any, steps: int, num_envs: int, axis: int | None, arrays: TensorArrays) -> None:
        super().__init__()
        rows: dict[FieldKey, Row] = {}
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

    def tree(self, steps: int) -> Any:
        """Arrays ``[steps, ...]`` of the first time steps, nested as the example was; None where there are none."""
        if self._names is None:
            return None
        arrays = {path: memory[:steps] for path, memory in self.memory.each()}
        return policy_states.tree_map(lambda _, path: arrays[path], self._names)

    def checked(self, given: Any, step: int | None) -> dict[Any, torch.Tensor]:
        """The states of one step by their names.

        Before its first step a policy has no state, and says so by None: zeros.

        Args:
            given: ``(actor, critic)``, each a tree or None; or None.
            step: The row that they are for, where that is known.

        Raises:
            SchemaError: They are none, or of other structures or shapes than the example; none behind the first row.
        """
        pair = isinstance(given, tuple | list) and len(given) == 2
        if self._names is None or not pair:
            if self._names is not None or not policy_states.is_empty(given):
                raise SchemaError("hidden_states: expected them in every row, and when it was made, or nowhere")
            return {}
        found: dict[Any, torch.Tensor] = {}
        rows, device = self.memory.rows, self._arrays.device

        def zeros(path: str, name: str) -> None:
            found[name] = torch.zeros(rows[name].shape, dtype=rows[name].dtype, device=device)

        def check(path: str, name: str, leaf: Any) -> None:
            found[name] = self._arrays.array(leaf)
            if tuple(found[name].shape) != rows[name].shape:
                expected, shape = list(rows[name].shape), list(found[name].shape)
                raise SchemaError(f"{path}: expected shape {expected}, found {shape}")

        for place, (names, states) in enumerate(zip(self._names, given, strict=True)):
            path = f"hidden_states[{place}]"
            if policy_states.is_empty(states) and not policy_states.is_empty(names):
                if step:
                    raise SchemaError(f"{path}: expected it in every row, found none in row {step}")
                policy_states.tree_map(zeros, names, path=path)
            else:
                policy_states.tree_map(check, names, states, path=path)
        return found


class _Arrays(TensorArrays):
    """Tensors that are looked at where nothing waits for them, and nothing is traced."""

    def may_look(self, array: torch.Tensor) -> bool:
        return is_known(array)


class RolloutStorage(BufferModule):
    """T steps of N environments on a device, from which nothing is fetched: in eager code, compiled, in CUDA graphs.

    It has the methods of ``mouse_torch.RolloutStorage``, and gives the same mini-batches in the same order for the same
    seed and rows. The number of the next row and of the next epoch are counted on the device, so that a graph that is
    replayed writes the next row, and has another order each time. All memory is allocated at once: fields that are
    optional need a mask, and hidden states are said at the beginning. Rows and counters belong to the ``state_dict`` of
    a module that it is part of. The array of a field, ``[T, N, ...]``, is ``storage["name"]``.

    On the host, where values can be seen, what comes out of turn or is not finite is an error, as of
    ``mouse_torch.RolloutStorage``. Elsewhere and in compiled code nobody looks: a row more than there is room for is
    left out.

    Args:
        num_envs, num_transitions_per_env, fields, seed, hidden_axis: As of ``mouse_core.rollouts.RolloutStorage``.
        amp_cfg: Likewise; the extractors are called without gradients.
        hidden_states: ``(actor, critic)`` of one step, whose shapes and dtypes say what to allocate; None: there are
            none.
        device: Where tensors are; None: on the host.

    Raises:
        ConfigError: An argument that cannot be used.
        SchemaError: Hidden states of other environments.

    Example:
        >>> import torch
        >>> from mouse_torch import device
        >>> storage = device.RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={"values": ()})
        >>> storage.add_transitions({"values": torch.zeros(2), "rewards": torch.ones(2), "dones": torch.zeros(2)})
        >>> storage.compute_returns(torch.zeros(2), gamma=0.99, lam=0.95)
        >>> sum(len(batch.returns) for batch in storage.mini_batch_generator(2, num_epochs=1))
        2
    """

    step: torch.Tensor
    """Rows that were added, int64 ``[]``; more than T where some were left out."""
    epoch: torch.Tensor
    """Epochs that were read, over all rollouts, int64 ``[]``."""
    seed: torch.Tensor
    computed: torch.Tensor
    """Whether returns belong to the rows, bool ``[]``."""

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
        completed = complete_fields(fields)
        for name, one in completed.items():
            if one.optional and not one.mask:
                raise ConfigError(f"fields[{name!r}]: expected mask=True beside optional=True, as memory is allocated")
        self.spec = stored_spec(completed)
        target, word = check_device(device), _philox.signed(check_seed(seed))
        self._arrays = _Arrays(target)
        self._checks = StepChecks(completed, self.num_envs, self.spec, self._arrays)
        self._extractors = find_extractors(amp_cfg, completed)
        self.hidden_axis = policy_states.check_axis(hidden_axis)
        with torch.inference_mode(False):
            rows: dict[FieldKey, Row] = {
                name: Row(tuple(one.shape), torch_dtype(one.dtype)) for name, one in self.spec.items()
            }
            # One step more, which belongs to nobody: rows for which there is no room are written there.
            steps = self.num_transitions_per_env + 1
            self.rows = Fields({name: Leaf(name) for name in rows}, rows, steps * self.num_envs, self.num_envs, target)
            self.states = States(hidden_states, steps, self.num_envs, self.hidden_axis, self._arrays)
            for name, value in (("step", 0), ("epoch", 0), ("seed", word)):
                self.register_buffer(name, torch.full((), value, dtype=torch.int64, device=target))
            self.register_buffer("computed", torch.zeros((), dtype=torch.bool, device=target))

    def extra_repr(self) -> str:
        """Arguments that the storage was created with."""
        return f"num_envs={self.num_envs}, num_transitions_per_env={self.num_transitions_per_env}"

    @property
    def device(self) -> torch.device:
        """Device that holds the rows."""
        return self.step.device

    def __getitem__(self, name: str) -> torch.Tensor:
        """The array of a field, ``[T, N, ...]``, which the next rollout overwrites.

        Raises:
            MissingFieldError: There is none of this name (also a KeyError).
        """
        arrays = self._by_time()
        name = ALIASES.get(name, name)
        if name not in arrays:
            raise MissingFieldError(f"rollout: expected one of {list(arrays)}, found {name!r}")
        return arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self.spec

    @property
    def hidden_states(self) -> Any:
        """``(actor, critic)``, arrays ``[T, ...]`` in the structure in which they were said; None if there are none."""
        return self.states.tree(self.num_transitions_per_env)

    # ------------------------------------------------------------------ filling it

    @torch.no_grad()
    def add_transitions(self, transition: Transition | Mapping[str, Any]) -> None:
        """Copy one step of all environments into the next row.

        Args:
            transition: As of ``mouse_core.rollouts.RolloutStorage``. Where hidden states were said, None for those of
                the actor or the critic stands for zeros, on the host in the first row alone.

        Raises:
            RolloutFullError: There is no row left, where that is seen.
            SchemaError, MissingFieldError, DataError: As there; values are looked at on the host.
        """
        step = self._known_step()
        if step is not None and step >= self.num_transitions_per_env:
            most = self.num_transitions_per_env
            raise RolloutFullError(f"add_transitions: expected at most {most} rows, found one more; clear() first")
        given = self._checks.given(transition)
        rows = self._checks.rows(given, step)
        states = self.states.checked(given.get("hidden_states"), step)
        place = self.step.clamp(max=self.num_transitions_per_env).reshape(1)
        for memory, values in ((self.rows, rows), (self.states.memory, states)):
            memory.put({name: memory.rows[name].as_held(row)[None] for name, row in values.items()}, place)
        self.step.add_(1)
        self.computed.fill_(False)

    def clear(self) -> None:
        """Begin a new rollout; the order of rows in mini-batches goes on being new in every epoch."""
        self.step.zero_()
        self.computed.fill_(False)

    def get_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean length of trajectories, which the end of the rollout cuts, and the mean reward, ``[]`` each."""
        arrays = self._by_time()
        there = torch.arange(self.num_transitions_per_env, device=self.device)[:, None] < self.step
        rows = there.sum() * self.num_envs
        rewards = torch.where(there, arrays["rewards"][:, :, 0], 0)
        return rows / (episode_starts(arrays["dones"]) & there).sum(), rewards.sum() / rows

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
        """Compute ``returns`` and ``advantages``, by generalized advantage estimation; see ``mouse_core.rollouts.gae``.

        Args:
            last_values, normalize_advantage, time_outs, final_values: As of ``mouse_core.rollouts.RolloutStorage``.
            gamma, lam: Numbers from 0 to 1, or tensors ``[]``.

        Raises:
            RolloutError, ConfigError, SchemaError, DataError, MissingFieldError: As there; values are looked at on the
                host.
        """
        self._check_full("compute_returns")
        if "values" not in self.spec:
            raise MissingFieldError(f"compute_returns: expected a field 'values', found {list(self.spec)}")
        discount, decay = (
            value if isinstance(value, torch.Tensor) else check_unit(name, value)
            for name, value in (("gamma", gamma), ("lam", lam))
        )
        arrays = self._by_time()
        rewards, values, dones = (widened(arrays[name]) for name in ("rewards", "values", "dones"))
        ends = self._checks.ends(arrays["values"], dones, last_values, time_outs, final_values)
        last, time_outs, finals = (None if end is None else widened(end) for end in ends)
        advantages, returns = gae(
            rewards, values, dones, last, discount=discount, lam=decay, time_outs=time_outs, final_values=finals
        )
        arrays["returns"].copy_(returns)
        arrays["advantages"].copy_(normalized(advantages) if normalize_advantage else advantages)
        self.computed.fill_(True)

    # ------------------------------------------------------------------ reading it

    def mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        drop_last: bool = False,
        histories: Mapping[str, int] | None = None,
    ) -> Iterator[MiniBatch]:
        """Mini-batches of rows, every row once in each epoch, in the order of ``mouse_core.rollouts.RolloutStorage``.

        In compiled code, and in a CUDA graph, go through all of them: each becomes a part of it.

        Args:
            num_mini_batches, num_epochs, drop_last, histories: As there.

        Returns:
            An iterator over ``num_mini_batches * num_epochs`` mini-batches.

        Raises:
            RolloutError: The rollout is not full, or has no returns yet, where that is seen.
            ConfigError: A number out of range; a history of an unknown field.
        """
        check_count("num_epochs", num_epochs)
        frames = check_histories(histories, self.spec)
        self._check_readable("mini_batch_generator")
        count = self.num_transitions_per_env * self.num_envs
        parts = cut(count, num_mini_batches, drop_last=drop_last)
        flat, amp, hidden = self._flat(), self._amp(), self.hidden_states
        starts = episode_starts(self._by_time()["dones"])

        def take(rows: torch.Tensor) -> MiniBatch:
            return take_mini_batch(
                flat, rows, starts, amp=amp, histories=frames, hidden_states=hidden, hidden_axis=self.hidden_axis
            )

        return self._read(take, count, parts, num_epochs, shuffle=True)

    def recurrent_mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        num_trajectories: int | None = None,
    ) -> Iterator[MiniBatch]:
        """Mini-batches of trajectories, padded, as of ``mouse_core.rollouts.RolloutStorage``.

        Args:
            num_mini_batches, num_epochs, drop_last, shuffle: As there.
            num_trajectories: K, the most trajectories in a mini-batch; those beyond what there are are empty. None: as
                many as there are, which is seen on the host alone; elsewhere, and in compiled code, T times the
                environments.

        Raises:
            RolloutError, ConfigError: As ``mini_batch_generator``.
        """
        check_count("num_epochs", num_epochs)
        self._check_readable("recurrent_mini_batch_generator")
        parts = cut(self.num_envs, num_mini_batches, drop_last=drop_last, what="environments")
        arrays, amp, hidden = self._by_time(), self._amp(), self.hidden_states

        def take(envs: torch.Tensor) -> MiniBatch:
            most = num_trajectories
            if most is None and not is_known(self.step):
                most = self.num_transitions_per_env * len(envs)
            return take_recurrent_mini_batch(
                arrays, envs, num_trajectories=most, amp=amp, hidden_states=hidden, hidden_axis=self.hidden_axis
            )

        return self._read(take, self.num_envs, parts, num_epochs, shuffle=shuffle)

    def _read(
        self,
        take: Callable[[torch.Tensor], MiniBatch],
        count: int,
        parts: list[slice],
        num_epochs: int,
        *,
        shuffle: bool,
    ) -> Iterator[MiniBatch]:
        for _ in range(num_epochs):
            order = (
                _philox.permutation(self.seed, self.epoch, count)
                if shuffle
                else torch.arange(count, device=self.device)
            )
            self.epoch.add_(1)
            for part in parts:
                yield take(order[part])

    # ------------------------------------------------------------------ details

    def _by_time(self) -> dict[str, torch.Tensor]:
        lead = (self.num_transitions_per_env, self.num_envs)
        return {name: flat.reshape(*lead, *flat.shape[1:]) for name, flat in self._flat().items()}

    def _flat(self) -> dict[str, torch.Tensor]:
        rows = self.num_transitions_per_env * self.num_envs
        return {str(name): memory[:rows] for name, memory in self.rows.each()}

    def _amp(self) -> AmpStates | None:
        if self._extractors is None:
            return None
        with torch.no_grad():
            return amp_states(self._flat(), *self._extractors)

    def _known_step(self) -> int | None:
        return int(self.step.numpy()) if is_known(self.step) else None

    def _check_full(self, caller: str) -> None:
        step = self._known_step()
        if step is not None and step != self.num_transitions_per_env:
            raise RolloutError(f"{caller}: expected {self.num_transitions_per_env} rows, found {step}")

    def _check_readable(self, caller: str) -> None:
        self._check_full(caller)
        if "values" in self.spec and is_known(self.computed) and not self.computed.numpy():
            raise RolloutError(f"{caller}: expected returns, found none for these rows; compute_returns() first")
