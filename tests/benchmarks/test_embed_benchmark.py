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
    assert rows[1]["num_tokens"] == 6 * (embed.EQUAL_WORDS + 2)  # with [CLS] and [SEP]
    printed = capsys.readouterr().out.splitlines()[1:3]
    for row, line in zip(rows, printed, strict=True):
        seconds = {name: wall for name, ((wall, _),) in row["runs"].items()}
        rates = {name: row["num_tokens"] / wall for name, wall in seconds.items()}
        assert row["tokens_per_second"] == pytest.approx(rates)
        assert row["ratio"] == pytest.approx(seconds["theirs"] / seconds["ours"])
        assert 0 < row["share_of_matrix_ceiling"] < 1
        assert line.split()[:5] == ["float32", row["lengths"], *(f"{rates[name]:,.0f}" for name in ("ours", "theirs")),
                                    f"{row['ratio']:.2f}"]  # fmt: skip


def test_embeddings_that_differ_give_no_figures() -> None:
    right = np.ones((2, 4), np.float32) / 2
    with pytest.raises(WrongAnswerError, match="differs by"):
        embed.check(right, right + np.float32(1e-3), "float32")
    with pytest.raises(WrongAnswerError, match="nan"):
        embed.check(right, right * np.float32("nan"), "float32")
