"""A night file: a TOML file with a database, models, workloads, and the order of the workloads."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field, field_validator
from pydantic_core import ErrorDetails

from engine.errors import ConfigError, ModelError
from flows.settings import EngineSettings, PlanSettings, Settings, WorkerSettings
from tasks.answers.toml_value import must
from tasks.cascades.cascade import Cascade
from tasks.database.attach import parse_attachments
from tasks.nights.cascade_steps import CascadeStep, add_cascades
from tasks.nights.check_steps import check_tables
from tasks.nights.graph import NightStep, check_graph
from tasks.runs.infer_job import FailurePolicy
from tasks.workloads.fault import UNKNOWN_KEY, choose_fault
from tasks.workloads.workload import SHIPPED, Workload, load_workload

Text = Annotated[str, Field(min_length=1), must(lambda text: "\0" not in text, "no file's name holds a NUL")]


_EXPECTED = {
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "string_pattern_mismatch": "auto or a size such as 512MiB",
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type"), "a table"),
}
"""By pydantic's types of errors, what the value should have been."""


class ModelTable(EngineSettings):
    """A table [models.NAME]: the model's path and its engine settings."""

    path: Text


class WorkloadTable(Settings):
    """A table [[workload]]: its file, model and adapter, the workloads whose answers it reads, its cascade."""

    file: Text
    model: str = ""
    adapter: str = ""
    after: tuple[Text, ...] = ()
    cascade: Cascade | None = None

    @field_validator("after", mode="before")
    @classmethod
    def _make_list(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given


class NightTables(Settings):
    """The keys of a night file, as written."""

    database: Text
    models: Annotated[dict[str, ModelTable], Field(min_length=1)]
    workload: Annotated[tuple[WorkloadTable, ...], Field(min_length=1)]
    until: str = ""
    budget: str = ""
    attach: dict[str, str] = Field(default_factory=dict)
    publish: Text | None = None
    planning: PlanSettings = PlanSettings()
    failures: FailurePolicy = FailurePolicy()
    machines: WorkerSettings = WorkerSettings()

    @field_validator("until", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        """TOML times and dates as text."""
        return given.isoformat() if isinstance(given, (datetime, time)) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class NightPlan:
    """A night file with its workloads loaded and its paths absolute.

    Attributes:
        tables: as written, for all other settings.
        models: name to checkpoint (folder, file or hub id) and engine settings.
        steps: the graph, in the order of the file.
        workloads: by name of the step.
        cascades: by name of the step, if it belongs to a cascade.
        attach: name to absolute path of a folder or file that queries may read.
    """

    tables: NightTables
    database: Path
    models: Mapping[str, tuple[str, EngineSettings]]
    steps: tuple[NightStep, ...]
    workloads: Mapping[str, Workload]
    cascades: Mapping[str, CascadeStep]
    attach: Mapping[str, str]
    publish: Path | None


def load_night(path: Path) -> NightPlan:
    """Read a night file and the workloads that it names. Raises `ConfigError` if the file, a key or the order of
    workloads is wrong, `WorkloadError` if a workload's file is."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        tables = NightTables.model_validate(values)
    except FileNotFoundError as error:
        raise ConfigError(f"no night file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    except pydantic.ValidationError as error:
        if "mode" in values:
            raise ConfigError(f"{path} is a workload's file, not a night's: name it with --workload") from error
        raise ConfigError(f"{path}: {_describe_fault(choose_fault(error), values)}") from error
    folder = path.absolute().parent
    models = {
        name: str(folder / table.path) if (folder / table.path).exists() else table.path
        for name, table in tables.models.items()
    }
    try:
        workloads = [_load_workload(folder, table) for table in tables.workload]
        steps = tuple(
            NightStep(name=workload.name, model=_choose_model(tables, workload.name, table), after=table.after)
            for workload, table in zip(workloads, tables.workload, strict=True)
        )
        check_graph(steps)
        check_tables(workloads)
        cascades = _list_cascades(tables, steps, models)
        by_name = {workload.name: workload for workload in workloads}
        steps, by_name, cascade_steps = add_cascades(steps, by_name, cascades)
        attach = parse_attachments(tables.attach, folder)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return NightPlan(
        tables=tables,
        database=folder / tables.database,
        models={name: (models[name], table) for name, table in tables.models.items()},
        steps=steps,
        workloads=by_name,
        cascades=cascade_steps,
        attach=attach,
        publish=folder / tables.publish if tables.publish is not None else None,
    )


def _load_workload(folder: Path, table: WorkloadTable) -> Workload:
    is_shipped = (SHIPPED / f"{table.file}.toml").is_file() and not (folder / table.file).exists()
    workload = load_workload(table.file if is_shipped else folder / table.file)
    if not table.adapter:
        return workload
    if workload.adapter is not None:
        raise ConfigError(
            f"workload {workload.name!r} names an adapter in {table.file}; it may not have another one here"
        )
    try:
        return workload.with_adapter(folder / os.path.expanduser(table.adapter))
    except ModelError as error:
        raise ConfigError(f"workload {workload.name!r}: {error}") from error


def _choose_model(tables: NightTables, workload: str, table: WorkloadTable) -> str:
    known = ", ".join(tables.models)
    if not table.model and len(tables.models) == 1:
        return next(iter(tables.models))
    if not table.model:
        raise ConfigError(f"workload {workload!r} names no model; there are {known}")
    if table.model not in tables.models:
        raise ConfigError(f"workload {workload!r} names model {table.model!r}, which is none of {known}")
    return table.model


def _list_cascades(tables: NightTables, steps: tuple[NightStep, ...], models: Mapping[str, str]) -> dict[str, Cascade]:
    """By name of the workload; raises `ConfigError` if a cascade's second model is not in the file, or is the first."""
    found = {step.name: table.cascade for step, table in zip(steps, tables.workload, strict=True) if table.cascade}
    for name, cascade in found.items():
        if cascade.to not in tables.models:
            known = ", ".join(tables.models)
            raise ConfigError(f"workload {name!r}: cascade: to names model {cascade.to!r}, which is none of {known}")
        first = next(step.model for step in steps if step.name == name)
        paths = {Path(os.path.expanduser(models[model])).resolve() for model in (first, cascade.to)}  # also of links
        if first != cascade.to and len(paths) == 1:
            both = f"models {first!r} and {cascade.to!r}"
            raise ConfigError(f"workload {name!r}: cascade: {both} have the same path {paths.pop()}")
    return found


def _describe_fault(fault: ErrorDetails, values: Mapping[str, Any]) -> str:
    """One line for an error: table, key, expected and given value."""
    names: list[str] = []
    for part in fault["loc"]:
        if isinstance(part, int):
            names[-1] += f" {part + 1}"
        elif not str(part).startswith(("constrained-", "literal[")):  # one of the types that a value may have
            names.append(str(part))
    *tables, key = names
    where = f"[{'.'.join(tables)}]: " if tables else ""
    if fault["type"] == "missing":
        return f"{where}{key} is missing"
    if key == "workload" and fault["type"] == "tuple_type":
        return "workload must be a list of tables: begin each with [[workload]], not with [workload]"
    if fault["type"] in UNKNOWN_KEY:
        return f"{where}{key!r} is not a known key here"
    if fault["type"] in _EXPECTED:
        return f"{where}{key} must be {_EXPECTED[fault['type']]}, got {fault['input']!r}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}{key}: {message[0].lower()}{message[1:]}, got {fault['input']!r}"
