"""Replay as a module whose buffers are its rows and all that is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from mouse_core.errors import ConfigError
from mouse_core.nested import FieldKey, as_array
from mouse_core.randomness import check_seed
from mouse_core.replay import Priorities, ReplayBuffer
from mouse_core.replay.device import Order, Slices, moving
from mouse_core.replay.device.arrays import Arrays as CoreArrays
from mouse_core.replay.device.arrays import Ring as CoreRing
from mouse_core.replay.device.episodes import EpisodeIndex
from mouse_core.replay.device.options import check_names, check_order, check_rooms, composed, find_marks, streams_of
from mouse_core.replay.device.samplers import State, sampler_of
from mouse_core.spec import Alignment, check_count
from mouse_torch import _philox
from mouse_torch.device import _priorities
from mouse_torch.device._batches import check_transform, drawn
from mouse_torch.device._checks import number_of
from mouse_torch.device.ground.episodes import Episodes
from mouse_torch.device.ground.fields import Fields, check_pad, is_integer, rows_of
from mouse_torch.device.ground.kept import Arrays, BufferModule
from mouse_torch.device.ground.reading import Ring
from mouse_torch.device.ground.turns import Epoch, Queue
from mouse_torch.device.ground.weights import Weights
from mouse_torch.placement import check_device
from mouse_torch.tracing import is_known
from mouse_torch.transfer import to_numpy
from mouse_torch.trees import on_host, tensor_dict


def like(replay: Replay) -> ReplayBuffer:
    """An empty buffer on the host that draws the same."""
    beta = 0.0 if replay.weights is None else replay.weights.beta
    beta = beta if callable(beta) else float(beta)
    return moving.buffer_like(replay.sampler, _known_ring(replay), replay.alignment, beta)


def to_host(replay: Replay, buffer: ReplayBuffer) -> None:
    """See ``Replay.to_host``."""
    lead = (replay.steps,) if replay.num_envs is None else (replay.steps, replay.num_envs)
    rows = {key: to_numpy(memory).reshape(*lead, *memory.shape[1:]) for key, memory in replay.rows.each()}
    ring = _known_ring(replay)
    state = replay.sampler.init(CoreArrays(), ring)
    for part, arrays in state.items():
        for name, array in arrays.items():
            found = to_numpy(getattr(getattr(replay, part), name))
            arrays[name] = found[: len(array)] if np.ndim(array) else found
    moving.to_host(
        replay.sampler,
        state,
        ring,
        lambda count: replay.rows.nested({key: values[:count] for key, values in rows.items()}),
        buffer,
        batch_size=replay.batch_size,
        seed=int(replay.seed) & ((1 << 64) - 1),
        samples=int(replay.samples),
    )


def _known_ring(replay: Replay) -> CoreRing:
    return CoreRing(int(replay.cursor), int(replay.size), replay.steps, replay.num_envs)


@torch.no_grad()
def from_host(replay: Replay, buffer: ReplayBuffer) -> None:
    """See ``Replay.from_host``."""
    ring, rows = moving.rows_from_host(_known_ring(replay), buffer)
    if ring.size:
        accepted, _ = replay.rows.accepted(on_host(rows))
        fields = {key: to_numpy(values) for key, values in accepted.items()}
        state: State = moving.state_from_host(replay.sampler, ring, fields, buffer)
        begin = (ring.cursor - ring.size) % ring.steps
        replay.rows.put(accepted, (begin + torch.arange(ring.size, device=replay.device)) % ring.steps)
        for part, arrays in state.items():
            for name, array in arrays.items():
                memory = getattr(getattr(replay, part), name)
                values = torch.as_tensor(np.asarray(array), dtype=memory.dtype)
                (memory[: len(values)] if values.ndim else memory).copy_(values)
    replay.cursor.fill_(ring.cursor)
    replay.size.fill_(ring.size)
    replay.seed.fill_(_philox.signed(buffer.seed))
    replay.samples.fill_(buffer.stats()["samples"])


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
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.transform = composed(transform, alignment)
        num_envs = streams_of(num_envs, slices, self.transform)
        check_rooms(capacity, batch_size, num_envs, slices)
        check_order(order, int(capacity), int(batch_size), slices, priorities)
        self.reach = 0 if self.transform is None else self.transform.reach
        self.capacity, self.num_envs, self.batch_size = int(capacity), num_envs, int(batch_size)
        self.alignment: Alignment = alignment
        self.order: Order = order
        structure, row = rows_of(example)
        check_names(structure, self.transform, slices, priorities)
        check_pad(row, slices)
        marks = None if slices is None else find_marks(row, slices, is_integer)
        index = None
        if slices is not None and marks is not None:
            dtype = None if marks.ids is None else str(row[marks.ids].held).removeprefix("torch.")
            index = EpisodeIndex(slices, marks, dtype, tiled=order == "epochs")
        self.sampler = sampler_of(self.capacity, index, priorities, order, self.reach)
        target = check_device(device)
        word = check_seed(seed)
        # What is made in inference mode can be written to only there.
        with torch.inference_mode(False):
            self.rows = Fields(structure, row, self.capacity, num_envs, target)
            self.episodes: Episodes | None = None
            if slices is not None and marks is not None:
                ids = None if marks.ids is None else row[marks.ids].held
                of = (self.steps, num_envs or 1)
                self.episodes = Episodes(*of, slices, marks, ids, tiled=order == "epochs", device=target)
            self.turns: Epoch | Queue | None = None
            if order != "random":
                self.turns = Epoch(target) if order == "epochs" else Queue(target)
            self.weights: Weights | None = None
            if priorities is not None:
                self.weights = Weights(self.capacity, priorities, sliced=slices is not None, device=target)
            for name, value in (("cursor", 0), ("size", 0), ("samples", 0), ("seed", _philox.signed(word))):
                self.register_buffer(name, torch.full((), value, dtype=torch.int64, device=target))
        check_transform(self)

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
        rows = self.size * (self.num_envs or 1)
        fewest = 1 if self.turns is None else self.batch_size
        return (rows >= min_length) & (self.left() >= fewest)

    def can_extend(self, time_steps: int = 1) -> torch.Tensor:
        """Whether so many time steps fit without writing over a row of a queue that has not come: bool ``[]``.

        Without a queue they always do.
        """
        left = self.turns.left if isinstance(self.turns, Queue) else torch.zeros_like(self.size)
        return left + time_steps * (self.num_envs or 1) <= self.capacity

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
        if self.weights is None:
            raise ConfigError("set_priorities: expected a replay made with priorities=, found one without")
        slots, given = (
            values if isinstance(values, torch.Tensor) else as_array(values, where="set_priorities")
            for values in (indices, priorities)
        )
        slots = torch.as_tensor(slots, device=self.device)
        values = _priorities.like(slots, torch.as_tensor(given, device=self.device)).reshape(-1)
        slots = slots.reshape(-1).to(torch.int64)
        rows = self.size * (self.num_envs or 1)
        if len(slots):
            _priorities.update(self.weights, rows, slots, values)

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
        if beta is not None and self.weights is None:
            raise ConfigError(f"beta: expected a replay made with priorities=, found one without, and {beta!r}")
        if self.turns is not None and size != self.batch_size:
            raise ConfigError(f"batch_size: expected {self.batch_size}, as each row comes once, found {size}")
        counters = self.counters()
        seed: Any = self.seed if counters is None else counters["seed"]
        counted: Any = self.samples if counters is None else counters["samples"]
        batch = drawn(self, seed, counted if index is None else number_of(index, self.device), size, beta)
        if index is None:
            counted += 1
        return self._delivered(batch)

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save it to a file that buffers of NumPy, torch and JAX load: the format of ``ReplayBuffer.dumps``.

        Args:
            path: A file; or a directory that exists, in which it is called ``replay.mouse``.

        Raises:
            SchemaError: A dtype that NumPy has not.
            StorageError: The file cannot be written (also an OSError).
        """
        buffer = like(self)
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
        buffer = like(self)
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
        to_host(self, buffer)

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
        from_host(self, buffer)

    @property
    def ring(self) -> Ring:
        """Return the slots of rows."""
        return Ring(self.cursor, self.size, self.steps)

    def counters(self) -> Arrays | None:
        """Return the module's buffers as NumPy arrays; None if they cannot be read, as while compiling."""
        size: Any = self._buffers["size"]
        return self.arrays() if is_known(size) else None

    def write(self, given: Mapping[FieldKey, torch.Tensor], count: int) -> None:
        """Write so many time steps, by field and as they lie in memory, which were checked."""
        places = self.cursor.reshape(1)
        if count > 1:
            places = (places + torch.arange(count, device=self.device)) % self.steps
        if self.episodes is not None:
            self.episodes.extend(given, places, self.cursor)
        if isinstance(self.turns, Queue):
            self.turns.left.add_(count * (self.num_envs or 1)).clamp_(max=self.capacity)
        elif self.turns is not None and self.episodes is not None:
            self.turns.rows.zero_()  # there are other slices
        self.rows.put(given, places)
        self.cursor.add_(count).remainder_(self.steps)
        self.size.add_(count).clamp_(max=self.steps)
        if self.weights is not None:
            _priorities.written(self.weights, self.episodes, self.ring, count, self.num_envs or 1)

    def left(self) -> torch.Tensor:
        """Number of rows or slices to draw; of a queue, those not yet returned; by priority, the sum of weights."""
        if isinstance(self.turns, Queue):
            return self.turns.left
        if self.weights is not None:
            return self.weights.total
        if self.episodes is not None:
            slices: torch.Tensor = self.episodes.table(self.episodes.reading(self.ring)).ends[-1]
            return slices
        return self.size if self.num_envs is None else self.size * self.num_envs

    def _delivered(self, batch: dict[str, Any]) -> TensorDict:
        if self.transform is None and self.rows.is_flat:
            index = batch["index"]
            # All of it was made here, of this shape and on this device: checked again, a batch would take 8 us longer.
            found: TensorDict = TensorDict._new_unsafe(batch, batch_size=index.shape, device=index.device)
            return found
        made: TensorDict = tensor_dict(batch if self.transform is None else self.transform(batch), self.device)
        return made
