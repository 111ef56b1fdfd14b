"""An artifact is whole or absent, and what its reference says."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import ArtifactError, DatabaseError
from tasks.storage.artifact import ArtifactRef, describe_parquet, open_parquet, replace_file, write_parquet

SCHEMA = pa.schema([pa.field("row_id", pa.int64(), nullable=False), ("token_ids", pa.list_(pa.int32()))])


def batches(num_batches: int = 3, rows: int = 4) -> Iterator[pa.RecordBatch]:
    for number in range(num_batches):
        ids = range(number * rows, (number + 1) * rows)
        yield pa.RecordBatch.from_pylist([{"row_id": i, "token_ids": [i] * (i % 3)} for i in ids], schema=SCHEMA)


@pytest.fixture
def ref(tmp_path: Path) -> ArtifactRef:
    return write_parquet(tmp_path / "a.parquet", SCHEMA, batches())


def test_what_is_written_is_read(ref: ArtifactRef) -> None:
    assert ref.num_rows == 12
    with open_parquet(ref) as file:
        assert file.schema_arrow.equals(SCHEMA)
        assert file.read().equals(pa.Table.from_batches(batches()))
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_no_batch_is_an_empty_file(tmp_path: Path) -> None:
    ref = write_parquet(tmp_path / "empty.parquet", SCHEMA, [])
    assert ref.num_rows == 0
    with open_parquet(ref) as file:
        assert file.read().num_rows == 0
        assert file.schema_arrow.equals(SCHEMA)


def test_equal_content_has_an_equal_digest(ref: ArtifactRef, tmp_path: Path) -> None:
    again = write_parquet(tmp_path / "b.parquet", SCHEMA, batches())
    other = write_parquet(tmp_path / "c.parquet", SCHEMA, batches(2))
    assert again.digest == ref.digest != other.digest


def test_a_reference_survives_json(ref: ArtifactRef) -> None:
    assert ArtifactRef(**asdict(ref)) == ref
    assert describe_parquet(ref.path) == ref


def test_only_the_owner_reads_it(ref: ArtifactRef) -> None:
    assert stat.S_IMODE(os.stat(ref.path).st_mode) == 0o600


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "was changed or damaged"),
        (lambda path: path.write_bytes(b""), "was changed or damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "was changed or damaged"),
        (lambda path: path.write_bytes(bytes([path.read_bytes()[0], 0]) + path.read_bytes()[2:]), "was changed"),
        (lambda path: write_parquet(path, SCHEMA, batches(1)), "was changed or damaged"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
def test_a_lost_or_changed_file_is_refused(ref: ArtifactRef, damage: object, message: str) -> None:
    damage(Path(ref.path))  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=message) as caught:
        open_parquet(ref)
    assert ref.path in str(caught.value)


def test_a_reference_to_other_rows_is_refused(ref: ArtifactRef) -> None:
    with pytest.raises(ArtifactError, match="has 12 rows, expected 11"):
        open_parquet(ArtifactRef(path=ref.path, num_rows=11, digest=ref.digest))


def test_a_torn_file_is_no_parquet(ref: ArtifactRef, tmp_path: Path) -> None:
    content = Path(ref.path).read_bytes()
    torn = tmp_path / "torn.parquet"
    for length in (0, 4, len(content) // 2, len(content) - 1):
        torn.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match="not a whole Parquet file"):
            describe_parquet(torn)
    with pytest.raises(ArtifactError, match="is missing"):
        describe_parquet(tmp_path / "absent.parquet")


def test_a_batch_of_another_schema_leaves_nothing(tmp_path: Path) -> None:
    other = pa.record_batch({"row_id": pa.array(["x"])})
    with pytest.raises(ArtifactError, match="do not fit the schema"):
        write_parquet(tmp_path / "a.parquet", SCHEMA, [next(batches()), other])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DatabaseError("of the query")])
def test_an_error_in_the_source_passes_and_keeps_the_old_file(
    ref: ArtifactRef, tmp_path: Path, error: BaseException
) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield next(batches())
        raise error

    with pytest.raises(type(error)):
        write_parquet(ref.path, SCHEMA, failing())
    with open_parquet(ref) as file:
        assert file.metadata.num_rows == 12
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_parquet(tmp_path / "no" / "a.parquet", SCHEMA, batches())


def test_a_name_too_long_for_a_temporary_file_is_an_artifact_error(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    with pytest.raises(ArtifactError, match="n cannot be written: File name too long"), replace_file(path):
        pass


def test_a_killed_writer_leaves_the_old_file(ref: ArtifactRef) -> None:
    program = """
import sys, time
import pyarrow as pa
from tasks.storage.artifact import write_parquet
schema = pa.schema([("row_id", pa.int64())])
def slow():
    for number in range(100):
        yield pa.record_batch([pa.array(range(50_000), pa.int64())], schema=schema)
    print("half", flush=True)
    time.sleep(600)
write_parquet(sys.argv[1], schema, slow())
"""
    with subprocess.Popen([sys.executable, "-c", program, ref.path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        child.kill()
    with open_parquet(ref) as file:
        assert file.read().equals(pa.Table.from_batches(batches()))
    (torn,) = set(Path(ref.path).parent.iterdir()) - {Path(ref.path)}
    assert torn.name.startswith(".a.parquet."), "a torn file never has an artifact's name"
    assert torn.suffix == ".tmp"


def test_one_batch_at_a_time_is_held(tmp_path: Path) -> None:
    """Each batch is written before the next is asked for."""
    path = tmp_path / "big.parquet"
    rows = 40_000
    allocated = []

    def big() -> Iterator[pa.RecordBatch]:
        for number in range(12):
            values = pa.array([bytes([number]) * 20 + str(i).encode() for i in range(rows)], pa.binary())
            allocated.append(pa.total_allocated_bytes())
            yield pa.record_batch([values], names=["value"])

    ref = write_parquet(path, pa.schema([("value", pa.binary())]), big())
    assert ref.num_rows == 12 * rows
    assert max(allocated) < 4 * allocated[0] + 2**20
    assert pq.ParquetFile(path).metadata.num_row_groups >= 12


def test_replace_file_is_for_any_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for content in (b"{}", b"[]"):
        with replace_file(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() != content
        assert path.read_bytes() == content
    with pytest.raises(RuntimeError, match="stop"), replace_file(path) as file:
        raise RuntimeError("stop")
    assert path.read_bytes() == b"[]"
