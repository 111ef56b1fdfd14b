"""The benchmark of int8 on a tiny model: its referee recognises greedy answers."""

import json
from pathlib import Path

import pytest

from benchmarks import agreement
from benchmarks.measuring import engine_session


@pytest.mark.slow
def test_it_counts_what_float32_would_have_said(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_session, "PEERS_FOLDER", tmp_path / "peers")
    short = {name: text[:5000] for name, text in agreement.texts().items()}
    monkeypatch.setattr(agreement, "texts", lambda: short)
    out = tmp_path / "agreement.json"
    sizes = "--engines batchloom --rows 6 --row-tokens 24 --tokens 5 --windows 2 --window-tokens 40 --threads 1"
    assert agreement.main(["--model", str(tiny_llama), *sizes.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert str(tmp_path) not in result["command"]
    found = result["engines"]["batchloom"]
    assert found["versions"]["torch"] == result["machine"]["versions"]["torch"]
    assert (found["num_answers"], found["num_tokens"]) == (6, 30)
    assert found["same_answers"] <= found["same_first_tokens"] <= 6
    assert (found["same_tokens"] == 30) == (found["mean_gap"] == 0) == (found["same_answers"] == 6)
    assert found["same_tokens"] >= 15  # random answers would have hardly any
    assert found["num_labels"] == 72
    assert found["same_labels"] >= 60  # random labels would have half of them
    assert 0 < found["mean_probability_error"] < 0.1
    exact, rounded, in_bytes = (result["texts"][dtype] for dtype in ("float32", "bfloat16", "int8"))
    assert len(exact) == 5
    for name, text in exact.items():
        assert text["divergence"] == 0
        assert text["same_tokens"] == 1
        assert rounded[name]["perplexity"] == pytest.approx(text["perplexity"], rel=0.02)
        assert in_bytes[name]["perplexity"] == pytest.approx(text["perplexity"], rel=0.1)
        assert 0 < rounded[name]["divergence"] < in_bytes[name]["divergence"] < 0.1
        assert rounded[name]["same_tokens"] <= 1
