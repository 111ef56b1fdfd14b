"""Parquet files that tasks pass on by reference: each is complete or absent, has a digest, and may be cached."""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ArtifactError, BatchloomError, UnreadableError
from tasks.database.messages import describe_write_error


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRef:
    """The reference of a Parquet file, which tasks pass on instead of a table; the digest is its sha256."""

    path: str
    num_rows: int
    digest: str


@contextmanager
def writing(path: str | Path, describe: Callable[[str | Path, OSError], str] = describe_write_error) -> Iterator[None]:
    """Turn an `OSError` in the block into an `ArtifactError` that says why the file or folder cannot be written. Errors
    of batchloom, some of which are `OSError`s, pass."""
    try:
        yield
    except BatchloomError:
        raise
    except OSError as error:
        raise ArtifactError(describe(path, error)) from error


@contextmanager
def replace_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` when the block ends without an exception, safe against power loss:
    it is written under a temporary name beside `path` (mode 0600), fsynced and renamed, and the folder is fsynced. An
    exception in the block deletes the temporary file and leaves `path` as it was. Raises as `writing`."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with writing(target):
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)


def write_parquet(path: str | Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> ArtifactRef:
    """Write batches of the schema to a file, one at a time, and return its reference; without a batch the file has no
    rows. Raises `ArtifactError` if the folder cannot be written, or a batch does not have this schema.

    Args:
        batches: consumed.
    """
    num_rows = 0
    try:
        with replace_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch)
                num_rows += batch.num_rows
    except (pa.ArrowException, ValueError) as error:
        raise ArtifactError(f"{path}: the batches do not fit the schema: {error}") from error
    return ArtifactRef(path=str(path), num_rows=num_rows, digest=_digest(path))


def open_parquet(ref: ArtifactRef) -> pq.ParquetFile:
    """Open an artifact for reading; use it as a context manager, or close it. Raises `ArtifactError` if the file is
    missing, damaged, or has another digest or row count than `ref`."""
    digest = _digest(ref.path)
    if digest != ref.digest:
        raise ArtifactError(f"{ref.path} has sha256 {digest}, expected {ref.digest}: it was changed or damaged")
    file = _open(ref.path)
    if file.metadata.num_rows != ref.num_rows:
        num_rows = file.metadata.num_rows
        file.close()
        raise ArtifactError(f"{ref.path} has {num_rows} rows, expected {ref.num_rows}")
    return file


def describe_parquet(path: str | Path) -> ArtifactRef:
    """The reference of a file on disk; `ArtifactError` if it is missing or not a complete Parquet file."""
    with _open(path) as file:
        num_rows = file.metadata.num_rows
    return ArtifactRef(path=str(path), num_rows=num_rows, digest=_digest(path))


def list_whole(paths: Iterable[Path]) -> list[ArtifactRef]:
    """References of the complete files among `paths`; a warning names damaged ones. Raises `UnreadableError`."""
    refs = []
    for path in paths:
        try:
            refs.append(describe_parquet(path))
        except UnreadableError:
            raise
        except ArtifactError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                logging.getLogger("batchloom").warning("%s", error)
    return refs


def _open(path: str | Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False)  # buffers would stay in memory until the file is closed
    except (pa.ArrowException, OSError) as error:
        raise _explain(path, error) from error


def _digest(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _explain(path, error) from error


def _explain(path: str | Path, error: Exception) -> ArtifactError:
    if isinstance(error, FileNotFoundError):
        return ArtifactError(f"{path} is missing")
    if getattr(error, "errno", None):  # pyarrow's errors about content have none
        return UnreadableError(f"{path} cannot be read: {error}")
    return ArtifactError(f"{path} is not a whole Parquet file: {error}")


def build_once(
    database: str | Path, kind: str, content: Sequence[object], build: Callable[[Path], ArtifactRef]
) -> ArtifactRef:
    """The artifact for `content` from the database's cache; built and cached if it is not there. A file's name is made
    of `kind`, a hash of content and code, and the start of the file's own digest. The digest tells damaged files, which
    are deleted and built again.

    Args:
        content: JSON values: digests and settings.
        build: writes the file at the path it is given.
    """
    folder = runs_folder(database) / "cache"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = f"{kind}-{hashlib.sha256(json.dumps([kind, content, _code_digest()]).encode()).hexdigest()[:32]}"
    for path in folder.glob(f"{stem}-*.parquet"):
        with suppress(OSError):  # it cannot be read now, or another process has just deleted it
            for found in list_whole([path]):
                if path.stem.endswith(f"-{found.digest[:16]}"):
                    os.utime(path)
                    return found
            path.unlink(missing_ok=True)
    built = build(folder / f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    path = Path(built.path).rename(folder / f"{stem}-{built.digest[:16]}.parquet")
    return replace(built, path=str(path))


@cache
def _code_digest() -> str:
    """Of all code that decides what is cached: a change of it makes cached files stale."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted([*root.glob("tasks/**/*.py"), *root.glob("engine/planning/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def runs_folder(database: str | Path) -> Path:
    """The folder of a database's runs, beside the file; links are followed, so that one file has one folder."""
    path = Path(database).resolve()
    return path.with_name(path.name + ".runs")
