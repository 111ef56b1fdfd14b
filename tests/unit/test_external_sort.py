"""Sorting more than fits: the same rows as an in-memory sort gives, and no file that anybody could find."""

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ArtifactError
from tasks.external_sort import sort_batches

SCHEMA = pa.schema([("position", pa.int64()), ("key", pa.large_binary()), ("values", pa.list_(pa.int32()))])


def keys_of(batch: pa.RecordBatch) -> list[bytes]:
    keys: list[bytes] = batch.column("key").to_pylist()
    return keys


def batches_of(keys: list[bytes], num_rows: int) -> Iterator[pa.RecordBatch]:
    rows = [{"position": i, "key": key, "values": [i] * (i % 3)} for i, key in enumerate(keys)]
    for start in range(0, len(rows), num_rows):
        yield pa.RecordBatch.from_pylist(rows[start : start + num_rows], schema=SCHEMA)


@given(
    keys=st.lists(st.binary(max_size=3) | st.sampled_from([b"same", b"same\0", b"sam"]), max_size=80),
    num_rows=st.integers(1, 30),
    run_bytes=st.sampled_from([1, 5_000, 20_000, 1 << 20]),
)
def test_rows_come_by_key_and_equal_ones_as_they_arrived(
    tmp_path_factory: pytest.TempPathFactory, keys: list[bytes], num_rows: int, run_bytes: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    found = list(sort_batches(batches_of(keys, num_rows), keys_of, folder, run_bytes=run_bytes))
    rows = [row for batch in found for row in batch.to_pylist()]
    expected = sorted(range(len(keys)), key=keys.__getitem__)
    assert [row["position"] for row in rows] == expected
    assert all(row["key"] == keys[row["position"]] for row in rows)
    assert all(row["values"] == [row["position"]] * (row["position"] % 3) for row in rows)


def test_runs_have_no_name_and_end_with_the_reader(tmp_path: Path) -> None:
    def open_files() -> int:
        links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.readlink(link) for link in links if link.exists() or link.is_symlink())

    found = sort_batches(batches_of([b"b", b"a"] * 5_000, 100), keys_of, tmp_path, run_bytes=1 << 20)
    assert next(found).num_rows == 1024
    assert open_files() > 3
    assert not list(tmp_path.iterdir())
    found.close()
    assert open_files() == 0


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no room for temporary files there"):
        list(sort_batches(batches_of([b"a"] * 9, 1), keys_of, tmp_path / "absent", run_bytes=1))
