"""Clients of object storage, web servers and the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mouse_core.remote.clients.options import (
    ObjectInfo,
    Reaching,
    StorageOptions,
    is_url,
    public_url,
    without_secrets,
)

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

__all__ = [
    "ObjectInfo",
    "Reaching",
    "StorageOptions",
    "is_url",
    "open_client",
    "public_url",
    "without_secrets",
]

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
"""URL schemes that obstore reads; ``HubClient`` reads "hf"."""


def open_client(url: str, storage_options: Mapping[str, Any] | None = None) -> FolderClient:
    """Return a client of the objects below an address, without any request.

    Args:
        url: ``s3://bucket/runs``, ``gs://``, ``az://``, ``https://``, ``file:///``, or ``hf://datasets/name/of/it``,
            with ``@revision`` after the name to read a revision other than the newest.
        storage_options: Options of obstore's store, in addition to the environment: ``{"aws_endpoint": ...,
            "client_options": {...}}``; for the Hub: "token".

    Raises:
        ConfigError: The address is invalid, or its client does not know an option.
        ImportError: The client is not installed; the message names the package to install.
    """
    from mouse_core.errors import ConfigError

    if not is_url(url):
        raise ConfigError(f"expected an address like s3://bucket/folder, found {without_secrets(str(url))!r:.200}")
    scheme = url.split("://")[0].lower()
    options = storage_options if isinstance(storage_options, StorageOptions) else StorageOptions(storage_options)
    if scheme == "hf":
        from mouse_core.remote.clients.hub import HubClient

        return HubClient(url, options)
    if scheme not in SCHEMES:
        raise ConfigError(f"{without_secrets(url)}: expected one of {[*SCHEMES, 'hf']} before ://, found {scheme!r}")
    from mouse_core.remote.clients.objects import FolderClient

    return FolderClient(url, options)
