"""Simulated runs: the real planner and scheduler of a configuration, steps timed by a roofline of a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.model.model_shape import ModelShape
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request
from engine.simulation.device import DEVICES, Roofline
from engine.simulation.simulation import SimulatedStep, SimulationSummary, simulate_plan, summarize_steps

MISTRAL_7B = ModelShape(
    num_layers=32, hidden_size=4096, intermediate_size=14336, num_q_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=32000, has_tied_embeddings=False, value_bytes=2,
)  # fmt: skip
QWEN2_7B = ModelShape(
    num_layers=28, hidden_size=3584, intermediate_size=18944, num_q_heads=28, num_kv_heads=4, head_dim=128,
    vocab_size=152064, has_tied_embeddings=False, value_bytes=2,
)  # fmt: skip
MEMORY_FRACTION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is simulated: a model's shape in bfloat16 on a device of `engine.simulation.device`."""

    model: str
    shape: ModelShape
    device: str

    @property
    def title(self) -> str:
        return DEVICES[self.device].title

    @property
    def text(self) -> str:
        return f"simulated: {self.title}, {self.model}'s shape in bfloat16"

    @property
    def kv_bytes(self) -> int:
        """KV memory of the whole device."""
        return int(MEMORY_FRACTION * (DEVICES[self.device].memory_bytes - self.shape.weight_bytes))

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.shape, DEVICES[self.device], "bfloat16")

    def run(self, requests: Sequence[Request], config: EngineConfig, *, kv_bytes: int | None = None) -> "SimulatedRun":
        """Simulate the requests with one configuration, in the device's whole KV memory or less."""
        block_bytes = config.block_size * self.shape.kv_bytes_per_token
        steps = list(
            simulate_plan(
                requests,
                plan_prefix_groups([request.token_ids for request in requests]),
                num_answer_tokens=max(request.max_new_tokens for request in requests),
                num_kv_blocks=(self.kv_bytes if kv_bytes is None else kv_bytes) // block_bytes,
                config=config,
                roofline=self.roofline,
            )
        )
        return SimulatedRun(
            requests=requests,
            steps=steps,
            summary=summarize_steps(steps),
            max_num_batched_tokens=config.max_num_batched_tokens,
        )


A100 = Place(model="Mistral-7B", shape=MISTRAL_7B, device="a100")
MI250 = Place(model="Qwen2-7B", shape=QWEN2_7B, device="mi250")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The steps of a run, and the papers' metrics."""

    requests: Sequence[Request]
    steps: Sequence[SimulatedStep]
    summary: SimulationSummary
    max_num_batched_tokens: int

    @property
    def seconds(self) -> float:
        return self.summary.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.requests) / self.seconds

    @property
    def token_saving_ratio(self) -> float:
        """Eq. 2 with the tokens that steps computed, recomputation after preemption included."""
        return 1 - self.summary.num_prompt_tokens / sum(len(request.token_ids) for request in self.requests)

    @property
    def num_warm_steps(self) -> int:
        """Steps without the cool-down."""
        return self.summary.num_steps - self.summary.num_cool_down_steps

    @property
    def warm_seconds(self) -> float:
        """Time excluding the cool-down (TECD, section 6.3.2)."""
        return self.seconds - self.summary.cool_down_seconds

    @property
    def warm_tokens(self) -> list[int]:
        """Tokens of each step before the cool-down."""
        return [step.record.num_tokens for step in self.steps[: self.num_warm_steps]]

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a step before the cool-down."""
        return sum(self.warm_tokens) / max(1, self.num_warm_steps)

    @property
    def valley_share(self) -> float:
        """Share of the steps before the cool-down that use less than half of the token budget."""
        return sum(count < self.max_num_batched_tokens / 2 for count in self.warm_tokens) / max(1, self.num_warm_steps)

    @property
    def mean_completion_seconds(self) -> float:
        """Mean seconds from the start of the run to an answer."""
        elapsed = weighted = 0.0
        for step in self.steps:
            elapsed += step.cost.seconds
            weighted += elapsed * step.record.num_finished_requests
        return weighted / max(1, self.summary.num_finished_requests)
