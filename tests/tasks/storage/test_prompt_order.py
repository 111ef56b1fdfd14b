"""The order of prompts that are sorted bucket by bucket, against a sort in memory."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.storage import prompt_order
from tasks.storage.schemas import TOKENS_SCHEMA

STRETCHES = st.lists(st.tuples(st.sampled_from([0, 1, 255, 256, -1]), st.integers(1, 60)), min_size=1, max_size=4)
PROMPTS = st.lists(STRETCHES.map(lambda parts: [token for token, length in parts for _ in range(length)]), max_size=30)


@settings(max_examples=50)
@given(prompts=PROMPTS, instruction_tokens=st.sampled_from([0, 3000]), bucket_tokens=st.sampled_from([1, 300, 10**6]))
def test_prompts_come_in_the_order_of_their_bytes_and_equal_ones_as_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], instruction_tokens: int, bucket_tokens: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    rows = [
        {"row_id": row, "token_ids": [7] * instruction_tokens + tokens, "error": None, "priority": row % 3}
        for row, tokens in enumerate(prompts)
    ]
    rows.append({"row_id": len(rows), "token_ids": [], "error": "too long", "priority": 0})
    pq.write_table(pa.Table.from_pylist(rows, schema=TOKENS_SCHEMA), folder / "tokens.parquet")
    with pq.ParquetFile(folder / "tokens.parquet") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_order, "BUCKET_TOKENS", bucket_tokens)
        found = [(*label, prompt.tolist()) for *label, prompt in prompt_order.sort_prompts(file, folder)]
    rows.pop()
    rows.sort(key=lambda row: b"".join(token.to_bytes(4, "little", signed=True) for token in row["token_ids"]))
    assert found == [(row["row_id"], row["priority"], row["token_ids"]) for row in rows]
