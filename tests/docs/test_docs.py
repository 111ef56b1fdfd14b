"""Documentation under test: links lead somewhere, commands exist, SQL runs and gives the columns that are shown."""

import ast
import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import yaml

from engine.errors import DatabaseError
from flows.command.commands import COMMANDS
from flows.command.run_flow import run_flow
from flows.explain import explain
from flows.nightly import nightly
from flows.nights.night import night
from flows.quality.calibrate import calibrate
from flows.quality.compare import compare
from flows.quality.evaluate import evaluate
from tasks.answers.reserved_names import RESERVED_COLUMNS
from tasks.database.connection import connect
from tasks.database.demo_database import build_demo_database, read_demo_contents
from tasks.database.schema import check_requests, create_schema
from tasks.workloads.workload import load_workload

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


SHOWN_TYPES = {"VARCHAR": "varchar", "INTEGER": "int32", "BIGINT": "int64", "DOUBLE": "double"}
"""DuckDB's types, as its client for Python shows them."""


def read_blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page whose info string is `language`."""
    return re.findall(
        rf"^```{re.escape(language)}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)} links to {target}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name in index, f"docs/README.md does not mention {name_of(page)}"


@pytest.fixture(scope="module")
def options_of() -> dict[str, set[str]]:
    """By flow, the options of its command in all its forms."""
    found = {}
    for flow, *forms in ((nightly, night), (explain,), (compare,), (evaluate,), (calibrate,)):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for form in (flow, *forms):
                assert run_flow(form, ["--help-all"]) == 0
        found[flow.name] = set(re.findall(r"--[a-z-]+", printed.getvalue()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path, options_of: dict[str, set[str]]) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"{name_of(page)}: make {target}"
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), f"{name_of(page)}: python -m {module}"
    for flow, known in options_of.items():
        for options in re.findall(rf"(?:python -m flows\.|batchloom ){flow}([^\n`]*)", text):
            assert set(re.findall(r"--[a-z-]+", options)) <= known, f"{name_of(page)}: {flow}{options}"
    for name in re.findall(r"(?:^    |`|bin/)batchloom (\w+)", text, re.MULTILINE):
        assert name in COMMANDS, f"{name_of(page)}: batchloom {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_python_blocks_import_is_there(page: Path) -> None:
    for block in read_blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), f"{name_of(page)}: {ast.unparse(node)}"


def test_the_page_of_operation_names_every_option_of_a_night(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_flow(nightly, ["--help-all"]) == 0
    offered, named = (
        set(re.findall(r"--[a-z-]+", text))
        for text in (capsys.readouterr().out, (ROOT / "docs" / "operating.md").read_text(encoding="utf-8"))
    )
    assert "--kv-memory" in offered
    assert offered <= named, offered - named


def test_the_page_of_workloads_names_every_reserved_column() -> None:
    text = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", text.partition("**Reserved names.**")[2].partition("\n\n")[0])
    assert {name for name in RESERVED_COLUMNS if not re.fullmatch(r"num_\w+_tokens", name)} <= set(named)


def test_the_readme_counts_what_the_demo_asks() -> None:
    contents = read_demo_contents()
    num_questions = sum(len(questions) for questions in contents.questions.values())
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"{num_questions} questions" in text
    assert f"documents of {len(contents.searches)} searches" in text


def test_the_readmes_queries_run_and_give_the_columns_it_shows(tmp_path: Path) -> None:
    queries, outputs = read_blocks(README, "sql"), read_blocks(README, "text")
    assert len(queries) == len(outputs) == 5
    path = tmp_path / "demo.duckdb"
    build_demo_database(path, read_demo_contents())
    with connect(path, read_only=True) as connection:
        for query, output in zip(queries, outputs, strict=True):
            names, types = ([cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines()[1:3])
            found = connection.sql(query)
            assert found.columns == names, query
            assert [SHOWN_TYPES[str(type_)] for type_ in found.types] == types, query


def test_the_readmes_sums_are_those_of_large_nights(tmp_path: Path) -> None:
    with connect(tmp_path / "demo.duckdb", create=True) as connection:
        create_schema(connection)
        connection.execute("insert into runs (run_id, workload) values ('r', 'snippets')")
        connection.execute("insert into steps (run_id, num_prefix_tokens) select 'r', 1 << 30 from range(4)")
        assert connection.execute(read_blocks(README, "sql")[-1]).fetchall()[0][:3] == ("snippets", 4, 1 << 32)


def test_views_of_tables_that_are_there_serve_as_inputs(tmp_path: Path) -> None:
    (setup,) = read_blocks(ROOT / "docs" / "tables.md", "sql setup")
    with connect(tmp_path / "mails.duckdb", create=True) as connection:
        connection.execute("create table mails (id text, subject text, body text)")
        connection.execute("insert into mails values ('m1', 'Hello', 'I would like my money back.')")
        connection.execute(setup)
        create_schema(connection)
        assert connection.execute("select doc_id, query_id from snippet_requests").fetchall() == [("m1", "q1")]
        assert connection.execute("select count(*) from latest_snippets").fetchone() == (0,)


def test_the_readmes_workload_is_one(tmp_path: Path) -> None:
    for name, language in (("select_mails.sql", "sql"), ("triage.toml", "toml")):
        (tmp_path / name).write_text(*read_blocks(README, f"{language} {name}"), encoding="utf-8")
    workload = load_workload(str(tmp_path / "triage.toml"))
    with connect(tmp_path / "mails.duckdb", create=True) as connection:
        connection.execute("create table mails (id integer, subject text, body text)")
        check_requests(connection, workload, "mails.duckdb")
        hint = "no table or view 'queries'; name your own workload with --workload: the default ones read"
        with pytest.raises(DatabaseError, match=hint):
            check_requests(connection, load_workload("snippets"), "mails.duckdb")
        create_schema(connection, workload)
        (query,) = read_blocks(README, "sql latest_triage")
        assert connection.execute(query).fetchall() == []


def test_the_parameters_of_the_documented_deployment_are_those_of_the_flow() -> None:
    (block,) = read_blocks(ROOT / "docs" / "operating.md", "yaml")
    given = nightly.validate_parameters(yaml.safe_load(block)["parameters"])
    assert given["workloads"] == ("triage.toml",)
    assert (given["engine"].kv_memory, given["failures"].max_error_rate) == ("4GiB", 0.1)


def test_no_message_installs_batchloom_from_a_package_index() -> None:
    for folder in ("engine", "flows", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "batchloom[" not in path.read_text(encoding="utf-8"), path


def test_the_readme_names_every_folder() -> None:
    text = README.read_text(encoding="utf-8")
    for package in ROOT.glob("*/"):
        if (
            not package.name.startswith((".", "__"))
            and any(package.glob("*.*"))
            and package.suffix not in (".egg-info", ".runs")
        ):
            assert f"`{package.name}/`" in text, package.name


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds
