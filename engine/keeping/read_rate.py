"""The rate at which files of a folder are read and their digests checked."""

import hashlib
import os
import secrets
import time
from pathlib import Path

PROBED_BYTES = 8 << 20


def measure_read_rate(folder: Path) -> float:
    """Bytes per second of reading a temporary file, from the disk instead of the page cache where the system allows.
    Raises `OSError` if the file cannot be written."""
    path = folder / f".probe.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
            file.write(os.urandom(PROBED_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            hashlib.file_digest(file, "sha256")
            return PROBED_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
