"""The source of a flow run whose model is not there, for tests that read rows and begin runs by hand."""

from pathlib import Path
from typing import Any

from tasks.runs.source import Source


def make_source(database: str | Path, model_digest: str = "digest", **given: Any) -> Source:
    """A source of rows of a database, for a model with this digest."""
    whole = {"model": "tiny", "checkpoint": Path("/nowhere"), "max_model_len": 1024, **given}
    return Source(database=Path(database), model_digest=model_digest, **whole)
