"""DataLoader: a loader of ours that is a torch DataLoader, as other people's trainers expect one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

from mouse_core import BatchSource, ConfigError, Snapshot
from mouse_core.mixtures import MixtureSource
from mouse_core.prefetch import Source
from mouse_core.ranks import Shard, find_ranks
from mouse_core.sampling import Sampling
from mouse_core.store import Store
from mouse_torch.prefetch import PrefetchBatchifier
from mouse_torch.tracing import untraced
from mouse_torch.transfer import batch_dims, from_numpy

# Who takes a TensorDict for a dict and finds nothing in it; and who takes a batch while the last one is trained on, so
# that a state is one batch too far, by module.
_TAKES_DICTS = "transformers.trainer"
_TAKES_AHEAD = "ray.train.torch.train_loop_utils"

# What torch's DataLoader takes and this one does not, and what to use in its place.
_OF_TORCH = {
    "shuffle": "sampling='sequential', every window once an epoch in a new order, or 'random'",
    "sampler": "sampling, the name of one or a WindowSampler",
    "batch_sampler": "sampling, the name of one or a WindowSampler",
    "collate_fn": "map, a function of a whole batch",
    "generator": "seed",
    "prefetch_factor": "prefetch",
    **dict.fromkeys(
        ("timeout", "worker_init_fn", "multiprocessing_context", "persistent_workers", "pin_memory_device", "in_order"),
        "num_workers, the number of threads, which need no more",
    ),
}


@untraced("next_batch", "__iter__", "set_epoch", "load_state_dict", "refresh")
class DataLoader(PrefetchBatchifier, torch.utils.data.DataLoader[Any]):
    """A ``PrefetchBatchifier`` that is a ``torch.utils.data.DataLoader``, for other people's trainers.

    Every process gets its rows of each batch and no trainer shards them again: Accelerate's ``prepare``, Fabric's
    ``setup_dataloaders``, Lightning's and Ray's trainers take the loader as one that is distributed already. So
    ``batch_size`` is that of the whole batch, however many processes there are. Accelerate and Lightning keep the
    loader's state in their checkpoints; Transformers skips numbers of batches, which costs nothing.

    Another DataLoader, with processes as workers, makes the epoch that ``set_epoch`` names of ``loader.dataset`` and
    ``loader.sampler``, in dicts of tensors: ``StatefulDataLoader(loader.dataset, batch_size=None,
    sampler=loader.sampler, num_workers=4)``.

    Args:
        store, sequence_length, batch_size, sampling: As in ``mouse_core.prefetch.Batchifier``.
        shard: ``(rank, count)``, or "auto": which process this is is found, at the latest when the first batch is asked
            for; a trainer may start the processes after the loader was made. A ``BatchSource`` that is whole and a
            ``MixtureSource`` are cut like a store with "auto"; a replay buffer or a source of one's own gives every
            process what it gives, unless a shard is said in numbers.
        as_dict: Whether a batch is a dict of tensors instead of a TensorDict, as Transformers needs it.
        options: The other arguments of ``PrefetchBatchifier``.

    Raises:
        ConfigError, MissingFieldError: See ``PrefetchBatchifier``.

    Example:
        >>> loader = DataLoader(store, sequence_length=64, batch_size=32)  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """

    dataset: EpochDataset
    sampler: EpochSampler

    # Accelerate takes a loader that says so for one of its own: `prepare` leaves it as it is, and `save_state` and
    # `load_state` keep its state.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        store: Any,
        sequence_length: int | None = None,
        batch_size: int | None = None,
        sampling: Sampling = "random",
        *,
        shard: Shard = "auto",
        as_dict: bool = False,
        **options: Any,
    ) -> None:
        for name in options:
            if name in _OF_TORCH:
                raise ConfigError(f"DataLoader: expected none of torch's {name}, found it; use {_OF_TORCH[name]}")
        whole = isinstance(store, BatchSource) and store.shard == (0, 1)
        unsettled = shard == "auto" and (whole or isinstance(store, Store | Snapshot | MixtureSource))
        first = {"sequence_length": sequence_length, "batch_size": batch_size, "sampling": sampling}
        self._asked, self.as_dict = (store, {**first, **options}), as_dict
        if shard == "auto":
            shard = _ranks_so_far() if unsettled else (0, 1)
        self._begin(shard, cut=whole and unsettled)
        dataset = EpochDataset(self.source, unsettled=unsettled)
        dims = batch_dims(self.source.spec) if isinstance(self.source, Source) else 2
        made = _as_it_is if as_dict else partial(_as_tensor_dict, dims)
        torch.utils.data.DataLoader.__init__(
            self, dataset, batch_size=None, sampler=EpochSampler(dataset), collate_fn=made
        )

    def _begin(self, shard: Shard, *, cut: bool) -> None:
        """Be a loader of a shard, of a source that is cut or of what else was asked for."""
        store, options = self._asked
        if cut:
            store, shard = store.with_options(shard=shard), (0, 1)
        PrefetchBatchifier.__init__(self, store, shard=shard, **options)

    def next_batch(self) -> Any:
        """The next batch, in index order; see ``PrefetchBatchifier``."""
        if self.dataset.unsettled:
            self.dataset.settle()
            shard = self.dataset.source.shard
            if shard != self.source.shard:
                state = self.state_dict()
                self._begin(shard, cut=isinstance(self._asked[0], BatchSource))
                if state != self.state_dict():
                    self.load_state_dict(state)
        batch = super().next_batch()
        return _plain(batch) if self.as_dict else batch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches up to the end of the current epoch; the next ``for`` loop runs over the next epoch.

        Raises:
            ConfigError: Transformers asks without ``as_dict``, or Ray's ``prepare_data_loader``, which takes batches
                before they are trained on.
        """
        _check_asking(as_dict=self.as_dict)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch, counted from 0, unless the loader is within that epoch already.

        After ``refresh()`` epochs are counted on from the one that begins there. The batches of a replay buffer have no
        epochs: there it does nothing.
        """
        if isinstance(self.source, Source):
            self.sampler.set_epoch(epoch)
            state = self.state_dict()
            begin = self.sampler.begin
            if not begin <= state["next_index"] < begin + len(self):
                digest = self._digest
                super().load_state_dict({**state, "next_index": begin})
                self._digest = digest  # it is the same loader, of which a state cannot be known to be

    def load_state_dict(self, state: Mapping[str, Any], *, accept_decoder: bool = False) -> None:
        """Go on exactly where ``state`` was taken; see ``PrefetchBatchifier``."""
        super().load_state_dict(state, accept_decoder=accept_decoder)
        self._follow()

    def refresh(self) -> None:
        """Take a new snapshot of the store; see ``PrefetchBatchifier``."""
        super().refresh()
        self._follow()

    def _follow(self) -> None:
        """Have the dataset and the sampler go along with what has become of the loader."""
        if isinstance(self.source, Source):
            self.dataset.source = self.source
            self.sampler.move_to(self.state_dict()["next_index"])


class EpochDataset(Dataset[Any]):
    """Batches by number, made in the process that asks: what a ``DataLoader`` of ours has as its ``dataset``.

    Args:
        source: Where they come from.
        unsettled: Whether it may turn out only later which of several processes this is.
    """

    def __init__(self, source: Any, *, unsettled: bool) -> None:
        self.source, self.unsettled = source, unsettled

    def settle(self) -> None:
        """Take the rows of this process, when batches are asked for: a trainer may tell it of the others only then.

        Raises:
            ConfigError: It is told half of it, or the processes do not divide a batch.
        """
        if self.unsettled:
            ranks = find_ranks()
            if ranks.shard != self.source.shard:
                self.source = self.source.with_options(shard=ranks)
            self.unsettled = False

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        """Batch ``index``, or the only one of a list, as a dict of tensors on the host, or a tuple of such views.

        Raises:
            ConfigError: Several are asked for at a time, or batches of a replay buffer, which have no numbers.
        """
        if not isinstance(self.source, Source):
            raise ConfigError("dataset: expected a loader over a store or a source, found one over a replay buffer")
        if not isinstance(index, int):
            if len(index) != 1:
                raise ConfigError(f"dataset: expected one batch to be asked for at a time, found {len(index)}")
            (index,) = index
        batch = self.source[index]
        return tuple(map(_in_tensors, batch)) if isinstance(batch, tuple) else _in_tensors(batch)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The only batch of a list, for whoever asks for lists."""
        return self[indices]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.source)


