"""How long a model takes to load, where no night has loaded it yet."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.forecast.load_time import forecast_load


def test_a_folder_without_weights_is_refused_in_a_line(tmp_path: Path) -> None:
    with connect(tmp_path / "team.duckdb", create=True) as connection:
        create_schema(connection)
    given = (tmp_path / "team.duckdb", tmp_path, "digest", EngineConfig(device="cpu"))
    with pytest.raises(ModelError, match="the folder holds no weights"):
        forecast_load(*given)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="the folder holds no weights"):
        forecast_load(*given)
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 16))
    assert forecast_load(*given) > 0
