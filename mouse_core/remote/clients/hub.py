"""Client of the files of a dataset on the Hub: huggingface_hub lists the files, and obstore reads them from a web
server.

The first request resolves the revision to a commit, which never changes. The address of a large file's bytes is signed
for a limited time; after an error, the client requests a new address.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, StorageError
from mouse_core.remote.clients.objects import FolderClient, MissingObject, asked_as, imported
from mouse_core.remote.clients.options import ObjectInfo, StorageOptions, without_secrets

_URL = re.compile(r"hf://datasets/(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[^/]+))?(?P<path>/.*)?$")
_NAMED = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+")


class HubClient(FolderClient):
    """Reads the files of a dataset on the Hub; see ``FolderClient``.

    Args:
        url: ``hf://datasets/namespace/name``, optionally followed by ``@revision`` and a folder.
        options: "token" and "endpoint", whose defaults come from huggingface_hub, and "client_options", which are
            passed to obstore.
    """

    def __init__(self, url: str, options: StorageOptions) -> None:
        found = _URL.match(url)
        if found is None or _NAMED.match(url) is None:
            raise ConfigError(
                "expected hf://datasets/namespace/name, optionally with @revision and a folder, found "
                f"{without_secrets(url)}"
            )
        super().__init__(url.rstrip("/"), options)
        self._name, self._revision = found["name"], (found["revision"] or "main").replace("%2F", "/")
        self._folder = (found["path"] or "").strip("/")
        self._places: dict[str, asyncio.Future[Any]] = {}

    @memo
    def _api(self) -> Any:
        try:
            import huggingface_hub
        except ImportError as error:
            raise ImportError("the Hub needs huggingface_hub: pip install 'mouse-data[remote]'") from error
        return huggingface_hub.HfApi(self._options.get("endpoint"), token=self._options.get("token"))

    @memo
    def _commit(self) -> str:
        """The commit of the revision."""
        info = self._of_hub(partial(self._api.dataset_info, self._name, revision=self._revision))
        return str(info.sha)

    @memo
    def _files(self) -> dict[str, ObjectInfo]:
        """All files below the folder."""
        listing = partial(
            self._api.list_repo_tree,
            self._name,
            self._folder or None,
            recursive=True,
            revision=self._commit,
            repo_type="dataset",
        )
        found = {}
        for one in self._of_hub(lambda: list(listing())):
            if hasattr(one, "blob_id"):
                content = one.lfs.sha256 if getattr(one, "lfs", None) else one.blob_id
                path = one.path.removeprefix(f"{self._folder}/") if self._folder else one.path
                found[path] = ObjectInfo(path, one.size, str(content))
        return found

    def _of_hub(self, call: Any) -> Any:
        """Return the result of a call to the Hub; convert errors to errors of this package, without signed
        addresses.
        """
        failure: ConfigError | StorageError
        try:
            return call()
        except Exception as error:  # errors of huggingface_hub and of its HTTP library
            status = getattr(getattr(error, "response", None), "status_code", None)
            said = f"{type(error).__name__}{f' {status}' if status else ''}"
            kind = ConfigError if status in (401, 403, 404) else StorageError
            asked = asked_as(self.url, self._options)
            failure = kind(f"{self.url}: expected a dataset on the Hub that you may read, found {said}; {asked}")
        raise failure

    # ------------------------------------------------------------------ see FolderClient

    async def _head(self, path: str) -> ObjectInfo:
        files = await asyncio.get_running_loop().run_in_executor(None, lambda: self._files)
        if path not in files:
            raise MissingObject(f"{self.shown(path)}: expected a file, found none")
        return files[path]

    async def _list(self, path: str) -> list[ObjectInfo]:
        files = await asyncio.get_running_loop().run_in_executor(None, lambda: self._files)
        return [one for name, one in files.items() if not path or name.startswith(f"{path}/")]

    async def _get(self, path: str, begin: int, end: int, version: str) -> memoryview:
        try:
            content = await self._got(path, begin, end)
        except (ConfigError, MissingObject):
            raise
        except Exception:
            # The address may have expired.
            self._places.pop(path, None)
            content = await self._got(path, begin, end)
        self._check_whole(path, content, begin, end)
        return content

    async def _get_some(self, path: str, ranges: Sequence[tuple[int, int]], version: str) -> list[memoryview]:
        return list(await asyncio.gather(*(self._get(path, begin, end, version) for begin, end in ranges)))

    async def _got(self, path: str, begin: int, end: int) -> memoryview:
        """Return a range of a file."""
        if path not in self._places:
            await self._head(path)  # raises an error for a missing file
        place = self._places.get(path)
        if place is None:
            running = asyncio.get_running_loop().run_in_executor(None, self._find, path)
            place = self._places.setdefault(path, asyncio.ensure_future(running))
        found = await imported().get_async(await asyncio.shield(place), "", options={"range": (begin, end)})
        return memoryview(await found.bytes_async())

    def _find(self, path: str) -> Any:
        """Return a client for the address of a file's bytes."""
        import huggingface_hub

        name = f"{self._folder}/{path}" if self._folder else path
        endpoint = self._api.endpoint
        url = huggingface_hub.hf_hub_url(
            self._name, name, repo_type="dataset", revision=self._commit, endpoint=endpoint
        )
        found = self._of_hub(partial(self._api.get_hf_file_metadata, url=url))
        times = {**dict(self._options.get("client_options", {}))}
        where = found.location or url
        if where.startswith("http://"):
            times["allow_http"] = True
        token = self._options.get("token") or huggingface_hub.get_token()
        if token and where.startswith(f"{endpoint}/"):
            times["default_headers"] = {**times.get("default_headers", {}), "authorization": f"Bearer {token}"}
        return imported().store.HTTPStore.from_url(where, client_options=times)

    async def _put(self, path: str, content: bytes | Path, version: str | None) -> NoReturn:
        raise ConfigError(
            f"{self.url}: expected a storage to write to, found the Hub; mouse push sends data to the Hub"
        )
