"""From requests to tokens: the order of the rows, their limits and errors."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import ModelError, WorkloadError
from engine.model.layer_counts import text_config_of
from engine.model.longest_sequence import longest_sequence
from tasks.prompts.prompt import PromptEncoder, RequestForm, build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.storage.artifact import write_parquet
from tasks.storage.schemas import TOKENS_SCHEMA
from tasks.tokenize import read_max_model_len, tokenize_requests, write_tokens
from tasks.workloads.workload import Prompt, load_workload
from tests.engine.model.families import make_config


@pytest.fixture(scope="module")
def codec(tiny_llama: Path) -> TextCodec:
    return TextCodec.load(tiny_llama)


def tokenize_table(table: pa.Table, codec: TextCodec, folder: Path, **limits: int) -> list[dict[str, Any]]:
    """The rows of tokens.parquet for requests in row groups of 300."""
    pq.write_table(table, folder / "requests.parquet", row_group_size=300)
    form = build_prompt_format(Prompt(system="", template="{body} {title}", chat=False, may_be_empty=()), codec)
    encode = PromptEncoder(form, codec).encode
    with pq.ParquetFile(folder / "requests.parquet") as file:
        options = {"max_model_len": 64, "num_answer_tokens": 8} | limits
        batches = list(tokenize_requests(file, ["body", "title"], encode, **options))
    return pa.Table.from_batches(batches, TOKENS_SCHEMA).to_pylist()


def requests_table(bodies: Sequence[str | None], errors: Sequence[str | None] | None = None) -> pa.Table:
    count = len(bodies)
    return pa.table(
        {
            "row_id": pa.array(range(count), pa.int64()),
            "body": pa.array(bodies, pa.large_string()),
            "title": pa.array(["t"] * count, pa.large_string()),
            "error": pa.array(errors or [None] * count, pa.large_string()),
            "row_priority": pa.array([0] * count, pa.int64()),
        }
    )


def test_a_tokenizer_is_read_once_while_its_folder_stays_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    first = TextCodec.load(folder)
    assert TextCodec.load(folder) is first
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    second = TextCodec.load(folder)
    assert second.render_chat([{"role": "user", "content": "go"}]) == "go!"
    assert TextCodec.load(tiny_llama) not in (first, second)


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


def test_labels_need_room_for_all_their_tokens_but_the_last(codec: TextCodec) -> None:
    workload = load_workload("ranking")
    lengths = [len(label) for label in RequestForm.of(workload, codec, None).settings[0]["labels"]]
    assert RequestForm.of(workload, codec, None).num_answer_tokens == max(lengths) - 1


def test_answers_as_long_as_the_model_are_refused_for_all_rows_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    workload = load_workload("snippets")  # answers have 48 tokens at most
    rows = pa.table({"row_id": pa.array([0], pa.int64()), "error": pa.array(["body is NULL"])})
    requests = write_parquet(tmp_path / "requests.parquet", rows.schema, rows.to_batches())
    with pytest.raises(WorkloadError, match=r"'snippets': answers of up to 48 tokens leave no room .* the model's 48"):
        write_tokens(requests, tmp_path / "tokens.parquet", workload, tiny_llama, 48)


def test_no_requests_are_no_tokens(codec: TextCodec, tmp_path: Path) -> None:
    assert tokenize_table(requests_table([]), codec, tmp_path) == []


@pytest.mark.parametrize(("setting", "expected"), [("auto", 1024), (100, 100), (5000, 1024)])
def test_the_model_length_is_the_lower_of_two(tiny_llama: Path, setting: Any, expected: int) -> None:
    assert read_max_model_len(tiny_llama, setting) == expected


PHI3 = {  # as in the repository of Phi-3-mini-128k-instruct
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.03] * 48},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(make_config("phi4-mini").to_dict(), 4096), (PHI3, 4096), (PHI3 | {"rope_scaling": None}, 131072)],
)
def test_the_model_length_is_the_engine_s(config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    """With longrope, a sequence ends at the first length: a longer prompt is cut or an error before the engine."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    text_config = text_config_of(config)
    assert read_max_model_len(tmp_path, "auto") == longest_sequence(text_config) == expected
    assert read_max_model_len(tmp_path, 100) == 100


def test_a_model_without_a_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ModelError, match=r"config\.json: max_position_embeddings must be a positive"):
        read_max_model_len(tmp_path, "auto")


WORKLOAD = """
name = "topics"
mode = "decide"
requests_sql = "requests.sql"
key = ["id"]

[prompt]
template = "Text: {body} Title: {title}"
chat = false
cut = "body"

[questions]
short = { type = "BOOLEAN", ask = "Good?" }
long = { type = "BOOLEAN", ask = "Is the watchman's walk through the night a long one?" }

[output]
table = "topics"
"""


def test_a_text_that_is_too_long_loses_its_end(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each row as much as fits with the longest question: its questions share the same text. Where nothing of the
    text would be left, and where it is not the text that is too long, the row is an error."""
    (tmp_path / "requests.sql").write_text("select 1 as id, '' as body, '' as title")
    (tmp_path / "topics.toml").write_text(WORKLOAD)
    workload, codec, limit = load_workload(tmp_path / "topics.toml"), TextCodec.load(tiny_llama), 99
    bodies = ["short", "The night watchman walks, " * 40, "Åé漢😀 " * 99, "w" * 400, "fine"]
    table = requests_table(bodies).append_column("open_questions", pa.array([[0, 1]] * len(bodies)))
    titles = pa.array([*"tttt", "a long title " * 40], pa.large_string())
    table = table.set_column(table.column_names.index("title"), "title", titles)
    requests = write_parquet(tmp_path / "requests.parquet", table.schema, table.to_batches())
    with caplog.at_level("INFO", logger="batchloom"):
        write_tokens(requests, tmp_path / "tokens.parquet", workload, tiny_llama, limit + 1)  # one for the answer
    assert caplog.messages == ["prompts of more than 99 tokens lose the end of {body}"]
    rows = pq.read_table(tmp_path / "tokens.parquet").to_pylist()

    def encode(row: int, size: int) -> list[list[int]]:
        text = f"Text: {bodies[row][:size]} Title: {titles[row]}"
        return codec.encode([text + suffix for suffix in workload.kind.suffixes], add_special_tokens=True)

    for row in range(4):
        found = [each["token_ids"] for each in rows[2 * row : 2 * row + 2]]
        (kept,) = (size for size in range(len(bodies[row]) + 1) if encode(row, size) == found)
        assert max(map(len, found)) <= limit
        assert bool(row) == (kept < len(bodies[row]))
        assert kept == len(bodies[row]) or max(map(len, encode(row, kept + 1))) > limit
    assert [each["error"] is None for each in rows] == [True] * 8 + [False] * 2
    assert "the limit is 99" in rows[-1]["error"]
    (tmp_path / "topics.toml").write_text(WORKLOAD.replace('cut = "body"\n', ""))
    assert load_workload(tmp_path / "topics.toml").digest != workload.digest
