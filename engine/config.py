"""Settings of one engine: frozen, checked when made."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from engine.conflicts import refuse_conflicts
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

CONFLICTING = ("dtype", "packing", "keep_prefixes_bytes", "disaggregation", "tensor_parallel_size", "deterministic")
"""Settings that go with some values of others only, unless they have their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine computes. Unknown keywords raise; values out of range raise `ConfigError`.

    The flows' form and command line take types, defaults and the description below each field from here. Policies
    change no answer.
    """

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    dtype: Dtype = "auto"
    """number format of weights and KV; auto: quantized if the file is, else bfloat16 or float32; fp8: GPU; int8: CPU"""
    device: str = "auto"
    """what the model computes on: cpu, cuda, cuda:1 and so on; auto: the first GPU, else the CPU"""
    attention: Attention = "auto"
    """native or torch on a CPU; fused on a GPU, where paged and relay are there to compare with; auto: native where
    there is a C++ compiler, fused on a GPU"""
    block_size: Annotated[int, Field(ge=1)] = 32
    """tokens in one KV block; native attention takes multiples of 32"""
    # S_chunk of BatchLLM, section 4.3.3.
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """most tokens in one step of the model; auto: on a CPU 2,048, on a GPU 8,192 or more if its memory allows"""
    # M_threshold. Free memory is measured when the engine is loaded: on a GPU after a full step and CUDA graphs.
    kv_memory_bytes: int | Literal["auto"] = "auto"
    """memory for KV, such as 512MiB or 4GB; auto: the share memory_fraction of what is free, on a CPU at most 4 GiB"""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    """share of the free memory that KV gets if kv_memory is auto"""
    max_model_len: int | Literal["auto"] = "auto"
    """most tokens of a prompt plus its answer; auto: what the model allows"""
    # 1 makes preemption rare; 0 counts only the KV blocks held now, as Algorithm 2 of BatchLLM does.
    output_reserve: Annotated[float, Field(ge=0, le=1)] = 1.0
    """share of an answer's expected tokens for which KV is reserved when its request starts"""
    order: Order = "ratio"
    """which requests start first; ratio: groups with the most decode tokens per prefill token; fcfs: in the order
    of the key; sjf: shortest expected answer; priority: largest value of the priority column"""
    sharing: Sharing = "path"
    """which KV is shared; path: prefixes of the plan's groups, and blocks that several groups have in common; group:
    prefixes alone; lru: blocks found in an LRU cache, without a plan; none: no KV"""
    max_running_requests: int | Literal["memory"] = "memory"
    """most requests that hold KV at a time; memory: as many as fit in kv_memory"""
    batching: Batching = "continuous"
    """when requests start; continuous: at any step; static: when all requests of the last batch are finished; dynamic:
    as static, with batches that fit in one step"""
    # Steps of whole prompts decode nothing; a prompt longer than max_num_batched_tokens has a step of its own.
    prefill: Prefill = "chunked"
    """how prompts are computed; chunked: cut to fill each step; whole: never cut"""
    packing: Packing = "ragged"
    """how prompts share a step if prefill is whole; ragged: in their order; prepacked: in bins, longest first; padded:
    padded to the longest; length_ordered: sorted by length, then padded"""
    preemption: Preemption = "recompute"
    """what happens to the latest request if KV memory runs out; recompute: it is computed again later; swap: its KV is
    copied to host memory and back; kill: it ends as an error"""
    # On a GPU only half of it may hold KV: pinned memory is allocated in powers of two.
    swap_memory_bytes: int | Literal["auto"] = "auto"
    """host memory for preemption swap, such as 4GiB; auto: as much as kv_memory, at most half of the free memory"""
    prompt_lookup: Lookup = "never"
    """always: look up the last tokens in prompt and answer to guess the next; steps on a GPU do not overlap then"""
    keep_prefixes_bytes: Annotated[int, Field(ge=0)] = 0
    """disk space for the KV of prefixes that later nights need again, such as 20GB; 0: keep none"""
    prefix_folder: str = ""
    """folder of the kept KV"""
    disaggregation: Disaggregation = "none"
    """none: one process computes prompts and answers; processes: another process of the host computes the prompts"""
    compile: Compile = "auto"
    """torch.compile for layers that are torch modules, not the attention backend's; auto: in 16-bit formats, with a C++
    compiler, where the plan is long enough to pay for the seconds it takes"""
    cuda_graphs: Literal["auto", "never"] = "auto"
    """decode steps as CUDA graphs, captured as needed; auto: where attention is fused or paged and computes
    batchloom's own families"""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """number of GPUs of this host that one engine uses, each for a share of every layer"""
    deterministic: bool = False
    """make answers bit-identical in any batch, in bfloat16 and float32 on a CPU; in int8 they always are"""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each process; 0: torch decides"""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, field.type, getattr(self, field.name))
        if any(field.name in CONFLICTING and getattr(self, field.name) != field.default for field in fields(self)):
            refuse_conflicts(self)

    @property
    def shared_block_size(self) -> int | None:
        """Tokens in the blocks that groups share, as plans count on them; None where groups share nothing."""
        return self.block_size if self.sharing == "path" else None

    @property
    def step_tokens(self) -> int:
        """max_num_batched_tokens; where that is "auto", what a CPU takes. An engine on a GPU replaces it first."""
        return 2048 if self.max_num_batched_tokens == "auto" else self.max_num_batched_tokens


def _check(name: str, annotation: Any, value: object) -> None:
    """Checks a value that is one of a list of words, a positive whole number or one word, or within bounds."""
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
    words = [get_args(part)[0] for part in get_args(kind) if get_origin(part) is Literal]
    if words and value != words[0] and not (type(value) is int and value > 0):
        raise ConfigError(f"{name} must be {words[0]!r} or a positive whole number, got {value!r}")
    if kind in (int, float, bool, str):
        try:
            TypeAdapter(annotation).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{name}: {error.errors()[0]['msg']}, got {value!r}") from error
