"""What a user may set: each field is a question of Prefect's form and an option of the command line."""

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter

from engine.config import EngineConfig
from engine.plan import PlanMethod

_DEFAULT = EngineConfig()


class EngineSettings(BaseModel):
    """How the model computes; see `engine.EngineConfig`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="number format of weights and KV; auto: bfloat16 where the device computes it natively"),
    ] = _DEFAULT.dtype
    device: Annotated[str, Field(description="auto, cpu, cuda or cuda:1; auto: the first GPU, else the CPU")] = (
        _DEFAULT.device
    )
    kv_memory: Annotated[
        str,
        Field(
            description="memory for KV, such as 512MiB or 4GB; auto: the share memory_fraction of what is free",
            pattern=r"^(auto|\d+(\.\d+)? ?([kKmMgGtT]i?)?[bB]?)$",
        ),
    ] = str(_DEFAULT.kv_memory_bytes)
    memory_fraction: Annotated[float, Field(gt=0, le=1, description="used where kv_memory is auto")] = (
        _DEFAULT.memory_fraction
    )
    chunk_tokens: Annotated[int, Field(ge=1, description="most tokens in one step of the model")] = (
        _DEFAULT.chunk_tokens
    )
    block_size: Annotated[int, Field(ge=1, description="tokens in one block of KV")] = _DEFAULT.block_size
    max_model_len: Annotated[
        int | Literal["auto"], Field(description="longest prompt plus answer in tokens; auto: what the model allows")
    ] = _DEFAULT.max_model_len
    output_reserve: Annotated[
        float, Field(ge=0, le=1, description="share of an answer's length set aside in KV when it starts")
    ] = _DEFAULT.output_reserve
    num_threads: Annotated[int, Field(ge=0, description="of the CPU; 0: torch decides")] = _DEFAULT.num_threads

    def to_config(self) -> EngineConfig:
        """The engine's own form; raises `ConfigError` for what it refuses."""
        settings = self.model_dump(exclude={"kv_memory"})
        if self.kv_memory == "auto":
            return EngineConfig(**settings)
        return EngineConfig(**settings, kv_memory_bytes=int(TypeAdapter(ByteSize).validate_python(self.kv_memory)))


class PlanSettings(BaseModel):
    """How prompts are grouped by their shared beginnings, and how much work is one unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[PlanMethod, Field(description="exact: fewest tokens; paper: BatchLLM's Algorithm 1")] = "exact"
    partition_tokens: Annotated[
        int, Field(ge=1, description="tokens of work after which answers are on disk and survive an interruption")
    ] = 500_000
