"""Settings of one engine: few, frozen, checked when made."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from engine.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "quantized"]
Attention = Literal["auto", "native", "torch", "paged", "relay", "fused"]
Compile = Literal["auto", "always", "never"]
Lookup = Literal["never", "always"]
Order = Literal["ratio", "fcfs", "sjf", "priority"]
Sharing = Literal["path", "group", "lru", "none"]
Batching = Literal["continuous", "static", "dynamic"]
Prefill = Literal["chunked", "whole"]
Packing = Literal["ragged", "prepacked", "length_ordered", "padded"]
Preemption = Literal["recompute", "swap", "kill"]
Disaggregation = Literal["none", "processes"]
"""Which process computes prompts: the one that decodes, or another one that sends their KV through shared memory."""

CONFLICTING = ("dtype", "packing", "keep_prefixes_bytes", "disaggregation", "tensor_parallel_size", "deterministic")
"""Settings whose other values than the default do not go with every value of other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine computes. Unknown keywords raise; values out of range raise `ConfigError`.

    The flows' form and command line take types, defaults and the description below each field from here. No policy
    changes an answer.
    """

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    dtype: Dtype = "auto"
    """number format of weights and KV; auto: bfloat16 where the device computes it natively; fp8: on a GPU that has
    it, half the memory; int8: on a CPU, half the memory, and answers that do not depend on the batch; quantized:
    weights as they are in a GGUF, AWQ, GPTQ or compressed-tensors file, which auto chooses where the CPU supports it"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1; auto: the first GPU, else the CPU"""
    attention: Attention = "auto"
    """native (compiled on first use) or torch on a CPU; fused on a GPU, or paged and relay (three launches) for
    comparison; auto: native where there is a C++ compiler, fused on a GPU"""
    block_size: Annotated[int, Field(ge=1)] = 32
    """tokens in one block of KV; native attention takes multiples of 32"""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = 2048
    """most tokens in one step of the model (S_chunk of BatchLLM section 4.3.3); auto: on a CPU 2,048, on a GPU
    8,192 or more where its memory allows"""
    # M_threshold. Free memory is measured when the engine is loaded: on a GPU after a full step and CUDA graphs.
    kv_memory_bytes: int | Literal["auto"] = "auto"
    """memory for KV, such as 512MiB or 4GB; auto: the share memory_fraction of what is free"""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    """used where kv_memory is auto"""
    max_model_len: int | Literal["auto"] = "auto"
    """longest prompt plus answer in tokens; auto: what the model allows"""
    # 1 makes preemption rare; 0 admits by the blocks in use now, as Algorithm 2 of BatchLLM does.
    output_reserve: Annotated[float, Field(ge=0, le=1)] = 1.0
    """share of an answer's length set aside in KV when it starts"""
    order: Order = "ratio"
    """which requests start first; ratio: groups with the most decode tokens for their prefill; fcfs: in table order;
    sjf: shortest expected answer; priority: largest priority column"""
    sharing: Sharing = "path"
    """which prompts share KV; path: the plan's groups, and groups that begin alike; group: the plan's groups; lru:
    blocks found in a cache, without a plan; none: no prompts"""
    max_running_requests: int | Literal["memory"] = "memory"
    """most requests that hold KV at once; memory: no limit but kv_memory"""
    batching: Batching = "continuous"
    """when requests start; continuous: at any step; static: when the batch before is finished; dynamic: likewise,
    and a batch has at most the prompt tokens of one step"""
    # Steps of whole prompts decode nothing; a prompt longer than max_num_batched_tokens has a step of its own.
    prefill: Prefill = "chunked"
    """chunked: prompts are cut to fill each step; whole: a prompt is never cut"""
    packing: Packing = "ragged"
    """prompts of a step, with prefill whole; ragged: in order; prepacked: in bins, longest first; padded: in order,
    padded to the longest; length_ordered: padded, sorted by length"""
    preemption: Preemption = "recompute"
    """where KV memory runs out, the latest request is computed again (recompute), copied to host memory and back
    (swap), or ends as an error (kill)"""
    # With a GPU half of it holds KV: pinned memory is allocated in powers of two.
    swap_memory_bytes: int | Literal["auto"] = "auto"
    """host memory for preemption swap, such as 4GiB; auto: as much as kv_memory, at most half of the free memory"""
    prompt_lookup: Lookup = "never"
    """always: tokens of an answer are guessed from its prompt and earlier tokens, and several are checked in a step;
    on a GPU steps then wait for the tokens of the step before"""
    keep_prefixes_bytes: Annotated[int, Field(ge=0)] = 0
    """disk space for KV of documents that later nights ask about again, such as 20GB; 0: none"""
    prefix_folder: str = ""
    """folder of that KV"""
    disaggregation: Disaggregation = "none"
    """none: one process does everything; processes: another process of the host computes prompts"""
    compile: Compile = "auto"
    """torch.compile where transformers computes the layers (attention torch); auto: in 16-bit formats, with a C++
    compiler, where the plan is long enough to make up for the seconds it takes"""
    cuda_graphs: Literal["auto", "never"] = "auto"
    """decode steps as CUDA graphs, captured as needed; auto: where attention is fused or paged"""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of this host that each compute a share of every layer of one model"""
    deterministic: bool = False
    """answers have the same bits in any batch: in bfloat16 and float32 on a CPU, and in int8 always"""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each process; 0: torch decides"""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, field.type, getattr(self, field.name))
        if any(field.name in CONFLICTING and getattr(self, field.name) != field.default for field in fields(self)):
            from engine.conflicts import refuse_conflicts  # imported only when needed

            refuse_conflicts(self)

    @property
    def shared_block_size(self) -> int | None:
        """Block size for planning: tokens in the KV blocks that groups share; None where groups share no blocks."""
        return self.block_size if self.sharing == "path" else None

    @property
    def step_tokens(self) -> int:
        """max_num_batched_tokens as a number: "auto" is a CPU's 2,048; an engine on a GPU has replaced it before."""
        return 2048 if self.max_num_batched_tokens == "auto" else self.max_num_batched_tokens


def _check(name: str, annotation: Any, value: object) -> None:
    """Checks a value against its annotation: one of some words, a positive whole number or one word, or a range."""
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
    words = [get_args(part)[0] for part in get_args(kind) if get_origin(part) is Literal]
    if words and value != words[0] and not (isinstance(value, int) and value > 0):
        raise ConfigError(f"{name} must be {words[0]!r} or a positive whole number, got {value!r}")
    if kind in (int, float):
        try:
            TypeAdapter(annotation).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{name}: {error.errors()[0]['msg']}, got {value!r}") from error
