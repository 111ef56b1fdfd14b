"""Configurations of several tables: servers, as the papers' baselines, and this engine."""

from collections.abc import Mapping
from typing import Any

from engine.config import EngineConfig

Settings = Mapping[str, Any]

SERVER: Settings = {"sharing": "none", "order": "fcfs", "max_running_requests": 256, "output_reserve": 0.0}
"""A server's policies: first come first served, at most 256 requests, admitted by the memory in use now."""

WHOLE: Settings = {"prefill": "whole", "max_num_batched_tokens": 8192}
"""Whole prompts, several per step: without chunks, servers allow larger steps."""

SERVERS: Mapping[str, Settings] = {
    "server": {**SERVER, **WHOLE},
    "+ prefix caching": {**SERVER, **WHOLE, "sharing": "lru"},
    "+ chunked prefill": SERVER,
    "+ both": {**SERVER, "sharing": "lru"},
}
OURS: Mapping[str, Settings] = {
    "single level": {"sharing": "group"},
    "path (default)": {},
}


def describe(settings: Settings) -> str:
    """The fields that differ from the defaults, as code."""
    return ", ".join(f"`{name}={value!r}`".replace("'", '"') for name, value in settings.items()) or "defaults"


def simulated_config(settings: Settings) -> EngineConfig:
    """Settings of servers on GPUs: blocks of 16 tokens, 2,048 tokens per step."""
    return EngineConfig(**{"block_size": 16, "max_num_batched_tokens": 2048, **settings})
