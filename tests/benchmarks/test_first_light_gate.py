"""What the gate of a GPU's first minutes refuses, beyond wrong answers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.first_light.answers import Answering
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine import Engine, EngineConfig


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        (["operation not permitted"], "1 captures of CUDA graphs failed: operation not"),
        ([], "no CUDA graph was captured"),
    ],
)
def test_answers_without_graphs_do_not_pass_for_answers_with_them(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, failures: list[str], message: str
) -> None:
    """An engine goes on where a capture fails, and answers alike."""

    def make_engine(answering: Answering, dtype: str, cuda_graphs: str = "auto") -> Any:
        config = EngineConfig(dtype=dtype, device="cpu", attention="torch", kv_memory_bytes=1 << 24)
        engine = Engine.load(str(tiny_llama), config)
        if cuda_graphs == "auto":
            found = {"capture_ms": [1.0] * len(failures), "failures": failures, "forward": lambda *_: None}
            engine._runner.graphs = SimpleNamespace(**found)  # type: ignore[assignment]
        return engine

    monkeypatch.setattr(Answering, "_engine", make_engine)
    answering = Answering(str(tiny_llama), "cpu", 500)
    answering._is_tiny = False
    with pytest.raises(WrongAnswerError, match=message):
        answering.with_graphs()
