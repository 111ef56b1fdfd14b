"""Every SQL statement of the project, one file each; `schema/schema.sql` alone holds several."""

from functools import cache
from pathlib import Path


@cache
def statement(name: str) -> str:
    """The text of ``sql/<name>.sql``, such as "read/checked_requests"; `FileNotFoundError` where there is none."""
    return (Path(__file__).parent / f"{name}.sql").read_text(encoding="utf-8")
