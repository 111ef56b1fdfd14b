"""docs/rows_way.md against a real night: what it lists is what a row meets, and the way stays short."""

import json
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tasks.database.connection import connect
from tasks.database.schema import create_schema

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rows_way.md"

pytestmark = pytest.mark.slow

MOST_MODULES = 70
MOST_LINES = 9_500


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, prefect_database: Path) -> dict[str, list[str]]:
    """Module to the names of its functions that a night of two rows calls, the report page apart."""
    database = tmp_path_factory.mktemp("night") / "team.duckdb"
    with connect(database, create=True) as connection:
        create_schema(connection)
    with duckdb.connect(str(database)) as connection:
        connection.execute("insert into documents values ('d1', 'House', 'The night watchman walks around the house.')")
        connection.execute("insert into queries values ('q1', 'what does he do?')")
        connection.execute("insert into snippet_requests values ('d1', 'q1')")
        connection.execute("insert into ranking_candidates values ('q1', 'd1')")
    night = subprocess.run(
        [sys.executable, "-m", "tests.docs.traced_night", str(database), str(tiny_llama)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert night.returncode == 0, night.stderr
    with duckdb.connect(str(database)) as connection:
        assert connection.execute("select count(*) from snippets where status = 'ok'").fetchone() == (1,)
        assert connection.execute("select count(*) from rankings where status = 'ok'").fetchone() == (1,)
    functions: dict[str, list[str]] = json.loads(night.stdout.splitlines()[-1])
    return functions


def read_page() -> list[tuple[str, list[str]]]:
    """The modules that the page lists, in its order, each with the functions that it names."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if module := re.match(r"\d+\. `([\w/]+\.py)`", line):
            found.append((module[1], re.findall(r"`([A-Za-z_][\w.]*)\(\)`", line)))
        elif found and line.startswith("   "):
            found[-1][1].extend(re.findall(r"`([A-Za-z_][\w.]*)\(\)`", line))
    return found


def test_every_listed_function_is_called_by_a_night(called: dict[str, list[str]]) -> None:
    listed = read_page()
    assert 30 <= len(listed) <= 45
    assert len({module for module, _ in listed}) == len(listed)
    for module, names in listed:
        assert module in called, f"{PAGE.name} lists {module}, where a row never comes by"
        assert names, f"{PAGE.name} names no function of {module}"
        for name in names:
            assert name in called[module], f"{PAGE.name}: {name}() of {module} is not called"


def test_the_way_is_short(called: dict[str, list[str]]) -> None:
    num_lines = sum(len((ROOT / module).read_text(encoding="utf-8").splitlines()) for module in called)
    assert len(called) <= MOST_MODULES, sorted(called)
    assert num_lines <= MOST_LINES
