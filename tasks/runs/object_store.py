"""An object store that several hosts reach, named by an fsspec URL; objects are put and got as a whole."""

import hashlib
import logging
import platform
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.errors import ArtifactError, ConfigError
from tasks.database.messages import DISK_FULL, describe_write_error
from tasks.storage.artifact import writing

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

LOGGER = logging.getLogger("batchloom")

PATIENCE_SECONDS = 15.0
"""How long calls are retried while the store is out of reach; fsspec's implementations may retry as well."""

TRY_AGAIN_SECONDS = 0.5
"""Delay before the second try; each further delay is twice as long."""

DIGEST_BYTES = hashlib.sha256().digest_size

Result = TypeVar("Result")


class DamagedObjectError(ArtifactError):
    """An object is damaged, or not complete yet."""


class MissingObjectError(ArtifactError):
    """There is no object of that name."""


class ObjectStore:
    """Objects below a URL, as fsspec takes it: ``file:///shared/nights``, ``s3://bucket/nights``. Each begins with the
    sha256 of its content, which tells truncated objects, so the store needs neither an atomic put nor a rename. Raises
    `ConfigError` if the protocol is unknown, lacks its package, or lacks a setting."""

    def __init__(self, url: str) -> None:
        import fsspec  # imported only when needed

        self.url = url.rstrip("/")
        self._store: AbstractFileSystem
        try:
            self._store, self._root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"exchange {url!r} cannot be used: {error}") from error
        except Exception as error:  # implementations that connect at once raise errors of their own
            raise _unreachable(self.url, error) from error

    def check(self) -> None:
        """Raise `ArtifactError` if objects cannot be stored, read, listed and deleted."""
        name = f"check-{secrets.token_hex(8)}"
        try:
            self._call("", lambda path: self._store.makedirs(path, exist_ok=True))
            self.put(name, b"")
            self.get(name)
            self.list("")
            self._call(name, self._store.rm_file)
        except MissingObjectError as error:
            raise _unreachable(self.url, error.__cause__ or error) from error

    def put(self, name: str, content: bytes) -> None:
        """Store an object, in place of one that has the name; `ArtifactError` where that cannot be."""
        framed = hashlib.sha256(content).digest() + content
        self._call(name, lambda path: self._store.pipe_file(path, framed))

    def get(self, name: str) -> bytes:
        """The content that `put` was given. Raises `DamagedObjectError` if it does not have its digest, `ArtifactError`
        if it is missing, or the store cannot be reached."""
        framed: bytes = self._call(name, self._store.cat_file)
        content = framed[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != framed[:DIGEST_BYTES]:
            what = "does not have the sha256 that was stored with it: it was changed or truncated"
            raise DamagedObjectError(f"{self.url}/{name} {what}")
        return content

    def put_file(self, name: str, path: str | Path) -> None:
        """Store a file of any size without a digest: the reader must know its digest."""
        self._call(name, lambda remote: self._store.put_file(str(path), remote))

    def get_file(self, name: str, path: str | Path) -> None:
        """Fetch a file that `put_file` stored. Raises `ArtifactError`, which names this host, if `path` cannot be
        written."""

        def fetch(remote: str) -> OSError | None:
            try:
                self._store.get_file(remote, str(path))
            except OSError as error:
                if error.filename != str(path) and error.errno not in DISK_FULL:
                    raise
                return error  # not of the store
            return None

        with writing(path, lambda path, error: f"on {platform.node()}: {describe_write_error(path, error)}"):
            if error := self._call(name, fetch):
                raise error

    def has(self, name: str) -> bool:
        """Whether there is such an object."""
        self._store.invalidate_cache()
        return bool(self._call(name, self._store.exists))

    def list(self, folder: str) -> dict[str, str]:
        """Names of the objects in a folder, without the folder, to a text that changes when the object does."""
        self._store.invalidate_cache()
        try:
            found = self._call(folder, lambda path: self._store.ls(path, detail=True))
        except MissingObjectError:
            return {}
        described = {info["name"].rstrip("/").rpartition("/")[2]: info for info in found if info["type"] == "file"}
        return {name: repr(sorted(info.items())) for name, info in described.items()}

    def make_folders(self, names: Iterable[str]) -> None:
        """Make folders, if the store has folders; on a file system they are readable by their owner alone (0700)."""
        for name in names:
            self._call(name, lambda path: self._store.makedirs(path, exist_ok=True))
        if self._store.protocol == ("file", "local"):
            self._call("", lambda path: Path(path).chmod(0o700))

    def delete(self) -> None:
        """Delete everything below the URL."""
        self._store.invalidate_cache()
        with suppress(MissingObjectError):
            self._call("", lambda path: self._store.rm(path.rstrip("/"), recursive=True))

    def _call(self, name: str, call: Callable[[str], Result]) -> Result:
        """Call a method of fsspec, and retry for `PATIENCE_SECONDS` if the store is out of reach."""
        delay_seconds, deadline = TRY_AGAIN_SECONDS, time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return call(f"{self._root}/{name}")
            except FileNotFoundError as error:
                raise MissingObjectError(f"{self.url}/{name} is missing") from error
            except (PermissionError, NotADirectoryError) as error:
                raise _unreachable(f"{self.url}/{name}", error) from error
            except Exception as error:  # each implementation raises errors of its own
                if time.monotonic() + delay_seconds > deadline:
                    raise _unreachable(f"{self.url}/{name}", error) from error
                LOGGER.warning("%s: trying again in %g s: %s", self.url, delay_seconds, _describe(error))
            time.sleep(delay_seconds)
            delay_seconds *= 2


def _unreachable(what: str, error: BaseException) -> ArtifactError:
    return ArtifactError(f"{what} cannot be reached: {_describe(error)}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def check_url(url: str) -> str:
    """The URL; `ValueError`, which does not repeat it, if it is no URL that workers see, or holds a secret."""
    protocol, separator, place = url.partition("://")
    if not (protocol and separator and place):
        raise ValueError("must be a URL such as s3://bucket/folder or file:///shared/folder")
    if protocol == "memory":
        raise ValueError("must be a place that workers see, such as file:///shared/folder, not the memory of a process")
    if re.search("//[^/@]*:[^/]*@", url) or "?" in url:
        raise ValueError(
            "may hold neither password nor query: credentials belong into the environment or fsspec's configuration"
        )
    return url
