"""Errors of DuckDB and of the file system as one line."""

import errno
import re
import shutil
from pathlib import Path

import duckdb

DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
NO_ACCESS = re.compile(r'Cannot access \w+ "(.+?)" - file system operations are disabled')


def explain(error: duckdb.Error) -> str:
    """DuckDB's message as one line, without the excerpt of the statement."""
    message = str(error)
    # A CTE with the same name as the missing table that it reads is reported as a reference to itself.
    if match := re.search(r'Table with name (.+?) does not exist|Circular reference to CTE "(.+?)"', message):
        name = (match.group(1) or match.group(2)).strip('"')
        folder, dot, _ = name.partition(".")
        return f"no table or view {name!r}" + (f"; is an --attach {folder}=PATH missing?" if dot else "")
    if match := re.search(r'Table "(.+?)" does not have a column named "(.+?)"', message):
        return f"table {match.group(1)!r} has no column {match.group(2)!r}"
    if match := re.search(r'Referenced column "(.+?)" (?:was )?not found', message):
        found = re.search(r"Candidate bindings: (.+)", message)
        return f"no column {match.group(1)!r}" + (f"; there are {found.group(1)}" if found else "")
    if "Parameter argument/count mismatch" in message or "parameters were bound" in message:
        return "a parameter that has no value (write the value into the query)"
    if "extension" in message or "disabled by configuration" in message:
        return _explain_reach(message)
    return message.strip().splitlines()[0]


def is_of_file(error: BaseException) -> bool:
    """Whether the database's file or DuckDB's memory was the reason, such as a lock or a full disk, and not what SQL
    said."""
    of_file = (duckdb.IOException, duckdb.TransactionException)  # the latter: of a commit
    return isinstance(error.__cause__, (*of_file, duckdb.OutOfMemoryException))


def _explain_reach(message: str) -> str:
    """DuckDB's message about a missing extension, or about a file that SQL may not read and how to allow it."""
    if match := re.search(r"install the required extension '(\w+)|Extension \"(\w+)\" is an existing", message):
        return f"DuckDB's extension {match.group(1) or match.group(2)!r} is not loaded here; install it in DuckDB first"
    match = NO_ACCESS.search(message)
    if match is None:
        return message.strip().splitlines()[0]
    path = match.group(1)
    if "://" in path:
        return f"no right to read {path} (SQL of a workload reaches no network: copy the data into a folder, attach it)"
    folder = Path(path).absolute().parent
    name = re.sub(r"\W", "_", folder.name) or "files"
    lines = f'[attach] and {name} = "{folder}"'
    return f"no right to read {path} (to allow it, add {lines} to the night file, or --attach {name}={folder})"


def describe_write_error(path: str | Path, error: OSError) -> str:
    """One line that says why a file cannot be written."""
    reason = error.strerror or str(error)
    return f"{path} cannot be written: {reason}{describe_free_space(path) if error.errno in DISK_FULL else ''}"


def describe_free_space(path: str | Path) -> str:
    """``; 4,096 bytes free in /data``, the end of a message; empty if the free space is unknown."""
    folder = Path(path).absolute().parent
    try:
        return f"; {shutil.disk_usage(folder).free:,} bytes free in {folder}"
    except OSError:
        return ""
