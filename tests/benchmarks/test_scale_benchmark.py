"""The benchmark of nights larger than memory: its night of embeddings, on few texts and in this process."""

from pathlib import Path

import duckdb
import pytest

from benchmarks.measuring import embedding_night as night
from benchmarks.measuring.wrong_answer import WrongAnswerError


def test_a_night_of_embeddings_is_measured_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    num_texts = 30
    night.prepare(tmp_path, num_texts)
    for stage in night.STAGES:
        night.run_stage(stage, tmp_path)
    found = night.check(tmp_path, num_texts)
    assert found["num_requests"] == num_texts
    assert found["num_prompt_tokens"] > 30 * num_texts
    with pytest.raises(WrongAnswerError, match=r"rows, texts and answers are \(30, 30, 30\), expected 31 each"):
        night.check(tmp_path, num_texts + 1)
    with duckdb.connect(str(tmp_path / "case.duckdb")) as connection:
        connection.execute("update document_embeddings set embedding = list_reverse(embedding::float[])::float[384]")
    with pytest.raises(WrongAnswerError, match="an embedding differs by"):
        night.check(tmp_path, num_texts)
