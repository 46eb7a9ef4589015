"""A replay buffer as a torch module, whose tensors are rows, counters and the state of the sampler; and a module that
draws batches from several replays, for example from recorded and from new rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from mouse_core.errors import ConfigError
from mouse_core.nested import as_array, unflatten
from mouse_core.randomness import check_seed
from mouse_core.replay import Priorities, ReplayBuffer, Schedule
from mouse_core.replay.device import Arrays, DeviceSampler, DrawKey, Layout, Order, Ring, RowPlan, Slices, moving
from mouse_core.replay.device.arrays import State
from mouse_core.replay.device.ensemble import TABLES, draw_members
from mouse_core.replay.device.samplers import ByPriority, check_left, priorities_of
from mouse_core.replay.ensemble import member_seed, shares_of
from mouse_core.spec import Alignment, check_count
from mouse_torch import _philox
from mouse_torch.device.arrays import TorchArrays
from mouse_torch.device.fields import BufferModule, Fields, rows_of
from mouse_torch.placement import check_device, is_known
from mouse_torch.transfer import to_numpy
from mouse_torch.trees import on_host, tensor_dict

_NUMPY, _ON_HOST = Arrays(), TorchArrays(torch.device("cpu"))


class Replay(BufferModule):
    """A replay buffer on a device, for vectorised environments in torch. No method that writes or samples waits for the
    device.

    Batches equal the batches of a ``mouse_core.replay.ReplayBuffer`` with the same seed, the same writes and the
    corresponding sampler. The corresponding sampler is a ``RandomSampler`` or ``SliceSampler``; with priorities, a
    ``PrioritizedSampler`` or ``PrioritizedSliceSampler``; for the order "epochs", a ``SamplerWithoutReplacement`` or
    ``SliceSamplerWithoutReplacement`` with ``drop_last=True``; for the order "queue", a
    ``ConsumingSampler(shuffle=False, drop_last=True)``.

    ``extend`` and ``sample`` run in eager code, in ``torch.compile(fullgraph=True)``, and in CUDA graphs. The index of
    the next sample is stored on the device, so each run of a CUDA graph draws new rows. A ``Replay`` is a module with
    ``to``, ``state_dict`` and ``load_state_dict``; methods that change dtypes, such as ``half()``, do not change its
    rows.

    Args:
        example: One row: tensors, arrays or numbers, nested in dicts, tuples or a TensorDict. Only the shapes and
            dtypes are used.
        capacity: The largest number of rows in memory, over all time steps and environments; in a full replay, new rows
            overwrite the oldest rows.
        batch_size: The default number of rows or slices in a batch, B.
        num_envs: Number of environments, whose rows are written side by side, ``[time, env]``; each environment is a
            stream. If ``num_envs`` is None, all rows are one stream, ``[n, ...]`` in the order of time. Slices, and
            transforms that read the next rows, need this argument.
        slices: The options of slices, if batches consist of slices; None: batches consist of single rows.
        transform: Functions that take and return a batch, applied in order: transforms of ``mouse_core.replay`` that
            draw no random numbers and read only the batch, such as ``NStep`` and ``NextView``, or your own functions.
        alignment: "outgoing" if the action, reward and done of a row follow the row's observation, "arrived" if they
            led to the row's observation.
        priorities: The options of priorities: each row is drawn in proportion to a power of its priority, or each slice
            in proportion to a power of its first row's priority. If ``priorities`` is None, all rows or slices are
            equally likely. New rows have the largest priority so far, at least 1; ``set_priorities`` changes
            priorities. ``beta`` is a number, a tensor ``[]`` on the device, or a function that takes the index of the
            sample (a tensor) and returns a tensor, such as a ``LinearSchedule``.
        order: The order in which rows are drawn. "random": rows are drawn with replacement. "epochs": every row is
            drawn once per epoch, shuffled; slices do not overlap. "queue": every row is drawn once, the oldest first.
        sampler: A custom sampler in place of ``priorities`` and ``order``: an instance of a subclass of
            ``mouse_core.replay.device.DeviceSampler``, whose ``units`` are set to the rows or slices of the replay.
        seed: An integer in ``[0, 2**64)``.
        device: The device of the rows, which must support int64 and float64; None: the host.

    Raises:
        ConfigError: An argument is out of range, the device does not exist, a transform cannot run on a device, or the
            dtype of a field cannot represent the pad.
        SchemaError: A field is not a tensor of numbers, or has the name of a field that the replay adds to batches.
        MissingFieldError: Batches consist of slices, and no field of the rows marks the ends of episodes.

    Example:
        >>> import torch
        >>> from mouse_torch import device
        >>> replay = device.Replay({"obs": torch.zeros(4), "reward": 0.0}, 100, batch_size=8, num_envs=None)
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
        sampler: DeviceSampler | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        structure, row = rows_of(example)
        self.layout = layout = Layout.of(
            unflatten(structure, row), capacity, batch_size, num_envs, slices, transform, alignment, priorities, order,
            sampler,
        )  # fmt: skip
        self.sampler, self.transform = layout.sampler, layout.transform
        self.beta = 0.0 if priorities is None else priorities.beta
        target, word = check_device(device), _philox.signed(check_seed(seed))
        # A tensor that is created in inference mode can be written only in inference mode.
        with torch.inference_mode(False):
            self.rows = Fields(structure, row, layout.capacity, layout.num_envs, target)
            for name, value in (("cursor", 0), ("size", 0), ("samples", 0), ("seed", word)):
                self.register_buffer(name, torch.full((), value, dtype=torch.int64, device=target))
            constants = {name: torch.tensor(table, device=target) for name, table in self.sampler.constants.items()}
            self.constants = BufferModule(constants, persistent=False)
            xp = TorchArrays(target, self.constants._buffers)
            ring = Ring(self.cursor, self.size, layout.steps, layout.num_envs)
            self.state = BufferModule(self.sampler.init(xp, ring))

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.cursor.device

    @torch.no_grad()
    def extend(self, rows: Any) -> None:
        """Write rows after the newest row; in a full replay, the new rows overwrite the oldest rows.

        Args:
            rows: One row like ``example``, or several rows, ``[n, ...]`` in every field. With ``num_envs``, ``rows``
                are one time step, ``[env, ...]``, or several time steps, ``[time, env, ...]``. Rows on another device
                are copied.

        Raises:
            SchemaError: The fields, shapes or dtypes of the rows differ from the example.
            ConfigError: ``rows`` has more rows than the capacity.
        """
        given, count = self.rows.accepted(rows, self.layout)
        if not count:
            return
        xp, counters, before, ring = self._core()
        read = (lambda key: to_numpy(given[key])) if xp is _NUMPY else given.__getitem__
        state = self.sampler.units.extend(xp, before, read, count, ring)
        self.rows.put(given, torch.as_tensor(xp.places(ring.cursor, count, ring.steps)))
        ring = ring.after(xp, count)
        for name, value in (("cursor", ring.cursor), ("size", ring.size)):
            counters[name][...] = value
        self._keep(before, self.sampler.settle(xp, state, read, count, ring))

    def can_sample(self, min_length: int = 1) -> torch.Tensor:
        """Return whether a batch can be drawn and the replay has ``min_length`` rows: bool ``[]`` on the device.

        A batch needs one row or slice; in the orders "epochs" and "queue", a batch needs ``batch_size`` rows or slices.
        """
        xp, _, state, ring = self._core()
        enough = self.sampler.left(xp, state, ring) >= self.sampler.fewest(self.layout.batch_size)
        return torch.as_tensor((ring.rows >= min_length) & enough, device=self.device)

    def can_extend(self, time_steps: int = 1) -> torch.Tensor:
        """Return whether ``time_steps`` more steps fit without overwriting queued rows that ``sample`` has not
        returned.

        The result is bool ``[]`` on the device. Without a queue, time steps always fit.
        """
        xp, _, state, ring = self._core()
        left = self.sampler.waiting(xp, state, ring)
        return torch.as_tensor(left + time_steps * ring.envs <= ring.capacity, device=self.device)

    @torch.no_grad()
    def set_priorities(self, indices: torch.Tensor, priorities: Any) -> None:
        """Set the priorities of some rows; if a row occurs twice, its last priority counts.

        Args:
            indices: Slots of the rows, integers of any shape, as in the field ``index`` of a batch. Negative slots are
                ignored, so that ``torch.where(batch["mask"], batch["index"], -1)`` leaves out padded steps.
            priorities: Numbers of at least 0, converted to float32, in the shape of ``indices`` (further axes of length
                1 are allowed); or one number for each slice, ``[B]`` or ``[B, 1]``. Values are checked only on the
                host. On other devices, negative priorities and NaN change nothing, too large priorities get the largest
                possible weight, and slots without a row are ignored.

        Raises:
            ConfigError: The replay has no priorities, shapes do not match, or indices are not integers.
            DataError, IndexError: See ``ReplayBuffer.update_priority``; raised only if the replay is on the host.
        """
        arrays = (
            values if isinstance(values, torch.Tensor) else as_array(values, where="set_priorities")
            for values in (indices, priorities)
        )
        given = (torch.as_tensor(values, device=self.device).detach() for values in arrays)
        xp, _, state, ring = self._core()
        sampler, slots, values = priorities_of(TorchArrays(self.device), self.sampler, *given)
        if xp is _NUMPY and is_known(slots) and is_known(values):
            slots, values = slots.numpy(), values.numpy()
            sampler.check_update(slots, values, ring.rows)
        else:
            xp, _, state, ring = self._in_torch()
        if len(slots):
            self._keep(state, sampler.tree.update(xp, state, ring.rows, slots, values))

    def sample(self, index: Any = None, batch_size: int | None = None, *, beta: Any = None) -> TensorDict:
        """Return the next batch, or the batch with a given index.

        Args:
            index: The index of the sample, an integer of at least 0 or int64 ``[]`` on the device; None: the index in
                ``samples`` on the device, which the call increments. In the orders "epochs" and "queue", the call
                returns the next rows for any ``index``; the index only determines the order of a new epoch.
            batch_size: Number of rows or slices in the batch, B; by default the batch size of the replay. With the
                orders "epochs" and "queue", only this size is allowed.
            beta: The exponent of ``priority_weight``: a number of at least 0, a tensor ``[]``, or a function that takes
                the index of the sample and returns a number; by default the exponent of the replay.

        Returns:
            ``TensorDict[B]``, or ``TensorDict[B, S]`` for slices, after the transforms: the fields of the rows, and
            ``index``, int64, the slots of the rows. Slices also have ``traj_id`` (unless the rows have a field of this
            name), and ``mask`` if slices are padded. With priorities, ``priority_weight``, float32, is ``(p_i / p_min)
            ** -beta`` with a relative error of up to ``1e-5``. If rows are not dicts, the field ``data`` contains the
            rows.

        Raises:
            ConfigError: A number is out of range, or the replay is empty (checked only on the host).
            SchemaError, MissingFieldError: Raised by a transform.
        """
        default = self.layout.batch_size
        size = default if batch_size is None else check_count("batch_size", batch_size)
        if beta is not None and not isinstance(self.sampler, ByPriority):
            raise ConfigError(f"beta: expected None, because this replay has no priorities, found {beta!r}")
        if self.sampler.order != "random" and size != default:
            raise ConfigError(f"batch_size: expected {default}, since each row is drawn once, found {size}")
        batch = self.drawn(size, None if index is None else number_of(index, self.device), beta=beta)
        if self.transform is None and self.rows.is_flat:
            index = batch["index"]
            # All tensors were created here, with one batch shape on one device: the checks of TensorDict would take 8
            # us.
            found: TensorDict = TensorDict._new_unsafe(batch, batch_size=index.shape, device=index.device)
            return found
        made: TensorDict = tensor_dict(batch if self.transform is None else self.transform(batch), self.device)
        return made

    def drawn(self, size: int, number: Any = None, seed: Any = None, *, beta: Any = None) -> dict[str, Any]:
        """Draw a batch, and return it before the transforms are applied.

        Args:
            size: The number of rows or slices.
            number: The index of the sample, int64 ``[]``; None: the next index, which the call increments.
            seed: The seed of the draw, int64 ``[]``; None: the seed of the replay.
            beta: The exponent of importance weights; None: the exponent of the replay.
        """
        xp, counters, state, ring = self._core()
        seen, sampler, is_next = xp is _NUMPY, self.sampler, number is None
        number, seed = counters["samples"] if is_next else number, counters["seed"] if seed is None else seed
        known = [part.numpy() if seen and type(part) is torch.Tensor else part for part in (seed, number)]
        key = DrawKey(*known)
        after, plan = sampler.draw(xp, state, ring, key, size)
        if seen:
            left = sampler.left(xp, state, ring) if plan.left is None else plan.left
            check_left(sampler, int(left), self.layout.batch_size, ring.size, "sample")
        if after is not state:
            self._keep(state, after)
        rows = self.rows.taken(plan.read)
        if seen:
            parts: list[Any] = [torch.from_numpy(part) if type(part) is np.ndarray else part for part in plan]
            xp, plan = _ON_HOST, RowPlan(*parts)
        exponent = self.beta if beta is None else beta
        exponent = exponent(torch.as_tensor(number)) if callable(exponent) else exponent
        batch = plan.batch(xp, rows, exponent)
        if is_next:
            number += 1
        return batch

    def to_host(self) -> ReplayBuffer:
        """Return a buffer on the host with all rows, the same options and the same draws.

        Each row keeps its slot, and the buffer continues with the replay's seed and with the index of the replay's next
        sample. The trajectory numbers of episodes (``traj_id``) can change. The buffer's ``dumps`` saves a file, which
        the buffer of an empty replay loads; see ``from_host``.

        Raises:
            SchemaError: NumPy lacks the dtype of a field.

        Example:
            >>> import os, tempfile
            >>> from mouse_torch import device
            >>> path = os.path.join(tempfile.mkdtemp(), "replay.mouse")
            >>> options = {"batch_size": 4, "num_envs": None}
            >>> replay, restored = (device.Replay({"x": 0.0}, 10, **options) for _ in range(2))
            >>> replay.extend({"x": torch.ones(3)})
            >>> replay.to_host().dumps(path)
            >>> buffer = restored.to_host()
            >>> buffer.loads(path)
            >>> restored.from_host(buffer)
            >>> int(restored.size)
            3
        """
        xp, _, state, ring = self._in_torch()
        lead = (ring.steps,) if ring.num_envs is None else (ring.steps, ring.num_envs)
        views = {key: memory.view(self.rows.rows[key].dtype) for key, memory in self.rows.each()}
        rows = {key: to_numpy(view).reshape(*lead, *view.shape[1:]) for key, view in views.items()}
        seed, samples = int(self.seed) & ((1 << 64) - 1), int(self.samples)
        beta = self.beta if callable(self.beta) else float(self.beta)
        return moving.to_host(self.layout, xp, state, ring, unflatten(self.rows.structure, rows), beta, seed, samples)

    @torch.no_grad()
    def from_host(self, buffer: ReplayBuffer) -> None:
        """Copy all rows of a buffer to an empty replay, and continue the draws of the buffer.

        Each row keeps its slot, and the replay continues with the buffer's seed and with the index of the buffer's next
        sample. The trajectory numbers of episodes (``traj_id``) can change.

        Args:
            buffer: A buffer of any package, with the same capacity. If the replay has ``num_envs``, the storage of the
                buffer has ``ndim=2``. ``to_host`` of an empty replay returns such a buffer.

        Raises:
            ConfigError: The replay is not empty or has another capacity, or the buffer's rows are not in the order of
                writing.
            SchemaError, DataError: The fields, shapes or dtypes of the rows differ from the replay, or a dtype cannot
                represent a value.
        """
        xp, _, before, ring = self._in_torch()
        ring, rows = moving.rows_from_host(ring, buffer)
        seed, samples = _philox.signed(buffer.seed), buffer.stats()["samples"]
        if ring.size:
            accepted, _ = self.rows.accepted(on_host(rows), self.layout)
            word = torch.full((), seed, device=self.device)
            read = {key: to_numpy(values) for key, values in accepted.items()}.__getitem__
            state = moving.state_from_host(self.sampler, xp, before, ring, read, buffer, word)
            self.rows.put(accepted, xp.places(ring.cursor - ring.size, ring.size, ring.steps))
            self._keep(before, state)
        for name, value in (("cursor", ring.cursor), ("size", ring.size), ("seed", seed), ("samples", samples)):
            getattr(self, name).fill_(value)

    def _core(self) -> tuple[Arrays, Any, State, Ring]:
        """Return the array functions, the counters, the state of the sampler, and the ring.

        On the host in eager code, these are NumPy functions and arrays in the memory of the module.
        """
        size: Any = self._buffers["size"]
        if not is_known(size):
            return self._in_torch()
        layout, known = self.layout, self.arrays()
        ring = Ring(int(known["cursor"]), int(known["size"]), layout.steps, layout.num_envs)
        return _NUMPY, known, self.state.arrays(), ring

    def _in_torch(self) -> tuple[TorchArrays, Any, State, Ring]:
        """Return the same values as ``_core``, with torch functions and tensors, for any device and for compiled
        code.
        """
        xp = TorchArrays(self.cursor.device, self.constants._buffers)
        ring = Ring(self.cursor, self.size, self.layout.steps, self.layout.num_envs)
        return xp, self._buffers, dict(self.state._buffers), ring

    def _keep(self, before: State, after: State) -> None:
        """Copy the arrays that differ between ``before`` and ``after`` to the memory of the module."""
        for name, values in after.items():
            if values is not before[name]:
                before[name][...] = values


