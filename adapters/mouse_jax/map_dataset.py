"""A function that converts a batch source to a grain dataset, for custom pipelines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mouse_core.batches import Batch, BatchSource
from mouse_core.prefetch import Source

if TYPE_CHECKING:
    import grain


def to_grain(source: Source) -> grain.MapDataset:
    """Return the batches of a source as a ``grain.MapDataset``, for pipelines of grain's transformations.

    Element ``i`` is ``source[i]``, a dict of NumPy arrays. The dataset has no end: after each epoch, the next epoch
    begins, in a new order. The state of a grain iterator, ``{"next_index": i}``, has the index of the next batch, like
    the ``state_dict()`` of a loader.

    Each element is a batch, and grain reads 500 elements ahead by default. To read fewer elements ahead, use
    ``to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))``. Without x64, JAX converts 64-bit
    numbers to 32 bits without a check; ``BatchSource(..., replace_dtypes=mouse_jax.replaced_dtypes())`` checks that
    each number can be represented.

    Grain's ``mp_prefetch`` would fail in programs that do not parse flags with absl, so this function marks absl's
    flags as parsed.

    Args:
        source: The source of batches: a ``BatchSource``, or another ``mouse_core.prefetch.Source``.

    Returns:
        A dataset of length ``sys.maxsize``.

    Raises:
        ImportError: Grain is not installed.

    Example:
        >>> dataset = to_grain(source).map(augment)  # doctest: +SKIP
        >>> for batch in dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)):
        ...     batch = jax.device_put(batch)
    """
    try:
        import grain
        from absl import flags
    except ImportError as error:
        raise ImportError("to_grain needs grain: pip install 'mouse-data[jax]'") from error
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return grain.MapDataset.source(_Endless(source))


class _Endless:
    """A source with random access for grain, which returns ``sys.maxsize`` as its length.

    Grain computes indices modulo the length, so with the length of one epoch, grain would repeat the first epoch.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        batch: Batch = self._source[index]
        return batch

    def __repr__(self) -> str:
        if not isinstance(self._source, BatchSource):
            return f"{type(self._source).__name__}(fingerprint={self._source.fingerprint!r})"
        return f"BatchSource(sampler={self._source.sampler}, seed={self._source.seed}, shard={self._source.shard})"
