"""MixtureSource, which mixes the batches of several sources window by window."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.mixtures.mixture import Mix, checked_stages, listed
from mouse_core.prefetch.source import Source, checked_source
from mouse_core.sampling.shares import Schedule, Shares, StagedShares, exact
from mouse_core.spec import FieldSpec, Spec, check_count

Views = tuple[Mapping[str, npt.NDArray[Any]], ...]

# Number of cached batches of each member, whose remaining windows are used in the next batches, in any thread.
_KEPT = 4


class MixtureSource:
    """Combines several sources into one source. Each batch contains windows of the members, in proportion to the
    members' shares.

    Pass members without sharding: a loader's ``shard`` divides the batches of the mixture, which do not depend on the
    number of processes.

    Use ``MixtureSource`` for user-defined sources, and for stores with different sampling. For stores with the same
    sampling, ``Mixture`` saves one copy of each window. A member's windows are used in the order of the member's
    batches, without gaps. Shares are as exact as in ``Mixture``. A replay buffer cannot be a member, because sampling
    changes the buffer; ``ReplayBufferEnsemble`` mixes replay buffers.

    Args:
        sources: The members by name, or a sequence of members, which are named "0", "1" and so on. All batches must be
            full, and all members must have the same spec.
        weights: A number of at least 0 for each member, by name or in order, or a ``Schedule``; None: 1 for each
            member.
        batch_size: Number of windows in a batch; None: the batch size of the first member.
        field: The name of a batch field that contains, for each window, the member's position in ``names``, int64.
            None: batches have no such field.

    Attributes:
        members: The members by name.
        names: The members' names, in the order of the codes in batches.

    Raises:
        ConfigError: No member is given, a member is not a source, or weights are invalid.
        SchemaError: The specs of members differ; the message names the field.
    """

    def __init__(
        self,
        sources: Mapping[str, Source] | Sequence[Source],
        weights: Mapping[str, float] | Sequence[float] | Schedule | None = None,
        *,
        batch_size: int | None = None,
        field: str | None = "member",
    ) -> None:
        if not isinstance(sources, Mapping):
            sources = {str(number): source for number, source in enumerate(listed("sources", sources))}
        if not sources:
            raise ConfigError("mixture: expected at least one source, found none")
        members = {str(name): _checked(str(name), source) for name, source in sources.items()}
        self.members: Mapping[str, Source] = members
        self.names = names = tuple(members)
        self._mix = Mix(names, checked_stages(weights, names), field=field)
        self._size = None if batch_size is None else check_count("batch_size", batch_size)
        self._sizes: dict[int, int] = {}
        self._kept: OrderedDict[tuple[int, int], Views] = OrderedDict()
        self._lock = ProcessLock()
        self.spec = _joined(self.members, field)

    def __repr__(self) -> str:
        return f"MixtureSource({self._mix!r})"

    @property
    def batch_size(self) -> int:
        """Number of windows in a batch."""
        return self._windows_of(0) if self._size is None else self._size

    @property
    def fingerprint(self) -> str:
        """A digest of the members' fingerprints, their names and weights, and the batch size."""
        parts = [[name, source.fingerprint] for name, source in self.members.items()]
        said = ["mixture", parts, repr(self._mix), self._mix.field, self.batch_size]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which has as many windows as the epochs of all members with a share
        together.
        """
        windows = 0
        for number, source in enumerate(self.members.values()):
            if any(weights[number] for _, weights in self._mix.stages):
                windows += len(source) * self._windows_of(number)
        return -(-windows // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        """Return batch ``index``, ``{field: [B, ...]}`` in new arrays; with several views, a tuple of such dicts.

        Raises:
            IndexError: ``index`` is below 0.
            ConfigError: The batches of a member differ in size.
        """
        if index < 0:
            raise IndexError(f"batch index: expected at least 0, found {index}")
        size = self.batch_size
        shares = StagedShares([stage * size for stage, _ in self._mix.stages], self._shares)
        members = shares.members(index * size, (index + 1) * size)
        before = shares.counts(index * size)
        views: list[dict[str, npt.NDArray[Any]]] = []
        for number in np.unique(members).tolist():
            (places,) = np.nonzero(members == number)
            done = 0
            while done < len(places):
                at, first = divmod(before[number] + done, self._windows_of(number))
                batch = self._batch(number, at)
                count = min(self._windows_of(number) - first, len(places) - done)
                for view, part in enumerate(batch):
                    if view == len(views):
                        views.append({name: np.empty((size, *part[name].shape[1:]), part[name].dtype) for name in part})
                    for name, values in part.items():
                        views[view][name][places[done : done + count]] = values[first : first + count]
                done += count
        if self._mix.field is not None:
            for made in views:
                shape = next(iter(made.values())).shape[1 : self.spec.batch_dims]
                made[self._mix.field] = np.broadcast_to(members.reshape(-1, *[1] * len(shape)), (size, *shape)).copy()
        return views[0] if len(views) == 1 else tuple(views)

    def _shares(self, stage: int) -> Shares:
        return Shares.of([exact(weight) for weight in self._mix.stages[stage][1]])

    def _windows_of(self, number: int) -> int:
        """Return how many windows a batch of a member contains."""
        if number not in self._sizes:
            self._batch(number, 0)
        return self._sizes[number]

    def _batch(self, number: int, index: int) -> Views:
        """Return a member's batch, as a tuple of views."""
        with self._lock:
            kept = self._kept.get((number, index))
            if kept is not None:
                self._kept.move_to_end((number, index))
                return kept
        name = self.names[number]
        batch = self.members[name][index]
        views = batch if isinstance(batch, tuple) else (batch,)
        size = len(next(iter(views[0].values())))
        with self._lock:
            if self._sizes.setdefault(number, size) != size:
                wanted = f"batches of {self._sizes[number]} windows of member {name!r}"
                raise ConfigError(f"mixture: expected {wanted}, found batches of {size}")
            self._kept[number, index] = views
            while len(self._kept) > _KEPT * len(self.members):
                self._kept.popitem(last=False)
        return views

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.members, self._mix, self._size)


