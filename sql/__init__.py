"""The SQL of the project: one statement per file, except `schema/schema.sql`."""

from functools import cache
from pathlib import Path


@cache
def statement(name: str) -> str:
    """The text of ``sql/<name>.sql``, such as "read/checked_requests"; `FileNotFoundError` where there is none."""
    return (Path(__file__).parent / f"{name}.sql").read_text(encoding="utf-8")
