"""Functions that place batches on one device, or, by a sharding, on devices of one or several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core import BatchSource, ConfigError

# Number of bytes whose copy takes half as long as ``device_put`` of the six arrays of a usual batch.
_MOST_COPIED = 1 << 20


@dataclass(frozen=True)
class Placement:
    """The devices of batches, and the transfer of batches to these devices.

    Args:
        target: A device or a sharding; None: JAX's default device, where arrays are not committed to the device.
        parts: The shards ``(rank, count)`` of a complete batch that this process needs, all with the same ``count``, in
            ascending order. If ``parts`` is None, the process needs all rows that the source delivers.
    """

    target: jax.Device | Sharding | None = None
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def on_host(self) -> bool:
        """Whether batches stay in the host's memory."""
        if self.target is None:
            return jax.default_backend() == "cpu"
        devices: set[Any] = self.target.device_set if isinstance(self.target, Sharding) else {self.target}
        return all(device.platform == "cpu" for device in devices)

    def sources(self, source: BatchSource) -> tuple[BatchSource, ...]:
        """Return the sources of this process's rows.

        Raises:
            ConfigError: See ``check_layout``.
        """
        check_layout(self.target, source)
        if self.parts is None:
            return (source,)
        return tuple(source if part == source.shard else source.with_options(shard=part) for part in self.parts)

    def put(self, arrays: Sequence[npt.NDArray[Any]], *, recurring: bool = False) -> list[jax.Array]:
        """Transfer this process's rows of arrays ``[b, ...]`` to their devices; the rows must not be modified later.

        Args:
            arrays: The rows.
            recurring: Whether later calls transfer arrays of the same shapes, so that compiling a function for these
                shapes saves time.
        """
        if self.parts is not None and not self._fully_addressable:
            own, count = len(self.parts), self.parts[0][1]
            shapes = [(values.shape[0] * count // own, *values.shape[1:]) for values in arrays]
            assemble: Callable[..., jax.Array] = jax.make_array_from_process_local_data
            return [assemble(self.target, values, shape) for values, shape in zip(arrays, shapes, strict=True)]
        if recurring and self.target is None and self.on_host and _copying_will_do(arrays):
            copied: list[jax.Array] = _copied(list(arrays))
            return copied
        # On a host, JAX may share the memory, because it is never modified later; ``may_alias`` halves the time of the
        # call.
        placed: list[jax.Array] = jax.device_put(list(arrays), self.target, may_alias=True)
        return placed

    @property
    def _fully_addressable(self) -> bool:
        return not isinstance(self.target, Sharding) or self.target.is_fully_addressable


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def _copying_will_do(arrays: Sequence[npt.NDArray[Any]]) -> bool:
    """Whether a compiled function can be used instead of ``device_put`` to copy arrays to JAX's default device; the
    compiled function is faster.

    ``device_put`` takes 50 us for each array, mostly in Python. The results of ``device_put`` and a compiled function
    are equal, unless a setting of JAX changes how compiled functions or their arguments are handled.
    """
    config: Any = jax.config
    return (
        sum(values.nbytes for values in arrays) <= _MOST_COPIED
        and config.jax_transfer_guard_host_to_device in (None, "allow")
        and not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)
        and jax.sharding.get_abstract_mesh().empty
    )


def find_placement(device: jax.Device | str | None, sharding: Sharding | None, source: BatchSource) -> Placement:
    """Return the placement for the arguments of a loader.

    Args:
        device: A device of this process, a platform ("cpu", "gpu"), or a platform with a number ("gpu:1"); None: JAX's
            default device.
        sharding: The sharding of complete batches; None: batches are on ``device``.
        source: The source of batches.

    Raises:
        ConfigError: The device does not exist; device and sharding are both given; the source is sharded although
            ``sharding`` is given; the sharding has no device of this process; see also ``check_layout``.
    """
    target = find_target(device, sharding)
    if sharding is None:
        return Placement(target)
    if source.shard != (0, 1):
        raise ConfigError(
            f"shard: when sharding is given, expected (0, 1), since the sharding divides the "
            f"batches, found {source.shard}"
        )
    check_layout(sharding, source)
    return Placement(sharding, _own_parts(sharding, source))


def find_target(device: jax.Device | str | None, sharding: Sharding | None) -> jax.Device | Sharding | None:
    """Return the device or the sharding; None for JAX's default device.

    Raises:
        ConfigError: The device does not exist, both arguments are given, or ``sharding`` is not a sharding.
    """
    if sharding is None:
        return find_device(device)
    if not isinstance(sharding, Sharding):
        raise ConfigError(f"sharding: expected a jax.sharding.Sharding, found {sharding!r}")
    if device is not None:
        raise ConfigError(f"device: when sharding is given, expected None, found {device!r}")
    return sharding


def check_layout(target: object, source: BatchSource) -> None:
    """Check that a sharding divides every batch of an epoch evenly, also a shorter last batch.

    Raises:
        ConfigError: The sharding does not divide the shape of a field evenly; the message names the field.
    """
    if not isinstance(target, Sharding):
        return
    if source.spec.is_packed:
        raise ConfigError(
            f"sharding: when packed= is given, expected None, since packed rows cannot be divided, found {target}"
        )
    last = source.plan(source.epoch_start + len(source) - 1).global_size
    parts = _parts_of(target, source) if source.uneven == "pad" else 1
    for rows in sorted({source.batch_size, last}, reverse=True):
        for name, spec in source.spec.items():
            shape = (*_axes(source, -(-rows // parts) * parts), *spec.shape)
            try:
                target.shard_shape(shape)
            except (ValueError, IndexError) as error:
                raise ConfigError(
                    f"sharding: expected a sharding that divides {name} of shape {list(shape)} evenly, found {target}"
                ) from error


def _axes(source: BatchSource, rows: int) -> tuple[int, ...]:
    """Return the sizes of the leading axes of a batch of ``rows`` windows, without the axes of the fields."""
    return (rows, source.sequence_length)[: source.spec.batch_dims]


def _own_parts(sharding: Sharding, source: BatchSource) -> tuple[tuple[int, int], ...]:
    """Return the rows of this process's devices as shards: one shard if the rows are contiguous, else one shard for
    each device.

    For padded batches the result always has one shard for each device, because each shard is padded separately.
    """
    padded = source.uneven == "pad"
    size = _parts_of(sharding, source) if padded else source.batch_size
    indices = sharding.addressable_devices_indices_map(_axes(source, size)).values()
    stretches = sorted({index[0].indices(size)[:2] for index in indices if index is not None})
    if not stretches:
        raise ConfigError(f"sharding: expected devices of process {jax.process_index()} in the sharding, found none")
    begin, end, length = stretches[0][0], stretches[-1][1], stretches[0][1] - stretches[0][0]
    whole = end - begin
    if not padded and whole == length * len(stretches) and begin % whole == 0 and size % whole == 0:
        return ((begin // whole, size // whole),)
    return tuple((first // length, size // length) for first, _ in stretches)


def _parts_of(sharding: Sharding, source: BatchSource) -> int:
    """Return the number of parts into which a sharding divides a batch's windows; raise ConfigError if the sharding
    cannot divide the windows.
    """
    devices = len(sharding.device_set)
    try:
        return devices // sharding.shard_shape(_axes(source, devices))[0]
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"sharding: expected a sharding that divides windows of {source.sequence_length} steps evenly, "
            f"found {sharding}"
        ) from error


def find_device(device: jax.Device | str | None) -> jax.Device | None:
    """Return the device, or None for JAX's default device; raise ConfigError if the device does not exist."""
    if device is None:
        return None
    if isinstance(device, jax.Device):
        if device.process_index != jax.process_index():
            raise ConfigError(f"device: expected a device of process {jax.process_index()}, found {device}")
        return device
    if not isinstance(device, str) or not device:
        raise ConfigError(f"device: expected a jax.Device, its platform or None, found {device!r}")
    platform, _, number = device.partition(":")
    try:
        return jax.local_devices(backend=platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        there = [str(found) for found in jax.local_devices()]
        raise ConfigError(f"device: expected a device of this machine, which has {there}, found {device!r}") from error
