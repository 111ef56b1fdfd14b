"""The benchmark of typed answers on a tiny model: its gate and its judges work, whatever its figures are."""

import json
from pathlib import Path

import duckdb
import pytest

from benchmarks import typed
from benchmarks.measuring.wrong_answer import WrongAnswerError

GOOD = {
    "vendor_name": "Łódź {Stal}",
    "invoice_number": "AX-0001",
    "invoice_date": "2025-02-28",
    "currency": "EUR",
    "total_amount": 12.5,
    "number_of_items": 3,
    "is_already_paid": None,
    "payment_terms": "on receipt",
}


def test_it_measures_and_judges(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--rows 2 --rounds 1 --gate-rows 2 --validity-rows 3 --dtype float32 --threads 1 --kv-bytes 8388608"
    out = tmp_path / "typed.json"
    assert typed.main(["--model", str(tiny_llama), *sizes.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert str(tmp_path) not in result["command"]
    assert set(result["speed"]["ratios"]) == {"masks", "forced tokens as prefill"}
    (timed,) = result["speed"]["rounds"]
    assert timed["free"]["tokens"] == timed["one by one"]["tokens"] == timed["chunks"]["tokens"]
    assert timed["one by one"]["steps"] == timed["free"]["steps"] > timed["chunks"]["steps"]
    assert sum(result["validity"]["typed"].values()) == 3
    assert "forced tokens as prefill" in capsys.readouterr().out


def test_the_judges_find_what_is_wrong() -> None:
    with duckdb.connect() as connection:
        assert typed.judge(json.dumps(GOOD), connection) == ""
        for name, value in (
            ("invoice_date", "2025-02-30"),
            ("currency", "YEN"),
            ("total_amount", 1e12),
            ("number_of_items", -1),
            ("invoice_number", "AX-1"),
        ):
            assert typed.judge(json.dumps(GOOD | {name: value}), connection), name
        assert typed.judge(json.dumps(GOOD)[:-1], connection) == "JSONDecodeError"


def test_other_ids_end_it(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = typed.Bench(tiny_llama, "float32", 1, 8 << 20)
    prompts = typed.make_prompts(bench.codec, 2)
    monkeypatch.setattr(bench, "chunks", bench.one_by_one.from_pattern("[ab]{9}", bench.chunks.vocabulary))
    with pytest.raises(WrongAnswerError, match="row 0: chunks give other ids"):
        typed.check_ids(bench, prompts)
