"""Files whose rows are numbered on, whatever gaps they have."""

from pathlib import Path

import pyarrow as pa

from tasks.storage.artifact import ArtifactRef, write_parquet
from tasks.storage.row_numbers import find_first_row_ids, renumber

SCHEMA = pa.schema([pa.field("row_id", pa.int64(), nullable=False), pa.field("text", pa.string())])


def write(path: Path, row_ids: list[int]) -> ArtifactRef:
    rows = {"row_id": row_ids, "text": [f"{path.stem} {row_id}" for row_id in row_ids]}
    return write_parquet(path, SCHEMA, pa.table(rows, SCHEMA).to_batches())


def test_rows_of_all_files_have_numbers_of_their_own(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.parquet", row_ids) for name, row_ids in [("a", [0, 3]), ("b", []), ("c", [1, 2])]
    ]
    assert find_first_row_ids(files) == [0, 4, 4]
    (first, second) = renumber(files, SCHEMA)
    assert first.to_pydict() == {"row_id": [0, 3], "text": ["a 0", "a 3"]}
    assert second.to_pydict() == {"row_id": [5, 6], "text": ["c 1", "c 2"]}
