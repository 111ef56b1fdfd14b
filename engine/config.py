"""Settings of one engine: few, frozen, checked when made."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine computes. Unknown keywords raise; values out of range raise `ConfigError`.

    Args:
        dtype: of weights and KV; "auto" is bfloat16 where the device computes it natively, else float32.
        device: "auto" is the first GPU, else the CPU.
        attention: "torch" on the CPU, the Triton kernel "fused" on a GPU, which "auto" means; "plain" (paged) and
            "relay" (three launches) are there to compare with.
        block_size: tokens in a KV block.
        chunk_tokens: most tokens in one token batch (S_chunk of BatchLLM section 4.3.3).
        kv_memory_bytes: KV budget (M_threshold); "auto" takes `memory_fraction` of the memory free after loading.
        memory_fraction: used where kv_memory_bytes is "auto".
        max_model_len: longest prompt plus answer, in tokens; "auto" is the checkpoint's own limit.
        output_reserve: share of an answer's expected length that is set aside in KV memory when a request starts.
            1 makes preemption rare; 0 admits by what is held now, as Algorithm 2 of BatchLLM does.
        compile: whether torch.compile fuses the elementwise work of the model. "auto" does so in 16-bit formats where
            a C++ compiler is installed and the plan is long enough to pay for the seconds it takes.
        num_threads: of the CPU; 0 leaves torch's setting.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attention: Literal["auto", "torch", "plain", "relay", "fused"] = "auto"
    block_size: int = 16
    chunk_tokens: int = 1024
    kv_memory_bytes: int | Literal["auto"] = "auto"
    memory_fraction: float = 0.8
    max_model_len: int | Literal["auto"] = "auto"
    output_reserve: float = 1.0
    compile: Literal["auto", "always", "never"] = "auto"
    num_threads: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got {self.dtype!r}")
        if self.compile not in ("auto", "always", "never"):
            raise ConfigError(f"compile must be 'auto', 'always' or 'never', got {self.compile!r}")
        if self.attention not in ("auto", "torch", "plain", "relay", "fused"):
            raise ConfigError(f"attention must be 'auto', 'torch', 'plain', 'relay' or 'fused', got {self.attention!r}")
        for name in ("block_size", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kv_memory_bytes", "max_model_len"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, int) and value > 0):
                raise ConfigError(f"{name} must be 'auto' or a positive whole number, got {value!r}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}")
        if not 0.0 <= self.output_reserve <= 1.0:
            raise ConfigError(f"output_reserve must be from 0 to 1, got {self.output_reserve}")
        if self.num_threads < 0:
            raise ConfigError(f"num_threads must not be negative, got {self.num_threads}")
