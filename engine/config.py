"""Settings of one engine: few, frozen, checked when made."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from engine.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "native", "torch", "paged", "relay", "fused"]
Compile = Literal["auto", "always", "never"]
Order = Literal["ratio", "fcfs", "sjf", "priority"]
Sharing = Literal["path", "group", "lru", "none"]
Batching = Literal["continuous", "static", "dynamic"]
Prefill = Literal["chunked", "whole"]
Packing = Literal["ragged", "prepacked", "length_ordered", "padded"]
Preemption = Literal["recompute", "swap", "kill"]
Disaggregation = Literal["none", "processes"]
"""Which process computes prompts, and which one decodes (batching notes, "Prefill-Decode Disaggregation").

"none"
    one process does both.
"processes"
    prompts are computed in a process of their own on this host, which the engine starts and ends; their KV comes
    through shared memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine computes. Unknown keywords raise; values out of range raise `ConfigError`.

    The policies change what is computed when, and how often, but no answer; their modules say what each value does.

    Args:
        dtype: of weights and KV; "auto" is bfloat16 where the device computes it natively, else float32.
        device: "auto" is the first GPU, else the CPU.
        attention: on the CPU "native" (compiled on first use; "auto" where there is a C++ compiler) or "torch"; on a
            GPU the Triton kernel "fused", which "auto" means there; "paged" and "relay" (three launches) are
            there to compare with.
        block_size: tokens in a KV block; "native" attention takes multiples of 32.
        max_num_batched_tokens: most tokens in one token batch (S_chunk of BatchLLM section 4.3.3).
        kv_memory_bytes: KV budget (M_threshold); "auto" takes `memory_fraction` of what is left: on the CPU, of what is
            free after loading; on a GPU, of what weights, a full step, CUDA graphs and other processes do not need,
            measured with a step when the engine is loaded.
        memory_fraction: used where kv_memory_bytes is "auto".
        max_model_len: longest prompt plus answer, in tokens; "auto" is the checkpoint's own limit.
        output_reserve: share of an answer's expected length that is set aside in KV memory when a request starts.
            1 makes preemption rare; 0 admits by what is held now, as Algorithm 2 of BatchLLM does.
        order: policy; which groups start first (`scheduling.policies.order`).
        sharing: policy; which requests share KV: "path" and "group" by the plan, "lru" by a cache of blocks, "none".
        max_running_requests: policy; most requests that hold KV at once; "memory" has no limit but the KV budget.
        batching: policy; when requests may start (`scheduling.policies.batching`).
        prefill: policy; "chunked" cuts prompts to fill each step and mixes them with decode tokens. "whole" computes
            a prompt (its prefix and its own part each) in one step, in steps of prompts alone, before anything decodes;
            a prompt longer than max_num_batched_tokens has a step of its own.
        packing: policy; which whole prompts share a step, padded or not (`scheduling.policies.packing`).
        preemption: policy; what becomes of a request that loses its KV memory (`scheduling.policies.preemption`).
        swap_memory_bytes: host memory for preemption "swap"; "auto" is as much as the KV budget, at most half of the
            host memory that is free when the engine is loaded. Beside a GPU half of it holds KV: memory that a GPU
            copies to comes in powers of two.
        disaggregation: policy; which process computes prompts (`scheduling.policies`). "processes" needs a
            checkpoint on disk, and each of the two processes has weights and KV memory as above; "auto" KV memory is
            divided between them.
        compile: whether torch.compile fuses the elementwise work of the model, where attention is not "native", which
            has it fused already. "auto" does so in 16-bit formats where a C++ compiler is installed and the plan is
            long enough to pay for the seconds it takes.
        cuda_graphs: on a GPU, whether steps of decode tokens alone are launched as CUDA graphs, captured as they are
            first needed; "auto" does so where attention is "fused" or "paged".
        num_threads: of the CPU, in each process; 0 leaves torch's setting.
    """

    dtype: Dtype = "auto"
    device: str = "auto"
    attention: Attention = "auto"
    block_size: int = 32
    max_num_batched_tokens: int = 2048
    kv_memory_bytes: int | Literal["auto"] = "auto"
    memory_fraction: float = 0.8
    max_model_len: int | Literal["auto"] = "auto"
    output_reserve: float = 1.0
    order: Order = "ratio"
    sharing: Sharing = "path"
    max_running_requests: int | Literal["memory"] = "memory"
    batching: Batching = "continuous"
    prefill: Prefill = "chunked"
    packing: Packing = "ragged"
    preemption: Preemption = "recompute"
    swap_memory_bytes: int | Literal["auto"] = "auto"
    disaggregation: Disaggregation = "none"
    compile: Compile = "auto"
    cuda_graphs: Literal["auto", "never"] = "auto"
    num_threads: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_choice(field.name, field.type, getattr(self, field.name))
        for name in ("block_size", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}")
        if not 0.0 <= self.output_reserve <= 1.0:
            raise ConfigError(f"output_reserve must be from 0 to 1, got {self.output_reserve}")
        if self.num_threads < 0:
            raise ConfigError(f"num_threads must not be negative, got {self.num_threads}")
        if self.packing != "ragged" and self.prefill != "whole":
            raise ConfigError(
                f"packing {self.packing!r} lays out whole prompts, and prefill is {self.prefill!r}, which cuts them to "
                "the room that is left: set prefill to 'whole'"
            )
        if self.disaggregation != "none":
            self._check_disaggregation()

    def _check_disaggregation(self) -> None:
        """Refuses policies that find KV in the process that decodes, where prompts are computed in another one."""
        for name, value, others in (
            ("sharing", "lru", "path, group or none"),
            ("preemption", "swap", "recompute or kill"),
        ):
            if getattr(self, name) == value:
                raise ConfigError(
                    f"{name} {value!r} finds KV that only the process that decodes has, and with disaggregation "
                    f"{self.disaggregation!r} another one computes prompts: set {name} to {others}"
                )


def _check_choice(name: str, kind: Any, value: object) -> None:
    """Checks fields that have a list of words, or one word beside whole numbers."""
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
    words = [get_args(part)[0] for part in get_args(kind) if get_origin(part) is Literal]
    if words and value != words[0] and not (isinstance(value, int) and value > 0):
        raise ConfigError(f"{name} must be {words[0]!r} or a positive whole number, got {value!r}")
