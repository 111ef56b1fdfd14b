"""Artifacts that are built once for the same content: a folder of content-addressed files beside a database's runs."""

import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engine.errors import ArtifactError
from tasks.runs.runs_folder import runs_folder
from tasks.storage.artifact import ArtifactRef, describe_parquet

KEEP_DAYS = 7
"""An artifact that no run has used for so long is deleted."""


def build_once(
    database: str | Path,
    kind: str,
    content: Sequence[object],
    code: Sequence[str],
    build: Callable[[Path], ArtifactRef],
) -> ArtifactRef:
    """The artifact that `content` and `code` decide: the whole file that an earlier run has left, else built now.

    The file's name holds the hash of content and code, and the beginning of the file's own digest, by which a damaged
    file is found. A damaged file is deleted and built again.

    Args:
        kind: what it is, the beginning of its name.
        content: JSON values: digests and settings.
        code: names of the modules whose source decides what is in it, so that another version builds it anew.
        build: writes the file it is given. Raises what `build` raises.
    """
    folder = _cache_folder(database)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    sources = [hashlib.sha256(Path(str(sys.modules[name].__file__)).read_bytes()).hexdigest() for name in code]
    stem = f"{kind}-{hashlib.sha256(json.dumps([kind, content, sources]).encode()).hexdigest()[:32]}"
    for path in folder.glob(f"{stem}-*.parquet"):
        try:
            found = describe_parquet(path)
        except ArtifactError:
            found = None
        if found is not None and path.name == _name(stem, found):
            path.touch()
            return found
        path.unlink(missing_ok=True)
    built = build(folder / f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    path = Path(built.path).rename(folder / _name(stem, built))
    return replace(built, path=str(path))


def prune_cache(database: str | Path, keep_days: float = KEEP_DAYS) -> None:
    """Delete the artifacts that no run has used for `keep_days`, and what killed processes had begun to write."""
    folder = _cache_folder(database)
    for path in (*folder.glob("*.parquet"), *folder.glob(".*.tmp"), *folder.glob("duckdb_temp_*")):
        if time.time() - path.stat().st_mtime > keep_days * 86400:
            path.unlink(missing_ok=True)


def _cache_folder(database: str | Path) -> Path:
    return runs_folder(database) / "cache"


def _name(stem: str, ref: ArtifactRef) -> str:
    return f"{stem}-{ref.digest[:16]}.parquet"
