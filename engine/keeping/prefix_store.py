"""The KV of prefixes on disk, found by their tokens: one file for each prefix, and an index of blocks in SQLite.

The key of a KV block is a digest of all tokens up to its end, of the model, of its KV layout and of the code that
computes it, with a secret of the folder: equal keys mean equal KV, and files of another folder are never used. A file
has consecutive blocks. Its name is the keys of the first and the last one, so a file that another process replaces has
the same blocks.
"""

import hashlib
import json
import logging
import mmap
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

LOGGER = logging.getLogger("batchloom.engine")

HEADER_BYTES = 4096
FORMAT = 1
HALF_LIFE_SECONDS = 7 * 86400.0
"""The saved seconds of a prefix count half for each week in which it was not read."""
ABANDONED_SECONDS = 3600.0
"""Age after which files that are not in the index are deleted."""

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)}

_SCHEMA = """
create table if not exists secrets (secret blob);
create table if not exists files (name text primary key, num_bytes integer, saved_seconds real, used_at real);
create table if not exists blocks (key blob primary key, name text, place integer) without rowid;
create index if not exists blocks_of on blocks (name);
"""


class PrefixStore:
    """The folder of kept prefixes, private to its user; made below an existing parent. Threads and processes may share
    it. `budget_bytes` bounds all files together. Every method raises `OSError` if the index cannot be used."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self._budget_bytes = budget_bytes
        self._opened_at = time.time()
        self._lock = threading.Lock()
        self._found: set[str] = set()
        path = folder / "index.sqlite"
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._index = sqlite3.connect(path, timeout=30.0, check_same_thread=False, isolation_level=None)
        weakref.finalize(self, self._index.close)
        with self._open_index() as index:
            index.create_function("decayed", 3, _decay)
            index.executescript(_SCHEMA)
            index.execute(
                "insert into secrets select ? where not exists (select * from secrets)", [secrets.token_bytes(32)]
            )
            self._secret = bytes(index.execute("select secret from secrets").fetchone()[0])
        self._identity = hashlib.blake2b(key=self._secret, digest_size=16).hexdigest()
        self._sweep()
        self._make_room(0)

    def name_blocks(self, token_ids: npt.NDArray[np.int32], block_size: int, about: str) -> list[bytes]:
        """Keys of the full blocks of a prefix.

        Args:
            token_ids: int32, from the prompt's first token on.
            about: identifies the model, the layout of its KV and the code, on which a block's contents depend, too.
        """
        key, keys = hashlib.blake2b(about.encode(), key=self._secret, digest_size=16).digest(), []
        for end in range(block_size, len(token_ids) + 1, block_size):
            tokens = np.ascontiguousarray(token_ids[end - block_size : end], np.int32)
            key = hashlib.blake2b(key + tokens.tobytes(), key=self._secret, digest_size=16).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[tuple[str, int]]:
        """Places of the leading kept blocks: the file, which this store does not evict any more, and the index."""
        found: list[tuple[str, int]] = []
        with self._open_index() as index:
            for key in keys:
                row = index.execute("select name, place from blocks where key = ?", [key]).fetchone()
                if row is None:
                    break
                found.append(row)
                self._found.add(row[0])
        return found

    def read(self, name: str) -> torch.Tensor | None:
        """The KV of a file, mapped: ``[2 * num_layers, n, block_size, num_kv_heads, head_size]``. None where it is
        missing, damaged or of another folder; it is then deleted, with a warning in the log."""
        path = self._path(name)
        try:
            return self._map(path, name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOGGER.warning("kept prefix %s is computed again: %s", path, error or type(error).__name__)
            self.forget([name])
            return None

    def write(self, keys: Sequence[bytes], kv: torch.Tensor) -> bool:
        """Writes consecutive blocks with these keys to a file, in the form of `read`, from host memory; returns whether
        there was room. Raises `OSError` if the file cannot be written."""
        payload = kv.contiguous().view(-1).view(torch.uint8).numpy()
        num_bytes = HEADER_BYTES + len(payload)
        if not self._make_room(num_bytes):
            return False
        name = f"{keys[0].hex()}-{keys[-1].hex()}"
        header = {"format": FORMAT, "store": self._identity, "name": name, "dtype": str(kv.dtype), "shape": [*kv.shape]}
        header["sha256"] = _digest(header, payload)
        temporary = self.folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
                file.write(payload.data)
            os.replace(temporary, self._path(name))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        with self._open_index() as index:
            index.execute("begin immediate")
            index.execute("replace into files values (?, ?, 0, ?)", [name, num_bytes, time.time()])
            rows = [(key, name, place) for place, key in enumerate(keys)]
            index.executemany("replace into blocks values (?, ?, ?)", rows)
            empty = index.execute("select name from files where name not in (select name from blocks)").fetchall()
        if empty:  # all their blocks are in the new file, too
            self.forget([name for (name,) in empty])
        return True

    def book(self, saved_seconds: Mapping[str, float]) -> None:
        """Adds the seconds that each file has saved by being read now."""
        now = time.time()
        with self._open_index() as index:
            index.execute("begin immediate")
            index.executemany(
                "update files set saved_seconds = decayed(saved_seconds, used_at, ?) + ?, used_at = ? where name = ?",
                [(now, seconds, now, name) for name, seconds in saved_seconds.items()],
            )

    def forget(self, names: Sequence[str]) -> None:
        """Deletes files and their entries in the index."""
        with self._open_index() as index:
            index.execute("begin immediate")
            for name in names:
                index.execute("delete from blocks where name = ?", [name])
                index.execute("delete from files where name = ?", [name])
        for name in names:
            with suppress(OSError):
                self._path(name).unlink(missing_ok=True)

    def _map(self, path: Path, name: str) -> torch.Tensor:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header: dict[str, Any] = json.loads(mapped[:HEADER_BYTES])
        digest = header.pop("sha256")
        if (header["format"], header["name"]) != (FORMAT, name):
            raise ValueError("the file is of another prefix")
        if header["store"] != self._identity:
            raise ValueError("the file is of another database")
        if digest != _digest(header, memoryview(mapped)[HEADER_BYTES:]):
            raise ValueError("the file is damaged")
        kv = torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER_BYTES)
        return kv.view(_DTYPES[header["dtype"]]).view(header["shape"])

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts files with the fewest saved seconds per byte, except those that were found, read or written since this
        store was opened, and says whether there is room then."""
        with self._open_index() as index:
            num_kept_bytes = index.execute("select coalesce(sum(num_bytes), 0) from files").fetchone()[0]
            rows = index.execute(
                "select name, num_bytes from files where used_at < ? "
                "order by decayed(saved_seconds, used_at, ?) / num_bytes, used_at, name",
                [self._opened_at, time.time()],
            ).fetchall()
        too_many = num_kept_bytes + num_bytes - self._budget_bytes
        evicted = []
        for name, size in rows:
            if too_many > 0 and name not in self._found:
                too_many -= size
                evicted.append(name)
        if too_many > 0:
            return False
        if evicted:
            self.forget(evicted)
        return True

    def _sweep(self) -> None:
        """Deletes files that killed processes have left."""
        with self._open_index() as index:
            known = {name for (name,) in index.execute("select name from files").fetchall()}
        for path in (*self.folder.glob("*.kv"), *self.folder.glob(".*.tmp")):
            with suppress(OSError):
                if path.stem not in known and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    @contextmanager
    def _open_index(self) -> Iterator[sqlite3.Connection]:
        """The index, for this thread alone. A transaction that the block begins is committed at its end."""
        try:
            with self._lock, self._index as index:
                yield index
        except sqlite3.Error as error:
            is_damaged = not isinstance(error, sqlite3.OperationalError)  # that is a lock or a full disk
            advice = "; delete the folder, which is then filled anew" if is_damaged else ""
            raise OSError(f"its index: {error}{advice}") from error

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.kv"


def _digest(header: Mapping[str, Any], payload: Any) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(payload)
    return digest.hexdigest()


def _decay(saved_seconds: float, used_at: float, now: float) -> float:
    return float(saved_seconds * 0.5 ** (max(0.0, now - used_at) / HALF_LIFE_SECONDS))
