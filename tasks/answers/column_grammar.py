"""Grammars for DuckDB types: the JSON texts that DuckDB casts to a type without loss.

DuckDB itself parses the types. The grammars include ranges of whole numbers, digits of decimals and days of months, so
every complete answer can be cast, and answers need no check.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, StrictInt
from pydantic.dataclasses import dataclass

from engine.grammar import DAY
from tasks.answers.grammar_source import check_pattern
from tasks.answers.toml_value import CONFIG, must

_TIMESTAMP = DAY + r"[ T]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]{1,6})?)?"
_TEXTS = {"date": f'/"{DAY}"/', "timestamp": f'/"{_TIMESTAMP}"/', "boolean": '("true" | "false")'}
_NUMBERS = {
    "double": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/",
    "float": r"/-?(0|[1-9][0-9]{0,7})(\.[0-9]{1,7})?([eE]-?[12]?[0-9])?/",
}
_BITS = {"tinyint": 8, "smallint": 16, "integer": 32, "bigint": 64, "hugeint": 128}

SUPPORTED = "VARCHAR, BOOLEAN, whole numbers, FLOAT, DOUBLE, DECIMAL, DATE, TIMESTAMP, ENUM, lists and STRUCT of these"


Count = Annotated[
    StrictInt,
    must(lambda count: 0 < count < 2**31, "must be 1 or more and below 2**31, or left out for any number, got {!r}"),
]


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Bounds:
    """Bounds of a column's values beyond its type.

    Attributes:
        max_chars: most characters of each VARCHAR in the type; 0 for any number.
        pattern: regular expression that each whole VARCHAR matches; empty for none.
        max_items: most items of each list in the type; 0 for any number.
    """

    max_chars: Count = 0
    pattern: Annotated[str, AfterValidator(check_pattern)] = ""
    max_items: Count = 0

    @property
    def string_schema(self) -> str:
        """The JSON schema of each VARCHAR."""
        limits: dict[str, Any] = {"maxLength": self.max_chars} if self.max_chars else {}
        if self.pattern:
            limits["pattern"] = f"^(?:{self.pattern})$"
        return json.dumps({"type": "string"} | limits)


def value_grammar(type_: Any, bounds: Bounds) -> str:
    """llguidance's Lark expression for the values of a type, without null; `ValueError` if it is not supported."""
    kind = type_.id
    if str(type_) == "VARCHAR":
        return f"(%json {bounds.string_schema})"
    if kind in _TEXTS:
        return _TEXTS[kind]
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if (num_bits := _BITS.get(kind.removeprefix("u"))) is not None:
        most = 2 ** (num_bits - 1)
        return f"/{_up_to(2 * most - 1)}/" if kind.startswith("u") else f"/({_up_to(most - 1)}|-{_up_to(most)})/"
    if kind == "decimal":
        (_, precision), (_, scale) = type_.children
        whole = f"(0|[1-9][0-9]{{0,{precision - scale - 1}}})" if precision > scale else "0"
        return rf"/-?{whole}" + (rf"(\.[0-9]{{1,{scale}}})?/" if scale else "/")
    if kind == "enum":
        ((_, values),) = type_.children
        return "(" + " | ".join(_literal(_literal(value)) for value in values) + ")"
    if kind == "struct":
        return object_grammar({name: f'({value_grammar(child, bounds)} | "null")' for name, child in type_.children})
    if kind in ("list", "array"):
        item = value_grammar(type_.children[0][1], bounds)
        most = type_.children[1][1] if kind == "array" else bounds.max_items
        least = most - 1 if kind == "array" else 0
        count = f"{{{least},{most - 1}}}" if most else "*"
        items = item if most == 1 else f'({item} (", " {item}){count})'  # a repetition of at most 0 is refused
        return f'("[" {items}{"" if kind == "array" else "?"} "]")'
    raise ValueError(f"{str(type_)!r} is not supported; a column may be {SUPPORTED}")


def object_grammar(values: dict[str, str]) -> str:
    """An expression for a JSON object with these names, in order; `values` maps them to the expressions of values."""
    starts = ["{", *[", "] * (len(values) - 1)]
    named = zip(starts, values.items(), strict=True)
    parts = [f"{_literal(f'{start}{_literal(name)}: ')} {value}" for start, (name, value) in named]
    return f'({" ".join(parts)} "}}")'


def leaf_ids(type_: Any) -> set[str]:
    """The ids of a type and of all types nested in it."""
    children = type_.children if type_.id in ("struct", "list", "array") else []
    return {type_.id}.union(*(leaf_ids(child) for _, child in children if not isinstance(child, int)))


def count_values(type_: Any) -> int:
    """The values that DuckDB stores for each row; fixed arrays take their whole size, also where they are null."""
    if type_.id == "array":
        (_, item), (_, size) = type_.children
        return int(size) * count_values(item)
    return sum(count_values(child) for _, child in type_.children) if type_.id == "struct" else 1


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark takes no DEL


def _up_to(most: int) -> str:
    """A regular expression for the whole numbers from 0 to `most` without leading zeros."""
    digits = str(most)
    choices = ["0", rf"[1-9][0-9]{{0,{len(digits) - 2}}}"]
    for place, digit in enumerate(digits):
        least = 1 if place == 0 else 0
        if int(digit) > least:
            choices.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - 1 - place}}}")
    return f"({'|'.join([*choices, digits])})"
