"""Sorting more than fits: the same rows as an in-memory sort gives, whatever their width, and nothing left behind."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ArtifactError, DatabaseError
from tasks.storage.batches import sort_batches
from tests.full_disk import files_of_at_most

SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("key", pa.binary()),
        ("values", pa.list_(pa.field("item", pa.int32(), nullable=False))),
        ("text", pa.large_string()),
    ]
)
VALUES = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70)
TEXTS = st.none() | st.text(max_size=90) | st.sampled_from(["ß" * 64, "ß" * 65, "\0" * 300])
ROWS = st.lists(
    st.tuples(st.binary(max_size=3) | st.sampled_from([b"same", b"same\0", b"sam"]), VALUES, TEXTS), max_size=40
)


@settings(max_examples=40)
@given(rows=ROWS, num_rows=st.integers(1, 30), start=st.integers(0, 2))
def test_rows_come_by_key_and_equal_ones_as_they_arrived(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[bytes, list[int], str | None]], num_rows: int, start: int
) -> None:
    values = [dict(zip(SCHEMA.names, (i, *row), strict=True)) for i, row in enumerate(rows)]
    # Slices: the arrays of a reader may begin anywhere in their buffers.
    before = values[:start]
    batches = [
        pa.RecordBatch.from_pylist([*before, *values[i : i + num_rows]], schema=SCHEMA).slice(len(before))
        for i in range(0, len(values), num_rows)
    ]
    found = list(sort_batches(batches, "key", tmp_path_factory.getbasetemp()))
    for batch in found:
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA)
    assert [row for batch in found for row in batch.to_pylist()] == sorted(values, key=lambda row: row["key"])


SPILL = """
import os, random, signal, sys
import pyarrow as pa
from tasks.storage import external_sort
from tasks.storage.batches import sort_batches

def batches(num_rows):
    values = random.Random(1)
    for _ in range(0, num_rows, 1000):
        keys = [values.randbytes(100) for _ in range(1000)]
        yield pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.binary())})

external_sort.MEMORY_LIMIT = "48MB"
rows = sort_batches(batches(300_000), "key", sys.argv[1])
first = next(rows)
print(len(os.listdir(sys.argv[1])), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
keys = first.column("key").to_pylist() + [key for batch in rows for key in batch.column("key").to_pylist()]
assert len(keys) == 300_000 and keys == sorted(keys)
"""
"""30 MB sorted in 48, of which DuckDB gives a part to the rows."""


def spill(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SPILL, str(folder), end]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)


def test_what_is_spilled_is_gone_at_the_end_and_what_a_killed_process_left_with_the_next_spill(tmp_path: Path) -> None:
    done = spill(tmp_path, "killed")
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = set(tmp_path.iterdir())
    assert len(left) == int(done.stdout) > 0
    done = spill(tmp_path, "sorted")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert not list(tmp_path.iterdir())


def test_wide_rows_lie_in_a_file_without_a_name_that_ends_with_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times the memory limit."""

    def open_files() -> int:
        links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.readlink(link) for link in links if link.is_symlink())

    texts = [chr(ord("a") + row % 26) * 40_000 for row in range(8_000)]
    batches = (
        pa.RecordBatch.from_pydict({"key": pa.array(range(-row, -row - 100, -1)), "text": texts[row : row + 100]})
        for row in range(0, len(texts), 100)
    )
    monkeypatch.setattr("tasks.storage.external_sort.MEMORY_LIMIT", "32MB")
    found = sort_batches(batches, "key", tmp_path)
    first = next(found)
    assert first.nbytes <= 17 << 20
    assert open_files() > 0
    assert not list(tmp_path.iterdir())
    assert first.column("text").to_pylist() == texts[: -first.num_rows - 1 : -1]
    found.close()
    assert open_files() == 0


def test_an_error_of_the_source_comes_as_it_is(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"key": [1, 2]})
        raise DatabaseError("no such row")

    with pytest.raises(DatabaseError, match="no such row"):
        list(sort_batches(batches(), "key", tmp_path))


def test_ctrl_c_while_rows_are_sorted_is_ctrl_c(tmp_path: Path) -> None:
    """The timer stands for it: it goes off when all rows have come and none is sorted yet."""
    values = random.Random(1)

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(300):
            yield pa.RecordBatch.from_pydict(
                {"key": pa.array([values.randbytes(100) for _ in range(1000)], pa.binary())}
            )
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(sort_batches(batches(), "key", tmp_path))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no room for temporary files there"):
        list(sort_batches([pa.RecordBatch.from_pydict({"key": [1]})] * 2, "key", tmp_path / "absent"))


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_full_disk_is_told_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_read: int) -> None:
    """A limit on the size of files stands for the disk, from the start or after the first sorted rows; what is sorted
    is narrow, so that DuckDB writes it."""
    monkeypatch.setattr("tasks.storage.external_sort.MEMORY_LIMIT", "48MB")
    values = random.Random(1)
    batches = [
        pa.RecordBatch.from_pydict({"key": pa.array([values.randbytes(100) for _ in range(1000)], pa.binary())})
        for _ in range(300)
    ]
    found = sort_batches(batches, "key", tmp_path)
    assert len(list(islice(found, num_read))) == num_read
    message = f"{tmp_path}: no room for temporary files there: .*File too large"
    with files_of_at_most(1 << 10), pytest.raises(ArtifactError, match=message):
        list(found)
