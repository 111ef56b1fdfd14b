"""Types of columns and questions, as a workload's file names them."""

from typing import Any

import duckdb


def parse_type(text: str) -> Any:
    """The type as DuckDB parses it; `ValueError` if there is no such type, or a constraint follows it."""
    try:
        (_, type_), *others = duckdb.sqltype(f"STRUCT(value {text})").children
    except duckdb.Error as error:
        reason = str(error).strip().splitlines()[0].partition(": ")[2]
        why = "" if "STRUCT(value" in reason else f": {reason}"
        raise ValueError(f"{text!r} is not a type of DuckDB{why}") from error
    if others:
        raise ValueError(f"{text!r} is not a type of DuckDB")
    return type_
