"""A module that draws batches from several replays, for example from recorded and from new rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from tensordict import TensorDict

from mouse_core.errors import ConfigError
from mouse_core.randomness import check_seed
from mouse_core.replay import Schedule
from mouse_core.replay.device.arrays import DrawKey
from mouse_core.replay.device.ensemble import TABLES, draw_members
from mouse_core.replay.device.samplers import ByPriority
from mouse_core.replay.ensemble import member_seed, shares_of
from mouse_core.spec import check_count
from mouse_torch import _philox
from mouse_torch.device.arrays import TorchArrays
from mouse_torch.device.fields import BufferModule
from mouse_torch.device.replay import Replay, number_of
from mouse_torch.trees import tensor_dict


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
