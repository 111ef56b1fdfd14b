"""Types for values of a workload's file, checked by pydantic: names, texts, and the table ``[output]``."""

from collections.abc import Callable
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from tasks.answers.reserved_names import RESERVED_TABLES

CONFIG = pydantic.ConfigDict(extra="forbid")


def refuse_if(is_wrong: object, why: str) -> None:
    """Raise a `ValueError` with the reason; pydantic and `load_workload` add the file and the table."""
    if is_wrong:
        raise ValueError(why)


def must(test: Callable[[Any], object], why: str) -> AfterValidator:
    """A validator that refuses values which fail the test; `why` follows the key's name, ``{!r}`` is the value."""

    def check(value: Any) -> Any:
        refuse_if(not test(value), why.format(list(value) if isinstance(value, tuple) else value))
        return value

    return AfterValidator(check)


_NOT_PRINTABLE = "must be a printable name of at most 128 characters, got {!r}"
Name = Annotated[str, must(lambda name: name.isprintable() and len(name) <= 128, _NOT_PRINTABLE)]
Text = Annotated[str, must(str.strip, "must not be empty")]
Texts = tuple[Annotated[str, Field(min_length=1)], ...]


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Output:
    """The table ``[output]`` of the file; a kind of answer may have more keys."""

    table: Annotated[
        Name,
        must(str.strip, "must not be empty"),
        must(lambda name: name.lower() not in RESERVED_TABLES, "may not be {!r}, a table of another use"),
        must(lambda name: "." not in name, "must be a name in the database's own schema, without a dot, got {!r}"),
    ]
