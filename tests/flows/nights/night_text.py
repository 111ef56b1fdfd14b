"""The first lines of a night's file."""

from collections.abc import Mapping
from pathlib import Path


def night_text(models: Mapping[str, Path], **settings: int) -> str:
    """The database of the fixture `nights`, and the models by name, each in float32 with these settings."""
    text = 'database = "team.duckdb"\n'
    for name, path in models.items():
        text += f'[models.{name}]\npath = "{path}"\ndtype = "float32"\nkv_memory = "8MiB"\n'
        text += "".join(f"{key} = {value}\n" for key, value in settings.items())
    return text
