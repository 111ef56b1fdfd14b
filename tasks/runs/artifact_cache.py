"""Artifacts that are built once for the same content: a folder of content-addressed files beside a database's runs."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import Task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH

from engine.errors import ArtifactError
from tasks.runs.run_folder import runs_folder
from tasks.storage.artifact import ArtifactRef, open_parquet

KEEP_DAYS = 7
"""An artifact that no run has used for so long is deleted."""


def _target_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Prefect's cache key of a task whose ``target`` is content-addressed; the task's name keeps tasks apart."""
    return f"batchloom-{context.task.name}-{hashlib.sha256(parameters['target'].encode()).hexdigest()}"


CACHED_ARTIFACT = CacheKeyFnPolicy(cache_key_fn=_target_key)
"""Cache policy of a task that writes the file ``target`` and returns its `ArtifactRef`."""


def cache_target(database: str | Path, kind: str, *content: object, code: Sequence[str]) -> Path:
    """The path of an artifact that is decided by `content` and `code` alone.

    Args:
        kind: what it is, the beginning of its name.
        content: JSON values: digests and settings.
        code: names of the modules whose source decides what is in it, so that another version builds it anew.
    """
    sources = [hashlib.sha256(Path(str(sys.modules[name].__file__)).read_bytes()).hexdigest() for name in code]
    key = hashlib.sha256(json.dumps([kind, content, sources]).encode()).hexdigest()
    return _cache_folder(database) / f"{kind}-{key[:32]}.parquet"


def build_once(build: Task[..., ArtifactRef], target: Path, **parameters: object) -> ArtifactRef:
    """Run a task of policy `CACHED_ARTIFACT`, or take what it built before if that file is there and whole.

    Raises what the task raises.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ref = build(target=str(target), **parameters)
    if not _is_whole(ref):
        ref = build.with_options(refresh_cache=True)(target=str(target), **parameters)
    target.touch(mode=0o600)
    return ref


def protect_result_storage() -> None:
    """Make Prefect's local result storage readable and writable by its owner alone (0700).

    A cache record names the code that reads it, so whoever can write there can run code here.
    """
    storage = Path(PREFECT_LOCAL_STORAGE_PATH.value())
    storage.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage.chmod(0o700)


def prune_cache(database: str | Path, keep_days: float = KEEP_DAYS) -> None:
    """Delete the artifacts that no run has used for `keep_days`, and what killed processes had begun to write."""
    folder = _cache_folder(database)
    for path in (*folder.glob("*.parquet"), *folder.glob(".*.tmp"), *folder.glob("duckdb_temp_*")):
        if time.time() - path.stat().st_mtime > keep_days * 86400:
            path.unlink(missing_ok=True)


def _cache_folder(database: str | Path) -> Path:
    return runs_folder(database) / "cache"


def _is_whole(ref: ArtifactRef) -> bool:
    try:
        open_parquet(ref).close()
    except ArtifactError:
        return False
    return True
