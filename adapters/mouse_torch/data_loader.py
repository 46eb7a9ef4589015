"""DataLoader, which is both a ``PrefetchBatchifier`` and a torch DataLoader, and WindowDataset, a dataset for torch's
own DataLoader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

from mouse_core import BatchSource, ConfigError, Snapshot
from mouse_core.mixtures import MixtureSource
from mouse_core.prefetch import Source
from mouse_core.ranks import Shard, find_ranks
from mouse_core.sampling import Plan, Sampling
from mouse_core.store import Store
from mouse_torch.placement import untraced
from mouse_torch.prefetch import PrefetchBatchifier
from mouse_torch.transfer import batch_dims, from_numpy

# Modules of unsupported callers. The first treats a TensorDict as a dict and finds no items; the second fetches a batch
# during the training step on the previous one, so that a saved state would be one batch ahead.
_TAKES_DICTS = "transformers.trainer"
_TAKES_AHEAD = "ray.train.torch.train_loop_utils"

# Arguments of torch's DataLoader that this class does not accept, and their replacements.
_OF_TORCH = {
    "shuffle": "sampling='sequential', every window once an epoch in a new order, or 'random'",
    "sampler": "sampling, the name of a kind of sampling or a WindowSampler",
    "batch_sampler": "sampling, the name of a kind of sampling or a WindowSampler",
    "collate_fn": "map, a function that receives a complete batch",
    "generator": "seed",
    "prefetch_factor": "prefetch",
    **dict.fromkeys(
        ("timeout", "worker_init_fn", "multiprocessing_context", "persistent_workers", "pin_memory_device", "in_order"),
        "num_workers, the number of threads; threads have no further options",
    ),
}


# Options of ``BatchSource`` with which a window has the same values in every batch.
_OF_A_WINDOW = (
    "fields",
    "required_fields",
    "dtypes",
    "boundary",
    "pad",
    "windows",
    "normalize",
    "layout",
    "transitions",
)


class WindowDataset(Dataset[dict[str, torch.Tensor]]):
    """A dataset of windows, ``{field: [S, ...]}`` as tensors, for torch's own ``DataLoader(shuffle=True)``.

    The dataset contains each window of an epoch with ``sampling="sequential"`` once, in the order of the store. The
    values of a window equal the values that a ``BatchSource`` delivers. A DataLoader reads the windows of a batch in
    one call, and may have worker processes. Torch's random numbers determine the order of the windows.

    Args:
        store: The store, as in ``mouse_core.BatchSource``. Rows that are added to the store later are not in the
            dataset.
        sequence_length: The number of steps in a window, as in ``mouse_core.BatchSource``. If ``sequence_length`` is
            None (only with ``windows`` or ``transitions``), each item is a single row or a single transition, ``{field:
            [...]}``.
        options: The options ``fields``, ``required_fields``, ``dtypes``, ``boundary``, ``pad``, ``windows``,
            ``normalize``, ``layout`` and ``transitions`` of ``mouse_core.BatchSource``.

    Raises:
        ConfigError: An option is not supported, because its result depends on the batch; see also ``BatchSource``.
        MissingFieldError: See ``BatchSource``.

    Example:
        >>> dataset = WindowDataset(store, sequence_length=64)  # doctest: +SKIP
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)  # doctest: +SKIP
    """

    def __init__(self, store: Store | Snapshot, sequence_length: int | None = None, **options: Any) -> None:
        others = [name for name in options if name not in _OF_A_WINDOW]
        if others:
            raise ConfigError(f"WindowDataset: expected options among {list(_OF_A_WINDOW)}, found {others}")
        self.source = source = BatchSource(store, sequence_length, 1, "sequential", **options)
        sampler: Any = source.sampler
        starts = sampler.starts_of_many(0, 0, len(source), source.snapshot, 0, slice(0, 1))
        self._starts, self._key = np.sort(starts[:, 0]), source.plan(0).key

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return window ``index``; raise IndexError if there is no such window."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several windows, which are read together; DataLoaders call this method."""
        starts = self._starts[np.asarray(indices, np.int64)]
        batch = self.source.gather(Plan(starts, self.source.sequence_length, self._key, len(starts)))
        fields = (from_numpy(values).unbind() for values in batch.values())
        return [dict(zip(batch, window, strict=True)) for window in zip(*fields, strict=True)]


