"""A storage, a writer and a sampler, kept in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.replay._checks import check_part
from mouse_core.replay._state import part_of
from mouse_core.replay.ahead import rows_behind
from mouse_core.replay.protocols import Draw, FieldKey, Sampler, Slots, Storage, Write, Writer
from mouse_core.replay.samplers import RandomSampler
from mouse_core.replay.writers import ImmutableWriter, MaxValueWriter, RoundRobinWriter

_NOTHING: AbstractContextManager[Any] = nullcontext()
# Single rows that a sampler may hear of at once, later.
_HEARD_LATER = 1024


class Parts:
    """What a buffer is made of. The buffer's lock and ``shared()`` are held around every other call.

    Args:
        storage, sampler, writer: See ``ReplayBuffer``.
        transform: What needs rows behind those that are drawn, if anything does.

    Raises:
        ConfigError: Parts that do not go together.
    """

    def __init__(self, storage: Storage, sampler: Sampler | None, writer: Writer | None, transform: Any) -> None:
        self.storage = storage
        self.sampler: Sampler = check_part("sampler", RandomSampler() if sampler is None else sampler, Sampler)
        if writer is None:
            writer = RoundRobinWriter() if self.storage.writable else ImmutableWriter()
        self.writer: Writer = check_part("writer", writer, Writer)
        if not self.storage.writable and not isinstance(writer, ImmutableWriter):
            raise ConfigError(
                f"writer: expected an ImmutableWriter, as {storage!r:.80} cannot be written to, found {writer!r}"
            )
        if isinstance(writer, MaxValueWriter):
            writer.check(storage)
        self.prioritized = hasattr(self.sampler, "update_priority")
        self._reach: int = getattr(transform, "reach", 0)
        if not self.writer.ordered and (self.sampler.needs_order or self._reach):
            part = self.sampler if self.sampler.needs_order else transform
            raise ConfigError(f"writer: expected one that keeps the order of rows, as {part!r} needs, found {writer!r}")
        # A ring of single rows that nobody else writes is the commonest by far, and written to without detours.
        self.plain_ring = type(writer) is RoundRobinWriter and storage.ndim == 1 and storage.lock() is None
        self._heard_later = min(_HEARD_LATER, storage.capacity)
        # Up to where the sampler knows the rows; it begins by looking at those there are.
        self._seen = 0
        self._changes = -1

    def shared(self) -> AbstractContextManager[Any]:
        """What to hold where other processes write the storage too."""
        return self.storage.lock() or _NOTHING

    # ------------------------------------------------------------------ writing

    def write(self, rows: Any, priority: npt.NDArray[np.float64] | None, *, one: bool) -> Slots:
        """Write rows, with the priorities they begin with if they have any; see ``Writer.write``."""
        if self._changes != self.storage.changes:
            self.sync()
        slots, written, first = self.writer.write(self.storage, rows, one=one)
        if not self.writer.ordered:
            self._heard(Write(written, first, self._reader(written)))
        elif not one or priority is not None or self.storage.written - self._seen >= self._heard_later:
            self.sync()
        if priority is not None:
            kept = slots >= 0
            self._priority_sampler.update_priority(self.storage, slots[kept], priority[kept])
        return slots

    def append(self, row: Any) -> int:
        """Write one row to a plain ring, and return its slot."""
        storage = self.storage
        if self._changes != storage.changes:
            self.sync()
        first = storage.append(row, one=True)[0]
        if first - self._seen >= self._heard_later:
            self.sync()
        return first % storage.capacity

    def check_writable(self) -> None:
        """Raise ConfigError where rows must not be written."""
        if isinstance(self.writer, ImmutableWriter):
            self.writer.write(self.storage, None)

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite rows in place."""
        self.sync()
        self.storage.put(slots, rows)
        self._heard(Write(slots, None, self._reader(slots)))
        self.writer.reset(self.storage)

    def empty(self) -> None:
        """Forget all rows and priorities."""
        self.check_writable()
        self.storage.empty()
        self.sync()

    def sync(self) -> None:
        """Tell the sampler of what was written, here or elsewhere, since it last heard."""
        written = self.storage.written
        if self._changes != self.storage.changes:
            self._changes, self._seen = self.storage.changes, written
            self.sampler.reset(self.storage)
            self.writer.reset(self.storage)
        elif written != self._seen:
            n = min(written - self._seen, len(self.storage))
            slots = np.arange(written - n, written, dtype=np.int64) % self.storage.capacity
            self._heard(Write(slots, written - n, self._reader(slots)))

    def _heard(self, write: Write) -> None:
        if write.slots.size:
            self.sampler.wrote(self.storage, write)
        self._changes, self._seen = self.storage.changes, self.storage.written

    def _reader(self, slots: Slots) -> Callable[[FieldKey], npt.NDArray[Any]]:
        return lambda key: self.storage.read(key, slots)

    # ------------------------------------------------------------------ sampling

    def draw(self, batch_size: int, key: Key) -> tuple[Any, Draw]:
        """Choose rows and gather them."""
        self.sync()
        if not len(self.storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        draw = self.sampler.draw(self.storage, batch_size, key)
        slots = draw.index
        if self._reach and slots.ndim == 1:
            slots, draw.mask = rows_behind(slots, self.storage, self._reach)
        return self.storage.get(slots), draw

    def mark(self) -> dict[str, Any]:
        """Where the sampler's draws are, to go back there; draws replace what they change and change nothing else."""
        return dict(getattr(self.sampler, "__dict__", {}))

    def rewind(self, mark: dict[str, Any]) -> None:
        """Go back to where ``mark()`` was called, with only draws in between."""
        if mark:
            vars(self.sampler).clear()
            vars(self.sampler).update(mark)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Tell the sampler how important rows are."""
        self.sync()
        self._priority_sampler.update_priority(self.storage, np.asarray(index), np.asarray(priority))

    @property
    def _priority_sampler(self) -> Any:
        if not self.prioritized:
            raise ConfigError(f"update_priority: expected a sampler that knows priorities, found {self.sampler!r}")
        return self.sampler

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """All there is; arrays may be views."""
        self.sync()
        return {
            "writer": _shown(self.writer),
            "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state_dict()},
            "storage": self.storage.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, or raise StateError and stay as before."""
        part_of({"writer": state}, "writer", {"writer": _shown(self.writer)})
        sampler = part_of(state, "sampler", {"kind": type(self.sampler).__name__})
        self.sync()
        before = self.sampler.state_dict()
        self.sampler.load_state_dict(part_of(sampler, "state", {}))
        try:
            self.storage.load(part_of(state, "storage", {}))
        except BaseException:
            self.sampler.load_state_dict(before)
            raise
        self._changes, self._seen = self.storage.changes, self.storage.written
        self.writer.reset(self.storage)


def _shown(part: Any) -> str:
    """What a part is, the same in every process."""
    own: Any = type(part).__repr__
    return type(part).__name__ if own is object.__repr__ else repr(part)
