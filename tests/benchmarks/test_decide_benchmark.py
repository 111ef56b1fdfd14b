"""The benchmark of several questions per row gives no figures if both sides' answers differ."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.decide import LARGEST_DIFFERENCE, QUESTIONS, Side, check, main
from benchmarks.measuring.wrong_answer import WrongAnswerError


def test_both_sides_give_the_same_answers(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "decide.json"
    options = ["--model", str(tiny_llama), "--rows", "3", "--row-tokens", "40", "--rounds", "1", "--dtype", "float32"]
    assert main([*options, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["num_rows"], found["num_questions"]) == (3, len(QUESTIONS))
    assert found["largest_difference"] < 1e-4
    assert found["num_computed_tokens_ratio"] > 1.2
    assert set(found) >= {"seconds_ratio", "cpu_seconds_ratio", "machine", "command"}


def test_a_wrong_answer_is_one_line(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LARGEST_DIFFERENCE, "float32", -1.0)  # so that no answer is right
    options = ["--rows", "1", "--row-tokens", "20", "--rounds", "1", "--dtype", "float32"]
    assert main(["--model", str(tiny_llama), *options]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"no figures: a probability differs by [\d.e+-]+ between the two sides\n", printed.err)


def test_another_answer_gives_no_figures() -> None:
    side = Side(seconds=1.0, cpu_seconds=1.0, num_computed_tokens=1, probabilities=[[(-0.1, -2.3)]])
    assert check(side, side, "float32") == 0.0
    with pytest.raises(WrongAnswerError, match="a probability differs by"):
        check(side, replace(side, probabilities=[[(-2.3, -0.1)]]), "bfloat16")
    with pytest.raises(WrongAnswerError, match="a probability differs by nan"):
        check(side, replace(side, probabilities=[[(-0.1, float("nan"))]]), "bfloat16")