@untraced("next_batch", "__iter__", "set_epoch", "load_state_dict", "refresh")
class DataLoader(PrefetchBatchifier, torch.utils.data.DataLoader[Any]):
    """A ``PrefetchBatchifier`` that is also a ``torch.utils.data.DataLoader``, for the trainers of other libraries.

    Every process gets only its own rows of each batch, and trainers do not shard these rows again: Accelerate's
    ``prepare``, Fabric's ``setup_dataloaders``, and the trainers of Lightning and Ray treat the loader as already
    distributed. ``batch_size`` is the size of the batch over all processes. Accelerate and Lightning save the loader's
    state in their checkpoints; Transformers skips batches by their indices, without loading the batches.

    A DataLoader with worker processes can be created from ``loader.dataset`` and ``loader.sampler``. Such a DataLoader
    delivers the epoch that ``set_epoch`` selected, as dicts of tensors: ``StatefulDataLoader(loader.dataset,
    batch_size=None, sampler=loader.sampler, num_workers=4)``.

    Args:
        store, sequence_length, batch_size, sampling: The arguments of ``mouse_core.prefetch.Batchifier``.
        shard: ``(rank, count)``, or "auto". With "auto" the loader finds the rank of this process, at the latest at the
            first batch, because a trainer may start the processes after the loader was created. With "auto", an
            unsharded ``BatchSource`` and a ``MixtureSource`` are sharded like a store. A replay buffer or a custom
            source is sharded only by ``(rank, count)``; with "auto", every process gets all rows of the buffer or
            source.
        as_dict: Whether a batch is a dict of tensors instead of a TensorDict; the library Transformers needs dicts.
        options: The other arguments of ``PrefetchBatchifier``.

    Raises:
        ConfigError, MissingFieldError: See ``PrefetchBatchifier``.

    Example:
        >>> loader = DataLoader(store, sequence_length=64, batch_size=32)  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """

    dataset: EpochDataset
    sampler: EpochSampler

    # Accelerate treats a loader with this attribute as its own: `prepare` returns it unchanged, and `save_state` and
    # `load_state` include its state.
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
                raise ConfigError(
                    f"DataLoader: expected no argument {name} of torch's DataLoader, "
                    f"found {name}; use {_OF_TORCH[name]}"
                )
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
        """Initialise the loader for a shard; if ``cut`` is True, the source itself is sharded."""
        store, options = self._asked
        if cut:
            store, shard = store.with_options(shard=shard), (0, 1)
        PrefetchBatchifier.__init__(self, store, shard=shard, **options)

    def next_batch(self) -> Any:
        """Return the next batch, in order; see ``PrefetchBatchifier``."""
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
        """Iterate over the batches up to the end of the current epoch; the next ``for`` loop iterates over the next
        epoch.

        Raises:
            ConfigError: The caller is Transformers, and ``as_dict`` is False; or the caller is Ray's
                ``prepare_data_loader``, which fetches batches too early.
        """
        _check_asking(as_dict=self.as_dict)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Move to the first batch of an epoch, unless the loader is already within this epoch. Epochs are counted from
        0.

        ``refresh()`` begins an epoch, and the count of epochs continues. For a replay buffer, whose batches have no
        epochs, the call does nothing.
        """
        if isinstance(self.source, Source):
            self.sampler.set_epoch(epoch)
            state = self.state_dict()
            begin = self.sampler.begin
            if not begin <= state["next_index"] < begin + len(self):
                digest = self._digest
                super().load_state_dict({**state, "next_index": begin})
                self._digest = digest  # a state does not show that it belongs to this loader

    def load_state_dict(self, state: Mapping[str, Any], *, accept_decoder: bool = False) -> None:
        """Restore the exact position in ``state``; see ``PrefetchBatchifier``."""
        super().load_state_dict(state, accept_decoder=accept_decoder)
        self._follow()

    def refresh(self) -> None:
        """Take a new snapshot of the store; see ``PrefetchBatchifier``."""
        super().refresh()
        self._follow()

    def _follow(self) -> None:
        """Set the source and epoch of the dataset and the sampler to the loader's source and epoch."""
        if isinstance(self.source, Source):
            self.dataset.source = self.source
            self.sampler.move_to(self.state_dict()["next_index"])


