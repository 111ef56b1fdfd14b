"""How long a sequence may be where rotary angles depend on the longest one of a batch."""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from engine.model.layer_counts import text_config_of
from engine.model.loading.config_sizes import find_size


def find_longest(config: Mapping[str, Any]) -> int:
    """As `longest_sequence`, of a config.json. transformers, which takes seconds to import, is asked only for longrope,
    or as in `find_size`. Raises `ModelError` where config.json cannot be used."""
    text_config = text_config_of(config) if "long_factor" in str(config) else None
    return find_size(config, "max_position_embeddings") if text_config is None else longest_sequence(text_config)


def longest_sequence(config: Any) -> int:
    """The longest sequence, in tokens, whose rotary angles do not depend on the rest of the batch.

    Rotary embeddings of type longrope change all angles of a batch once one of its sequences is longer than the
    original context. Sequences are therefore limited to that; those of other types to max_position_embeddings. Raises
    `ModelError` if the text model's config, one of transformers, lacks it.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ModelError(f"architecture {config.model_type!r}: config.json names no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    longrope = [kind for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([longest, *(int(kind.get("original_max_position_embeddings", longest)) for kind in longrope)])
