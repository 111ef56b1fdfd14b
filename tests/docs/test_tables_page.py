"""docs/tables.md names every column of every table that batchloom keeps in a database."""

import re
from pathlib import Path

import duckdb
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
CREATED = re.compile(r"^create table if not exists (\w+) \(.*?^\)", re.MULTILINE | re.DOTALL)
TABLES = {
    match[1]: match[0]
    for path in sorted((ROOT / "sql").rglob("*.sql"))
    for match in CREATED.finditer(path.read_text(encoding="utf-8"))
}


def read_part(table: str) -> str:
    """What the page says about a table: its row in a table of tables, or its section; outputs share further columns."""
    if section := re.search(rf"^`{table}` has one row .*?(?=^`\w+` has one row |^More tables )", PAGE, re.M | re.S):
        return section[0]
    row = re.search(rf"^\| `{table}` \|.*$", PAGE, re.MULTILINE)
    assert row is not None, f"docs/tables.md does not list {table}"
    if table not in ("snippets", "rankings"):
        return row[0]
    return row[0] + PAGE[PAGE.index("All output tables have these columns") : PAGE.index("### Reasons of error rows")]


def test_all_tables_are_found() -> None:
    assert TABLES.keys() >= {
        "documents",
        "snippets",
        "runs",
        "steps",
        "certificates",
        "workload_layouts",
        "evaluations",
    }


def test_every_view_is_on_the_page() -> None:
    """Those of the demo alone apart."""
    files = {*(ROOT / "sql").rglob("*.sql")} - {*(ROOT / "sql" / "demo").iterdir()}
    sql = "".join(path.read_text(encoding="utf-8") for path in files)
    views = {*re.findall(r"^create or replace view (\w+)", sql, re.MULTILINE), "calibrated_<table>", "latest_<table>"}
    assert views - set(re.findall(r"`([\w<>]+)`", PAGE[PAGE.index("## Views") :])) == set()


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_on_the_page(table: str) -> None:
    with duckdb.connect() as connection:
        connection.execute(TABLES[table])
        columns = {name for name, *_ in connection.execute(f"describe {table}").fetchall()}
    assert columns - set(re.findall(r"`(\w+)`", read_part(table))) == set()
