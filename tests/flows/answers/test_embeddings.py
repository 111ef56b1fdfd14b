"""The examples of docs/embeddings.md as nights: embeddings of an encoder, and a reranker of pairs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.errors import DatabaseError, ModelError, WorkloadError
from flows.explain import explain
from tests.tiny_encoders import HIDDEN_SIZE, MAX_TOKENS, save_encoder, save_modules

PAGE = Path(__file__).parents[3] / "docs" / "embeddings.md"
BLOCKS = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
PROMPTS = {"prompts": {"query": "search for {it}: "}, "default_prompt_name": None}

pytestmark = pytest.mark.usefixtures("prefect_server")


def write(folder: Path, name: str, old: str = "", new: str = "") -> str:
    """The page's files; returns the path of the named one."""
    for block in ("embeddings.toml", "reranking.toml", "select_documents.sql"):
        (folder / block).write_text(BLOCKS[block].replace(old, new) if block == name else BLOCKS[block])
    return str(folder / name)


def read_embeddings(nights: Any) -> np.ndarray:
    rows = nights.sql("select embedding from latest_document_embeddings where status = 'ok' order by doc_id")
    return np.array([row[0] for row in rows], np.float32)


def test_documents_by_meaning(nights: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    nights.model = save_modules(save_encoder("bert", tmp_path / "model"), "pooling_mode_mean_tokens", **PROMPTS)
    nights.sql("insert into documents select 'copy', title, body from documents where doc_id = 'd1'")
    nights.sql("insert into documents values ('empty', 'A title', null)")
    path = write(tmp_path, "embeddings.toml")
    (summary,) = nights.run(path, partition_tokens=150)
    assert (summary.num_ok, summary.num_errors) == (5, 1)
    assert len(list(nights.runs.glob("*/parts/*"))) == 0, "the run is finished"
    texts = nights.sql("select title || chr(10) || body from documents where body is not null order by doc_id")
    model = SentenceTransformer(str(nights.model), device="cpu", model_kwargs={"dtype": "float32"})
    assert np.abs(read_embeddings(nights) - model.encode([text for (text,) in texts])).max() < 2e-5
    longest = nights.sql("select max(num_prompt_tokens) from document_embeddings")
    assert longest == [(MAX_TOKENS,)], "longer texts are cut, as sentence-transformers does"
    saved = nights.sql("select token_saving_ratio, best_token_saving_ratio, num_cached_tokens > 0 from runs")
    assert saved[0][0] == saved[0][1] > 0, "no prefix is shared, and none could be; the copy is computed once"
    assert saved[0][2]
    (page,) = nights.runs.glob("*/report.html")
    shown = [part in page.read_text() for part in ('id="requests"', "<dt>preempted", 'id="kv-memory"', "<dt>KV memory")]
    assert shown == [True, True, False, False], "an encoder has no KV memory"
    types = "select data_type from information_schema.columns where column_name = 'embedding'"
    assert nights.sql(types) == [(f"FLOAT[{HIDDEN_SIZE}]",)] * 2

    neighbours = nights.sql(BLOCKS["latest_neighbours"])
    assert len(neighbours) == 5 * 3
    assert neighbours[0][:2] == ("copy", "d1")
    assert ("copy", "d1") in [row[:2] for row in nights.sql(BLOCKS["near_duplicates"])]

    nights.sql("update documents set body = 'Another text.' where doc_id = 'd0'")
    (again,) = nights.run(path)
    assert (again.num_rows, again.num_ok, again.num_already_done) == (1, 1, 5)
    (asked,) = nights.run(write(tmp_path, "embeddings.toml", 'mode = "embed"', 'mode = "embed"\nprompt_name = "query"'))
    assert (asked.num_ok, asked.num_errors) == (5, 1), "another prompt is another text"
    texts = nights.sql("select title || chr(10) || body from documents where body is not null order by doc_id")
    expected = model.encode([text for (text,) in texts], prompt_name="query")
    assert np.abs(read_embeddings(nights) - expected).max() < 2e-5
    shorter = write(tmp_path, "embeddings.toml", 'mode = "embed"', 'mode = "embed"\ndimensions = 8')
    with pytest.raises(DatabaseError, match=re.escape(f"is FLOAT[{HIDDEN_SIZE}], batchloom writes FLOAT[8]")):
        nights.run(shorter)


def test_a_reranker_of_pairs(nights: Any, tmp_path: Path) -> None:
    nights.model = save_encoder("bert", tmp_path / "model", num_classes=1)
    (summary,) = nights.run(write(tmp_path, "reranking.toml"))
    assert (summary.num_ok, summary.num_errors) == (6, 0)
    pairs = nights.sql(
        "select query_text, body from reranked join queries using (query_id) join documents using (doc_id)"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(nights.model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(nights.model, dtype=torch.float32)
    inputs = tokenizer(*map(list, zip(*pairs, strict=True)), truncation=True, padding=True, return_tensors="pt")
    assert int(inputs["attention_mask"].sum(1).max()) == MAX_TOKENS, "of some pairs the longer text is cut"
    with torch.inference_mode():
        expected = model(**inputs).logits[:, 0].sigmoid().numpy()
    found = nights.sql(
        "select score, label, rank from reranked join queries using (query_id) join documents using (doc_id)"
    )
    assert np.abs(np.array([row[0] for row in found]) - expected).max() < 1e-5
    assert {row[1] for row in found} == {"LABEL_0"}
    ranks = "select rank = row_number() over (partition by query_id order by score desc) from latest_reranked"
    assert nights.sql(ranks) == [(True,)] * 6


def test_what_a_model_does_not_answer_is_an_error_before_any_work(nights: Any, tmp_path: Path) -> None:
    causal, encoder = nights.model, save_modules(save_encoder("bert", tmp_path / "m"), "pooling_mode_cls_token")
    cases = [
        (causal, "reranking.toml", "", "", ModelError, "no classification head"),
        (encoder, "embeddings.toml", 'mode = "embed"', 'mode = "embed"\ndimensions = 99', WorkloadError, "have 48"),
        (
            encoder,
            "embeddings.toml",
            'mode = "embed"',
            'mode = "embed"\ndimensions = 0',
            WorkloadError,
            "at least 1, got 0",
        ),
        (
            encoder,
            "embeddings.toml",
            'mode = "embed"',
            'mode = "embed"\nprompt_name = "q"',
            WorkloadError,
            "its prompts: none",
        ),
        (
            encoder,
            "embeddings.toml",
            'mode = "embed"',
            'mode = "embed"\nlabels = ["a"]',
            WorkloadError,
            "labels belong to",
        ),
    ]
    for nights.model, name, old, new, kind, message in cases:
        with pytest.raises(kind, match=message):
            nights.run(write(tmp_path, name, old, new))
    with pytest.raises(ModelError, match="is an encoder"):
        explain(nights.path, str(encoder), (write(tmp_path, "embeddings.toml"),))


def test_a_night_that_was_stopped_goes_on(nights: Any, tmp_path: Path) -> None:
    """Stopped in its second partition, as Ctrl-C does; the rest is left for the next night."""
    from tasks.partitions import partition_work

    nights.model = save_modules(save_encoder("roberta", tmp_path / "m"), "pooling_mode_cls_token")
    path = write(tmp_path, "embeddings.toml")
    keep, calls = partition_work.answer_batch, []

    def fail_later(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return keep(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_work, "answer_batch", fail_later)
        with pytest.raises(KeyboardInterrupt):
            nights.run(path, partition_tokens=60)
    (summary,) = nights.run(path)
    assert summary.num_already_done >= 1
    assert summary.num_already_done + summary.num_ok == 4
    assert len(read_embeddings(nights)) == 4
