"""What a user may set: each field is a question of Prefect's form and an option of the command line."""

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationInfo, field_validator

from engine.config import Batching, Dtype, EngineConfig, Order, Packing, Preemption, Prefill, Sharing
from engine.planning.plan import PlanMethod
from tasks.runs.object_store import check_url
from tasks.workloads.failure_policy import FailurePolicy

_DEFAULT = EngineConfig()
_SIZE = r"^(auto|\d+(\.\d+)? ?([kKmMgGtT]i?)?[bB]?)$"
_DEFAULT_POLICY = FailurePolicy()


class EngineSettings(BaseModel):
    """How the model computes; see `engine.EngineConfig`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Annotated[
        Dtype,
        Field(description="number format of weights and KV; auto: bfloat16 where the device computes it natively"),
    ] = _DEFAULT.dtype
    device: Annotated[str, Field(description="auto, cpu, cuda or cuda:1; auto: the first GPU, else the CPU")] = (
        _DEFAULT.device
    )
    kv_memory: Annotated[
        str,
        Field(
            description="memory for KV, such as 512MiB or 4GB; auto: the share memory_fraction of what is free",
            pattern=_SIZE,
        ),
    ] = str(_DEFAULT.kv_memory_bytes)
    memory_fraction: Annotated[float, Field(gt=0, le=1, description="used where kv_memory is auto")] = (
        _DEFAULT.memory_fraction
    )
    max_num_batched_tokens: Annotated[int, Field(ge=1, description="most tokens in one step of the model")] = (
        _DEFAULT.max_num_batched_tokens
    )
    block_size: Annotated[int, Field(ge=1, description="tokens in one block of KV")] = _DEFAULT.block_size
    max_model_len: Annotated[
        int | Literal["auto"], Field(description="longest prompt plus answer in tokens; auto: what the model allows")
    ] = _DEFAULT.max_model_len
    output_reserve: Annotated[
        float, Field(ge=0, le=1, description="share of an answer's length set aside in KV when it starts")
    ] = _DEFAULT.output_reserve
    order: Annotated[
        Order,
        Field(
            description="who starts first; ratio: groups that decode most for their prefill; fcfs: in table order; "
            "sjf: shortest expected answer; priority: largest priority column"
        ),
    ] = _DEFAULT.order
    sharing: Annotated[
        Sharing,
        Field(
            description="who shares KV; path: the plan's groups, and what groups have in common; group: the plan's "
            "groups; lru: blocks found in a cache, without a plan; none: nobody"
        ),
    ] = _DEFAULT.sharing
    max_running_requests: Annotated[
        int | Literal["memory"], Field(description="most requests that hold KV at once; memory: no limit but kv_memory")
    ] = _DEFAULT.max_running_requests
    batching: Annotated[
        Batching,
        Field(
            description="when requests start; continuous: at any step; static: when the batch before is finished; "
            "dynamic: likewise, and a batch is what one step can take"
        ),
    ] = _DEFAULT.batching
    prefill: Annotated[
        Prefill, Field(description="chunked: prompts are cut to fill each step; whole: a prompt is never cut")
    ] = _DEFAULT.prefill
    packing: Annotated[
        Packing,
        Field(
            description="prompts of a step, with prefill whole; ragged: in turn; prepacked: in bins, longest first; "
            "padded: in turn, padded to the longest; length_ordered: padded, sorted by length"
        ),
    ] = _DEFAULT.packing
    preemption: Annotated[
        Preemption,
        Field(
            description="where KV memory runs out, the latest request is computed again (recompute), copied to host "
            "memory and back (swap), or ends as an error (kill)"
        ),
    ] = _DEFAULT.preemption
    swap_memory: Annotated[
        str,
        Field(
            description="host memory for preemption swap, such as 4GiB; auto: as kv_memory, at most half of the free",
            pattern=_SIZE,
        ),
    ] = str(_DEFAULT.swap_memory_bytes)
    disaggregation: Annotated[
        Literal["none", "processes"],
        Field(description="none: one process does all; processes: another process of the host computes prompts"),
    ] = "none"
    num_threads: Annotated[int, Field(ge=0, description="of the CPU, in each process; 0: torch decides")] = (
        _DEFAULT.num_threads
    )

    def to_config(self) -> EngineConfig:
        """The engine's own form; raises `ConfigError` for what it refuses."""
        return EngineConfig(
            **self.model_dump(exclude={"kv_memory", "swap_memory"}),
            kv_memory_bytes=_num_bytes(self.kv_memory),
            swap_memory_bytes=_num_bytes(self.swap_memory),
        )


def _num_bytes(size: str) -> int | Literal["auto"]:
    return "auto" if size == "auto" else int(TypeAdapter(ByteSize).validate_python(size))


class PlanSettings(BaseModel):
    """How prompts are grouped by their shared beginnings, and how much work is one unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[PlanMethod, Field(description="exact: fewest tokens; paper: BatchLLM's Algorithm 1")] = "exact"
    partition_tokens: Annotated[
        int, Field(ge=1, description="tokens of work after which answers are on disk and survive an interruption")
    ] = 500_000


class WorkerSettings(BaseModel):
    """Which processes and machines compute; see `flows.workers.Workers`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    workers: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        Field(description="engines on this host; auto: one for each GPU, one on a CPU; on a CPU they share its memory"),
    ] = "auto"
    runner: Annotated[
        Literal["local", "ray"], Field(description="local: this host computes; ray: the workers of a Ray cluster do")
    ] = "local"
    ray_address: Annotated[
        str, Field(description="of the cluster's head, host:port; auto: the cluster that this host is part of")
    ] = "auto"
    exchange: Annotated[
        str,
        Field(
            description="fsspec URL of a folder, such as s3://bucket/nights, through which workers that do not see the "
            "database's folder get their work and hand it in; empty: all see it"
        ),
    ] = ""

    @field_validator("runner")
    @classmethod
    def _check_runner(cls, runner: str, others: ValidationInfo) -> str:
        if runner == "ray" and others.data.get("workers", "auto") != "auto":
            raise ValueError("the cluster decides how many workers there are: leave workers at auto")
        return runner

    @field_validator("exchange")
    @classmethod
    def _check_exchange(cls, url: str) -> str:
        return url and check_url(url)


class FailureSettings(BaseModel):
    """When the run tries again, and when it gives up; see `tasks.workloads.failure_policy.FailurePolicy`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    retries: Annotated[
        int, Field(ge=0, description="of a partition, before it is split until the rows that fail are found")
    ] = _DEFAULT_POLICY.retries
    retry_delay_seconds: Annotated[
        float, Field(ge=0, description="before the first retry; each further one waits twice as long")
    ] = _DEFAULT_POLICY.retry_delay_seconds
    max_error_rate: Annotated[
        float, Field(ge=0, le=1, description="the run fails where a larger share of the rows it tried does")
    ] = _DEFAULT_POLICY.max_error_rate
    error_rate_rows: Annotated[int, Field(ge=1, description="fewest rows that say something about that share")] = (
        _DEFAULT_POLICY.error_rate_rows
    )

    def to_policy(self) -> FailurePolicy:
        return FailurePolicy(**self.model_dump())
