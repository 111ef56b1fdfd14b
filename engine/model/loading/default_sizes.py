"""Sizes that config.json may leave to the defaults of transformers' config class."""

from collections.abc import Mapping
from typing import Any

from engine.model.loading.config_sizes import read_size, read_sizes


def find_size(config: Mapping[str, Any], name: str) -> int:
    """A size of the text model in a config.json, or transformers' default, by its usual name; transformers, which takes
    seconds to import, is asked only where config.json has no such key. Raises `ModelError` where neither has one."""
    values = config.get("text_config", config)
    is_named = isinstance(values, Mapping) and name in values
    return read_size(values if is_named else read_sizes(config), name)
