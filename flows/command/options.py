"""The options of a command, made from its function's parameters and the fields of its settings."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from itertools import chain
from typing import Annotated, Any, NamedTuple, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter, ValidationError

from engine.errors import ConfigError
from flows.command.commands import ARGUMENTS, COMMANDS, FLAGS, HELP_FLAGS, show_default
from flows.command.option_faults import describe_usage, describe_values

SHOWN_FIRST = (
    *("file", "database", "model", "workloads", "full", "until", "budget", "publish", "sample", "show"),
    *("workload", "gold", "new_model", "run", "against", "min", "max", "device", "dtype", "kv_memory", "workers"),
)
"""Options that ``--help`` shows, which shows all of a command with few."""


class _Option(NamedTuple):
    name: str
    settings: str
    """The function's parameter of which the option is a field; empty if the option is a parameter itself."""
    annotation: Any
    default: Any
    help: str | None = None
    group: str = "Parameters"


def parse_options(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> dict[str, Any] | None:
    """The parameters of the `function` of command `name` in `arguments`, checked, and the command's `FLAGS`; None after
    printing help. See `run_flow`. Raises `ConfigError` if an option is unknown, missing, or has a wrong value."""
    options: dict[str, _Option] = {}
    flags = (_Option(flag, "", bool, False, meaning) for flag, meaning in FLAGS.get(name, {}).items())
    for option in chain(_find_options(function), flags):
        options.setdefault(option.name, option)
    if (given := _parse(name, options, arguments)) is None:
        return None
    chosen: dict[str, Any] = {}
    for option_name, value in given.items():
        owner = options[option_name].settings
        (chosen.setdefault(owner, {}) if owner else chosen)[option_name] = value
    parameters = inspect.signature(function).parameters.values()
    fields = [(p.name, p.annotation, *(() if p.default is p.empty else (p.default,))) for p in parameters]
    try:
        TypeAdapter(make_dataclass("Parameters", fields, kw_only=True)).validate_python(chosen)
    except ValidationError as error:
        found = describe_values(error, {option.name: option.help for option in options.values()})
        raise ConfigError("; ".join(f"{_flag(option)}: {message}" for option, message in found)) from error
    return chosen


def _find_options(function: Callable[..., Any]) -> Iterator[_Option]:
    described = parameter_schema(function).properties
    for parameter in inspect.signature(function).parameters.values():
        fields = getattr(parameter.annotation, "__pydantic_fields__", None)
        if fields is None:
            meaning = described[parameter.name].get("description")
            yield _Option(parameter.name, "", parameter.annotation, parameter.default, meaning)
            continue
        group = parameter.annotation.__doc__.split(";")[0].split(".")[0]
        for name, field in fields.items():
            yield _Option(name, parameter.name, field.annotation, field.default, field.description, group)


def _parse(command: str, options: Mapping[str, _Option], arguments: Sequence[str]) -> dict[str, Any] | None:
    """The options in `arguments`, each of its type; None after printing help."""
    unnamed, shown = ARGUMENTS.get(command, ("", ""))

    def collect(*first: Any, **given: Any) -> dict[str, Any]:
        return dict(zip((unnamed,), first, strict=False)) | given

    about, shows_all = COMMANDS[command], "--help-all" in arguments or len(options) <= 5
    collect.__annotations__ = {name: option.annotation for name, option in options.items()}
    keywords = []
    for name, kind in get_type_hints(collect).items():  # without bounds of values, which are checked later
        option = options[name]
        parameter = Parameter(
            name=_flag(name),
            help=option.help and option.help.removesuffix("."),
            group=option.group if shows_all else "Parameters",
            show=(shows_all or name in SHOWN_FIRST) and name != "file",
            show_default=show_default,
            negative=(),
            allow_repeating=True,  # the last value counts
        )
        way = inspect.Parameter.POSITIONAL_OR_KEYWORD if name == unnamed else inspect.Parameter.KEYWORD_ONLY
        keywords.append(inspect.Parameter(name, way, default=option.default, annotation=Annotated[kind, parameter]))
    keywords.sort(key=lambda keyword: keyword.kind)
    collect.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    collect.__annotations__ = {keyword.name: keyword.annotation for keyword in keywords}
    app = App(
        name=f"batchloom {command}",
        help=about if shows_all else f"{about} --help-all shows all options.",
        usage=f"Usage: batchloom {command} {shown} [OPTIONS]" if unnamed in options else None,
        help_flags=HELP_FLAGS,
        version_flags=(),
        result_action="return_value",
    )
    app["--help"].group = Group("Parameters")
    app.default(collect)
    try:
        given: dict[str, Any] | None = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(describe_usage(error, command, options)) from error
    return given


def _flag(name: str) -> str:
    return "--workload" if name == "workloads" else f"--{name.replace('_', '-')}"
