"""The inference engine: token ids in, token ids or label scores out. It knows no database, workflow or text."""

from engine.config import EngineConfig
from engine.engine import Engine
from engine.plan import PrefixGroup, plan_prefix_groups
from engine.request import Completion, Request
from engine.step_record import StepRecord

__all__ = ["Completion", "Engine", "EngineConfig", "PrefixGroup", "Request", "StepRecord", "plan_prefix_groups"]
