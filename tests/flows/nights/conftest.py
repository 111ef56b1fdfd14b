"""Fixtures for nights."""

from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Any]]:
    """Checkpoint and adapter of each engine that this process loads."""
    found: list[tuple[Path, Any]] = []
    load = Engine.load.__func__  # type: ignore[attr-defined]

    def count(engine_class: type[Engine], model: str, *arguments: Any, **keywords: Any) -> Engine:
        found.append((Path(model), keywords["adapter"]))
        engine: Engine = load(engine_class, model, *arguments, **keywords)
        return engine

    monkeypatch.setattr(Engine, "load", classmethod(count))
    return found
