"""The benchmark of number formats measures every format and every work, or refuses to."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import formats
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.config import EngineConfig
from engine.engine import Engine


def test_every_format_is_timed_on_every_work(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "formats.json"
    options = ["--formats", "float32", "bfloat16", "--rows", "1", "3", "--prompts", "3", "--new-tokens", "4"]
    assert formats.main(["--model", str(tiny_llama), *options, "--rounds", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["works"].keys() == {"prompts", "decode 1", "decode 3"}
    for by_format in found["works"].values():
        assert by_format.keys() == {"float32", "bfloat16"}
        assert by_format["float32"]["all_speedups"] == [1.0, 1.0]
        assert all(len(figures["all_speedups"]) == 2 for figures in by_format.values())
    assert 0 < found["largest_differences"]["bfloat16"] < formats.LARGEST_DIFFERENCE


def test_figures_are_medians_of_all_rounds_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rounds 2 to 4 a format takes 16, 24 and 32 ms, another one 5, 7 and 9."""
    times = {"slow": lambda seed: 8.0 * seed, "fast": lambda seed: 2.0 * seed + 1}
    engines: Any = {name: SimpleNamespace(vocab_size=9, ms=ms) for name, ms in times.items()}
    monkeypatch.setattr(formats.Bench, "time_prompts", lambda _, engine, seed: engine.ms(seed))
    monkeypatch.setattr(formats.Bench, "time_decode", lambda _, engine, num_rows, seed: num_rows * engine.ms(seed))
    found = formats.Bench(engines, num_prompts=1, num_new_tokens=1).measure(3, [5])
    speedups = {"speedup": 3.429, "all_speedups": [3.2, 3.429, 3.556]}
    assert found["prompts"]["fast"] == {"ms": 7.0, **speedups}
    assert found["decode 5"]["fast"] == {"ms": 35.0, **speedups}
    assert found["decode 5"]["slow"] == {"ms": 120.0, "speedup": 1.0, "all_speedups": [1.0] * 3}


def test_each_round_begins_with_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    engines: Any = {name: SimpleNamespace(vocab_size=9, name=name) for name in ("one", "two", "three")}
    monkeypatch.setattr(formats.Bench, "time_prompts", lambda _, engine, seed: order.append(engine.name) or seed)
    formats.Bench(engines, num_prompts=1, num_new_tokens=1).measure(3, [])
    assert order == ["one", "two", "three", "two", "three", "one", "three", "one", "two", "one", "two", "three"]


def test_another_model_gives_no_figures(tiny_checkpoint: Any) -> None:
    config = EngineConfig(dtype="float32", kv_memory_bytes=8 << 20)
    engines = {name: Engine.load(tiny_checkpoint(name), config) for name in ("llama", "qwen3")}
    bench = formats.Bench(engines, num_prompts=8, num_new_tokens=2)
    with pytest.raises(WrongAnswerError, match="a probability in qwen3 differs by"):
        bench.check()


def test_a_wrong_answer_is_one_line(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "LARGEST_DIFFERENCE", -1.0)  # so that no answer is right
    options = ["--formats", "float32", "bfloat16", "--prompts", "2", "--rounds", "1"]
    assert formats.main(["--model", str(tiny_llama), *options]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"no figures: a probability in bfloat16 differs by \S+ from that in float32\n", printed.err)
