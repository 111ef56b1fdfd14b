"""The settings of a user: each field is a field of Prefect's form and an option of the command line."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    create_model,
    field_validator,
)

from engine.config import EngineConfig
from engine.device.placement import check_device
from engine.errors import ConfigError
from engine.limits import check_kv_budget
from engine.planning.planner import PlanMethod
from tasks.database.attach import parse_attachments
from tasks.runs.object_store import ObjectStore, check_url
from tasks.storage.artifact import runs_folder
from tasks.workers.engine_team import lay_out_workers

_ENGINE_ONLY = ("attention", "compile", "cuda_graphs", "prefix_folder")
"""Fields of `EngineConfig` that only tests, benchmarks and the flows themselves set."""

_SIZE = r"^(auto|\d+(\.\d+)? ?([kKmMgGtT]i?)?[bB]?)$"


class Settings(BaseModel):
    """Frozen settings; unknown names are errors. The docstring below a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


def _engine_fields() -> dict[str, Any]:
    """The fields of `EngineConfig` but for `_ENGINE_ONLY`; sizes are text with a unit."""
    found: dict[str, Any] = {}
    described = TypeAdapter(EngineConfig).json_schema()["properties"]
    for field in fields(EngineConfig):
        about = " ".join(described[field.name]["description"].split())
        if field.name.endswith("_bytes"):
            text = Field(description=about, pattern=_SIZE)
            found[field.name.removesuffix("_bytes")] = (Annotated[str, text], str(field.default))
        elif field.name not in _ENGINE_ONLY:
            described_field = Field(description=about, strict=field.type is bool or None)
            found[field.name] = (Annotated[field.type, described_field], field.default)
    return found


_EngineFields: Any = create_model("_EngineFields", __base__=Settings, **_engine_fields())


class EngineSettings(_EngineFields):  # type: ignore[misc]  # its fields are those of `EngineConfig`
    """How the model computes; see `engine.EngineConfig`."""

    def to_config(self, database: Path | None = None) -> EngineConfig:
        """The engine's configuration; raises `ConfigError` for a wrong value. KV is kept in the runs folder."""
        given: dict[str, Any] = self.model_dump(include=set(EngineSettings.model_fields))
        for name in ("kv_memory", "swap_memory", "keep_prefixes"):
            size = given.pop(name)
            size = f"{size}B" if size.endswith("i") else size  # pydantic reads "4G", "4GB", "4GiB", but not "4Gi"
            given[f"{name}_bytes"] = size if size == "auto" else int(TypeAdapter(ByteSize).validate_python(size))
        if given["keep_prefixes_bytes"] and database is not None:
            given["prefix_folder"] = str(runs_folder(database) / "prefixes")
        return EngineConfig(**given)


Attachments = tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*=.+$")], ...]
"""NAME=PATH of folders and files that the SQL of workloads may read under this name."""


def find_attachments(given: Attachments) -> dict[str, str]:
    """Name to absolute path; raises `ConfigError` for a name that is taken or there twice, or a path without a file."""
    paths = dict(item.split("=", 1) for item in given)
    if len(paths) < len(given):
        raise ConfigError(f"attach: each name may be given once, got {', '.join(given)}")
    return parse_attachments(paths, Path()) if given else {}


class PlanSettings(Settings):
    """How prompts are grouped by shared prefixes, and how large a partition is."""

    method: PlanMethod = "exact"
    """how prompts are grouped by shared prefixes; exact: fewest computed tokens; paper: BatchLLM's Algorithm 1; none:
    no groups, full KV blocks are shared all the same unless sharing is group or none"""
    partition_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """tokens in a partition, the work an engine takes at a time; auto: 1/32 of all, from 500,000 to 5,000,000"""


class WorkerSettings(Settings):
    """Which processes and machines compute; see `flows.workers.Workers`."""

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """number of engines on this host; auto: one for each GPU, one on a CPU; several on a CPU share its memory"""
    runner: Literal["local", "ray"] = "local"
    """what computes; local: this host; ray: the workers of a Ray cluster"""
    ray_address: str = "auto"
    """host:port of the Ray cluster's head; auto: the cluster that this host is part of"""
    exchange: Annotated[str, AfterValidator(lambda url: url and check_url(url))] = ""
    """fsspec URL of a folder, such as s3://bucket/nights, through which workers exchange work and answers if they
    cannot see the database's folder; empty: all can"""

    @field_validator("runner")
    @classmethod
    def _check_runner(cls, runner: str, others: ValidationInfo) -> str:
        if runner == "ray" and others.data.get("workers", "auto") != "auto":
            raise ValueError("the cluster decides how many workers there are: leave workers at auto")
        return runner

    def check_host(self, engine: EngineConfig, checkpoint: Path) -> None:
        """Raise if the exchange cannot be used, or what computes is not here: a Ray cluster, GPUs, KV memory."""
        if self.exchange:
            ObjectStore(self.exchange).check()
        if self.runner == "ray":
            from flows.ray_cluster import check_cluster  # imported only when needed

            check_cluster(self.ray_address, engine, checkpoint)
            return
        if self.ray_address != "auto":
            raise ConfigError(f"ray_address {self.ray_address!r} is for runner ray, and runner is local")
        check_device(engine.device)
        if self.workers not in ("auto", 1):
            engine = lay_out_workers(self.workers, engine).engine  # on a CPU they share its memory
        if engine.device != "cpu" or engine.tensor_parallel_size > 1 or engine.dtype == "int8" or engine.deterministic:
            from flows.kernel_check import check_kernels  # imported only when needed

            check_kernels(engine, checkpoint)
        check_kv_budget(engine, checkpoint)