class EpochDataset(Dataset[Any]):
    """The ``dataset`` of a ``DataLoader``: a dataset of batches by index; a batch is created in the process that reads
    the batch.

    Args:
        source: The source of the batches.
        unsettled: Whether the rank of this process can still change.
    """

    def __init__(self, source: Any, *, unsettled: bool) -> None:
        self.source, self.unsettled = source, unsettled

    def settle(self) -> None:
        """Shard the source by the rank of this process; called at the first batch, because a trainer may set the ranks
        only after the loader was created.

        Raises:
            ConfigError: Only one of the rank and the number of processes is known, or the number of windows in a batch
                is not a multiple of the number of processes.
        """
        if self.unsettled:
            ranks = find_ranks()
            if ranks.shard != self.source.shard:
                self.source = self.source.with_options(shard=ranks)
            self.unsettled = False

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        """Return batch ``index`` (an integer, or a list of one integer): a dict of tensors on the host, or a tuple of
        such dicts for several views.

        Raises:
            ConfigError: ``index`` has several integers, or the source is a replay buffer, whose batches have no
                indices.
        """
        if not isinstance(self.source, Source):
            raise ConfigError("dataset: expected a loader of a store or a source, found a loader of a replay buffer")
        if not isinstance(index, int):
            if len(index) != 1:
                raise ConfigError(f"dataset: expected the index of one batch, found {len(index)} indices")
            (index,) = index
        batch = self.source[index]
        return tuple(map(_in_tensors, batch)) if isinstance(batch, tuple) else _in_tensors(batch)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the batch whose index is the only item of a list, for callers that pass lists."""
        return self[indices]

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.source)


class EpochSampler(DistributedSampler[Any], BatchSampler):
    """The indices of an epoch's batches, each as a list of one integer. All ranks get the same indices, because the
    source already shards each batch.

    The class derives from ``DistributedSampler``, so trainers do not shard the sampler again, and from
    ``BatchSampler``, so trainers can skip batches.

    Args:
        dataset: The dataset of the batches.
    """

    dataset: EpochDataset

    def __init__(self, dataset: EpochDataset) -> None:
        self.dataset, self.sampler = dataset, range(0)
        self.num_replicas, self.rank, self.shuffle, self.drop_last, self.batch_size = 1, 0, False, False, 1
        self.epoch = 0
        # The number of the snapshot's first epoch; None: the next ``set_epoch`` gives the current epoch its number.
        self._first_epoch: int | None = 0
        self._current = 0

    @property
    def begin(self) -> int:
        """The index of the first batch of the epoch."""
        first: int = getattr(self.dataset.source, "epoch_start", 0)
        return first + self._current * len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0."""
        if self._first_epoch is None:
            self._first_epoch = epoch - self._current
        self.epoch, self._current = epoch, max(0, epoch - self._first_epoch)

    def move_to(self, index: int) -> None:
        """Set the epoch to the epoch that contains batch ``index``; also valid after ``refresh`` has given the source a
        new snapshot.
        """
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
    """Return the rank of this process and the number of processes; (0, 1) if these numbers are unknown."""
    try:
        return find_ranks()
    except ConfigError:
        return (0, 1)


def _in_tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: from_numpy(values) for name, values in batch.items()}


def _as_it_is(batch: Any) -> Any:
    return batch


def _as_tensor_dict(dims: int, batch: Any) -> Any:
    """Convert a batch ``{field: [B, S, ...]}``, or several views of a batch, to TensorDicts whose batch size has
    ``dims`` axes.
    """
    if isinstance(batch, tuple):
        return tuple(_as_tensor_dict(dims, view) for view in batch)
    return TensorDict(batch, batch_size=next(iter(batch.values())).shape[:dims])


def _plain(batch: Any) -> Any:
    """Convert a TensorDict, or several views of a batch, to plain dicts of the same tensors."""
    return tuple(map(_plain, batch)) if isinstance(batch, tuple) else batch.to_dict()


def _check_asking(*, as_dict: bool) -> None:
    """Raise ConfigError if the caller is a trainer that cannot use TensorDicts or that would lose a batch."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "mouse_torch.")):
        frame = frame.f_back
    asking = "" if frame is None else frame.f_globals.get("__name__", "")
    if asking == _TAKES_DICTS and not as_dict:
        raise ConfigError(
            f"as_dict: expected True for {asking}, because {asking} cannot read the fields of a TensorDict, found False"
        )
    if asking == _TAKES_AHEAD:
        raise ConfigError(
            "loader: expected a loader without prepare_data_loader of Ray Train, found prepare_data_loader. It fetches "
            "a batch before the previous batch is used, so a resumed run would miss that batch. Remove the call of "
            "prepare_data_loader, and pass device=ray.train.torch.get_device()"
        )
