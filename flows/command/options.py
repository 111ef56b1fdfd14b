"""The options of a command, made from its flow's parameters and the fields of its settings."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter
from prefect import Flow
from pydantic import ValidationError, create_model

from engine.errors import ConfigError
from flows.command.commands import HELP_FLAGS, USAGES, show_default
from flows.command.option_faults import describe_usage, describe_values
from flows.settings import RENAMED

SHOWN_FIRST = (
    *("file", "database", "model", "workloads", "full", "until", "budget", "publish", "sample", "keep", "json"),
    *("workload", "gold", "run", "against", "min", "max"),
    *("device", "dtype", "kv_memory", "max_num_batched_tokens", "workers"),
)


class _Option(NamedTuple):
    name: str
    settings: str
    """The flow's parameter of which the option is a field; empty if the option is a parameter itself."""
    annotation: Any
    default: Any
    help: str | None = None
    group: str = "Parameters"


def parse_options(
    flow: Flow[..., Any], arguments: Sequence[str], about: str, flags: Mapping[str, str]
) -> dict[str, Any] | None:
    """The parameters of the flow that `arguments` give, checked; None after printing help.

    Args:
        flow: whose parameters are the options.
        arguments: of the command line.
        about: what the command does, for the help.
        flags: names and help texts of further options without a value; True in the result if given.

    Raises:
        ConfigError: an option is unknown or missing, or has a value that is not allowed.
    """
    options: dict[str, _Option] = {}
    for option in chain(_find_options(flow), (_Option(name, "", bool, False, flags[name]) for name in flags)):
        options.setdefault(option.name, option)
    given = _parse(flow, options, arguments, about)
    if given is None:
        return None
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        owner = options[name].settings
        (chosen.setdefault(owner, {}) if owner else chosen)[name] = value
    parameters = inspect.signature(flow.fn).parameters.values()
    fields: dict[str, Any] = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    try:
        create_model("Parameters", **fields).model_validate(chosen)
    except ValidationError as error:
        found = describe_values(error, {name: option.help for name, option in options.items()})
        raise ConfigError("; ".join(f"{_flag(name)}: {message}" for name, message in found)) from error
    return chosen


def _find_options(flow: Flow[..., Any]) -> Iterator[_Option]:
    for parameter in inspect.signature(flow.fn).parameters.values():
        fields = getattr(parameter.annotation, "__pydantic_fields__", None)
        if fields is None:
            meaning = flow.parameters.properties[parameter.name].get("description")
            yield _Option(parameter.name, "", parameter.annotation, parameter.default, meaning)
            continue
        group = parameter.annotation.__doc__.split(";")[0].split(".")[0]
        for name, field in fields.items():
            yield _Option(name, parameter.name, field.annotation, field.default, field.description, group)


def _parse(
    flow: Flow[..., Any], options: Mapping[str, _Option], arguments: Sequence[str], about: str
) -> dict[str, Any] | None:
    """The options in `arguments`, each of its type; None after printing help."""

    def collect(**given: Any) -> dict[str, Any]:
        return given

    shows_all = "--help-all" in arguments
    collect.__annotations__ = {name: option.annotation for name, option in options.items()}
    keywords = []
    for name, kind in get_type_hints(collect).items():  # without bounds of values, which are checked later
        option = options[name]
        parameter = Parameter(
            name=_flag(name),
            help=option.help,
            group=option.group if shows_all else "Parameters",
            show=(shows_all or name in SHOWN_FIRST) and name != "file",
            show_default=show_default,
            negative=(),
            allow_repeating=True,  # the last value counts
        )
        keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        keywords.append(keyword.replace(annotation=Annotated[kind, parameter]))
    collect.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    collect.__annotations__ = {keyword.name: keyword.annotation for keyword in keywords}
    app = App(
        name=f"batchloom {flow.name}",
        help=about if shows_all else f"{about} --help-all shows all options.",
        usage=USAGES.get((flow.name, "file" in options)),
        help_flags=HELP_FLAGS,
        version_flags=(),
        result_action="return_value",
    )
    app["--help"].group = Group("Parameters")
    app.default(collect)
    try:
        given: dict[str, Any] | None = app(list(map(_rename, arguments)), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(describe_usage(error, flow.name, options)) from error
    return given


def _flag(name: str) -> str:
    return "--workload" if name == "workloads" else f"--{name.replace('_', '-')}"


def _rename(argument: str) -> str:
    """The argument with an option's old name replaced by the new one."""
    flag, equals, value = argument.partition("=")
    for old, new in RENAMED.items():
        if flag == _flag(old):
            print(f"{flag} is now called {_flag(new)}; the old name goes with the next release", file=sys.stderr)
            return f"{_flag(new)}{equals}{value}"
    return argument
