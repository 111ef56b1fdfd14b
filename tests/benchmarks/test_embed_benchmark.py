"""The benchmark of embeddings: it runs, and refuses figures for embeddings that differ."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import embed
from benchmarks.measuring.wrong_answer import WrongAnswerError


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = ["--shape", "tiny", "--texts", "6", "--rounds", "1", "--dtype", "float32", "--out", str(out)]
    assert embed.main(options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["lengths"] for row in rows] == ["mixed", "equal"]
    assert all(row["ratio"] > 0 and row["share_of_matrix_ceiling"] > 0 for row in rows)
    assert "float32" in capsys.readouterr().out


def test_embeddings_that_differ_give_no_figures() -> None:
    right = np.ones((2, 4), np.float32) / 2
    with pytest.raises(WrongAnswerError, match="differs by"):
        embed.check(right, right + np.float32(1e-3), "float32")
    with pytest.raises(WrongAnswerError, match="nan"):
        embed.check(right, right * np.float32("nan"), "float32")
