"""The inference engine: token ids in; token ids, label scores or embeddings out. It imports no database, workflow or
text code.

Names are imported when first used: the planner and the settings need no torch, which takes seconds to import.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from engine import cores  # noqa: F401  # which notes the cores before torch is imported

if TYPE_CHECKING:
    from engine.completion import Completion as Completion
    from engine.config import EngineConfig as EngineConfig
    from engine.encoding.encoder_engine import EncoderEngine as EncoderEngine
    from engine.engine import Engine as Engine
    from engine.execution.step_record import StepRecord as StepRecord
    from engine.grammar import Grammar as Grammar
    from engine.grammar import Vocabulary as Vocabulary
    from engine.keeping.keeping_engine import KeepingEngine as KeepingEngine
    from engine.penalties import Penalties as Penalties
    from engine.planning.group import PrefixGroup as PrefixGroup
    from engine.planning.prefix_groups import plan_prefix_groups as plan_prefix_groups
    from engine.request import Request as Request
    from engine.thinking import Thinking as Thinking

_MODULES = {
    "Completion": "engine.completion",
    "EncoderEngine": "engine.encoding.encoder_engine",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Grammar": "engine.grammar",
    "KeepingEngine": "engine.keeping.keeping_engine",
    "Penalties": "engine.penalties",
    "PrefixGroup": "engine.planning.group",
    "Request": "engine.request",
    "StepRecord": "engine.execution.step_record",
    "Thinking": "engine.thinking",
    "Vocabulary": "engine.grammar",
    "plan_prefix_groups": "engine.planning.prefix_groups",
}

# Both variables are read when torch is imported. OpenMP threads that wait for each other spin for milliseconds by
# default, which slows a run down several times on cores shared with other programs; tens of microseconds suffice.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Weights, KV and rows in pages of 2 MB: a product over pages of 4 KB touches more pages than the TLB has entries.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
