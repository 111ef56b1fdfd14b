"""A workload over a table of notes, and a database file that another process has open."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORKLOAD = """
name = "notes"
mode = "generate"
requests_sql = "select.sql"
key = ["note_id"]
[prompt]
template = "Sum up: {text}"
[output]
table = "note_sums"
answer_column = "sum"
"""


@contextmanager
def held_open(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file open for writing until its standard input ends."""
    program = f"import duckdb; c = duckdb.connect({str(path)!r}); print('open', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    yield child
    child.communicate()
