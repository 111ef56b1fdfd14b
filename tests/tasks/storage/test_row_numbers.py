"""Files whose rows are numbered on, whatever gaps they have."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.storage.artifact import ArtifactRef, write_parquet
from tasks.storage.row_numbers import find_first_row_ids, write_joined
from tasks.storage.schemas import TOKENS_SCHEMA


def write(path: Path, row_ids: list[int]) -> ArtifactRef:
    texts = [f"{path.stem} {row_id}" for row_id in row_ids]
    rows = {"row_id": row_ids, "token_ids": [[1]] * len(row_ids), "error": texts, "priority": [0] * len(row_ids)}
    return write_parquet(path, TOKENS_SCHEMA, pa.table(rows, TOKENS_SCHEMA).to_batches())


def test_rows_of_all_files_have_numbers_of_their_own(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.parquet", row_ids) for name, row_ids in [("a", [0, 3]), ("b", []), ("c", [1, 2])]
    ]
    assert find_first_row_ids(files) == [0, 4, 4]
    joined = pq.read_table(write_joined(files, tmp_path / "joined.parquet").path)
    assert joined.column("row_id").to_pylist() == [0, 3, 5, 6]
    assert joined.column("error").to_pylist() == ["a 0", "a 3", "c 1", "c 2"]
