"""Replay as a module whose buffers are its rows and all that is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from os import PathLike
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from mouse_core.errors import ConfigError
from mouse_core.nested import FieldKey, as_array
from mouse_core.randomness import check_seed
from mouse_core.replay import Compose, Priorities, ReplayBuffer
from mouse_core.replay.device import Order, Slices, moving
from mouse_core.replay.device.arrays import Arrays, DrawKey, Ring
from mouse_core.replay.device.episodes import EpisodeIndex
from mouse_core.replay.device.options import check_names, check_order, check_rooms, composed, find_marks, streams_of
from mouse_core.replay.device.samplers import ByPriority, DeviceSampler, Reads, RowPlan, State, check_left, sampler_of
from mouse_core.replay.samplers.weighing import shape_like, weighed
from mouse_core.spec import Alignment, check_count
from mouse_torch import _philox
from mouse_torch.device.arrays import TorchArrays
from mouse_torch.device.fields import BufferModule, Buffers, Fields, check_pad, is_integer, rows_of
from mouse_torch.placement import check_device
from mouse_torch.tracing import is_known
from mouse_torch.transfer import to_numpy
from mouse_torch.trees import on_host, tensor_dict

_NUMPY, _ON_HOST = Arrays(), TorchArrays(torch.device("cpu"))


class Replay(BufferModule):
    """A replay buffer on a device, from which nothing is fetched: for vectorised environments in torch.

    Batches are those of a ``mouse_core.replay.ReplayBuffer`` of the same seed and writes, with a ``RandomSampler`` or,
    for slices, a ``SliceSampler``; with priorities, a ``PrioritizedSampler`` or ``PrioritizedSliceSampler``; in epochs,
    a ``SamplerWithoutReplacement`` or ``SliceSamplerWithoutReplacement`` with ``drop_last=True``; as a queue, a
    ``ConsumingSampler(shuffle=False, drop_last=True)``.
    ``extend`` and ``sample`` run as they are, inside of ``torch.compile(fullgraph=True)``, and in CUDA
    graphs: the number of the next sample lies on the device, so that a graph draws other rows each time. As a module it
    has ``to``, ``state_dict`` and ``load_state_dict``, and belongs to the state of a module that it is part of; what
    changes the dtypes of that, as ``half()`` does, leaves rows as they are.

    Args:
        example: One row: tensors, arrays or numbers, nested in dicts, tuples or a TensorDict. Its values do not matter.
        capacity: Rows that it holds, all time steps of all environments; the oldest are overwritten.
        batch_size: Rows or slices in a batch, B, where ``sample`` is not told.
        num_envs: Environments whose rows are written side by side, ``[time, env]``, and of which each is a stream of
            its own; None: rows are one stream, ``[n, ...]`` in the order of time. Where slices or a transform read
            rows that follow each other, it is required.
        slices: What a batch consists of: slices; None: single rows, each as likely.
        transform: Functions of a batch, applied in order: those of ``mouse_core.replay`` that draw no random numbers
            and look at the batch alone, such as ``NStep`` and ``NextView``, or your own.
        alignment: Which transition the action, reward and done of a row belong to.
        priorities: Rows, or slices by their first rows, are drawn in proportion to powers of their priorities; None:
            each as likely. New rows have the largest priority so far, at least 1, and ``set_priorities`` changes them.
            ``beta`` is a number, a tensor ``[]`` on the device, or a function from the number of the sample, which is
            such a tensor, to one, such as a ``LinearSchedule``.
        order: In which order rows come. "random": each drawn from all, with replacement; "epochs": every row once
            before one comes a second time, shuffled, of slices those that lie side by side; "queue": every row once,
            the oldest first.
        sampler: A sampler of your own in place of ``priorities`` and ``order``: a class that inherits from
            ``mouse_core.replay.device.DeviceSampler``, or a function of ``units`` that gives one.
        seed: In ``[0, 2**64)``.
        device: Where rows lie; None: on the host. What computes there has int64 and float64.

    Raises:
        ConfigError: An argument out of range, a device that is not there, a transform that is not for one, or a pad
            that a field cannot hold.
        SchemaError: A field that is no tensor of numbers, or that has a name that batches need.
        MissingFieldError: Slices of rows that do not say where episodes end.
        MouseError: What transforms of ``mouse_core.replay`` raise of a batch of such rows.

    Example:
        >>> import torch
        >>> from mouse_torch import device
        >>> replay = device.Replay({"obs": torch.zeros(4), "reward": 0.0}, 100, batch_size=8)
        >>> replay.extend({"obs": torch.ones(3, 4), "reward": torch.ones(3)})
        >>> replay.sample()["obs"].shape
        torch.Size([8, 4])
    """

    cursor: torch.Tensor
    size: torch.Tensor
    samples: torch.Tensor
    seed: torch.Tensor

    def __init__(
        self,
        example: Any,
        capacity: int,
        *,
        batch_size: int,
        num_envs: int | EllipsisType | None = ...,
        slices: Slices | None = None,
        transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        alignment: Alignment = "outgoing",
        priorities: Priorities | None = None,
        order: Order = "random",
        sampler: Callable[..., DeviceSampler] | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.transform = composed(transform, alignment)
        num_envs = streams_of(num_envs, slices, self.transform)
        check_rooms(capacity, batch_size, num_envs, slices)
        check_order(order, int(capacity), int(batch_size), slices, priorities)
        reach = 0 if self.transform is None else self.transform.reach
        self.capacity, self.num_envs, self.batch_size = int(capacity), num_envs, int(batch_size)
        self.alignment: Alignment = alignment
        structure, row = rows_of(example)
        check_names(structure, self.transform, slices, priorities)
        check_pad(row, slices)
        marks = None if slices is None else find_marks(row, slices, is_integer)
        index = None
        if slices is not None and marks is not None:
            dtype = None if marks.ids is None else str(row[marks.ids].held).removeprefix("torch.")
            index = EpisodeIndex(slices, marks, dtype, tiled=order == "epochs")
        self.sampler = sampler_of(self.capacity, index, priorities, order, reach, sampler)
        self.beta = 0.0 if priorities is None else priorities.beta
        target = check_device(device)
        word = check_seed(seed)
        # What is made in inference mode can be written to only there.
        with torch.inference_mode(False):
            self.rows = Fields(structure, row, self.capacity, num_envs, target)
            for name, value in (("cursor", 0), ("size", 0), ("samples", 0), ("seed", _philox.signed(word))):
                self.register_buffer(name, torch.full((), value, dtype=torch.int64, device=target))
            constants = {name: torch.tensor(table, device=target) for name, table in self.sampler.constants.items()}
            self.constants = Buffers(constants, persistent=False)
            state = self.sampler.init(self._functions(), self.ring)
            self._parts = tuple(state)
            for part, arrays in state.items():
                self.add_module(part, Buffers(arrays))
        self._check_transform()

    def extra_repr(self) -> str:
        """Arguments that the replay was created with."""
        return f"capacity={self.capacity}, num_envs={self.num_envs}, batch_size={self.batch_size}"

    @property
    def steps(self) -> int:
        """Time steps that it holds, T."""
        return self.capacity // (self.num_envs or 1)

    @property
    def device(self) -> torch.device:
        """Device that holds the rows."""
        return self.cursor.device

    @torch.no_grad()
    def extend(self, rows: Any) -> None:
        """Write rows behind the newest, over the oldest where there is no room.

        Args:
            rows: One row as ``example`` was, or some, ``[n, ...]`` in every field; with environments one time step,
                ``[env, ...]``, or some, ``[time, env, ...]``. Those that lie elsewhere are moved to the device.

        Raises:
            SchemaError: Other fields, shapes or dtypes than the example had.
            ConfigError: More rows at once than there is room for.
        """
        given, count = self.rows.accepted(rows)
        if count:
            self.write(given, count)

    def can_sample(self, min_length: int = 1) -> torch.Tensor:
        """Whether there is something to draw, and at least so many rows in all: bool ``[]`` on the device.

        That is a row or a slice; where each row comes once, a whole batch of them.
        """
        left = self.sampler.left(self._functions(), self._state(), self.ring)
        found: torch.Tensor = (self.ring.rows >= min_length) & (left >= self.sampler.fewest(self.batch_size))
        return found

    def can_extend(self, time_steps: int = 1) -> torch.Tensor:
        """Whether so many time steps fit without writing over a row of a queue that has not come: bool ``[]``.

        Without a queue they always do.
        """
        left = self.sampler.waiting(self._functions(), self._state(), self.ring)
        found: torch.Tensor = left + time_steps * (self.num_envs or 1) <= self.capacity
        return found

    @torch.no_grad()
    def set_priorities(self, indices: torch.Tensor, priorities: Any) -> None:
        """Say how important some rows are; of a row that comes twice the last one counts.

        Args:
            indices: Their slots, integers of any shape, as ``sample`` gives them in ``index``. Those that are negative
                are left out, so that ``torch.where(batch["mask"], batch["index"], -1)`` leaves steps out that are not
                there.
            priorities: Numbers from 0, which become float32, of the same shape, also with axes of length 1 behind it,
                or one for each slice: ``[B]`` or ``[B, 1]``. On a device, where nobody looks, rows with negative ones
                and NaN keep theirs, those that are larger than a row may have weigh as much as one may, and rows that
                are not there are left out.

        Raises:
            ConfigError: A replay without priorities, shapes that do not go together, or indices that are no integers.
            DataError, IndexError: As of ``ReplayBuffer.update_priority``, where rows lie on the host.
        """
        sampler = self.sampler
        if not isinstance(sampler, ByPriority):
            raise ConfigError("set_priorities: expected a replay made with priorities=, found one without")
        slots, given = (
            values if isinstance(values, torch.Tensor) else as_array(values, where="set_priorities")
            for values in (indices, priorities)
        )
        slots = torch.as_tensor(slots, device=self.device)
        if not is_integer(slots.dtype):
            raise ConfigError(f"set_priorities: expected integers as indices, found {slots.dtype}")
        values, shape = torch.as_tensor(given, device=self.device).detach().to(torch.float32), slots.shape
        values = values.reshape(shape_like(shape, values.shape, "set_priorities")).expand(shape).reshape(-1)
        slots = slots.reshape(-1).to(torch.int64)
        if not self.is_seen or not is_known(slots) or not is_known(values):
            if len(slots):
                state = self._state()
                self._keep(state, sampler.update(self._functions(), state, self.ring, slots, values))
            return
        known, seen, tree, rows = slots.numpy(), values.numpy(), sampler.tree, self._seen_ring().rows
        if known.size and known.min() < 0:
            there = known >= 0
            known, seen = known[there], seen[there]
        units = weighed(seen, tree.capacity, tree.alpha, tree.eps)
        if not known.size:
            return
        if known.max() >= rows:
            raise IndexError(f"set_priorities: expected slots in 0..{rows - 1}, found {known.max()}")
        state = self._seen_state()
        self._keep(state, {"weights": tree.put(_NUMPY, state["weights"], known, seen, units)})

    def sample(self, index: Any = None, batch_size: int | None = None, *, beta: Any = None) -> TensorDict:
        """The next batch, or that of any number.

        Args:
            index: The number of the sample, an integer from 0 or int64 ``[]`` on the device; None: the next one, which
                is counted in ``samples`` on the device. Where each row comes once it names the order of an epoch that
                begins, and what comes next is counted all the same.
            batch_size: Rows or slices in the batch, B; by default that of the replay, which it is where each row comes
                once.
            beta: The exponent of ``priority_weight``, a number from 0, a tensor ``[]`` or such a function; by default
                that of the replay.

        Returns:
            ``TensorDict[B]``, of slices ``TensorDict[B, S]``, with the fields of the rows and ``index``, int64: where
            they lie. Slices have ``traj_id``, where the rows have none themselves, and ``mask`` where they are padded.
            With priorities there is ``priority_weight``, float32, ``(p_i / p_min) ** -beta`` to ``1e-5`` of it.
            Rows that are no dict are the field ``data``. Transforms were applied.

        Raises:
            ConfigError: A number out of range; nothing to draw, where that is seen without waiting: on the host.
            SchemaError, MissingFieldError: What transforms raise.
        """
        size = self.batch_size if batch_size is None else check_count("batch_size", batch_size)
        if beta is not None and not isinstance(self.sampler, ByPriority):
            raise ConfigError(f"beta: expected a replay made with priorities=, found one without, and {beta!r}")
        if self.sampler.order != "random" and size != self.batch_size:
            raise ConfigError(f"batch_size: expected {self.batch_size}, as each row comes once, found {size}")
        counters: Any = self._counters()
        number = counters["samples"] if index is None else number_of(index, self.device)
        batch = self.drawn(counters["seed"], number, size, beta, counters)
        if index is None:
            number += 1
        return self._delivered(batch)

    def drawn(self, seed: Any, number: Any, size: int, beta: Any = None, counters: Any = None) -> dict[str, Any]:
        """A batch before transforms.

        Args:
            seed: May be another than that of the replay, int64 ``[]``, a tensor or NumPy's.
            number: The number of the sample, int64 ``[]``, likewise.
            size: Rows or slices.
            beta: The exponent of importance weights; None: that of the replay.
            counters: What ``_counters`` gives, where it was called already.
        """
        known, sampler = self._counters() if counters is None else counters, self.sampler
        seen = known is not self._buffers
        if seen:
            if type(seed) is torch.Tensor:
                seed = seed.numpy()
            if type(number) is torch.Tensor:
                number = number.numpy()
            xp, state = _NUMPY, self._seen_state()
            ring = Ring(int(known["cursor"]), int(known["size"]), self.steps, self.num_envs)
        else:
            xp, state, ring = self._functions(), self._state(), self.ring
        after, plan = sampler.draw(xp, state, ring, DrawKey(seed, number), size)
        if seen:
            left = sampler.left(xp, state, ring) if plan.left is None else plan.left
            check_left(sampler, int(left), self.batch_size, ring.size, "sample")
        if after is not state:
            self._keep(state, after)
        rows = self.rows.taken(plan.read)
        if seen:
            parts: list[Any] = [torch.from_numpy(part) if type(part) is np.ndarray else part for part in plan]
            xp, plan = _ON_HOST, RowPlan(*parts)
        exponent = None
        if plan.times is not None:
            exponent = self.beta if beta is None else beta
            exponent = exponent(torch.as_tensor(number)) if callable(exponent) else exponent
        return plan.batch(xp, rows, exponent)

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save it to a file that buffers of NumPy, torch and JAX load: the format of ``ReplayBuffer.dumps``.

        Args:
            path: A file; or a directory that exists, in which it is called ``replay.mouse``.

        Raises:
            SchemaError: A dtype that NumPy has not.
            StorageError: The file cannot be written (also an OSError).
        """
        buffer = self._like()
        self.to_host(buffer)
        buffer.dumps(path)

    def loads(self, path: str | PathLike[str]) -> None:
        """Go on from a file, in a replay that is empty and made as the one was that was saved.

        Args:
            path: What ``dumps`` wrote, here, of ``mouse_jax.device``, or of a buffer of any package over an
                ``ArrayStorage`` and with the sampler that draws the same.

        Raises:
            ConfigError: It is not empty.
            SchemaError, DataError: Rows of another kind.
            StateError: The file is damaged, or of other parts.
            StorageError: It cannot be read (also an OSError).
        """
        buffer = self._like()
        buffer.loads(path)
        self.from_host(buffer)

    def to_host(self, buffer: ReplayBuffer) -> None:
        """Put all rows into an empty buffer, which then draws what the replay would.

        Each row lies in the same place, and the buffer takes over the seed and the number of the next sample. Episodes
        may have other numbers (``traj_id``).

        Args:
            buffer: An empty one of any package and of the same capacity, with environments over a storage with
                ``ndim=2``; its sampler and transforms are its own.

        Raises:
            ConfigError: A buffer that is not empty, or of another capacity or ``ndim``.
            SchemaError: A dtype that NumPy has not.
        """
        lead = (self.steps,) if self.num_envs is None else (self.steps, self.num_envs)
        rows = {key: to_numpy(memory).reshape(*lead, *memory.shape[1:]) for key, memory in self.rows.each()}
        ring = self._known_ring()
        moving.to_host(
            self.sampler,
            moving.state_in_numpy(self.sampler, self._functions(), self._state(), ring),
            ring,
            lambda count: self.rows.nested({key: values[:count] for key, values in rows.items()}),
            buffer,
            batch_size=self.batch_size,
            seed=int(self.seed) & ((1 << 64) - 1),
            samples=int(self.samples),
        )

    @torch.no_grad()
    def from_host(self, buffer: ReplayBuffer) -> None:
        """Take all rows of a buffer, and draw from then on what it would.

        Each row lies in the same place, and the replay takes over the seed and the number of the next sample. Episodes
        may have other numbers (``traj_id``).

        Args:
            buffer: One of any package and of the same capacity, with environments over a storage with ``ndim=2``.

        Raises:
            ConfigError: A replay that is not empty, or of another capacity; a buffer whose rows lie in no order.
            SchemaError, DataError: Rows of another kind.
        """
        ring, rows = moving.rows_from_host(self._known_ring(), buffer)
        if ring.size:
            accepted, _ = self.rows.accepted(on_host(rows))
            fields = {key: to_numpy(values) for key, values in accepted.items()}
            state = moving.state_from_host(self.sampler, ring, fields, buffer)
            begin = (ring.cursor - ring.size) % ring.steps
            self.rows.put(accepted, (begin + torch.arange(ring.size, device=self.device)) % ring.steps)
            for part, arrays in self._state().items():
                for name, memory in arrays.items():
                    values = torch.as_tensor(np.asarray(state[part][name]), dtype=memory.dtype)
                    (memory[: len(values)] if values.ndim else memory).copy_(values)
        self.cursor.fill_(ring.cursor)
        self.size.fill_(ring.size)
        self.seed.fill_(_philox.signed(buffer.seed))
        self.samples.fill_(buffer.stats()["samples"])

    @property
    def ring(self) -> Ring:
        """The ring of rows, of tensors."""
        return Ring(self.cursor, self.size, self.steps, self.num_envs)

    @property
    def is_seen(self) -> bool:
        """Whether NumPy may compute in the memory of the module: it lies on the host, and nothing is compiled."""
        size: Any = self._buffers["size"]
        return is_known(size)

    def _counters(self) -> Any:
        """The buffers of the module: NumPy's where ``is_seen``."""
        return self.arrays() if self.is_seen else self._buffers

    def _seen_ring(self) -> Ring:
        known = self.arrays()
        return Ring(int(known["cursor"]), int(known["size"]), self.steps, self.num_envs)

    def _known_ring(self) -> Ring:
        return Ring(int(self.cursor), int(self.size), self.steps, self.num_envs)

    def _functions(self) -> TorchArrays:
        return TorchArrays(self.cursor.device, self.constants._buffers)

    def _state(self) -> State:
        return {part: dict(getattr(self, part)._buffers) for part in self._parts}

    def _seen_state(self) -> State:
        return {part: getattr(self, part).arrays() for part in self._parts}

    def _keep(self, before: State, after: State) -> None:
        """Write arrays that are others than before to the memory of the module."""
        for part, arrays in after.items():
            memory = before[part]
            if arrays is not memory:
                for name, values in arrays.items():
                    if values is not memory[name]:
                        memory[name][...] = values

    def write(self, given: Mapping[FieldKey, torch.Tensor], count: int) -> None:
        """Write so many time steps, by field and as they lie in memory, which were checked."""
        places = self.cursor.reshape(1)
        if count > 1:
            places = (places + torch.arange(count, device=self.device)) % self.steps
        if self.is_seen:
            self._write_seen(given, count, places)
            return
        xp, before = self._functions(), self._state()
        state = self.sampler.extend(xp, before, given, count, self.ring)
        self.rows.put(given, places)
        self.cursor.add_(count).remainder_(self.steps)
        self.size.add_(count).clamp_(max=self.steps)
        self._keep(before, self.sampler.settle(xp, state, count, self.ring))

    def _write_seen(self, given: Mapping[FieldKey, torch.Tensor], count: int, places: torch.Tensor) -> None:
        """``write`` with NumPy's functions in the memory of the module."""
        fields, sampler = Reads(lambda key: _in_numpy(given[key])), self.sampler
        before, ring, known = self._seen_state(), self._seen_ring(), self.arrays()
        state = sampler.extend(_NUMPY, before, fields, count, ring)
        self.rows.put(given, places)
        ring = ring._replace(cursor=(ring.cursor + count) % self.steps, size=min(ring.size + count, self.steps))
        known["cursor"][...], known["size"][...] = ring.cursor, ring.size
        self._keep(before, sampler.settle(_NUMPY, state, count, ring))

    def _like(self) -> ReplayBuffer:
        """An empty buffer on the host that draws the same."""
        beta = self.beta if callable(self.beta) else float(self.beta)
        return moving.buffer_like(self.sampler, self._known_ring(), self.alignment, beta)

    def _check_transform(self) -> None:
        """Raise what the transforms of ``mouse_core.replay`` do, given a batch without values, up to one of a user."""
        given = () if self.transform is None else self.transform.transforms
        ours = [*takewhile(lambda part: type(part).__module__.partition(".")[0] == "mouse_core", given)]
        if not ours:
            return
        constants = {name: table.to("meta") for name, table in self.constants.named_buffers()}
        xp = TorchArrays(torch.device("meta"), constants)
        number = xp.full((), 0, "index")
        ring = Ring(number, number, self.steps, self.num_envs)
        _, plan = self.sampler.draw(xp, self.sampler.init(xp, ring), ring, DrawKey(number, number), self.batch_size)
        Compose(*ours)(plan.batch(xp, self.rows.outline([*plan.read.shape]), 0.0))

    def _delivered(self, batch: dict[str, Any]) -> TensorDict:
        if self.transform is None and self.rows.is_flat:
            index = batch["index"]
            # All of it was made here, of this shape and on this device: checked again, a batch would take 8 us longer.
            found: TensorDict = TensorDict._new_unsafe(batch, batch_size=index.shape, device=index.device)
            return found
        made: TensorDict = tensor_dict(batch if self.transform is None else self.transform(batch), self.device)
        return made


def _in_numpy(values: torch.Tensor) -> Any:
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def number_of(index: Any, device: torch.device) -> torch.Tensor:
    """The number of a sample, int64 ``[]`` on a device, or ConfigError."""
    if isinstance(index, torch.Tensor):
        if index.ndim or index.is_floating_point() or index.dtype == torch.bool:
            raise ConfigError(f"index: expected an integer, found {index.dtype} {[*index.shape]}")
        if is_known(index) and index.numpy() < 0:
            raise ConfigError(f"index: expected an integer in [0, 2**63), found {index}")
        return index.to(device, torch.int64)
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < 1 << 63:
        raise ConfigError(f"index: expected an integer in [0, 2**63), found {index!r}")
    # Filled there, not copied.
    return torch.full((), int(index), dtype=torch.int64, device=device)