def number_of(index: Any, device: torch.device) -> torch.Tensor:
    """Return the index of a sample, int64 ``[]`` on a device; raise ConfigError if the index is out of range."""
    if isinstance(index, torch.Tensor):
        if index.ndim or index.is_floating_point() or index.dtype == torch.bool:
            raise ConfigError(f"index: expected an integer, found {index.dtype} {[*index.shape]}")
        if is_known(index) and index.numpy() < 0:
            raise ConfigError(f"index: expected an integer in [0, 2**63), found {index}")
        return index.to(device, torch.int64)
    # The tensor is filled on the device; nothing is copied.
    return torch.full((), check_count("index", index, 0), dtype=torch.int64, device=device)


class ReplayEnsemble(BufferModule):
    """Draws batches from several replays (the members) on one device; each member provides a share of each batch.

    The batches equal the batches of a ``mouse_core.replay.ReplayBufferEnsemble`` with the same seed over buffers with
    the same rows. The batches are equal only if no other caller samples the buffers, and if each member with a weight
    above 0 has at least one row in every batch. A member's share is its weight times the batch size, rounded up or down
    at random, so that the share is exact on average. The seeds of the members are derived from the seed of the
    ensemble, and the transforms of the members are applied. Like a ``Replay``, an ensemble draws in eager code, in
    compiled code and in CUDA graphs, and counts its samples on the device. Rows are written to the members.

    Args:
        replays: Replays with ``order="random"``; they become submodules of this module.
        batch_size: Number of rows or slices in a batch, B.
        p: A weight of at least 0 for each replay; by default all weights are equal. The weights of a ``Schedule``
            change with the index of the sample.
        seed: An integer in ``[0, 2**64)``.

    Raises:
        ConfigError: No replay is passed, a replay has an order other than "random", the replays are on different
            devices, or weights are invalid.

    Example:
        >>> import torch
        >>> from mouse_torch import device
        >>> options = {"batch_size": 1, "num_envs": None}
        >>> fresh, recorded = (device.Replay({"x": 0.0}, 10, **options) for _ in range(2))
        >>> fresh.extend({"x": torch.zeros(3)})
        >>> recorded.extend({"x": torch.ones(9)})
        >>> device.ReplayEnsemble([fresh, recorded], batch_size=4, p=[0.25, 0.75]).sample()["buffer_ids"].tolist()
        [0, 1, 1, 1]
    """

    samples: torch.Tensor
    """The index of the next sample, int64 ``[]``."""
    seed: torch.Tensor
    seeds: torch.Tensor
    """The seeds of the members, int64 ``[M]``."""

    def __init__(
        self,
        replays: Sequence[Replay],
        *,
        batch_size: int,
        p: Sequence[float] | npt.NDArray[Any] | Schedule | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = int(check_count("batch_size", batch_size))
        if not replays:
            raise ConfigError("replays: expected at least one, found none")
        for number, replay in enumerate(replays):
            if not isinstance(replay, Replay) or replay.sampler.order != "random":
                found = replay.sampler.order if isinstance(replay, Replay) else type(replay).__name__
                raise ConfigError(f"replay {number}: expected a Replay with order='random', found {found!r}")
        devices = {replay.device for replay in replays}
        if len(devices) > 1:
            raise ConfigError(f"replays: expected all replays on the same device, found {sorted(map(str, devices))}")
        self.shares, checked = shares_of(p, len(replays), self.batch_size), check_seed(seed)
        self.replays = torch.nn.ModuleList(replays)
        seeds = [_philox.signed(member_seed(checked, number)) for number in range(len(replays))]
        with torch.inference_mode(False):
            for name, values in (("samples", 0), ("seed", _philox.signed(checked)), ("seeds", seeds)):
                self.register_buffer(name, torch.as_tensor(values, dtype=torch.int64).to(replays[0].device))
            made = {name: torch.as_tensor(getattr(self.shares, name)) for name in TABLES}
            self.constants = BufferModule(made, persistent=False).to(replays[0].device)

    def can_sample(self) -> torch.Tensor:
        """Return whether a batch can be drawn from every member with a weight above 0: bool ``[]`` on the device."""
        asked = [replay.can_sample() for replay, given in zip(self._members(), self.shares.given, strict=True) if given]
        return torch.stack(asked).all()

    @torch.no_grad()
    def sample(self, index: Any = None) -> TensorDict:
        """Return the next batch, or the batch with a given index.

        Args:
            index: The index of the sample, as in ``Replay.sample``; None: the index in ``samples`` on the device,
                which the call increments.

        Returns:
            A batch as in ``Replay.sample``, with the rows of the members one after another. The field ``buffer_ids``,
            int64, is the index of each row's member. For rows of members without ``mask`` (or ``priority_weight``), the
            value of this field is True (or 1). If any member has ``mask`` or ``priority_weight``, every batch has this
            field, even if the member contributes no row.

        Raises:
            ConfigError: The index is out of range, or a member cannot draw a batch (checked only on the host).
            SchemaError: The fields of a member's batches differ from the fields of the first member's batches.
        """
        number = self.samples if index is None else number_of(index, self.samples.device)
        replays, xp = self._members(), TorchArrays(self.samples.device, self.constants._buffers)

        def draw(member: int) -> dict[str, Any]:
            batch = replays[member].drawn(self.shares.most[member], number, self.seeds[member])
            transform = replays[member].transform
            return batch if transform is None else transform(batch)

        batch = draw_members(xp, self.shares, DrawKey(self.seed, number), number, self.batch_size, draw)
        if index is None:
            self.samples.add_(1)
        made: TensorDict = tensor_dict(batch, self.samples.device)
        return made

    def set_priorities(self, indices: torch.Tensor, priorities: Any, buffer_ids: torch.Tensor) -> None:
        """Set the priorities of some rows; rows of members without priorities are ignored.

        Args:
            indices, priorities: See ``Replay.set_priorities``.
            buffer_ids: The index of each row's member, as in the field ``buffer_ids`` of a batch.

        Raises:
            ConfigError, DataError, IndexError: See ``Replay.set_priorities``.
        """
        for member, replay in enumerate(self._members()):
            if isinstance(replay.sampler, ByPriority):
                replay.set_priorities(torch.where(buffer_ids == member, indices, -1), priorities)

    def _members(self) -> list[Replay]:
        return [replay for replay in self.replays if isinstance(replay, Replay)]
