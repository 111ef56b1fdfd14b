"""A plan, or a part of it, through the simulated engine of one device."""

from collections.abc import Iterator, Sequence

from engine.config import EngineConfig
from engine.planning.prefix_groups import PrefixGroup
from engine.request import Request
from engine.simulation.roofline import Roofline
from engine.simulation.simulation import SimulatedStep, simulate_plan
from tasks.forecast.answer_length import AnswerLength
from tasks.forecast.hardware import Hardware


class Simulator:
    """Runs groups as the engine would, under any configuration."""

    __slots__ = ("_kv_bytes_per_token", "_num_answer_tokens", "_roofline")

    def __init__(self, hardware: Hardware, answer: AnswerLength) -> None:
        """Raises `ConfigError` where the device has no rate for the number format."""
        self._num_answer_tokens = answer.num_tokens
        self._roofline = Roofline(hardware.shape, hardware.device, hardware.dtype)
        self._kv_bytes_per_token = hardware.shape.kv_bytes_per_token

    def run(
        self, requests: Sequence[Request], groups: Sequence[PrefixGroup], config: EngineConfig, budget_bytes: int
    ) -> Iterator[SimulatedStep]:
        """The steps, one by one, with `budget_bytes` of KV memory."""
        return simulate_plan(
            requests,
            groups,
            num_answer_tokens=self._num_answer_tokens,
            num_kv_blocks=budget_bytes // (config.block_size * self._kv_bytes_per_token),
            config=config,
            roofline=self._roofline,
        )
