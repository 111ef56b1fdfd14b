"""The benchmark of grammar libraries, with the one that is a dependency; its judge finds what is wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import grammars
from benchmarks.measuring.wrong_answer import WrongAnswerError


def test_it_measures_each_case(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "grammars.json"
    arguments = [str(tiny_llama), "--rounds", "1", "--libraries", "llguidance", "--out", str(out)]
    assert grammars.main(arguments) == 0
    result = json.loads(out.read_text())
    assert len(result["cases"]) == 5
    for case in result["cases"].values():
        figures = case["llguidance"]
        assert figures["compile_ms"] > 0
        assert 0 < figures["forced"] < 1
    wrong = {name for name, verdict in result["types"]["llguidance"].items() if verdict}
    assert wrong == {"HUGEINT"}, "it has no whole numbers of 128 bits in a JSON schema"


def test_what_is_wrong_is_found(tiny_llama: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_llama)

    class Lax(grammars.LLGuidance):
        """Takes any JSON for any schema."""

        def compile(self, schema: Any) -> Any:
            return super().compile({"type": ["string", "number", "boolean", "array"]})

    verdicts = grammars.judge_types(Lax(tokenizer, 512, 2))
    assert 'takes "abcd"' in verdicts["VARCHAR of 3"]
    assert "refuses null" in verdicts["BOOLEAN, nullable"]
    library, mask = grammars.LLGuidance(tokenizer, 512, 2), np.zeros((1, 16), np.int32)
    token_ids = tokenizer.encode("[1]", add_special_tokens=False)
    with pytest.raises(WrongAnswerError, match="does not allow token 0"):
        grammars.answer(library, library.compile({"type": "boolean"}), token_ids, mask)