class EpochSampler(DistributedSampler[Any], BatchSampler):
    """The numbers of an epoch's batches, each in a list of its own; what has shards already is not shared out again.

    It is a ``DistributedSampler`` because that is how trainers know it, and a ``BatchSampler`` because that is where
    they can skip.

    Args:
        dataset: Whose batches they are.
    """

    dataset: EpochDataset

    def __init__(self, dataset: EpochDataset) -> None:
        self.dataset, self.sampler = dataset, range(0)
        self.num_replicas, self.rank, self.shuffle, self.drop_last, self.batch_size = 1, 0, False, False, 1
        self.epoch = 0
        # What number the first epoch of the snapshot has; None: that which the current one is given next.
        self._first_epoch: int | None = 0
        self._current = 0

    @property
    def begin(self) -> int:
        """The number of the first batch of the epoch."""
        first: int = getattr(self.dataset.source, "epoch_start", 0)
        return first + self._current * len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Take another epoch, counted from 0."""
        if self._first_epoch is None:
            self._first_epoch = epoch - self._current
        self.epoch, self._current = epoch, max(0, epoch - self._first_epoch)

    def move_to(self, index: int) -> None:
        """Take the epoch of batch ``index``, of a snapshot that may be another one."""
        first = getattr(self.dataset.source, "epoch_start", 0)
        self._current = (index - first) // len(self.dataset)
        self._first_epoch = None if first else 0
        self.epoch = self._current

    def __iter__(self) -> Iterator[Any]:
        self.dataset.settle()
        begin = self.begin
        return ([index] for index in range(begin, begin + len(self)))

    def __len__(self) -> int:
        return len(self.dataset)


def _ranks_so_far() -> Shard:
    """This process among others, as far as it is known."""
    try:
        return find_ranks()
    except ConfigError:
        return (0, 1)


def _in_tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: from_numpy(values) for name, values in batch.items()}


def _as_it_is(batch: Any) -> Any:
    return batch


def _as_tensor_dict(dims: int, batch: Any) -> Any:
    """A batch ``{field: [B, S, ...]}``, or several views, as TensorDicts ``[B, S]``; or of so many axes."""
    if isinstance(batch, tuple):
        return tuple(_as_tensor_dict(dims, view) for view in batch)
    return TensorDict(batch, batch_size=next(iter(batch.values())).shape[:dims])


def _plain(batch: Any) -> Any:
    """A TensorDict, or several views, as plain dicts of the same tensors."""
    return tuple(map(_plain, batch)) if isinstance(batch, tuple) else batch.to_dict()


def _check_asking(*, as_dict: bool) -> None:
    """Raise ConfigError where the caller is a trainer that has no use for TensorDicts, or would lose a batch."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "mouse_torch.")):
        frame = frame.f_back
    asking = "" if frame is None else frame.f_globals.get("__name__", "")
    if asking == _TAKES_DICTS and not as_dict:
        raise ConfigError(f"as_dict: expected True for {asking}, which finds no fields in a TensorDict, found False")
    if asking == _TAKES_AHEAD:
        raise ConfigError(
            "loader: expected to be used as it is in Ray Train, found it in prepare_data_loader, which takes a batch "
            "before the last one was trained on, so that whoever resumes would miss it; leave prepare_data_loader out, "
            "and pass device=ray.train.torch.get_device()"
        )
