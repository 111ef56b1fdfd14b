"""A disk that is full, told plainly: which file, and how much is free."""

import errno
import shutil
from pathlib import Path

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def describe_write_error(path: str | Path, error: OSError) -> str:
    """Why a file cannot be written, in a line."""
    reason = error.strerror or str(error)
    return f"{path} cannot be written: {reason}{describe_free_space(path) if error.errno in FULL else ''}"


def describe_free_space(path: str | Path) -> str:
    """``; 4,096 bytes free in /data``, to end a message with; empty where the folder does not say."""
    folder = Path(path).absolute().parent
    try:
        return f"; {shutil.disk_usage(folder).free:,} bytes free in {folder}"
    except OSError:
        return ""