def _restored(members: Mapping[str, Source], mix: Mix, size: int | None) -> MixtureSource:
    return MixtureSource(members, Schedule(dict(mix.stages)), batch_size=size, field=mix.field)


def _checked(name: str, source: Any) -> Source:
    if hasattr(source, "update_priority"):
        raise ConfigError(f"mixture: expected sources, found a buffer {name!r}; a ReplayBufferEnsemble mixes buffers")
    if (shard := getattr(source, "shard", (0, 1))) != (0, 1):
        raise ConfigError(
            f"mixture: expected members that are not sharded, found member {name!r} with shard {shard}; otherwise "
            "batches would depend on the number of processes. Pass the shard to the loader of the mixture"
        )
    try:
        return checked_source(source)
    except ConfigError as error:
        raise ConfigError(f"mixture: member {name!r}: {error}") from error


def _joined(members: Mapping[str, Source], field: str | None) -> Spec:
    """Return the spec that all members share, with the field of the member's position."""
    first, spec = next((name, source.spec) for name, source in members.items())
    for name, source in members.items():
        if source.spec.is_packed:
            raise SchemaError(f"mixture: expected members that are not packed, found {name!r}: {source.spec}")
        if source.spec.alignment != spec.alignment or source.spec.batch_dims != spec.batch_dims:
            raise SchemaError(f"mixture: expected member {name!r} to have the spec of {first!r}, found {source.spec}")
        if list(source.spec) != list(spec):
            raise SchemaError(
                f"mixture: expected fields {list(spec)} as in member {first!r}, found {list(source.spec)}"
            )
        for one, other in zip(spec.values(), source.spec.values(), strict=True):
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                raise SchemaError(
                    f"field {one.name!r}: expected {one.dtype} {list(one.shape)}, as in member {first!r}, "
                    f"found {other.dtype} {list(other.shape)} in {name!r}"
                )
    if field is None:
        return spec
    if field in spec:
        raise SchemaError(
            f"mixture: expected members without a field {field!r}, since batches get this field, found this field"
        )
    return Spec({**spec, field: FieldSpec(field, np.dtype(np.int64), ())}, spec.alignment, spec.batch_dims)
