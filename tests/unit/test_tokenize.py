"""From requests to partitions: tokens, limits, plan rows, and the rows of one partition gathered again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ArtifactError, ModelError
from engine.plan import plan_token_table
from engine.prefix_groups import rebuild_groups
from tasks.artifact import ArtifactRef, write_parquet
from tasks.partition import read_partition
from tasks.plan_prefix import cut_partitions, plan_prefix, read_plan_summary
from tasks.prompt import build_prompt_format
from tasks.text_codec import TextCodec
from tasks.tokenize import TOKENS_SCHEMA, read_max_model_len, tokenize_requests
from tasks.workload import Prompt


@pytest.fixture(scope="module")
def codec(tiny_llama: Path) -> TextCodec:
    return TextCodec.load(tiny_llama)


def tokenize_table(table: pa.Table, codec: TextCodec, folder: Path, **limits: int) -> list[dict[str, Any]]:
    """The rows of tokens.parquet for requests in row groups of 300."""
    pq.write_table(table, folder / "requests.parquet", row_group_size=300)
    form = build_prompt_format(Prompt(system="", template="{body} {title}", chat=False, may_be_empty=()), codec)
    with pq.ParquetFile(folder / "requests.parquet") as file:
        batches = list(tokenize_requests(file, form, codec, **({"max_model_len": 64, "num_answer_tokens": 8} | limits)))
    return pa.Table.from_batches(batches, TOKENS_SCHEMA).to_pylist()


def requests_table(bodies: Sequence[str | None], errors: Sequence[str | None] | None = None) -> pa.Table:
    count = len(bodies)
    return pa.table(
        {
            "row_id": pa.array(range(count), pa.int64()),
            "body": pa.array(bodies, pa.large_string()),
            "title": pa.array(["t"] * count, pa.large_string()),
            "error": pa.array(errors or [None] * count, pa.large_string()),
        }
    )


def test_rows_stream_in_order(codec: TextCodec, tmp_path: Path) -> None:
    bodies = [f"row {i} walks" for i in range(1500)]
    rows = tokenize_table(requests_table(bodies), codec, tmp_path)
    assert [row["row_id"] for row in rows] == list(range(1500))
    expected = codec.encode([f"{body} t" for body in bodies], add_special_tokens=True)
    assert [row["token_ids"] for row in rows] == expected
    assert not any(row["error"] for row in rows)


def test_a_row_with_an_error_keeps_it_and_has_no_tokens(codec: TextCodec, tmp_path: Path) -> None:
    rows = tokenize_table(requests_table(["one", None, "three"], [None, "body is NULL", None]), codec, tmp_path)
    assert [row["error"] for row in rows] == [None, "body is NULL", None]
    assert [bool(row["token_ids"]) for row in rows] == [True, False, True]


def test_the_limit_leaves_room_for_the_answer(codec: TextCodec, tmp_path: Path) -> None:
    (row,) = tokenize_table(requests_table(["a watchman"]), codec, tmp_path)
    num_tokens = len(row["token_ids"])
    (fits,) = tokenize_table(requests_table(["a watchman"]), codec, tmp_path, max_model_len=num_tokens + 8)
    assert fits == row
    (too_long,) = tokenize_table(requests_table(["a watchman"]), codec, tmp_path, max_model_len=num_tokens + 7)
    assert too_long["token_ids"] == []
    limit = f"the limit is {num_tokens - 1}: {num_tokens + 7} of the model less 8 for the answer"
    assert too_long["error"] == f"the prompt has {num_tokens} tokens, {limit}"


def test_bytes_that_are_no_text_are_an_error_of_their_row(codec: TextCodec, tmp_path: Path) -> None:
    table = requests_table(["x", "y", "z"])
    blobs = pa.array([b"fine", b"ab\xff", "caf\u00e9".encode()], pa.binary())
    rows = tokenize_table(table.set_column(1, "body", blobs), codec, tmp_path)
    assert [row["error"] for row in rows] == [None, "body holds bytes that are not UTF-8, the first at byte 2", None]
    assert rows[2]["token_ids"] == codec.encode(["caf\u00e9 t"], add_special_tokens=True)[0]


def test_no_requests_are_no_tokens(codec: TextCodec, tmp_path: Path) -> None:
    assert tokenize_table(requests_table([]), codec, tmp_path) == []


@pytest.mark.parametrize(("setting", "expected"), [("auto", 1024), (100, 100), (5000, 1024)])
def test_the_model_length_is_the_lower_of_two(tiny_llama: Path, setting: Any, expected: int) -> None:
    assert read_max_model_len(tiny_llama, setting) == expected


def test_a_model_without_a_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ModelError, match=r"config\.json: cannot read max_position_embeddings"):
        read_max_model_len(tmp_path, "auto")


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=25)


def flat(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]).astype(np.int64)
    return np.array([token for prompt in prompts for token in prompt], dtype=np.int32), offsets


@given(prompts=PROMPTS, partition_tokens=st.integers(1, 60), num_answer_tokens=st.integers(1, 9))
def test_partitions_are_whole_groups_of_about_the_size_asked(
    prompts: list[list[int]], partition_tokens: int, num_answer_tokens: int
) -> None:
    values, offsets = flat(prompts)
    table = plan_token_table(values, offsets, method="exact")
    partitions = cut_partitions(table, np.diff(offsets), partition_tokens, num_answer_tokens)
    assert len(partitions) == len(prompts)
    groups = (
        rebuild_groups(np.split(values, offsets[1:-1]), table.group_id, table.member_id, table.num_prefix_tokens)
        if prompts
        else []
    )
    work = [group.num_tokens + num_answer_tokens * len(group.members) for group in groups]
    of_group = [int(partitions[group.members[0].request_indices[0]]) for group in groups]
    for group, partition in zip(groups, of_group, strict=True):
        indices = [index for member in group.members for index in member.request_indices]
        assert set(partitions[indices].tolist()) == {partition}
    assert sorted(of_group) == of_group
    assert sorted(set(of_group)) == list(range(max(of_group, default=-1) + 1))
    for partition in set(of_group):
        sizes = [size for size, found in zip(work, of_group, strict=True) if found == partition]
        assert sum(sizes[:-1]) < partition_tokens, "it was full before its last group"


def tokens_file(folder: Path, prompts: Sequence[Sequence[int] | None]) -> ArtifactRef:
    """Rows in several row groups; None is a row with an error."""
    rows = [
        {"row_id": i, "token_ids": list(prompt or ()), "error": None if prompt else "no"}
        for i, prompt in enumerate(prompts)
    ]
    batches = [pa.RecordBatch.from_pylist(rows[i : i + 4], schema=TOKENS_SCHEMA) for i in range(0, len(rows), 4)]
    return write_parquet(folder / "tokens.parquet", TOKENS_SCHEMA, batches)


def test_partitions_together_are_the_plan(tmp_path: Path) -> None:
    prompts = [[1, 2, 3, i % 5, i] if i % 7 else None for i in range(40)]
    prompts[9] = prompts[8]
    tokens = tokens_file(tmp_path, prompts)
    plan = plan_prefix.fn(tokens, str(tmp_path / "plan.parquet"), "exact", 20, 2)
    summary = read_plan_summary(plan)
    assert summary.num_rows == plan.num_rows == sum(prompt is not None for prompt in prompts)
    assert summary.num_partitions > 3
    seen: list[int] = []
    num_groups = num_tokens = 0
    for number in range(summary.num_partitions):
        rows = read_partition(plan, tokens, number)
        assert [prompt.tolist() for prompt in rows.prompts] == [prompts[row] for row in rows.row_ids.tolist()]
        groups = rebuild_groups(rows.prompts, rows.group_id, rows.member_id, rows.num_prefix_tokens)
        num_groups += len(groups)
        num_tokens += sum(group.num_tokens for group in groups)
        seen += rows.row_ids.tolist()
    assert sorted(seen) == [row for row, prompt in enumerate(prompts) if prompt is not None]
    assert (num_groups, num_tokens) == (summary.num_groups, summary.sharing.num_processed_tokens)
    partitions = pq.read_table(plan.path).column("partition").to_pylist()
    assert partitions == sorted(partitions)


def test_nothing_to_plan_is_an_empty_plan(tmp_path: Path) -> None:
    plan = plan_prefix.fn(tokens_file(tmp_path, [None, None]), str(tmp_path / "plan.parquet"), "exact", 20, 2)
    assert (plan.num_rows, read_plan_summary(plan).num_partitions) == (0, 0)


def test_a_partition_is_gathered_from_whole_files_only(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, [[1, 2, 3], [1, 2, 4], [5]])
    plan = plan_prefix.fn(tokens, str(tmp_path / "plan.parquet"), "exact", 100, 1)
    assert read_partition(plan, tokens, 0).row_ids.tolist() == [0, 1, 2]
    with pytest.raises(ArtifactError, match="has no partition 1"):
        read_partition(plan, tokens, 1)
    shuffled = pq.read_table(tokens.path).take([2, 0, 1])
    other = write_parquet(tmp_path / "shuffled.parquet", TOKENS_SCHEMA, shuffled.to_batches())
    with pytest.raises(ArtifactError, match="are not the rows' positions"):
        read_partition(plan, other, 0)
    short = write_parquet(tmp_path / "short.parquet", TOKENS_SCHEMA, pq.read_table(tokens.path)[:2].to_batches())
    with pytest.raises(ArtifactError, match="holds 2 of the 3 rows"):
        read_partition(plan, short, 0)
    path = Path(tokens.path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="changed or damaged"):
        read_partition(plan, tokens, 0)
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_partition(plan, tokens, 0)
