"""Addresses of remote objects, and the options of clients. Messages and reprs never contain a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from mouse_core._base.checks import check_choice
from mouse_core._base.locks import is_spawning
from mouse_core.errors import ConfigError


@dataclass(frozen=True)
class ObjectInfo:
    """Path, size and version of a remote object.

    Args:
        path: The name of the object below the client's ``url``.
        size: Size in bytes.
        version: A text that changes with the content: an ETag, a version, a commit. Empty if the server has no version;
            the object then counts as unchangeable.
    """

    path: str
    size: int
    version: str


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_QUERY = re.compile(r"\?[^\s'\"),]*")
# Options without credentials, which describe the server and the kind of requests.
_OPEN = re.compile(
    r"(aws_|google_|azure_)?(storage_)?(endpoint(_url)?(_s3)?|(default_)?region|bucket(_name)?|container_name|account_name"
    r"|virtual_hosted_style_request|skip_signature|allow_http|s3_express|request_payer|unsigned_payload|imdsv1_fallback"
    r"|metadata_endpoint|sts_endpoint|checksum_algorithm|conditional_put|copy_if_not_exists|disable_\w+"
    r"|server_side_encryption|use_emulator|use_fabric_endpoint|use_azure_cli|authority_host)$",
    re.IGNORECASE,
)
_OPEN_OF_CLIENTS = re.compile(
    r"(connect_|read_)?timeout$|allow_(http|invalid_certificates)$|http[12]_\w+$|pool_\w+$|randomize_addresses$"
    r"|user_agent$|proxy_excludes$"
)
_USER = re.compile(r"(://)[^/\s@]*@")


def is_url(path: object) -> bool:
    """Whether ``path`` is the address of remote objects, such as ``s3://bucket/runs``, and not a local path."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def without_secrets(text: str) -> str:
    """Return the text without the query and user parts of addresses, which can contain credentials."""
    return _USER.sub(r"\1", _QUERY.sub("", text))


def public_url(url: str) -> str:
    """Return the address without a query and without a slash at the end.

    Raises:
        ConfigError: The address has a user or a password, which messages would reveal.
    """
    parts = urlsplit(url)
    user, mark, _ = parts.netloc.rpartition("@")
    # In Azure addresses, abfss://container@account, the part before the @ is not a user.
    if mark and (parts.scheme.lower() in ("http", "https", "s3", "s3a", "gs", "hf") or ":" in user):
        raise ConfigError(
            f"{without_secrets(url)}: expected an address without a user name, found a user name; pass credentials in "
            "the environment or in storage_options=, such as "
            "{'client_options': {'default_headers': {'authorization': ...}}}"
        )
    return urlunsplit((parts.scheme.lower(), parts.netloc, parts.path.rstrip("/"), "", ""))


class StorageOptions(Mapping[str, Any]):
    """The options of a client: keys, endpoints, time-outs. Messages never contain the options.

    Processes that ``multiprocessing`` starts get all options. Every other pickle contains only options without
    credentials, such as an endpoint, a region and time-outs; the client finds keys and tokens again in the
    environment.

    Args:
        options: The options by name.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        if options is not None and not (
            isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        ):
            raise ConfigError(f"storage_options: expected a dict of options, found {type(options).__name__}")
        self._options = dict(options or {})

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return f"StorageOptions({len(self)} of them)"

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (self._options if is_spawning() else _plain(self._options),)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without credentials, selected by a list of names."""
    plain = {name: value for name, value in options.items() if _OPEN.match(name) and _is_open(value)}
    for name, known in (("client_options", _OPEN_OF_CLIENTS), ("retry_config", None)):
        told = options.get(name)
        if isinstance(told, Mapping):
            plain[name] = {one: value for one, value in told.items() if known is None or known.match(str(one))}
    return plain


def _is_open(value: Any) -> bool:
    """Whether a value is a number, or a text in which no address has a user or a query part."""
    return isinstance(value, bool | int | float) or (isinstance(value, str) and not set("@?") & set(value))


@dataclass(frozen=True)
class Reaching:
    """The options for reaching remote objects, for ``DatasetStore.open`` and all other functions that accept an
    address.

    Args:
        storage_options: Options of the client, in addition to the environment:
            ``{"aws_endpoint": ..., "client_options": {"timeout": "10s"}}``. Options have obstore's names; for the Hub,
            the options are "token" and "endpoint". Messages, states and fingerprints never contain the options; pickles
            contain all options only for processes that ``multiprocessing`` starts.
        cache: The folder of the cache, which all processes of a machine and later runs share; None: the folder in
            ``MOUSE_CACHE``, or a folder in the user's cache directory.
        cache_bytes: Largest size of the cache in bytes, at least 4 MB; None: half of the free space on its disk.
        fail: How long requests are repeated after temporary failures. With "raise", requests are repeated for half a
            minute, and then the error is raised; with "retry", without end.

    Raises:
        ConfigError: ``storage_options`` is not a mapping from names to values, the cache is not a local folder, or
            ``fail`` has another value.
    """

    storage_options: Mapping[str, Any] | None = None
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    fail: Literal["raise", "retry"] = "raise"

    def __post_init__(self) -> None:
        check_choice("fail", self.fail, ("raise", "retry"))
        if self.cache is not None and (not isinstance(self.cache, str | os.PathLike) or is_url(self.cache)):
            raise ConfigError(
                f"cache: expected a folder of this machine, found {without_secrets(str(self.cache))!r:.200}"
            )
        if not isinstance(self.storage_options, StorageOptions):
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
