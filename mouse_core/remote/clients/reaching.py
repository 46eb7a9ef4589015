"""How objects elsewhere are reached, and where what was read of them is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mouse_core.errors import ConfigError
from mouse_core.remote.clients.options import StorageOptions, is_url, without_secrets


@dataclass(frozen=True)
class Reaching:
    """The options of ``DatasetStore.open``, and of whatever else takes an address.

    Args:
        storage_options: What the client is told, where the environment, or a profile, does not say it:
            ``{"aws_endpoint": ..., "client_options": {"timeout": "10s"}}``. Names are those of obstore; for the Hub
            "token" and "endpoint". They never show, and no state, fingerprint or pickle has them, but for those of
            processes that ``multiprocessing`` starts.
        cache: The folder in which what was read is kept, for all processes of a machine and for the next run; None: the
            one that ``MOUSE_CACHE`` names, or one among the user's caches.
        cache_bytes: How many bytes it may take, at least 4 MB; None: half of what is free on its disk.
        fail: What becomes of requests that fail in a way that may pass: they are made again for half a minute before
            the error is raised ("raise"), or for ever ("retry").

    Raises:
        ConfigError: Options that are no mapping by name, a cache that is no folder of this machine, another ``fail``.
    """

    storage_options: Mapping[str, Any] | None = None
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    fail: Literal["raise", "retry"] = "raise"

    def __post_init__(self) -> None:
        if self.fail not in ("raise", "retry"):
            raise ConfigError(f"fail: expected 'raise' or 'retry', found {self.fail!r}")
        if self.cache is not None and (not isinstance(self.cache, str | os.PathLike) or is_url(self.cache)):
            raise ConfigError(
                f"cache: expected a folder of this machine, found {without_secrets(str(self.cache))!r:.200}"
            )
        if not isinstance(self.storage_options, StorageOptions):
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
